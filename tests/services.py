"""Services of the machine that tests start for themselves."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path


class redis_server:
    """Debian's redis-server on a port of its own; gives its URL and process."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()

    def __enter__(self) -> tuple[str, subprocess.Popen[bytes]]:
        program = shutil.which("redis-server")
        assert program, "redis-server is missing: make system"
        self.process = subprocess.Popen(
            [program, "--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1",
             "--dir", str(self.folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end, "redis-server does not listen"
        return f"redis://127.0.0.1:{self.port}/0", self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
