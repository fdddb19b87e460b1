"""The address of a node: one URL for a single server, for Sentinel and for Cluster."""

import difflib
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

from pydantic import SecretStr

from emqtimerd.config.values import TextForm, host_port_text, parse_host_port

Topology = Literal["standalone", "sentinel", "cluster"]

_SERVERS = ("redis", "rediss", "valkey", "valkeys")
SCHEMES = (
    *_SERVERS,
    "unix",
    *(f"{s}+sentinel" for s in _SERVERS),
    *(f"{s}+cluster" for s in _SERVERS),
)
ALLOWED = (
    'a URL such as "redis://127.0.0.1:6379/0", "rediss://host" (TLS), "unix:///run/valkey.sock", '
    '"redis+sentinel://host1,host2/mymaster/0" or "redis+cluster://host1,host2"'
)
_ENCODE = (
    "a password that holds / @ : ? # or % must have them percent-encoded, or stand in password_file"
)
_PORT = 6379
_SENTINEL_PORT = 26379
# Servers answer "DB index is out of range" long before; this only keeps numbers printable.
_DB_DIGITS = 6


@dataclass(frozen=True, slots=True)
class NodeUrl:
    """A node's address, taken apart; its text and its repr hide the password."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    socket: str = ""
    username: str = ""
    password: SecretStr | None = None
    master: str = ""
    db: int = 0

    @property
    def topology(self) -> Topology:
        """How many servers stand behind this address, and who knows them."""
        if self.scheme.endswith("+sentinel"):
            return "sentinel"
        return "cluster" if self.scheme.endswith("+cluster") else "standalone"

    @property
    def tls(self) -> bool:
        """Whether connections to the node are encrypted."""
        return self.scheme.partition("+")[0] in ("rediss", "valkeys")

    @property
    def plain_scheme(self) -> str:
        """The scheme of the same servers without TLS."""
        return self.scheme.replace("rediss", "redis").replace("valkeys", "valkey")

    @property
    def tls_scheme(self) -> str:
        """The scheme of the same servers with TLS; a socket file has none, and keeps its own."""
        return self.plain_scheme.replace("redis", "rediss").replace("valkey", "valkeys")

    def __str__(self) -> str:
        login = quote(self.username, safe="") + (":***" if self.password else "")
        login += "@" if login else ""
        if self.scheme == "unix":
            return f"unix://{login}{quote(self.socket)}" + (f"?db={self.db}" if self.db else "")
        place = ",".join(host_port_text(*host) for host in self.hosts)
        master = f"/{quote(self.master, safe='')}" if self.master else ""
        db = "" if self.topology == "cluster" else f"/{self.db}"
        return f"{self.scheme}://{login}{place}{master}{db}"


def parse_url(text: str) -> NodeUrl:
    """The parts of a node URL; errors repeat no part of it that may be a secret."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(
            _scheme_problem(scheme if separator and scheme.strip() == scheme else text)
        )
    if scheme == "unix":
        return _unix(rest)
    authority, _, path = rest.partition("/")
    login, _, places = authority.rpartition("@")
    username, password = _login(login)
    default_port = _SENTINEL_PORT if scheme.endswith("+sentinel") else _PORT
    hosts = tuple(_host(place, default_port) for place in places.split(","))
    if "?" in path or "#" in path:
        raise ValueError(
            "nothing may follow the database: options go in the [node] section, not after ? or #"
        )
    steps = [_decoded(step) for step in path.split("/") if step]
    master = ""
    if scheme.endswith("+sentinel"):
        if not steps:
            raise ValueError(f'names no master: write "{scheme}://host1,host2/mymaster/0"')
        master = steps.pop(0)
    elif len(hosts) > 1 and not scheme.endswith("+cluster"):
        raise ValueError(
            f'has several hosts: those topologies are "{scheme}+sentinel://" and '
            f'"{scheme}+cluster://"'
        )
    if len(steps) > 1:
        raise ValueError(f"has too many parts after the host; must be {ALLOWED}")
    db = _db(steps[0] if steps else "0")
    if db and scheme.endswith("+cluster"):
        raise ValueError("names a database, and Cluster has only database 0: leave it out")
    return NodeUrl(scheme, hosts, "", username, password, master, db)


