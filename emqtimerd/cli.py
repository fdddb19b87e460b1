"""The command line: parse, call, print, exit code. The work is in the other rooms.

Each command imports what it needs when it runs, so that `--help` and completion stay quick.
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from emqtimerd import __version__

if TYPE_CHECKING:
    from emqtimerd.config import Config

EXIT_USAGE = 2

app = typer.Typer(
    name="emqtimerd",
    help="The clock of an EMQ node: promotes due jobs and recovers expired leases.",
    no_args_is_help=True,
    # Names and ids must reach people as they are: rich would wrap them and read [brackets].
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Configuration file (TOML); also EMQTIMERD_CONFIG."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Address of the node, such as redis://127.0.0.1:6379, or rediss:// for TLS; also "
        "EMQTIMERD_NODE__URL.",
    ),
]
Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        metavar="NAME",
        help="A queue; repeat for more. Replaces the configured ones; also EMQTIMERD_QUEUES.",
    ),
]


# --- what options are made of -------------------------------------------------------------------


def _like(setting: str) -> Callable[[str], Any]:
    """Reads an option as the setting of this name: the same values, refused in the same words."""

    def read(text: str) -> Any:
        from emqtimerd.config import ConfigError, load

        try:
            value: Any = load(None, {}, {setting: text}).settings
        except ConfigError as error:
            raise typer.BadParameter(error.problems[0].message) from None
        for name in setting.split("."):
            value = getattr(value, name)
        return value

    return read


def _duration(text: str) -> float:
    from emqtimerd.config import duration

    # A number alone is seconds, as timeout(1) takes it.
    unit = "s" if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else ""
    try:
        return duration("1ms", "24h").parse(text + unit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _verb(text: str) -> str:
    # The configuration and the documents write it with an underscore.
    verb = text.replace("-", "_")
    if verb not in ("promote", "stalled_check"):
        raise typer.BadParameter("must be promote or stalled-check")
    return verb


def _port(text: str) -> int:
    # The default comes this way as well, as the number that it is.
    if not re.fullmatch(r"[0-9]{1,5}", str(text)) or int(text) > 65_535:
        raise typer.BadParameter("must be a port from 1 to 65535, or 0 for any free one")
    return int(text)


# --- the commands -------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emqtimerd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command(short_help="Run the daemon.")
def run(
    config: ConfigFile = None,
    url: Url = None,
    queue: Queues = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Start a local node (devnode) and work on that.")
    ] = False,
) -> None:
    """Run the daemon: every due job pending on time, every lost lease recovered.

    SIGTERM and SIGINT stop it after the running sweeps, SIGHUP re-reads the file. Exit codes:
    0 stopped; 1 the grace was exceeded, or a thread died; 2 usage, configuration, port in use.
    """
    flags = _flags(url, queue)
    if embedded and url is not None:
        _refuse("--embedded brings a node of its own: leave out --url, or --embedded")

    def load() -> "Config":
        from emqtimerd.config import load as read

        return read(config, os.environ, flags, needs_queues=True)

    with contextlib.ExitStack() as stack:
        if embedded:
            from emqtimerd.devnode import DevNode, DevNodeError

            # From here on there is something to clear away.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: sys.exit(0))
            try:
                node = stack.enter_context(DevNode())
            except DevNodeError as error:
                _refuse(str(error))
            flags["node.url"] = node.url

        from emqtimerd.daemon import run as run_daemon

        code = run_daemon(load, _checked(load))
    # A sweep that was abandoned may wait for its server, and Python would wait for its thread.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


@app.command(short_help="Sweep queues once, now.")
def once(
    queue: Queues = None,
    config: ConfigFile = None,
    url: Url = None,
    verb: Annotated[
        str | None,
        typer.Option(
            parser=_verb,
            autocompletion=lambda: ["promote", "stalled-check"],
            metavar="VERB",
            help="Send only this verb: promote or stalled-check.",
            show_default="both",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            parser=_like("promote.limit"),
            metavar="N",
            help="Jobs that one command moves at most.",
            show_default="as configured, else 100",
        ),
    ] = None,
    max_stalled: Annotated[
        int | None,
        typer.Option(
            parser=_like("stalled_check.max_stalled"),
            metavar="N",
            show_default="as configured, else 1",
            help="Counted stalls that bury a job. With 1, EchoMQ's default, the first counted "
            "stall dead-letters it; an expiry that crossed a server restart is not counted.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="DURATION",
            help="Send nothing more after this long, such as 500ms, 30s or 5m; a number alone is "
            "seconds.",
            show_default="none",
        ),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain/--no-drain", help="Sweep until nothing is due, or only once.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read, and say what a sweep would touch now.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Sweep queues once: promote what is due, recover what has expired.

    Exit codes: 0 done; 1 a sweep failed, or a row blocks one; 2 usage or configuration;
    3 node unreachable, TLS or authentication; 4 not an EMQ node of this wire; 130 and 143
    interrupted, with what was done still printed.
    """
    settings = _load(config, _flags(url, queue)).settings
    if not settings.queues:
        search = "; once does not search for queues, as run does with discovery.enabled"
        _refuse(
            "no queue to sweep: name one with --queue NAME, or list `queues` in --config FILE"
            + (search if settings.discovery.enabled else "")
        )

    from emqtimerd.once import document, sweep_once, table
    from emqtimerd.sweeper import VERBS

    interrupt = _Interrupt()
    report = sweep_once(
        settings,
        settings.queues,
        verbs=[each for each in VERBS if verb in (None, each)],
        limit=limit,
        max_stalled=max_stalled,
        timeout_seconds=timeout,
        drain=drain,
        dry_run=dry_run,
        stop=lambda: interrupt.signal is not None,
    )
    if as_json:
        _print_document(document(report))
    elif report.fault is None:
        _print(table(report))
    if report.fault:
        _complain(f"{report.fault}" + (f"\nfix: {report.fix}" if report.fix else ""))
    raise typer.Exit(interrupt.exit_code or report.exit_code)


