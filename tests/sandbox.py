"""A copy of this machine's root to install things into, which is gone afterwards."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

# With their places: the image's PATH, which they are started with, need not lead to them.
TOOLS = {
    name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""
    for name in ("unshare", "nsenter", "chroot", "setpriv")
}


def missing(reason: str) -> None:
    """Skip a test for want of something; in CI nothing may be wanting."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Sandbox:
    """A copy of this machine's root in memory, in a mount namespace that this object keeps.

    A context manager; without the rights for one the test is skipped.
    """

    def __init__(self, place: Path) -> None:
        self.root = place / "root"
        self._layers = place
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if sys.platform != "linux" or os.geteuid() != 0 or not all(TOOLS.values()):
            missing(f"needs Linux, root and {', '.join(TOOLS)}")
        self._layers.mkdir()
        script = """
            cd "$1"
            # The upper layer may not lie in the lower one, which is everything: so it is in memory.
            mount -t tmpfs tmpfs .
            cd "$1"
            mkdir upper work root
            mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
            mount --rbind /dev root/dev
            echo ready
            read -r end
        """
        self._keeper = subprocess.Popen(
            [TOOLS["unshare"], "--mount", "--propagation", "private", "sh", "-ec", script, "-",
             str(self._layers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._keeper.stdout
        assert self._keeper.stderr
        if self._keeper.stdout.readline() != "ready\n":
            missing(f"no namespaces or no overlay here: {self._keeper.stderr.read()}")
        return self

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs something as root in the copy."""
        assert self._keeper
        enter = [TOOLS["nsenter"], "--mount", f"--target={self._keeper.pid}"]
        return [*enter, TOOLS["chroot"], str(self.root), *arguments]

    def shell(self, text: str, environment: dict[str, str], directory: str = "/") -> str:
        done = subprocess.run(
            self.command("/bin/sh", "-ec", f"cd {shlex.quote(directory)}\n{text}"),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def __exit__(self, *_: object) -> None:
        assert self._keeper
        self._keeper.communicate("end\n")
