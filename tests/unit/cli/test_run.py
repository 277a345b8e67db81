"""``kvcatch run`` around commands that are no engine: status, signals, output, orphans, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcatch.cli.main import main

RUN = [sys.executable, "-m", "kvcatch", "run"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVCATCH", "VLLM_"))}
    return {**kept, "KVCATCH_DIR": str(tmp_path / "rings")}


def run(environment: dict[str, str], *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words], env=environment, capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize(
    ("command", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_the_exit_status_is_the_commands(environment: dict[str, str], command: str, status: int) -> None:
    assert run(environment, "--", "sh", "-c", command).returncode == status


def test_output_and_input_are_untouched(environment: dict[str, str]) -> None:
    done = run(environment, "--", "sh", "-c", "cat; echo err >&2", input="in\n")
    assert done.stdout == "in\n"
    assert done.stderr.startswith("err\n")


def test_it_says_that_nothing_was_recorded_and_why(environment: dict[str, str]) -> None:
    done = run(environment, "--", "sh", "-c", "true")
    assert "the engine has ended and was never recorded" in done.stderr


def test_the_interpreter_that_lacks_kvcatch_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "python-bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = run(environment, "--", str(bare), "-c", "pass")
    assert f"{bare} has no kvcatch" in done.stderr
    assert f"{bare} -m pip install kvcatch" in done.stderr


def test_the_child_is_asked_to_record_and_allowed_to(environment: dict[str, str]) -> None:
    environment["VLLM_PLUGINS"] = "mine"
    done = run(
        environment,
        "--sample-steps",
        "5",
        "--",
        "sh",
        "-c",
        'echo "$KVCATCH $VLLM_PLUGINS $KVCATCH_SAMPLE_STEPS"',
    )
    assert done.stdout == "1 mine,kvcatch 5\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_forwarded(environment: dict[str, str], number: signal.Signals) -> None:
    # Blocked before it says ready, so that the signal cannot come between a check and a wait.
    script = "import signal, sys\n"
    script += f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(number)}}})\n"
    script += f"print('ready', flush=True)\nsignal.sigwait({{{int(number)}}})\n"
    script += "print('got it', flush=True)\nsys.exit(5)\n"
    child = subprocess.Popen(
        [*RUN, "--", sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert out == "got it\n"
    assert child.returncode == 5


def test_grandchildren_do_not_outlive_a_killed_child(environment: dict[str, str]) -> None:
    # A grandchild in a session of its own holds the pipe open: only its death ends the read.
    script = "setsid sh -c 'trap \"\" TERM HUP; echo $$; exec sleep 300' & read -t 0.3 x; kill -9 $$"
    done = run(environment, "--", "bash", "-c", script)
    assert done.returncode == 137
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_bad_use_is_told(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run"]) == 2
    assert "no command to run" in capsys.readouterr().err
    assert main(["run", "--", "no-such-command-here"]) == 2
    assert "command not found" in capsys.readouterr().err
    existing = tmp_path / "x.kvcap"
    existing.touch()
    assert main(["run", "-o", str(existing), "--", "true"]) == 2
    assert "will not overwrite" in capsys.readouterr().err
