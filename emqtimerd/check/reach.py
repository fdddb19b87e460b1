"""Whether the node is reached at all: address, TLS, login, and which server has what."""

from collections.abc import Iterator
from pathlib import Path

from emqtimerd import verdict, wire
from emqtimerd.check.findings import Finding, failed, passed, warned
from emqtimerd.config import NodeSettings
from emqtimerd.dialling import UnusableTls
from emqtimerd.node import NodeFault, Unreachable
from emqtimerd.topology import Account
from emqtimerd.verdict import EXIT_UNREACHABLE


def topology(account: Account) -> Iterator[Finding]:
    """Who the servers are, in the words of those who were asked."""
    yield passed("topology", account.found)
    for trouble in account.troubles:
        yield warned("topology", trouble, "bring them back, or correct node.url")


def no_topology(settings: NodeSettings, fault: NodeFault) -> Finding:
    """Nobody could say who the servers are."""
    fix = verdict.fix(settings, fault) or f"does node.url name a {settings.url.topology} that runs?"
    return failed("topology", fault.message, fix, verdict.exit_code(fault))


def unreadable_tls_files(settings: NodeSettings) -> Iterator[Finding]:
    """The files of `node.tls` that cannot be read: else they show as a connection that failed."""
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(settings.tls, name)
        try:
            if settings.url.tls and path:
                Path(path).open("rb").close()
        except OSError as error:
            found = f"node.tls.{name}: {path} cannot be read: {error.strerror}"
            fix = "correct the path, or let this user read the file"
            yield failed("tls", found, fix, EXIT_UNREACHABLE)


def unreachable(
    settings: NodeSettings, fault: Unreachable, *, port_is_open: bool
) -> Iterator[Finding]:
    """How far the connection got; `port_is_open` is for TLS that was met with silence, or
    that the server hung up on."""
    fix = verdict.fix(settings, fault)
    if fault.code in ("NOAUTH", "WRONGPASS"):
        yield passed("reach", f"{fault.node} answers")
        yield encryption(settings)
        yield failed("auth", fault.message, fix, EXIT_UNREACHABLE)
    elif isinstance(fault.__cause__, UnusableTls):
        yield failed("tls", fault.message, fix, EXIT_UNREACHABLE)
    elif verdict.tls_error(fault):
        yield passed("reach", f"{fault.node} answers")
        yield failed("tls", fault.message, fix, EXIT_UNREACHABLE)
    elif settings.url.tls and port_is_open:
        yield passed("reach", f"{fault.node} answers")
        found = fault.message
        if fault.code == "timeout":
            found += ": the port is open, but there is no TLS session"
            fix = verdict.not_tls(settings)
        yield failed("tls", found, fix, EXIT_UNREACHABLE)
    else:
        yield failed("reach", str(fault), fix, EXIT_UNREACHABLE)


def handshake_refused(settings: NodeSettings, fault: NodeFault) -> Iterator[Finding]:
    """The server refused what comes before the fence: it is loading, or SELECT is refused."""
    yield passed("reach", f"{fault.node} answers")
    yield encryption(settings)
    check = "acl" if verdict.denies_select(fault) else "server"
    found = f"database {settings.url.db}: {fault.message}" if settings.url.db else fault.message
    yield failed(check, found, verdict.fix(settings, fault), verdict.exit_code(fault))


def reached(
    settings: NodeSettings, node: str, first_reply: wire.Reply = None, seconds: float | None = None
) -> Iterator[Finding]:
    """The first reply on a connection tells whether the server wants a login that it did not get.

    It comes before the fence: a server says what it does not know before it asks who we are.
    """
    where = settings.url if settings.url.topology == "standalone" else node
    took = "" if seconds is None else f" in {seconds * 1000:.1f} ms"
    yield passed("reach", f"{where} answers{took}")
    yield encryption(settings)
    if isinstance(first_reply, wire.ReplyError) and first_reply.code == "NOAUTH":
        yield failed("auth", "the server wants authentication", verdict.LOGIN_FIX, EXIT_UNREACHABLE)
    elif settings.password_file or settings.url.password:
        user = settings.username or settings.url.username or "the default user"
        yield passed("auth", f"logged in as {user}")
    else:
        yield passed("auth", "no password is set and none is wanted (the default user)")


def encryption(settings: NodeSettings) -> Finding:
    """How the connection is made that stands."""
    if not settings.url.tls:
        return passed("tls", f"not encrypted, as {settings.url.scheme}:// says")
    ca = settings.tls.ca_file or "the system's CA certificates"
    return passed("tls", f"encrypted, certificate checked against {ca}")
