"""How a connection to a server is made: name look-up, TCP or a socket file, TLS, logging in.

redis-py dials, speaks TLS and authenticates; it retries nothing.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias, cast

import redis
from redis.connection import AbstractConnection

from emqtimerd.config import NodeSettings, TlsSettings, read_secret

MIN_WAIT_SECONDS = 0.001
"""A timeout of zero would switch a socket to non-blocking: it is waited this long at least."""

Connection: TypeAlias = AbstractConnection


class UnusableTls(Exception):
    """What `node.tls` names cannot be used; the message says which setting, and why."""


def reason(error: BaseException) -> str:
    """The innermost words of an error; redis-py wraps the operating system's in its own."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class NoAnswer(Exception):
    """The name servers did not answer in time."""


_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
"""Written as it is, without asking anybody for a name."""


class _LookUps:
    """Looks names up in threads of their own: the resolver has a limit of half a minute and more,
    and nobody can end it sooner. Who asks again meanwhile waits for the same answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, Future[list[str]]] = {}

    def addresses(self, host: str, seconds: float) -> list[str]:
        """Return the addresses of a name. Raises OSError, UnicodeError or NoAnswer."""
        with self._lock:
            answer = self._asked.get(host)
            if answer is None:
                answer = Future()
                run = partial(self._ask, host, answer)
                try:
                    threading.Thread(target=run, name="emqtimerd-name", daemon=True).start()
                except RuntimeError as error:
                    raise OSError(str(error)) from error
                # Only now: nobody is to wait for a thread that there is not. It may have its answer
                # already, and waits for the lock to take itself out.
                self._asked[host] = answer
        try:
            return answer.result(seconds)
        except TimeoutError as error:
            raise NoAnswer(f"no answer to the look-up of {host}") from error

    def _ask(self, host: str, answer: Future[list[str]]) -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            # In full: what an answer begins with lacks the zone, without which an address of one
            # link leads nowhere.
            addresses = [socket.getnameinfo(where, _AS_NUMBERS)[0] for *_, where in found]
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        else:
            answer.set_result(list(dict.fromkeys(addresses)))
        finally:
            with self._lock:
                del self._asked[host]


_LOOK_UPS = _LookUps()


class _TcpConnection(redis.Connection):
    """redis-py's TCP connection, with one limit for looking up the name and trying its addresses:
    redis-py has none for the one, and gives each of the others all the time."""

    _connect_until = 0.0
    """When connecting is to have ended (monotonic seconds)."""

    def _connect(self) -> socket.socket:
        name, limit = self.host, cast("float", self.socket_connect_timeout)
        self._connect_until = time.monotonic() + limit
        addresses = [name] if _is_address(name) else _LOOK_UPS.addresses(name, limit)
        last: OSError | None = None
        try:
            for number, address in enumerate(addresses):
                self.host = address
                # What an address does not use is left to the next ones.
                self.socket_connect_timeout = self._time_left() / (len(addresses) - number)
                try:
                    return super()._connect()  # type: ignore[no-any-return, no-untyped-call]
                except OSError as error:
                    last = error
        finally:
            self.host, self.socket_connect_timeout = name, limit
        raise last or OSError("the name has no address")

    def _time_left(self) -> float:
        return max(self._connect_until - time.monotonic(), MIN_WAIT_SECONDS)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Credentials(redis.CredentialProvider):
    """User name and password, the file read anew at each connection so that rotation needs no
    restart."""

    def __init__(self, username: str, password_file: str) -> None:
        self._username = username
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = read_secret(self._password_file)
        return (self._username, password) if self._username else (password,)


class _TlsConnection(redis.SSLConnection, _TcpConnection):
    """redis-py's TLS connection, with a server name that may differ from the dialled host, and
    with no authority beside the one that is named: redis-py trusts the system's as well, and reads
    all of them at each connection (45 ms of processor time)."""

    def __init__(self, tls: TlsSettings, **options: Any) -> None:
        self._tls = tls
        # Anew for each connection: files are rotated. Before there is a socket, which would be left
        # open if they cannot be used.
        self._context = _tls_context(tls)
        super().__init__(**options)

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        # The TLS session is a part of connecting, and its time counts as such.
        sock.settimeout(self._time_left())
        name = self._tls.server_name or self._host
        wrapped = self._context.wrap_socket(sock, server_hostname=name)
        wrapped.settimeout(self.socket_timeout)
        return wrapped


def _tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return what a TLS session is made with. Raises UnusableTls."""
    try:
        tls.server_name.encode("idna")
    except UnicodeError as error:
        raise UnusableTls(f"tls.server_name ({tls.server_name}): {error}") from error
    try:
        context = ssl.create_default_context(cafile=tls.ca_file or None)
    except OSError as error:
        raise UnusableTls(f"tls.ca_file ({tls.ca_file}): {reason(error)}") from error
    # The floor of today's TLS; Python's default context may allow less on old systems.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file:
        try:
            # Without a key file, the key is expected in the same file.
            context.load_cert_chain(tls.cert_file, tls.key_file or None, _no_passphrase)
        except OSError as error:
            files = " and ".join(filter(None, (tls.cert_file, tls.key_file)))
            raise UnusableTls(f"tls.cert_file and key_file ({files}): {reason(error)}") from error
    return context


