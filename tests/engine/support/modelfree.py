"""The engine's real scheduler without a model: every ``schedule()`` is answered with made-up tokens.

    python modelfree.py FOLDER < cases.json          (a list of ``Case`` fields, all of one release)

Runs in a process with the wanted release first on PYTHONPATH, imports it once and forks a child per case, which
writes to ``FOLDER/<case>/``: the observer's file, the recorder's rings, result.json or error.txt. The order of calls
is that of ``EngineCore.step`` (one batch at a time) and ``EngineCore.step_with_batch_queue`` (two in flight).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WINDOW = 128
EOS = 1


@dataclass(frozen=True)
class Case:
    """One run. ``layout``: full | sliding | alternating | chunked | mamba; the last three beside a full group."""

    version: str = "0.32.0"
    layout: str = "full"
    asynchronous: bool = False
    v2_runner: bool = False
    requests: int = 150
    num_blocks: int = 400
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    max_prompt: int = 900
    max_output: int = 200
    eos_ratio: float = 0.01
    abort_ratio: float = 0.001
    arrivals_per_step: float = 0.5
    prefixes: int = 6
    prefix_caching: bool = True
    #: SIGKILL from outside once this many updates have been observed; 0 = run to the end
    kill_after: int = 0
    #: wall clock jump in seconds at update 100
    clock_jump: float = 0.0
    #: run on until the file FOLDER/stop exists, with new requests for ever
    endless: bool = False
    seed: int = 0
    model: str = ""
    recorder: bool = True
    #: further environment of the child
    env: dict[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        mode = "async" if self.asynchronous else "sync"
        parts = [self.version, self.layout, mode, "v2" if self.v2_runner else "", self.label]
        return "-".join(part for part in parts if part)


def relabel(case: Case, label: str, **more: str) -> Case:
    """The same case under another name, with further environment."""
    return dataclasses.replace(case, label=label, env={**case.env, **more})


def build(case: Case) -> Any:
    """The release's own scheduler over a pool with the case's layout."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=case.model, dtype="bfloat16", max_model_len=4096, skip_tokenizer_init=True)
    scheduling = SchedulerConfig(
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=4096,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=case.asynchronous,
    )
    cache = CacheConfig(block_size=case.block_size, enable_prefix_caching=case.prefix_caching)
    config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
    config.scheduler_config.async_scheduling = case.asynchronous
    cache.num_gpu_blocks = case.num_blocks
    scheduler = (AsyncScheduler if case.asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=case.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups(case, torch.bfloat16)
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=case.block_size,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = case.v2_runner
    return scheduler


def groups(case: Case, dtype: Any) -> list[Any]:
    """KV cache groups of the layout."""
    from vllm.v1 import kv_cache_interface as kv

    heads = {"block_size": case.block_size, "num_kv_heads": 2, "head_size": 32, "dtype": dtype}
    full = kv.KVCacheGroupSpec(["full.0"], kv.FullAttentionSpec(**heads))
    sliding = kv.KVCacheGroupSpec(["sliding.0"], kv.SlidingWindowSpec(**heads, sliding_window=WINDOW))
    if case.layout == "full":
        return [full]
    if case.layout == "sliding":
        return [sliding]
    if case.layout == "alternating":
        return [full, sliding]
    if case.layout == "chunked":
        chunked = kv.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=WINDOW)
        return [full, kv.KVCacheGroupSpec(["chunked.0"], chunked)]
    if case.layout == "mamba":
        known = {f.name for f in dataclasses.fields(kv.MambaSpec)}
        mode = {"mamba_cache_mode": "align"} if case.version >= "0.33" and "mamba_cache_mode" in known else {}
        state = kv.MambaSpec(block_size=case.block_size, shapes=((2, 64),), dtypes=(dtype,), **mode)
        return [full, kv.KVCacheGroupSpec(["mamba.0"], state)]
    raise ValueError(case.layout)


