"""Finding engines that nobody records, on a made-up /proc and on the real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from kvcatch.sources.procs import engine_of, local_engines


def process(proc: Path, pid: int, parent: int, *words: str, sockets: tuple[int, ...] = ()) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "net").mkdir()
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "stat").write_text(f"{pid} (a b) c) S {parent} 1 1\n")
    rows = [
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    ]
    for index, port in enumerate(sockets):
        os.symlink(f"socket:[{pid}{index}]", folder / "fd" / str(index))
        rows.append(f"   {index}: 0100007F:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 {pid}{index} 1 0 100")
    (folder / "net" / "tcp").write_text("\n".join(rows) + "\n")


def test_servers_are_found_with_the_port_they_listen_on(tmp_path: Path) -> None:
    process(
        tmp_path,
        10,
        1,
        "/usr/bin/python3",
        "/usr/bin/vllm",
        "serve",
        "m",
        "--port",
        "8100",
        sockets=(40001, 8100),
    )
    process(tmp_path, 11, 1, "python", "-m", "vllm.entrypoints.openai.api_server", sockets=(8000,))
    process(tmp_path, 12, 1, "python3", "-m", "sglang.launch_server", "--port=30000")
    process(tmp_path, 13, 1, "vim", "vllm", "serve")
    process(tmp_path, 14, 1, "python", "-m", "http.server", sockets=(9000,))
    (tmp_path / "self").mkdir()
    got = [(engine.pid, engine.kind, engine.port) for engine in local_engines(str(tmp_path))]
    assert got == [(10, "vllm", 8100), (11, "vllm", 8000), (12, "sglang", None)]
    assert local_engines(str(tmp_path))[0].url == "http://127.0.0.1:8100/metrics"


def test_a_worker_belongs_to_the_server_above_it(tmp_path: Path) -> None:
    process(tmp_path, 20, 1, "python", "-m", "vllm.entrypoints.openai.api_server", sockets=(8000,))
    process(tmp_path, 21, 20, "VLLM::EngineCore")
    process(tmp_path, 22, 21, "VLLM::Worker")
    engine = engine_of(22, str(tmp_path))
    assert engine is not None
    assert (engine.pid, engine.port) == (20, 8000)
    assert engine_of(1, str(tmp_path)) is None


def test_a_real_process_is_found_by_its_real_socket(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import socket, sys\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        port = int(child.stdout.readline())
        engine = engine_of(child.pid)
        assert engine is not None
        assert (engine.pid, engine.kind, engine.port) == (child.pid, "sglang", port)
        with socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
