"""Install the Debian programs that the tests drive: redis-server, promtool, prometheus, chromium.

Run by ``make system``. Does nothing when every program is there; needs root and apt when one is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: program -> Debian package
PROGRAMS = {
    "redis-server": "redis-server",
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "chromium": "chromium",
}
#: Debian starts what it installs; a machine that only runs tests wants no daemons.
NO_DAEMONS = "#!/bin/sh\nexit 101\n"
POLICY = "/usr/sbin/policy-rc.d"


def missing() -> list[str]:
    """Packages whose program is not on the path."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


def _apt(*words: str) -> None:
    done = subprocess.run(
        ["apt-get", "-qq", *words],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        sys.exit(f"system packages: apt-get {' '.join(words)} failed ({done.returncode}):\n{tail}")


def main() -> None:
    """Install what is missing; exits non-zero with the command to run when it cannot."""
    wanted = missing()
    if not wanted:
        return
    command = "apt-get install --no-install-recommends " + " ".join(wanted)
    if shutil.which("apt-get") is None:
        sys.exit(f"system packages: {', '.join(wanted)} missing, no apt-get here: install them by hand.")
    if os.geteuid() != 0:
        sys.exit(f"system packages: {', '.join(wanted)} missing. Run as root: {command}")
    own_policy = not os.path.exists(POLICY)
    if own_policy:
        with open(POLICY, "w", encoding="ascii") as file:
            file.write(NO_DAEMONS)
        os.chmod(POLICY, 0o755)
    try:
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", *wanted)
    finally:
        if own_policy:
            os.remove(POLICY)
    still = missing()
    if still:
        sys.exit(f"system packages: installed, but still not on the path: {', '.join(still)}.")
    print(f"system packages: installed {', '.join(wanted)}.")


if __name__ == "__main__":
    main()
