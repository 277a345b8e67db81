"""Write a golden capture of the current format; only for a new format version, the old ones stay."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Refuses to overwrite."""
    from kvcatch.store.capture import ReplayCapture
    from kvcatch.store.drain import CoreDrain
    from kvcatch.store.kvcap import FORMAT_VERSION
    from unit.capture.embedded_run import EmbeddedRun

    target = ROOT / "tests" / "golden" / f"v{FORMAT_VERSION}.kvcap"
    if target.exists():
        sys.exit(f"{target.name} exists: golden files are kept for ever")
    with tempfile.TemporaryDirectory() as folder:
        run = EmbeddedRun(Path(folder), seed=11, requests=40)
        drain = CoreDrain(run.path, str(target), b"golden", SimpleNamespace(rotate_bytes=0, rotate_seconds=0))  # type: ignore[arg-type]
        for number, _ in enumerate(run.steps()):
            if number % 100 == 0:
                drain.pump(final=True)
        run.ring.close()
        drain.finish()
    capture = ReplayCapture.open(str(target))
    facts = {
        "totals": capture.state.totals,
        "requests": len(capture.requests()),
        "num_blocks": capture.info.usable_blocks,
    }
    target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
