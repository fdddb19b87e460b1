"""Connections to EMQ nodes: the fence, pipelines with a deadline, and what a fault means.

After the fence a connection is a `Link`: one exchange at a time, a total deadline on each, and
errors as plain values.
"""

import contextlib
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import cast

import hiredis
import redis

from emqtimerd import wire
from emqtimerd.config import ConfigError, NodeSettings, host_port_text
from emqtimerd.dialling import (
    MIN_WAIT_SECONDS,
    Connection,
    NoAnswer,
    UnusableTls,
    connector,
    file_connector,
    reason,
)

BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_CAP_SECONDS = 5.0
"""The pause before a dead node is dialled again doubles up to this: long enough to cost nothing,
short enough that a node is swept within a few intervals of its return."""

READ_BYTES = 65_536
"""One read takes a whole pipeline's replies in the common case; also the usual socket buffer."""

_MORE = object()

# What the parser makes of bytes that are no protocol: the last two of maps and sets that Python
# cannot keep, and of lengths that no memory holds.
_NO_PROTOCOL = (hiredis.HiredisError, TypeError, MemoryError)

# Where a reply announces tens of millions of elements, for which the parser would make room: what a
# sweep is answered with has some thousands. Room for 10⁹ takes 10 s to give back, and all threads
# stand still that long.
_BOUNDLESS = re.compile(rb"\r\n[*~%>|]\d{8}")
_BOUNDLESS_BYTES = len(b"\r\n*12345678")

CLOCK_WINDOW_SECONDS = 10.0
"""How long a measured distance between the clocks is trusted: even at 100 ppm of drift, which is
a bad crystal, a wake is then at most 1 ms off."""

# Replies after which the connection leads to the wrong server or to none.
_ASTRAY = frozenset({"READONLY", "MASTERDOWN", "LOADING", "NOAUTH"})


def leads_astray(error: Exception) -> bool:
    """Tell whether an error means that this connection should not be used again.

    Dropping it makes the next one resolve the name (or ask Sentinel) again and pass the fence
    again; an unloaded module shows up as an unknown command.
    """
    if not isinstance(error, wire.ReplyError):
        return isinstance(error, wire.ShapeError)
    return error.code in _ASTRAY or str(error).startswith("ERR unknown command")


class NodeFault(Exception):
    """A node could not be worked on; `code` is what the fault is counted under."""

    def __init__(self, node: str, code: str, message: str) -> None:
        super().__init__(f"{node}: {message}")
        self.node = node
        self.code = code
        self.message = message


class Unreachable(NodeFault):
    """The node was not reached: no connection, no TLS session, or no authentication."""


class NotTried(NodeFault):
    """Nothing was sent, and that is no failure: another round will come."""


class BackingOff(Unreachable, NotTried):
    """The node failed a moment ago, as `last` tells, and its next try is to come."""

    def __init__(self, last: NodeFault) -> None:
        super().__init__(last.node, last.code, last.message)
        self.last = last


def first_fault(fault: NodeFault) -> NodeFault:
    """Return what was found when the node was last tried."""
    return fault.last if isinstance(fault, BackingOff) else fault


class Replaced(NotTried):
    """Another server process answers than the one that the round was meant for."""


class FenceRefused(NodeFault):
    """The server is not an EMQ node of this wire: a token is missing, or the brand is another."""


class NotReady(NodeFault):
    """The server answered the handshake with an error that means "later", such as LOADING."""


class Lost(NodeFault):
    """A pipeline was sent and not all of its replies arrived: the outcome of the rest is unknown.

    `replies` are those that did arrive, in order; none of them where more came than were due.
    """

    def __init__(self, node: str, code: str, message: str, replies: list[wire.Reply]) -> None:
        super().__init__(node, code, message)
        self.replies = replies


@dataclass(frozen=True, slots=True)
class Identity:
    """What the fence read from a server: which process it is and what it can do."""

    run_id: str
    version: str
    brand: str
    tokens: tuple[str, ...]
    started: float
    """When the server process started, by the local monotonic clock (seconds); `-inf` unknown."""


