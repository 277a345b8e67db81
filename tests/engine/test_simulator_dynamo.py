"""One trace through Dynamo's replay, vLLM's scheduler and our simulator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.support import env


@pytest.mark.soak  # installs Dynamo; vLLM's scheduler alone takes minutes
def test_twenty_thousand_requests_equal_vllm_and_dynamo() -> None:
    done = subprocess.run(
        [sys.executable, str(env.ROOT / "tools" / "dynamo_check.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    # What Dynamo's report has is equal in all three; what it lacks is vLLM's own number.
    assert found["dynamo"]["token_hit_ratio"] == pytest.approx(found["vllm"]["token_hit_ratio"], abs=1e-12)
    for name in set(found["vllm"]) - {"seconds"}:
        assert found["kvcatch"][name] == found["vllm"][name], name
    assert found["vllm"]["preemptions"] > 100
    assert len(found["vllm"]["tenants"]) == 12
