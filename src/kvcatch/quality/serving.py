"""One engine at a time: a running server by its URL, or a command that is started, awaited and stopped."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from kvcatch.errors import KVCatchError

START_SECONDS = 1200.0
_STOP_SECONDS = 20.0


class Side(msgspec.Struct, frozen=True):
    """Where one arm runs: a URL, or the whole command of a server."""

    url: str | None
    command: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The side as the user would type it."""
        return self.url or shlex.join(self.command)


def side(text: str, command: Sequence[str] = ()) -> Side:
    """A side from ``--baseline`` or ``--candidate``: a URL, a whole command, or flags to add to ``command``.

    Raises KVCatchError when flags come without a command.
    """
    if text.startswith(("http://", "https://")):
        return Side(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise KVCatchError(f"cannot read {text!r}: {error}.", "Check the quotes.") from None
    if words and not words[0].startswith("-"):
        return Side(None, tuple(words))
    if not command:
        raise KVCatchError(
            f"{text!r} are only flags.",
            'Give the engine after --, for example: kvcatch quality --candidate "--kv-cache-dtype fp8" -- vllm serve MODEL',
        )
    return Side(None, (*command, *words))


def option(command: Sequence[str], *names: str) -> str | None:
    """The last value of a flag in a command, None when it is not given."""
    found = None
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (command[at + 1] if at + 1 < len(command) else None)
    return found


@contextmanager
def serving(where: Side, log_folder: str | None = None) -> Iterator[str]:
    """The URL of a side; an engine that is started here is gone when this ends.

    Raises KVCatchError when the command is missing, ends early or does not answer in time.
    """
    if where.url is not None:
        yield where.url
        return
    with tempfile.TemporaryDirectory(prefix="kvcatch-quality-") as folder:
        path = os.path.join(log_folder or folder, f"engine-{os.getpid()}-{time.monotonic_ns()}.log")
        port = option(where.command, "--port") or str(_free_port())
        host = option(where.command, "--host") or "127.0.0.1"
        line = list(where.command)
        for name, value in (("--port", port), ("--host", host)):
            if option(line, name) is None:
                line += [name, value]
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        with open(path, "wb") as log:
            try:
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise KVCatchError(
                    f"cannot start {line[0]}: {error.strerror}.", "Is the engine's environment active?"
                ) from None
        try:
            _wait(process, url, path)
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], url: str, log: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None:
            print(_tail(log), file=sys.stderr)
            raise KVCatchError(
                f"the engine ended with {process.returncode} before it answered.", "Its last lines are above."
            )
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if time.monotonic() > end:
            print(_tail(log), file=sys.stderr)
            raise KVCatchError(
                f"the engine did not answer at {url} within {START_SECONDS:.0f} s.",
                "Its last lines are above.",
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # until the next look; an engine that ends is seen at once


def _tail(path: str, lines: int = 15) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask politely, then end the whole session: engine cores outlive a killed server."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
