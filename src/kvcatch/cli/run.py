"""``kvcatch run -- CMD``: start an engine with capture on and pass everything else through."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from kvcatch.errors import KVCatchError
from kvcatch.units import parse_duration, parse_size

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SI_KERNEL = 0x80  # si_code of a signal that the terminal sent to the whole foreground group
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.usage = "kvcatch run [-o FILE] [options] -- CMD…"
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="capture file; default kvcatch-<model>.<pid>.kvcap"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the capture file")
    parser.add_argument("--no-file", action="store_true", help="keep only the ring, write no capture file")
    parser.add_argument(
        "--sample-steps", type=int, metavar="N", help="one sample row every N steps (default 1)"
    )
    parser.add_argument(
        "--sample-interval", metavar="TIME", help="or after this time, whichever is first (default 1s)"
    )
    parser.add_argument(
        "--memory-interval", metavar="TIME", help="between memory samples of a rank (default 1s)"
    )
    parser.add_argument("--ring-size", metavar="SIZE", help="size of the flight recorder (default 64MiB)")
    parser.add_argument("--rotate-size", metavar="SIZE", help="start a new capture file at this size")
    parser.add_argument("--rotate-age", metavar="TIME", help="start a new capture file at this age")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Start the engine and the drainer; returns the engine's exit status."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise KVCatchError("no command to run.", "Write: kvcatch run -- vllm serve MODEL")
    if shutil.which(command[0]) is None:
        raise KVCatchError(f"command not found: {command[0]}.", "Is the engine's environment active?")
    _check_output(args)
    environment = _environment(args)
    directory, run_id = environment["KVCATCH_DIR"], environment["KVCATCH_RUN_ID"]
    os.makedirs(directory, mode=0o700, exist_ok=True)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    drain = None if args.no_file else _start_drain(args, directory, run_id)
    # Blocked before the child exists, so that none is lost; taken one by one below.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
    child = subprocess.Popen(command, env=environment, preexec_fn=_in_child)  # noqa: PLW1509 (single thread)
    watch = _Watch(command, directory, run_id)
    watch.start()
    status = _supervise(child)
    watch.stop.set()
    _end_orphans({drain.pid} if drain else set())
    watch.report(final=True)
    _finish(drain, run_id)
    return status


def _check_output(args: argparse.Namespace) -> None:
    if args.output and os.path.exists(args.output):
        if not args.force:
            raise KVCatchError(f"{args.output} exists, will not overwrite it without --force.")
        os.unlink(args.output)
    if args.output and not os.path.isdir(os.path.dirname(os.path.abspath(args.output))):
        raise KVCatchError(f"no folder for {args.output}.", "Create it first.")


def _environment(args: argparse.Namespace) -> dict[str, str]:
    from kvcatch.capture.options import new_run_id
    from kvcatch.store.paths import default_directory

    environment = dict(os.environ)
    environment["KVCATCH"] = "1"
    environment["KVCATCH_DIR"] = os.path.abspath(default_directory(environment))
    environment["KVCATCH_RUN_ID"] = new_run_id()
    if args.sample_steps is not None:
        if args.sample_steps < 1:
            raise KVCatchError(f"--sample-steps {args.sample_steps}: at least 1.")
        environment["KVCATCH_SAMPLE_STEPS"] = str(args.sample_steps)
    for option in ("sample_interval", "memory_interval"):
        text = getattr(args, option)
        if text is not None:
            environment[f"KVCATCH_{option.upper()}"] = str(parse_duration(text))
    if args.ring_size:
        environment["KVCATCH_RING_BYTES"] = str(parse_size(args.ring_size))
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "kvcatch" not in plugins.split(","):
        # The variable is an allow-list: a plugin that it does not name is dropped silently.
        environment["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "kvcatch"]))
    return environment


def _start_drain(args: argparse.Namespace, directory: str, run_id: str) -> subprocess.Popen[str]:
    from kvcatch.api import start_drain

    arguments = ["-o", args.output] if args.output else []
    if args.rotate_size:
        arguments += ["--rotate-bytes", str(parse_size(args.rotate_size))]
    if args.rotate_age:
        arguments += ["--rotate-seconds", str(parse_duration(args.rotate_age))]
    return start_drain(directory, run_id, arguments)


def _in_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGCHLD))
    # If this process is killed the engine must not stay behind unwatched.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _supervise(child: subprocess.Popen[bytes]) -> int:
    """Forward signals and reap whoever ends, until the child does; returns its exit status."""
    while True:
        info = signal.sigtimedwait((*_FORWARDED, signal.SIGCHLD), 0.5)
        if info is not None and info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
            # What the terminal sends has reached the child already: it is in the same group.
            _signal(child.pid, info.si_signo)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1 if child.returncode is None else child.returncode
            if pid == 0:
                break
            if pid == child.pid:
                code = os.waitstatus_to_exitcode(status)
                child.returncode = code
                return code if code >= 0 else 128 - code


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end_orphans(spare: set[int]) -> None:
    """Engine cores and workers outlive a killed API server; as subreaper we are now their parent."""
    for number, patience in ((0, 2.0), (signal.SIGTERM, ORPHAN_SECONDS), (signal.SIGKILL, ORPHAN_SECONDS)):
        orphans = _children() - spare
        for pid in orphans if number else ():
            _signal(pid, number)
        deadline = time.monotonic() + patience
        while orphans and time.monotonic() < deadline:
            _reap(spare)
            orphans = _children() - spare
            time.sleep(0.02)
        _reap(spare)
        if not orphans:
            return


def _children() -> set[int]:
    """Pids whose parent is this process."""
    me, found = os.getpid(), set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if int(fields[1]) == me and fields[0] != "Z":
                found.add(int(name))
    return found


def _reap(spare: set[int]) -> None:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in spare:
            try:
                os.waitpid(int(name), os.WNOHANG)
            except ChildProcessError:
                pass


class _Watch(threading.Thread):
    """Says once, when the engine is healthy and nothing records it, why that is and what to do."""

    def __init__(self, command: list[str], directory: str, run_id: str) -> None:
        super().__init__(daemon=True)
        self.command = command
        self.prefix = os.path.join(directory, run_id)
        self.stop = threading.Event()
        self.said = False

    def attached(self) -> bool:
        """Whether a recorder of this run exists."""
        directory, run_id = os.path.split(self.prefix)
        return any(name.startswith(run_id) and ".core" in name for name in os.listdir(directory))

    def run(self) -> None:
        url = f"http://{_option(self.command, '--host', '127.0.0.1')}:{_option(self.command, '--port', '8000')}/health"
        url = url.replace("//0.0.0.0:", "//127.0.0.1:")
        while not self.stop.wait(1.0):
            if self.attached():
                return
            try:
                with urllib.request.urlopen(url, timeout=2):
                    self.report()
                    return
            except (urllib.error.URLError, OSError, ValueError):
                continue

    def report(self, *, final: bool = False) -> None:
        """Name the interpreter that lacks kvcatch, and the pip command."""
        if self.said or self.attached():
            return
        self.said = True
        interpreter = _interpreter(self.command)
        when = (
            "the engine has ended and was never recorded"
            if final
            else "the engine is up but nothing records it"
        )
        lines = [f"kvcatch: {when}."]
        if interpreter and not _has_kvcatch(interpreter):
            lines.append(f"  {interpreter} has no kvcatch. Install it there:")
            lines.append(f"  {interpreter} -m pip install kvcatch")
        else:
            lines.append(
                "  Look for a line with [kvcatch] in the engine's log; an engine that starts its workers on"
            )
            lines.append("  other machines needs KVCATCH=1 and kvcatch installed there too.")
        print("\n".join(lines), file=sys.stderr, flush=True)


def _option(command: list[str], name: str, default: str) -> str:
    for index, word in enumerate(command):
        if word == name and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(name + "="):
            return word[len(name) + 1 :]
    return default


def _interpreter(command: list[str]) -> str | None:
    """The Python that the command runs: itself, or its script's first line."""
    path = shutil.which(command[0])
    if path is None:
        return None
    if "python" in os.path.basename(path):
        return path
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and words[0].endswith("/env") and len(words) > 1:
        return shutil.which(words[1])
    return words[0] if words else None


def _has_kvcatch(interpreter: str) -> bool:
    done = subprocess.run([interpreter, "-c", "import kvcatch"], capture_output=True, check=False)
    return done.returncode == 0


def _finish(drain: subprocess.Popen[str] | None, run_id: str) -> None:
    """Wait for the capture to be complete and print what to type next."""
    if drain is None:
        print(f"kvcatch: next: kvcatch top {run_id}.core0", file=sys.stderr)
        return
    _signal(drain.pid, signal.SIGTERM)
    try:
        output, _ = drain.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        drain.kill()
        output, _ = drain.communicate()
    files = output.split("\n")[:-1]
    for path in files:
        print(f"Wrote {path}", file=sys.stderr)
    if files:
        print(f"Next: kvcatch top {files[0]}", file=sys.stderr)