def without_secrets(text: str) -> str:
    """A URL that may be ill formed, as an error may show it: what could be a secret is masked.

    No secret are a scheme, hosts with their ports, and a database. What stands before the last "@"
    may be one, and whatever is nothing of these.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text if _HOST.fullmatch(text) else "***"
    if not re.fullmatch(r"[a-z+]{1,20}", scheme):
        return "***"
    login, _, place = rest.rpartition("@")
    path = _PATHS.get(scheme.partition("+")[2] or scheme, "(/[0-9]*)?")
    where = path if scheme == "unix" else f"{_PLACE}(:[0-9]+)?(,{_PLACE}(:[0-9]+)?)*{path}"
    masked = "***@" if login else ""
    return f"{scheme}://{masked}{place if re.fullmatch(where, place) else '***'}"


_PLACE = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
# What is a host without a doubt, though nothing says so: a word alone may be a password.
_HOST = re.compile(f"{_PLACE}:[0-9]+|localhost|[0-9]+([.][0-9]+){{3}}")
_PATHS = {"unix": r"[A-Za-z0-9._/-]+", "sentinel": "(/[A-Za-z0-9._-]*)?(/[0-9]*)?"}


def _scheme_problem(scheme: str) -> str:
    if scheme != scheme.strip():
        return f"begins or ends with white space; must be {ALLOWED}"
    if _HOST.fullmatch(scheme):
        return f'does not begin with a scheme: write "redis://{scheme}", or "rediss://" for TLS'
    close = difflib.get_close_matches(scheme.lower(), SCHEMES, 1, 0.7)
    hint = f' (did you mean "{close[0]}://"?)' if close else ""
    return f"does not begin with a known scheme{hint}; must be {ALLOWED}"


def _unix(rest: str) -> NodeUrl:
    path, _, query = rest.partition("?")
    before, _, after = path.rpartition("@")
    # Only what stands before the path is a login: a socket path may hold an "@" of its own.
    login, socket = (before, after) if "@" in path and not path.startswith("/") else ("", path)
    socket = _decoded(socket)
    if not socket.startswith("/") or "\0" in socket:
        raise ValueError('names no socket: write "unix:///run/valkey.sock", with three slashes')
    if query and not query.startswith("db="):
        raise ValueError('only "?db=1" may follow the socket\'s path')
    username, password = _login(login)
    return NodeUrl(
        "unix", (), socket, username, password, "", _db(query.removeprefix("db=") or "0")
    )


def _login(text: str) -> tuple[str, SecretStr | None]:
    username, _, password = text.partition(":")
    if re.search("[?#]", username):
        # An option after ? or # whose value holds an "@": what was meant for a host stands here,
        # with a password perhaps, and a user name is shown.
        raise ValueError(f"has a user name that holds ? or #; {_ENCODE}")
    return _decoded(username), SecretStr(_decoded(password)) if password else None


def _host(text: str, default_port: int) -> tuple[str, int]:
    found = parse_host_port(text, default_port)
    if found is None or found[1] == 0:
        raise ValueError(
            f"has a host that is not host, host:port or [IPv6]:port (1 to 65535); {_ENCODE}"
        )
    return found


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DB_DIGITS):
        raise ValueError(f"names a database that is not a number; {_ENCODE}")
    return int(text)


def _decoded(text: str) -> str:
    problem = ""
    try:
        decoded = unquote(text, errors="strict")
        decoded.encode()
        return decoded
    except UnicodeError:
        problem = f"is not valid UTF-8 once its %XX are decoded; {_ENCODE}"
    # Outside the handler: the decoding error carries the text, and would be kept as context.
    raise ValueError(problem)


URL_FORM = TextForm(parse_url, str, ALLOWED, rf"^({'|'.join(SCHEMES).replace('+', '[+]')})://.+$")