class Link:
    """One fenced connection to one server."""

    def __init__(self, node: str, connection: Connection) -> None:
        self._node = node
        self._connection = connection
        # redis-py has no public way to its socket, and its own reader has no total deadline:
        # a server that drips one byte a second would hold a round for ever.
        self._socket = cast("socket.socket", connection._sock)
        self._reader = hiredis.Reader(replyError=wire.ReplyError, notEnoughData=_MORE)
        self._usable = True
        # As if a reply had been read: the first one begins a line, too.
        self._read_last = b"\r\n"
        self._boundless = False
        self.run_id = ""
        """Which server process is at the other end; set by the fence."""
        self.generation = 0
        """How often its node had dropped what it held when this link was made."""
        self.asked_at = float("-inf")
        """When the latest exchange began, by the monotonic clock."""
        self.lost: Lost | None = None
        """What broke it, if a reply did not come."""

    def exchange(
        self, commands: bytes | list[bytes], count: int, deadline: float
    ) -> list[wire.Reply]:
        """Send commands in one go and return their `count` replies, errors as values.

        `deadline` is an instant of the monotonic clock. Raises Lost when it passes, or when the
        connection breaks; the connection is then of no further use.
        """
        replies: list[wire.Reply] = []
        data = b"".join(commands) if isinstance(commands, list) else commands
        self.asked_at = time.monotonic()
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), MIN_WAIT_SECONDS))
            self._socket.sendall(data)
            while len(replies) < count:
                reply = self._reader.gets()
                if reply is _MORE:
                    self._read_more(deadline)
                else:
                    replies.append(reply)
        except TimeoutError as error:
            raise self._lose("timeout", "no reply within the timeout", replies) from error
        except (OSError, *_NO_PROTOCOL) as error:
            what = f"the connection broke before the reply ({reason(error)})"
            raise self._lose("connection", what, replies) from error
        except BaseException:
            # An interrupt leaves replies unread: the next user of this link would take them for
            # its own.
            self.close()
            raise
        if self._reader.has_data() or self._boundless:
            # Whose they are, nobody can say; a count among them may be that of another queue.
            raise self._lose("shape", "there were more replies than commands", [])
        return replies

    def _lose(self, code: str, message: str, replies: list[wire.Reply]) -> Lost:
        self.close()
        self.lost = Lost(self._node, code, message, replies)
        return self.lost

    def _read_more(self, deadline: float) -> None:
        if self._boundless:
            raise MemoryError("it announces more elements than there can be")
        wait = deadline - time.monotonic()
        if wait <= 0:
            raise TimeoutError
        self._socket.settimeout(wait)
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        read = self._read_last + data
        self._read_last = read[1 - _BOUNDLESS_BYTES :]
        if found := _BOUNDLESS.search(read):
            # What was answered before it counts. In the midst of a job's id it would be taken for
            # an announcement as well, which costs that one sweep its count.
            self._boundless = True
            data = data[: max(found.start() + len(b"\r\n") - (len(read) - len(data)), 0)]
        self._reader.feed(data)

    def drop(self) -> None:
        """Let this link not be used again once it is given back."""
        self._usable = False

    def is_usable(self) -> bool:
        """Tell whether the next exchange may use this link, without asking the server.

        An idle connection has nothing to read; one that has was closed by the server (a restart)
        or holds an answer that nobody asked for.
        """
        if not self._usable:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._usable = False
        self._connection.disconnect()  # type: ignore[no-untyped-call]


class ServerClock:
    """Where the server's clock stands against the local monotonic one.

    A reply to TIME puts the distance between two bounds: the instants of sending and receiving.
    The tightest recent bounds count. What is converted is never early, since a sweep sent before
    its due time would move nothing.
    """

    def __init__(self) -> None:
        self._least = float("-inf")
        self._most = float("inf")
        self._until = float("-inf")

    def observe(self, sent: float, received: float, server_ms: float) -> None:
        """Take in one reading of the server's clock, in milliseconds."""
        least, most = sent - server_ms / 1000, received - server_ms / 1000
        stepped = most < self._least or least > self._most
        if stepped or sent > self._until or most - least < self._most - self._least:
            self._least, self._most = least, most
            self._until = received + CLOCK_WINDOW_SECONDS

    def to_monotonic(self, server_ms: float) -> float:
        """Return the instant of the local monotonic clock at which the server's will say this."""
        return server_ms / 1000 + self._most


@dataclass(frozen=True, slots=True)
class _Return:
    """When the server could be reached again (monotonic seconds), and how long it could not."""

    at: float
    outage_seconds: float