def _no_passphrase() -> str:
    """Called for a key that is encrypted; else OpenSSL would ask for it on the terminal, and wait
    there for ever."""
    raise UnusableTls(
        "the key of tls.cert_file is encrypted, and nobody is there to be asked for its passphrase"
    )


class _UnixConnection(redis.UnixDomainSocketConnection):
    """redis-py's connection over a socket file; the abstract `host` of its base stays unused."""

    host = ""


Connector: TypeAlias = Callable[[str, int], Connection]
"""Makes a connection to a host and port; it is not connected yet."""


def connector(settings: NodeSettings) -> Connector:
    """Return what dials the servers of a node: its credentials, its TLS, its database."""
    options = _options(settings) | _login(settings) | {"db": settings.url.db}
    return _connector(options, settings.tls if settings.url.tls else None)


def file_connector(settings: NodeSettings) -> Callable[[], Connection]:
    """Return what dials the server at a socket file."""
    own = {"path": settings.url.socket, "db": settings.url.db}
    return partial(_connection, _UnixConnection, **_options(settings), **_login(settings), **own)


def sentinel_connector(settings: NodeSettings, patience_seconds: float) -> Connector:
    """Return what dials its sentinels, which have credentials and TLS of their own."""
    sentinel = settings.sentinel
    options = _options(settings)
    options["socket_connect_timeout"] = options["socket_timeout"] = patience_seconds
    if sentinel.password_file:
        credentials = _Credentials(sentinel.username, sentinel.password_file)
        options["credential_provider"] = credentials
    return _connector(options, sentinel.tls if sentinel.tls.enabled else None)


def _connector(options: dict[str, Any], tls: TlsSettings | None) -> Connector:
    kind = _TcpConnection if tls is None else _TlsConnection
    options = options if tls is None else options | {"tls": tls}
    return lambda host, port: _connection(kind, host=host, port=port, **options)


def _connection(kind: Callable[..., Connection], **options: Any) -> Connection:
    connection = kind(**options)
    # No CLIENT SETINFO: an ACL with little more than the two verbs must do. An option will not:
    # to redis-py 7 its absence means the default.
    connection.driver_info = None
    return connection


def _options(settings: NodeSettings) -> dict[str, Any]:
    return {
        # No HELLO either.
        "protocol": 2,
        "socket_connect_timeout": settings.connect_timeout_seconds,
        "socket_timeout": settings.timeout_seconds,
        # One arrival a sweep: a verb whose reply is late must never be sent again by itself.
        "retry": None,
    }


def _login(settings: NodeSettings) -> dict[str, Any]:
    """How the connection authenticates; what stands beside the URL is stronger than the URL."""
    username = settings.username or settings.url.username
    if settings.password_file:
        return {"credential_provider": _Credentials(username, settings.password_file)}
    if settings.url.password is None:
        return {}
    return {"username": username or None, "password": settings.url.password.get_secret_value()}
