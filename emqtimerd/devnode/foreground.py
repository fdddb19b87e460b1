"""The development node in the foreground: what `emqtimerd devnode` runs."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TextIO

from emqtimerd.devnode.node import DevNode
from emqtimerd.devnode.parts import DevNodeError, ServerFailed
from emqtimerd.wire import BRAND


def run_devnode(
    port: int, directory: Path | None, server: str | None, output: TextIO, errors: TextIO
) -> int:
    """Run a node until SIGTERM, SIGINT or SIGHUP comes, and return the exit code.

    0: stopped by a signal. 1: the server failed, or ended by itself. 2: something that was named
    or must be installed is missing or in use. 4: the directory holds foreign data.
    """
    asked = threading.Event()
    ended = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        asked.set()
        ended.set()
        # A second one ends this process at once, and the kernel then ends the server.
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)

    # One that is ignored stays so: nohup, and a shell that starts us in the background, mean it.
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        for number in handlers:
            signal.signal(number, on_signal)
        with DevNode(directory, port=port, server=server) as node:

            def watch() -> None:
                node.wait()
                ended.set()

            threading.Thread(target=watch, name="emqtimerd-devnode-watch", daemon=True).start()
            if not asked.is_set():
                _greet(node, output)
            ended.wait()
            if asked.is_set():
                return 0
            raise ServerFailed(f"The server ended by itself. Its last words:\n{node.log_tail()}")
    except DevNodeError as error:
        print(f"emqtimerd: {error}", file=errors)
        return error.exit_code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _greet(node: DevNode, output: TextIO) -> None:
    kept = (
        "temporary, gone when this ends" if node.temporary else f"{node.directory} (kept, with AOF)"
    )
    print(
        f"EMQ node   {node.url}   ({node.version}, {BRAND.decode()})\n"
        f"data       {kept}\n"
        f"try        emqtimerd once --queue orders --url {node.url}\n"
        "stop       Ctrl-C",
        file=output,
        flush=True,
    )