class Node:
    """One EMQ server, reached anew whenever its connections drop. Safe for several threads.

    One that was found through others (`found`) must be a primary. `brand_is_here` is asked at each
    fence and says whether the server has the brand; it raises NodeFault where another one has it
    and does not say the right one. `predecessor` is the `run_id` of whom it took over from, ""
    where that is not known, None for a server that was there at our own start.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[], Connection],
        timeout: float,
        *,
        found: bool = False,
        brand_is_here: Callable[["Node"], bool] = lambda _: True,
        predecessor: str | None = None,
    ) -> None:
        self.name = name
        self.timeout_seconds = timeout
        self.identity: Identity | None = None
        """What the latest fence read; None before the first one passed."""
        self.failing_since: float | None = None
        """When the first question of an outage that lasts was asked (monotonic seconds)."""
        self.peek_allowed = True
        """Whether the node's ACL lets us peek; a new connection asks again."""
        self.clock = ServerClock()
        self._dial = dial
        self._found = found
        self._brand_is_here = brand_is_here
        self._predecessor = predecessor
        # Guards what is found out below, and is never held while a server is asked: what a thread
        # has found must not be written over what another one has found since.
        self._lock = threading.Lock()
        self._generation = 0
        self._lost: Lost | None = None
        self._idle: list[Link] = []
        self._connecting = threading.Lock()
        self._closed = False
        self._failures = 0
        self._failed_at = float("-inf")
        self._retry_at = 0.0
        self._last_fault: NodeFault | None = None
        self._untold: NodeFault | None = None
        self._returns: list[_Return] = []

    @contextlib.contextmanager
    def link(self, run_id: str | None = None) -> Iterator[Link]:
        """Lend a fenced link; it comes back to the idle ones unless something broke it.

        With `run_id`, only to that server process. Raises Unreachable, BackingOff, FenceRefused,
        NotReady or Replaced.
        """
        link = self._take_idle() or self._connect()
        try:
            if run_id is not None and link.run_id != run_id:
                raise Replaced(self.name, "connection", "the server was restarted or replaced")
            yield link
        except (Replaced, Lost):
            self._give_back(link)
            raise
        except BaseException:
            link.close()
            raise
        self._give_back(link)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            current = link.generation == self._generation and not self._closed
            if link.is_usable() and current:
                if self._last_fault and link.asked_at > self._failed_at:
                    # A further link could not be made for a while, but this one held. An answer to
                    # what was asked before may be older than the failure.
                    self._works()
                self._idle.append(link)
                return
            if link.lost and current:
                # The other links lead to the same server: each would cost its user a timeout.
                self._lost = link.lost
                self.failing_since = self.failing_since or link.asked_at
                self._drop_idle()
        link.close()

    @property
    def run_id(self) -> str | None:
        """The server process that was there last; None if none was ever seen."""
        return self.identity.run_id if self.identity else self._predecessor

    def look(self) -> None:
        """See to it that there is a connection, and that one from before a fault is tried. What is
        wrong is told to who wants to work next: by the pause alone he would take it for old."""
        try:
            with self.link() as link:
                if not self.is_well():
                    link.exchange(wire.TIME, 1, time.monotonic() + self.timeout_seconds)
        except NotTried:
            pass
        except NodeFault as fault:
            with self._lock:
                if fault in (self._last_fault, self._lost):
                    self._untold = fault

    def untold(self) -> NodeFault | None:
        """Return, once, what `look` found wrong."""
        with self._lock:
            fault, self._untold = self._untold, None
            return fault

    def fault(self) -> BackingOff | None:
        """Say what is wrong with the node as far as is known, without trying it.

        A link that is idle is to be tried: nobody dials while there is one, so a dial that failed
        would be the last word.
        """
        fault = self._last_fault or self._lost
        return BackingOff(fault) if fault and not self._idle else None

    def is_well(self) -> bool:
        """Tell whether nothing was found wrong since the node last answered. If not, and `fault`
        says nothing either, there is a link from before that: nobody knows."""
        return not (self._last_fault or self._lost)

    def pause(self) -> BackingOff | None:
        """Say why the node is not to be dialled just now, if so."""
        fault = self._last_fault
        return BackingOff(fault) if fault and time.monotonic() < self._retry_at else None

    def grace_ends(self, grace_seconds: float) -> float:
        """Say until when leases are to be left alone, by the monotonic clock (seconds).

        After a restart, and after an outage longer than the grace, living workers come back and
        extend their leases first. At our own start the server's own start counts.
        """
        ends = (r.at + grace_seconds for r in self._returns if r.outage_seconds > grace_seconds)
        return max(ends, default=float("-inf"))

    def drop_idle(self) -> None:
        """Close the idle links, and those on loan when they come back: the server behind them is
        not the one to talk to."""
        with self._lock:
            self._drop_idle()

    def close(self) -> None:
        """Close what is idle; links on loan are closed when they come back."""
        with self._lock:
            self._closed = True
            self._drop_idle()

    def _drop_idle(self) -> None:
        self._generation += 1
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> Link | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.is_usable():
                return link
            link.close()

    def _connect(self) -> Link:
        # One thread dials; the others wait and then find a link or a fresh fault, so that a black
        # hole costs one connect timeout and not one for each thread.
        with self._connecting:
            if link := self._take_idle():
                return link
            generation = self._generation
            if pause := self.pause():
                if untold := self.untold():
                    raise untold
                raise pause from pause.last
            begun = time.monotonic()
            try:
                link, identity = self.open(brand=self._brand_is_here(self))
            except NodeFault as fault:
                with self._lock:
                    self._note_failure(fault, begun)
                raise
            with self._lock:
                self._note_return(identity)
                self.identity = identity
                link.generation = generation
                self._works()
                self.peek_allowed = True
            return link

    def _note_failure(self, fault: NodeFault, begun: float) -> None:
        self._failures += 1
        self._failed_at = time.monotonic()
        # From the first question that was not answered, not from when waiting for it ended: two
        # timeouts may be longer than the grace that an outage is measured for.
        self.failing_since = self.failing_since or begun
        # The cap is reached long before the exponent is: a node may be dead for days.
        doubled = BACKOFF_FIRST_SECONDS * 2.0 ** min(self._failures - 1, 32)
        pause = min(doubled, BACKOFF_CAP_SECONDS)
        # Full jitter in the upper half: replicas that lost one node do not come back in step, and
        # none comes back at once.
        self._retry_at = self._failed_at + pause * random.uniform(0.5, 1)
        self._last_fault = fault

    def _works(self) -> None:
        self._untold = None
        self._failures = 0
        self.failing_since = None
        self._last_fault = self._lost = None

    def _note_return(self, identity: Identity) -> None:
        now = time.monotonic()
        before = self.run_id
        known = list(self._returns)
        if before is None:
            known.append(_Return(identity.started, float("inf")))
        elif before != identity.run_id:
            known.append(_Return(now, float("inf")))
        if self.failing_since is not None:
            known.append(_Return(now, now - self.failing_since))
        # One that was followed by a longer outage makes no grace any longer. So few are left that
        # it does not matter that nobody waits for the oldest of them any more.
        kept: list[_Return] = []
        for each in sorted(known, key=attrgetter("at", "outage_seconds"), reverse=True):
            if not kept or each.outage_seconds > kept[-1].outage_seconds:
                kept.append(each)
        # At once: another thread may be about to check for expired leases, and asks for the grace.
        self._returns = kept

    def open(self, *, brand: bool) -> tuple[Link, Identity]:
        """Connect and pass the fence, apart from the links that are lent.

        Raises Unreachable, FenceRefused or NotReady.
        """
        link = self.dial()
        try:
            identity = read_identity(
                self.name, link, self.timeout_seconds, primary=self._found, brand=brand
            )
            link.run_id = identity.run_id
            return link, identity
        except Lost as lost:
            link.close()
            raise Unreachable(
                self.name, lost.code, f"during the handshake: {lost.message}"
            ) from lost
        except wire.ShapeError as error:
            link.close()
            raise NotReady(self.name, error.code, f"during the handshake: {error}") from error
        except BaseException:
            link.close()
            raise

    def dial(self) -> Link:
        """Connect and log in, and leave the fence out: for who looks into what it refuses.

        Raises Unreachable or NotReady.
        """
        connection = None
        try:
            connection = self._dial()
            connection.connect()  # type: ignore[no-untyped-call]
        except ConfigError as error:
            # The password file may be mounted or rotated in later. redis-py closes a connection
            # after its own errors only.
            if connection is not None:
                connection.disconnect()  # type: ignore[no-untyped-call]
            raise Unreachable(self.name, "NOAUTH", f"cannot log in: {error}") from error
        except NoAnswer as error:
            what = f"{error} within node.connect_timeout"
            raise Unreachable(self.name, "timeout", what) from error
        except UnusableTls as error:
            raise Unreachable(self.name, "connection", f"TLS cannot be begun: {error}") from error
        except redis.AuthenticationError as error:
            raise Unreachable(
                self.name,
                "WRONGPASS",
                f"authentication was refused ({reason(error)}); check the user name and the "
                "password (node.username, node.password_file, or the URL)",
            ) from error
        except redis.BusyLoadingError as error:
            raise NotReady(self.name, "LOADING", "the server is loading its data") from error
        except redis.TimeoutError as error:
            raise Unreachable(
                self.name,
                "timeout",
                f"no connection{self._where(connection)} within node.connect_timeout",
            ) from error
        except redis.ResponseError as error:
            # redis-py takes the code off the text of the errors that it knows.
            code = error.status_code or wire.ReplyError(str(error)).code
            raise NotReady(self.name, code, f"the handshake was refused: {error}") from error
        # UnicodeError: a name that cannot be one of a host, wherever it came from.
        except (redis.RedisError, OSError, UnicodeError) as error:
            raise Unreachable(
                self.name,
                "connection",
                f"cannot connect{self._where(connection)} ({reason(error)})",
            ) from error
        return Link(self.name, connection)

    def _where(self, connection: Connection | None) -> str:
        """Where the connection leads, if the node's name does not say it."""
        if not self._found or not isinstance(connection, redis.Connection):
            return ""
        where = host_port_text(connection.host, connection.port)
        return "" if where == self.name else f" to {where}"


