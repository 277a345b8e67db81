"""``kvcatch top`` in a real terminal: it draws, follows a resize, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CAPTURE = Path(__file__).parents[2] / "data" / "top" / "crash.kvcap"
LIMIT_SECONDS = 60.0


class Terminal:
    """The user's end of a pseudo terminal with ``top`` at the other end."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master = master
        self.process = process

    def read_until(self, *words: str) -> None:
        """Read until each of ``words`` was drawn, in whatever order and pieces the terminal gives them."""
        seen = b""
        while missing := [word for word in words if word.encode() not in seen]:
            ready, _, _ = select.select([self.master], [], [], LIMIT_SECONDS)
            assert ready, f"{missing!r} did not appear in {seen[-2000:]!r}"
            try:
                seen += os.read(self.master, 65536)
            except OSError:  # the other end has closed
                raise AssertionError(f"closed before {missing!r} in {seen[-2000:]!r}") from None

    def resize(self, columns: int, rows: int) -> None:
        """Change the window, as a window manager does."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)


@contextmanager
def top(columns: int, rows: int) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("COLUMNS", None)
    env.pop("LINES", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcatch", "top", str(CAPTURE)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait(10)
        os.close(master)


def test_it_draws_follows_a_resize_and_gives_the_terminal_back():
    with top(80, 24) as terminal:
        terminal.read_until("\x1b[?1049h", "requests 39/39", "report-0061")  # on a screen of its own
        terminal.resize(150, 30)
        terminal.read_until("output")  # a column that 80 had no room for
        os.write(terminal.master, b"q")
        terminal.read_until("\x1b[?1049l", "\x1b[?25h")  # screen and cursor are back
        assert terminal.process.wait(LIMIT_SECONDS) == 0


def test_ctrl_c_leaves():
    with top(80, 24) as terminal:
        terminal.read_until("requests 39/39")
        os.write(terminal.master, b"\x03")
        terminal.read_until("\x1b[?1049l")
        assert terminal.process.wait(LIMIT_SECONDS) == 0