@app.command(short_help="Find out whether it would work, and what to do if not.")
def check(
    config: ConfigFile = None,
    url: Url = None,
    queue: Queues = None,
    acl: Annotated[
        bool,
        typer.Option(
            "--acl", help="Print the smallest ACL rule for this configuration; contact nothing."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Examine configuration and node: a line a check, and the fix below what needs one.

    Nothing on the node is changed. Exit codes: 0 all well, or warnings only; 1 a check failed;
    2 usage or configuration; 3 node unreachable, TLS or authentication; 4 not an EMQ node of this
    wire.
    """
    loaded = _load(config, _flags(url, queue))
    if acl:
        from emqtimerd.acl import acl_document, acl_rule

        if as_json:
            _print_document(acl_document(loaded.settings))
        else:
            _print(acl_rule(loaded.settings))
        return

    from emqtimerd.check import document, examine, lines

    report = examine(loaded.settings, None if loaded.file is None else str(loaded.file))
    if as_json:
        _print_document(document(report))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        _print("\n".join(lines(report, color=color)))
    raise typer.Exit(report.exit_code)


@app.command(short_help="Start a local EMQ node, to try things out.")
def devnode(
    port: Annotated[
        int,
        typer.Option(parser=_port, metavar="PORT", help="Port to listen on; 0: any free one."),
    ] = 6379,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Keep the data here (AOF); else it is gone at the end."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Server binary to run instead of the embedded one."),
    ] = None,
) -> None:
    """Start a local EMQ node: an embedded Valkey with the native job core, branded.

    It listens on loopback only, prints its URL, and stops on Ctrl-C or SIGTERM.
    """
    from emqtimerd.devnode import run_devnode

    try:
        code = run_devnode(port, directory, server, sys.stdout, sys.stderr)
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{error.filename} cannot be used: {error.strerror}")
    raise typer.Exit(code)


@app.command(short_help="Watch all of it work for half a minute.")
def demo() -> None:
    """Watch it work for half a minute: a node, jobs and workers, a server killed in between.

    Exit code 0 if every number of the summary adds up, 1 if not.
    """
    from emqtimerd.demo import run_demo
    from emqtimerd.devnode import DevNodeError

    # Whatever ends it, the daemon and the node that it started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = run_demo(sys.stdout, live=sys.stdout.isatty())
    except DevNodeError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(code)


config_app = typer.Typer(help="Show the configuration, or check it.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command(short_help="Print the settings in force, and who set them.")
def show(config: ConfigFile = None) -> None:
    """Print the effective settings, secrets masked, with where each came from."""
    from emqtimerd.config import show as shown

    _print(shown(_load(config, {})))


@config_app.command(short_help="List every problem; contact nothing.")
def validate(config: ConfigFile = None) -> None:
    """Check file and environment as `run` does; list every problem, contact nothing.

    Exit codes: 0 valid; 2 not, or there is nothing to sweep.
    """
    loaded = _load(config, {}, needs_queues=True)
    _print(f"{loaded.file or 'no configuration file'}: valid, {loaded.settings.extent()}")


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from emqtimerd.config import schema as json_schema

    _print_document(json_schema())


# --- what the commands share --------------------------------------------------------------------


def _load(
    file: Path | None, flags: Mapping[str, object], *, needs_queues: bool = False
) -> "Config":
    from emqtimerd.config import load

    return _checked(lambda: load(file, os.environ, flags, needs_queues=needs_queues))


def _flags(url: str | None, queues: list[str] | None) -> dict[str, object]:
    """The flags that stand for settings, by path; None is one that was not given."""
    return {"node.url": url, "queues": tuple(queues) if queues else None}


def _checked(load: Callable[[], "Config"]) -> "Config":
    from emqtimerd.config import ConfigError

    try:
        return load()
    except ConfigError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    _complain(message)
    raise typer.Exit(EXIT_USAGE)


def _complain(message: str) -> None:
    for line in message.splitlines():
        typer.echo(f"emqtimerd: {line}", err=True)


def _print_document(document: dict[str, Any]) -> None:
    _print(json.dumps(document, indent=2))


def _print(text: str) -> None:
    """Print a result; a reader who has left (a closed pipe) is no error."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        # A name that the terminal's encoding does not know is no reason to lose the result.
        out.reconfigure(errors="backslashreplace")
        if isinstance(out.buffer, io.RawIOBase):
            # PYTHONUNBUFFERED: it forgets what a write that was cut short left over.
            fd, encoding, errors = out.fileno(), out.encoding, out.errors
            out = os.fdopen(fd, "w", encoding=encoding, errors=errors, closefd=False)
    try:
        out.write(text + "\n")
        out.flush()
    except OSError as error:
        # Python flushes once more at exit, and would complain about the same thing then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"emqtimerd: cannot write the result: {error.strerror}", err=True)
            raise typer.Exit(1) from None


class _Interrupt:
    """SIGINT and SIGTERM ask the work to stop; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            # One that is ignored stays so: nohup, and a shell's background jobs, mean it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    @property
    def exit_code(self) -> int | None:
        """128 + the signal, as shells say it."""
        return None if self.signal is None else 128 + self.signal