def read_identity(
    node: str, link: Link, timeout: float, *, primary: bool = False, brand: bool = True
) -> Identity:
    """Pass the fence of a native client: tokens, brand, run_id (contract, section 1).

    With `primary`, a replica is refused; without `brand`, another server of the cluster has it.
    INFO is welcome but not required: an ACL may deny it, and then `run_id` is unknown. Raises
    FenceRefused, or NotReady with the server's own code.
    """
    commands = [wire.pack("CLIENT", "SETNAME", "emqtimerd"), wire.VERSION, wire.INFO_SERVER]
    commands += [_INFO_ROLE] if primary else []
    commands += [wire.READ_BRAND] if brand else []
    _, version, info, *rest = link.exchange(commands, len(commands), time.monotonic() + timeout)
    for reply in (info, *rest):
        # A server says that it does not know a verb before it asks who we are.
        if isinstance(reply, wire.ReplyError) and reply.code == "NOAUTH":
            raise _handshake_fault(node, "EMQ.VERSION", reply) from reply
    if primary:
        _check_role(node, rest.pop(0))
    tokens = _read_tokens(node, version)
    missing = [token for token in wire.REQUIRED_TOKENS if token not in tokens]
    if missing:
        raise FenceRefused(
            node, "ERR", f"the server lacks the capability {' and '.join(missing)} (EMQ.VERSION)"
        )
    if brand:
        _check_brand(node, rest[0])
    server = {} if isinstance(info, wire.ReplyError) else wire.read_info(info)
    uptime = wire.whole_number(server.get("uptime_in_seconds", ""))
    return Identity(
        run_id=server.get("run_id", ""),
        version=server.get("valkey_version") or server.get("redis_version", ""),
        brand=wire.BRAND.decode(),
        tokens=tokens,
        started=float("-inf") if uptime is None else time.monotonic() - uptime,
    )


