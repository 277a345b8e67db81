"""Write what the how-to pages look at (``tests/data/howto``): recordings, a request log and a server log.

    python tools/howto_data.py [FOLDER]

The recordings are the embedded engine's, which decides as vLLM's scheduler does; the out-of-memory text has the
numbers of a public report (tests/data/cases, B54).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "analysis_rules"))

from recordings import record, steady  # noqa: E402

from kvcatch.store.feeds import open_feed  # noqa: E402
from kvcatch.store.kvcap import KvcapWriter  # noqa: E402

OOM = """\
INFO 11-29 18:00:00 [utils.py:233] non-default args: {'model': 'openai/gpt-oss-20b', 'gpu_memory_utilization': 0.95}
INFO 11-29 18:00:41 [gpu_worker.py:298] Available KV cache memory: 58.21 GiB
Traceback (most recent call last):
  File "vllm/v1/worker/gpu_worker.py", line 391, in compile_or_warm_up_model
  File "vllm/v1/worker/gpu_model_runner.py", line 3011, in _dummy_sampler_run
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB of \
which 552.50 MiB is free. Including non-PyTorch memory, this process has 78.64 GiB memory in use. Of the allocated \
memory 74.91 GiB is allocated by PyTorch, with 626.00 MiB allocated in private pools (e.g., CUDA Graphs), and 1.78 GiB \
is reserved by PyTorch but unallocated.
RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering \
`max_num_seqs` or `gpu_memory_utilization` when initializing the engine.
"""
POLICY = " ".join(
    f"Rule {number}: answer {word}, name the order and never promise a date."
    for number, word in enumerate(["kindly", "briefly", "exactly", "calmly"] * 8, 1)
)


def main(argv: list[str]) -> int:
    """Write every file."""
    target = Path(argv[0]) if argv else ROOT / "tests" / "data" / "howto"
    target.mkdir(parents=True, exist_ok=True)
    (target / "oom.log").write_text(OOM)
    (target / "requests.jsonl").write_text(_requests(first=True))
    (target / "moved.jsonl").write_text(_requests(first=False))
    with tempfile.TemporaryDirectory() as folder:
        load = steady(240, 0.04, prompt=150, output=80, seed=7)
        for name, version, seqs in (
            ("before", "0.31.0", 64),
            ("after", "0.32.0", 12),
            ("restored", "0.32.0", 64),
        ):
            ring = record(Path(folder), load, blocks=801, max_num_seqs=seqs)
            _packed(ring, target / f"{name}.kvcap", {"engine_version": version})
    return 0


def _requests(first: bool) -> str:
    """Forty requests of one application, its clock in front of its rules or behind them."""
    rng = random.Random(3)
    lines = []
    for number in range(40):
        clock = f"It is 2025-11-29 18:{number:02d}:07."
        system = f"{clock} {POLICY}" if first else f"{POLICY} {clock}"
        question = f"Where is order {rng.randrange(10_000, 99_999)}?"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        lines.append(json.dumps({"id": f"r{number}", "messages": messages}))
    return "\n".join(lines) + "\n"


def _packed(ring: str, target: Path, more: dict[str, Any]) -> None:
    """A ring as a capture file."""
    target.unlink(missing_ok=True)
    feed = open_feed(ring)
    writer = KvcapWriter(str(target))
    writer.info(0, feed.core_info() | more)
    for source, words, _ in feed.raw(1 << 24):
        if source == 0:
            writer.records(0, words)
    feed.close()
    writer.close({})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
