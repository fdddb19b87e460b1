"""The start of the command `emqtimerd`, also as `python -m emqtimerd`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    if sys.argv[1:2] == ["run"]:
        _guard_start()
    # Only now: what follows takes a quarter of a second, and a signal may come before that.
    from emqtimerd.cli import app

    try:
        app()
    except OSError as error:
        if error.filename is not None:
            raise
        # Help and version, which typer writes itself.
        sys.stderr.write(f"emqtimerd: cannot write the result: {error.strerror}\n")
        # Python flushes once more at exit, and would complain about the same thing then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _open_standard_streams() -> None:
    """Have streams that were closed at the start lead nowhere.

    Else the next socket would get such a number, and what libraries and a crash write to "standard
    error" would go to the server.
    """
    # The lowest number that is free is given out: three are the streams.
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)
    # Python has None for a stream that it found closed.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _guard_start() -> None:
    """Have signals do no harm before the daemon's own handlers stand.

    A hangup would kill a daemon that is about to read its file anyway; a stop finds nothing
    started yet and is done at once.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


if __name__ == "__main__":
    main()