def _read_tokens(node: str, reply: wire.Reply) -> tuple[str, ...]:
    try:
        return wire.read_tokens(reply)
    except wire.ReplyError as error:
        if error.code == "ERR":
            raise FenceRefused(
                node,
                "ERR",
                "the server does not know EMQ.VERSION: the native job core is not loaded there",
            ) from error
        raise _handshake_fault(node, "EMQ.VERSION", error) from error


_INFO_ROLE = wire.pack("INFO", "replication")


def _check_role(node: str, reply: wire.Reply) -> None:
    """Refuse a replica: whoever named it as a primary does not know of the failover yet."""
    if isinstance(reply, wire.ReplyError):
        return  # denied; the first sweep will be told READONLY
    if wire.read_info(reply).get("role") == "slave":
        raise NotReady(
            node, "READONLY", "the server that is named as the primary is a replica by now"
        )


def _check_brand(node: str, reply: wire.Reply) -> None:
    try:
        brand = wire.read_brand(reply)
    except wire.ReplyError as error:
        raise _handshake_fault(node, "GET {emq}:version", error) from error
    if brand is None:
        raise FenceRefused(
            node,
            "ERR",
            "the node has no brand at {emq}:version; its operator sets it to "
            f"{wire.BRAND.decode()}, emqtimerd never does",
        )
    if brand != wire.BRAND:
        raise FenceRefused(
            node,
            "ERR",
            f"the node's brand is {wire.printable(brand)[:80]}, not {wire.BRAND.decode()}",
        )


def _handshake_fault(node: str, command: str, error: wire.ReplyError) -> NodeFault:
    if error.code in ("NOAUTH", "WRONGPASS"):
        return Unreachable(
            node,
            error.code,
            "the server wants authentication; give node.username and node.password_file",
        )
    return NotReady(node, error.code, f"{command} was refused: {error}")


def open_node(settings: NodeSettings) -> Node:
    """Return the one server that the settings name; nothing is dialled before the first link."""
    url = settings.url
    if url.scheme == "unix":
        name, dial = url.socket, file_connector(settings)
    else:
        name, dial = host_port_text(*url.hosts[0]), partial(connector(settings), *url.hosts[0])
    return Node(name, dial, settings.timeout_seconds)
