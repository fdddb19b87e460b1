"""Networks of our own: one for the run and one for each daemon, joined by a wire that can be cut.

They are the kernel's network namespaces, without a name: what was made in one ends with the last
process in it, however that ends. Nothing of the machine's own network is touched, or reached.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HOST = "198.18.0.1"
"""Where servers are found: of a range that is set aside for tests of networks."""

PATIENCE_SECONDS = 10.0
"""How long a wire may take to carry, on a busy machine."""

_NETWORK = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000

# Not in `os` before Python 3.12.
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Say why there can be no networks here; nothing if there can."""
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "this takes Linux and the command ip (Debian: iproute2)"
    # All of it is tried by a process of its own: half of it could not be taken back.
    tried = subprocess.run(
        [sys.executable, "-m", "chaos.network"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def leave_the_machine() -> None:
    """Have this thread, and all that it starts, in a network in which there is nobody."""
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        # Who is not root may be so in a world of their own.
        _unshare(_CLONE_NEWNET | _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _ip(f"address add {HOST}/32 dev lo", "link set lo up")


class Network:
    """A network with one wire, which leads to HOST. As a context manager: what this thread does
    inside, it does there. Any number of threads may."""

    def __init__(self, number: int) -> None:
        self._wire = f"wire{number}"
        self._here, self._there = f"198.18.{number}.1", f"198.18.{number}.2"
        self._home = os.open(_NETWORK, os.O_RDONLY)
        try:
            _unshare(_CLONE_NEWNET)
            self._place = os.open(_NETWORK, os.O_RDONLY)
        finally:
            _enter(self._home)
        place = f"/proc/{os.getpid()}/fd/{self._place}"
        _ip(
            f"link add {self._wire} type veth peer name wire netns {place}",
            f"address add {self._here}/24 dev {self._wire}",
        )
        with self:
            _ip(f"address add {self._there}/24 dev wire", "link set lo up")
        self.mend()

    def __enter__(self) -> "Network":
        _enter(self._place)
        return self

    def __exit__(self, *_: object) -> None:
        _enter(self._home)

    def cut(self) -> None:
        """Cut the wire far from here: what is sent vanishes, and nobody is told."""
        _ip(f"link set {self._wire} down")

    def unplug(self) -> None:
        """Pull the plug out here: there is no way to anywhere, and that is what is told."""
        with self:
            _ip("link set wire down")

    def mend(self) -> None:
        """Be a good network again."""
        _ip(f"link set {self._wire} up")
        with self:
            _ip("link set wire up", f"route replace default via {self._here}")

    def close(self) -> None:
        """Give the network up."""
        os.close(self._place)
        os.close(self._home)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "no network of our own")


def _enter(network: int) -> None:
    if _libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no way into the network")


def _ip(*commands: str) -> None:
    for command in commands:
        words = [shutil.which("ip") or "ip", *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {command}: {done.stderr.strip()}")


def _try() -> None:
    """Make a network, and see that its wire carries, and does not when it is cut."""
    leave_the_machine()
    network = Network(1)
    with contextlib.closing(network), socket.create_server((HOST, 0)) as server:
        address = server.getsockname()[:2]

        def carries(seconds: float) -> bool:
            try:
                with network, socket.create_connection(address, seconds):
                    server.accept()[0].close()
            except OSError:
                return False
            return True

        # A wire that was mended takes a moment: the kernel wakes it up at its leisure.
        if not carries(PATIENCE_SECONDS):
            raise OSError("a new wire carries nothing")
        for spoil in (network.cut, network.unplug):
            spoil()
            if carries(0.2):
                raise OSError(f"a wire carries after {spoil.__name__}")
            network.mend()
            if not carries(PATIENCE_SECONDS):
                raise OSError(f"a mended wire carries nothing after {spoil.__name__}")


if __name__ == "__main__":
    try:
        _try()
    except OSError as error:
        sys.exit(str(error))