def requests(case: Case, rng: random.Random) -> Iterator[Any]:
    """Made-up requests; prompts of the same prefix share their first tokens."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(case.block_size, hash_function)
    more = {"eos_token_id": EOS} if "eos_token_id" in inspect.signature(Request.__init__).parameters else {}
    prefixes = [[rng.randrange(2, 120) for _ in range(rng.randrange(300))] for _ in range(case.prefixes)]
    for index in range(case.requests):
        room = case.max_prompt - 300
        tail = [rng.randrange(2, 120) for _ in range(int(room * rng.random() ** 3) + 1)]
        sampling = SamplingParams(max_tokens=rng.randrange(1, case.max_output), ignore_eos=False)
        if not more:
            sampling.update_from_generation_config({}, EOS)
        yield Request(
            request_id=f"cmpl-tenant{index % 5}.r{index}-0-{index:08x}",
            prompt_token_ids=rng.choice(prefixes) + tail,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher if case.prefix_caching else None,
            **more,
        )


class Driver:
    """Feeds one scheduler."""

    def __init__(self, case: Case) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.case = case
        self.rng = random.Random(case.seed)
        self.scheduler = build(case)
        if recorder := getattr(self.scheduler, "kvcatch_recorder", None):
            recorder.behind = True  # as in an engine core of its own
        self.coming = deque(requests(case, self.rng))
        self.all = list(self.coming)
        self.output_class = ModelRunnerOutput
        parameters = inspect.signature(ModelRunnerOutput).parameters
        empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        self.fields = {k: v for k, v in empty.items() if parameters[k].default is inspect.Parameter.empty}
        self.batches: deque[tuple[Any, dict[str, bool]]] = deque()
        self.steps = self.aborted = self.round = 0

    def run(self) -> None:
        """Until every request has ended and the scheduler has nothing left to say."""
        stop = Path(os.environ["KVCATCH_TEST_OBSERVER"]) / "stop"
        while self.coming or self.batches or self.scheduler.has_requests():
            self._arrivals()
            self._step()
            if self.case.endless and len(self.coming) < 10 and not stop.exists():
                self._again()

    def _again(self) -> None:
        """Another round of requests under new names."""
        self.round += 1
        more = list(requests(self.case, self.rng))
        for request in more:
            request.request_id = f"{request.request_id[:-8]}{self.round:04x}{request.request_id[-4:]}"
        self.coming.extend(more)

    def _arrivals(self) -> None:
        idle = not self.scheduler.has_requests() and not self.batches
        while self.coming and (idle or self.rng.random() < self.case.arrivals_per_step):
            idle = False
            self.scheduler.add_request(self.coming.popleft())

    def _step(self) -> None:
        depth = 2 if self.case.asynchronous else 1
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            # As the engine core does once the step is with the workers; without grammars there is no answer.
            self.scheduler.get_grammar_bitmask(output)
            executed = output.total_num_scheduled_tokens > 0
            self.batches.append((output, self._who_samples(output)))
            if len(self.batches) < depth and (executed or self.scheduler.has_requests()):
                return
        if not self.batches:
            return
        self._aborts()
        output, samples = self.batches.popleft()
        ids = list(output.num_scheduled_tokens)
        answer = self.output_class(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[self._tokens() if samples[i] else [] for i in ids],
            **self.fields,
        )
        self.scheduler.update_from_output(output, answer)
        self.steps += 1
        if self.steps == 100 and self.case.clock_jump:
            jump_clock(self.case.clock_jump)

    def _who_samples(self, output: Any) -> dict[str, bool]:
        """Requests whose known tokens are all computed by this batch get a new one."""
        table = self.scheduler.requests
        return {i: table[i].num_computed_tokens >= table[i].num_tokens for i in output.num_scheduled_tokens}

    def _tokens(self) -> list[int]:
        return [EOS if self.rng.random() < self.case.eos_ratio else self.rng.randrange(2, 120)]

    def _aborts(self) -> None:
        from vllm.v1.request import RequestStatus

        for request_id in sorted(self.scheduler.requests):
            if self.rng.random() < self.case.abort_ratio:
                self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                self.aborted += 1


def run_case(case: Case) -> dict[str, Any]:
    """Run a case with the observer on, and with the recorder when the case wants it."""
    if "KVCATCH_TEST_FAULT" in os.environ:
        from kvcatch_test_plugins import faults

        faults.register()
    from kvcatch_test_plugins import mutants, observer

    mutants.register()
    if case.recorder:
        from kvcatch.capture.plugin import register

        register()
    observer.register()
    driver = Driver(case)
    driver.run()
    import vllm

    return {
        "vllm": str(getattr(vllm, "__version__", "?")),
        "scheduler": type(driver.scheduler).__name__,
        "steps": driver.steps,
        "aborted": driver.aborted,
        "preemptions": sum(request.num_preemptions for request in driver.all),
        "unfinished": sum(not request.is_finished() for request in driver.all),
    }


def child(case: Case, folder: Path) -> int:
    """One case in a forked process: returns the exit status."""
    folder.mkdir(parents=True)
    os.environ["KVCATCH_TEST_OBSERVER"] = str(folder)
    if case.recorder:
        os.environ |= {"KVCATCH": "1", "KVCATCH_DIR": str(folder / "rings")}
    os.environ |= case.env
    with open(folder / "log.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            (folder / "result.json").write_text(json.dumps(run_case(case)))
        except Exception:  # noqa: BLE001 (told to the parent, whatever it is)
            (folder / "error.txt").write_text(traceback.format_exc())
            return 1
    return 0


def kill_after(pid: int, folder: Path, updates: int) -> None:
    """SIGKILL a child as soon as its observer has written this many updates, wherever it is then."""
    seen, tail = 0, b""
    file = None
    while seen < updates and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if file is None:
            found = list(folder.glob("observer-*.jsonl"))
            file = open(found[0], "rb") if found else None  # noqa: SIM115 (followed until the kill)
            continue
        data = tail + file.read()
        lines = data.split(b"\n")
        tail = lines.pop()
        seen += sum(line.startswith(b'{"k":"u"') for line in lines)
    os.kill(pid, signal.SIGKILL)


def jump_clock(seconds: float) -> None:
    """Let the wall clock of this process jump."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def main(folder: Path) -> None:
    """Fork a child per case read from standard input; print the exit statuses."""
    cases = [Case(**fields) for fields in json.load(sys.stdin)]
    import vllm.config
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.structured_output  # noqa: F401 (imported once here, not once a case)

    statuses = {}
    for case in cases:
        pid = os.fork()
        if pid == 0:
            os._exit(child(case, folder / case.name))
        if case.kill_after:
            kill_after(pid, folder / case.name, case.kill_after)
        statuses[case.name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(statuses))


def start_cases(
    cases: list[Case], folder: Path, release: Path | None = None, command: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start cases of one release in a process of their own; ``command`` goes before the python command line."""
    from engine.support import env

    path = [str(release)] if release else []
    process = subprocess.Popen(
        [*command, sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env.environment(
            PYTHONPATH=os.pathsep.join([*path, str(env.ROOT / "tests")]),
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_PLUGINS="",
        ),
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([dataclasses.asdict(case) for case in cases]))
    process.stdin.close()
    process.stdin = None
    return process


def run_cases(
    cases: list[Case], folder: Path, release: Path | None = None, command: Sequence[str] = ()
) -> dict[str, int]:
    """``start_cases`` and wait for the end. Returns exit statuses by case name."""
    output, errors = start_cases(cases, folder, release, command).communicate(timeout=900)
    try:
        statuses: dict[str, int] = json.loads(output.splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise RuntimeError(errors[-4000:]) from error
    return statuses


if __name__ == "__main__":
    main(Path(sys.argv[1]))
