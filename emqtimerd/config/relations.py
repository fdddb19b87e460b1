"""What must hold between settings, each of which is right by itself.

A relation is an error when the settings together cannot do what one of them says. What only costs
latency or is merely unusual is not: `node.timeout` may be longer than an interval, since sweeps of
one queue never overlap and a late one does not pile up; `restart_grace` may be longer than the
interval, since it only moves the first check; `connect_timeout` and `timeout` follow one another.
"""

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from emqtimerd.config.files import writable_by_anybody
from emqtimerd.config.problems import Path, masked
from emqtimerd.config.settings import (
    SentinelSettings,
    SentinelTlsSettings,
    Settings,
    TlsSettings,
)
from emqtimerd.config.values import duration_text


@dataclass(frozen=True)
class Relation:
    """A relation that does not hold: where it is told, and which other settings it concerns."""

    path: Path
    message: str
    others: tuple[Path, ...] = ()


URL: Path = ("node", "url")


def broken_relations(settings: Settings, listed: Collection[str] | None) -> Iterator[Relation]:
    """Every relation that does not hold; `listed` are the queues that any source lists, and None
    when they were chosen by hand, so that the file's overrides are not expected to fit."""
    yield from _shutdown(settings)
    yield from _base_in_cluster(settings)
    yield from _credentials(settings)
    yield from _tls(settings)
    yield from _sentinel(settings)
    yield from _secret_files(settings)
    if listed is not None:
        yield from _overrides_of_nothing(settings, listed)
    yield from _globs_out_of_reach(settings)
    if settings.shard.index >= settings.shard.count:
        yield Relation(
            ("shard", "index"),
            f"must be less than shard.count, which is {settings.shard.count}: parts are counted "
            "from 0",
            (("shard", "count"),),
        )


def _shutdown(settings: Settings) -> Iterator[Relation]:
    grace, timeout = settings.shutdown_grace_seconds, settings.node.timeout_seconds
    if 0 < grace < timeout:
        # A stop would promise to wait for running sweeps, and then abandon one within its rights.
        yield Relation(
            ("shutdown_grace",),
            f"is shorter than node.timeout ({duration_text(timeout)}), so a sweep may be cut off "
            "while its reply is still in time; raise it, lower node.timeout, or do not wait at "
            'all with "0s"',
            (("node", "timeout"),),
        )


def _base_in_cluster(settings: Settings) -> Iterator[Relation]:
    if settings.node.base == "arg" and settings.node.url.topology == "cluster":
        # The base as a key is what makes the server answer TRYAGAIN while a slot moves key by key.
        # Without it a sweep could run there and take ids whose rows have left for ghosts.
        yield Relation(
            ("node", "base"),
            'must be "key" in a cluster: while a slot moves, only the base among the keys keeps a '
            "sweep from running on half of its rows",
            (URL,),
        )


def _credentials(settings: Settings) -> Iterator[Relation]:
    node = settings.node
    if node.url.password and node.password_file:
        yield Relation(
            ("node", "password_file"),
            "the password stands in node.url as well; keep one of the two",
            (URL,),
        )
    if node.url.username and node.username:
        yield Relation(
            ("node", "username"),
            "the user name stands in node.url as well; keep one of the two",
            (URL,),
        )


def _tls(settings: Settings) -> Iterator[Relation]:
    node, sentinel = settings.node, settings.node.sentinel.tls
    if node.tls != TlsSettings() and not node.url.tls:
        secure = f'TLS needs "{node.url.tls_scheme}://"'
        advice = "a Unix socket has no TLS" if node.url.socket else secure
        yield Relation(
            ("node", "tls"),
            f'is set, but node.url begins with "{node.url.scheme}://" and is not encrypted: '
            f"{advice}; change the URL or remove the section",
            (URL,),
        )
    if not sentinel.enabled and sentinel != SentinelTlsSettings():
        yield Relation(
            ("node", "sentinel", "tls"),
            "is set but not in use: add enabled = true, or remove the section",
        )
    for path, tls in ((("node", "tls"), node.tls), (("node", "sentinel", "tls"), sentinel)):
        if tls.key_file and not tls.cert_file:
            yield Relation(
                (*path, "key_file"), "a key is of no use without cert_file, its certificate"
            )


def _sentinel(settings: Settings) -> Iterator[Relation]:
    url = settings.node.url
    if settings.node.sentinel != SentinelSettings() and url.topology != "sentinel":
        yield Relation(
            ("node", "sentinel"),
            f'is set, but node.url begins with "{url.scheme}://" and names no sentinels: write '
            '"redis+sentinel://host1,host2/mymaster/0" or remove the section',
            (URL,),
        )


def _secret_files(settings: Settings) -> Iterator[Relation]:
    node, sentinel = settings.node, settings.node.sentinel
    for path, file in (
        (("node", "password_file"), node.password_file),
        (("node", "tls", "key_file"), node.tls.key_file),
        (("node", "sentinel", "password_file"), sentinel.password_file),
        (("node", "sentinel", "tls", "key_file"), sentinel.tls.key_file),
    ):
        # Whether it is there is asked at each connection: it may be mounted or rotated in later.
        if file and (problem := writable_by_anybody(file)):
            yield Relation(path, problem)


def _overrides_of_nothing(settings: Settings, listed: Collection[str]) -> Iterator[Relation]:
    unknown = [n for n in settings.queue if n not in listed and not settings.discovers(n)]
    for position, name in enumerate(unknown):
        # Looking for near names among ten thousand takes its time: a few times will do.
        close = difflib.get_close_matches(name, listed, 1, 0.75) if position < 10 else []
        if close:
            advice = f"did you mean {masked(close[0])}?"
        elif settings.discovery.enabled:
            advice = "queues does not list it and discovery leaves it out"
        else:
            advice = "add it to queues, or remove the section"
        yield Relation(
            ("queue", name),
            f"no such queue; {advice}",
            (("queues",), ("discovery",)),
        )


def _globs_out_of_reach(settings: Settings) -> Iterator[Relation]:
    globs = [match.glob for match in settings.match]
    for index, glob in enumerate(globs):
        before = globs[:index]
        if glob in before or "*" in before:
            earlier = before.index(glob if glob in before else "*")
            yield Relation(
                ("match", index, "glob"),
                f"never counts: match[{earlier}] ({masked(globs[earlier])}) takes its queues, "
                "and the first match wins",
                (("match",),),
            )
