"""The configuration room: what it accepts, what it refuses and in which words, what it hides."""

import json
import os
import re
import string
import tomllib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from emqtimerd.cli import app
from emqtimerd.config import (
    Config,
    ConfigError,
    Settings,
    load,
    read_secret,
    schema,
    show,
)
from emqtimerd.config.settings import (
    MassExpirySettings,
    PromoteOverride,
    PromoteSettings,
    Section,
    StalledCheckOverride,
    StalledCheckSettings,
)
from emqtimerd.config.shape import fields, paths_in
from emqtimerd.config.sources import variable
from emqtimerd.config.url import SCHEMES, parse_url
from emqtimerd.config.values import Listen, duration_text, seconds_of

FIXTURES = Path(__file__).parent / "fixtures" / "config"
SECRET = "hunter2"


def loaded(
    text: str | bytes, tmp_path: Path, environ: Mapping[str, str] = {}, **flags: object
) -> Config:
    """The configuration in a file of this text, under these variables and flags (a__b is a.b)."""
    file = tmp_path / "emqtimerd.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, environ, {name.replace("__", "."): value for name, value in flags.items()})


def problems(
    text: str | bytes, tmp_path: Path, environ: Mapping[str, str] = {}, **flags: object
) -> list[str]:
    """The problems of such a configuration, the file's path cut short."""
    with pytest.raises(ConfigError) as caught:
        loaded(text, tmp_path, environ, **flags)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def problems_of(environ: Mapping[str, str] = {}, **flags: object) -> list[str]:
    """The problems of variables and flags without a file."""
    with pytest.raises(ConfigError) as caught:
        load(None, environ, {name.replace("__", "."): value for name, value in flags.items()})
    return str(caught.value).splitlines()


# --- what is accepted ---------------------------------------------------------------------------


def test_defaults() -> None:
    """Without any source every setting has the default that the interface documents."""
    config = load(None, {}, {})
    assert tomllib.loads(show(config)) == {
        "queues": [],
        "shutdown_grace": "10s",
        "node": {
            "url": "redis://127.0.0.1:6379/0",
            "username": "",
            "password_file": "",
            "connect_timeout": "3s",
            "timeout": "5s",
            "tls": {"ca_file": "", "cert_file": "", "key_file": "", "server_name": ""},
            "sentinel": {
                "username": "",
                "password_file": "",
                "tls": {
                    "ca_file": "",
                    "cert_file": "",
                    "key_file": "",
                    "server_name": "",
                    "enabled": False,
                },
            },
            "wire": "auto",
            "base": "key",
        },
        "promote": {"interval": "1s", "limit": 100, "due_wake": True},
        "stalled_check": {
            "interval": "30s",
            "limit": 100,
            "max_stalled": 1,
            "restart_grace": "10s",
            "at_expiry": False,
            "mass_expiry": False,
        },
        "discovery": {
            "enabled": False,
            "interval": "30s",
            "include": ["*"],
            "exclude": [],
            "max_queues": 10000,
        },
        "shard": {"index": 0, "count": 1},
        "http": {"listen": "127.0.0.1:9846"},
        "log": {"level": "info", "format": "auto"},
    }
    assert set(config.origins.values()) == {"default"}


def test_units_are_in_the_names_inside(tmp_path: Path) -> None:
    """Durations are seconds inside, whatever their unit was outside."""
    settings = loaded(
        'shutdown_grace = "1.5m"\n[node]\ntimeout = "250ms"\n[promote]\ninterval = "1h"', tmp_path
    ).settings
    assert settings.shutdown_grace_seconds == 90
    assert settings.node.timeout_seconds == 0.25
    assert settings.promote.interval_seconds == 3600
    assert settings.http.listen == Listen("127.0.0.1", 9846)


def test_queues_alone_are_a_complete_file(tmp_path: Path) -> None:
    """The one line that the interface calls a complete file is one, byte order mark or not."""
    assert loaded('queues = ["orders", "emails"]', tmp_path).settings.queues == ("orders", "emails")
    assert loaded(b'\xef\xbb\xbfqueues = ["orders"]', tmp_path).settings.queues == ("orders",)


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    """Not at the top, not below, not in a table of queues."""
    settings = loaded('queues = ["a"]\n[queue.a.promote]\nlimit = 5', tmp_path).settings
    with pytest.raises(ValidationError):
        settings.promote.limit = 5
    with pytest.raises(TypeError):
        settings.queue["b"] = settings.queue["a"]  # type: ignore[index]
    assert settings.model_dump()["queue"]["a"]


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    """Each value comes from the strongest source that gives it, and its origin says which."""
    config = loaded(
        "[promote]\nlimit = 1\n[stalled_check]\nlimit = 1\nmax_stalled = 3",
        tmp_path,
        {"EMQTIMERD_PROMOTE__LIMIT": "2", "EMQTIMERD_STALLED_CHECK__LIMIT": "2"},
        promote__limit=3,
        node__url=None,
    )
    assert config.settings.promote.limit == 3
    assert config.settings.stalled_check.limit == 2
    assert config.origins["promote.limit"] == "flag --limit"
    assert config.origins["stalled_check.limit"] == "environment EMQTIMERD_STALLED_CHECK__LIMIT"
    assert config.origins["stalled_check.max_stalled"] == f"file {tmp_path}/emqtimerd.toml"
    assert config.origins["node.url"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """EMQTIMERD_CONFIG names the file unless a flag does; empty, it names none."""
    file = tmp_path / "a.toml"
    file.write_text('queues = ["a"]')
    config = load(None, {"EMQTIMERD_CONFIG": str(file)}, {})
    assert config.settings.queues == ("a",)
    assert config.file == file
    assert load(None, {"EMQTIMERD_CONFIG": ""}, {}).file is None


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("QUEUES", "orders, emails", "queues", ["orders", "emails"]),
        ("QUEUES", '["a,b", "c"]', "queues", ["a,b", "c"]),
        ("QUEUES", "", "queues", []),
        ("PROMOTE__LIMIT", "5", "promote.limit", 5),
        ("PROMOTE__DUE_WAKE", "false", "promote.due_wake", False),
        ("PROMOTE__DUE_WAKE", "1", "promote.due_wake", True),
        ("PROMOTE__INTERVAL", "250ms", "promote.interval", "250ms"),
        ("STALLED_CHECK__MASS_EXPIRY", "false", "stalled_check.mass_expiry", False),
        (
            "STALLED_CHECK__MASS_EXPIRY",
            "{ share = 0.25, at_least = 7 }",
            "stalled_check.mass_expiry",
            {"share": 0.25, "at_least": 7},
        ),
        ("STALLED_CHECK__MASS_EXPIRY__SHARE", ".5", "stalled_check.mass_expiry.share", 0.5),
        ("SHARD", "{ index = 1, count = 3 }", "shard", {"index": 1, "count": 3}),
        ("QUEUE", '{ "a.b".promote.limit = 7 }', "", {}),
        ("NODE__TLS__CA_FILE", "", "node.tls.ca_file", ""),
    ],
)
def test_environment_text_is_read_by_the_kind_of_setting(
    name: str, text: str, path: str, value: object, tmp_path: Path
) -> None:
    """Numbers, booleans, lists and tables are spelled out in text."""
    config = loaded('queues = ["a.b"]', tmp_path, {f"EMQTIMERD_{name}": text})
    found: Any = tomllib.loads(show(config))
    for part in path.split(".") if path else []:
        found = found[part]
    if path:
        assert found == value
    else:
        assert config.settings.for_queue("a.b").promote.limit == 7


def test_a_table_gives_way_to_false_and_false_to_a_table(tmp_path: Path) -> None:
    """Sources of different shape do not mix: the stronger one has its way."""
    on, off = (
        "[stalled_check]\nmass_expiry = { share = 0.3 }",
        "[stalled_check]\nmass_expiry = false",
    )
    name = "EMQTIMERD_STALLED_CHECK__MASS_EXPIRY"
    assert loaded(on, tmp_path, {name: "false"}).settings.stalled_check.mass_expiry is False
    switched_on = loaded(off, tmp_path, {f"{name}__AT_LEAST": "9"}).settings.stalled_check
    assert switched_on.mass_expiry == MassExpirySettings(share=0.5, at_least=9)
    assert loaded(off, tmp_path, {name: "{}"}).settings.stalled_check.mass_expiry


@pytest.mark.parametrize("text", ["2", "emqtimerd-2", "my-release-0-2"])
def test_shard_index_from_a_pod_name(text: str) -> None:
    """A StatefulSet gives its pods names that end in their number."""
    environ = {"EMQTIMERD_SHARD__INDEX": text, "EMQTIMERD_SHARD__COUNT": "3"}
    assert load(None, environ, {}).settings.shard.index == 2


def test_what_kubernetes_injects_is_not_ours() -> None:
    """Variables for a Service called emqtimerd, or emqtimerd-metrics, are left alone."""
    load(
        None,
        {
            "EMQTIMERD_PORT": "tcp://10.0.0.1:9846",
            "EMQTIMERD_PORT_9846_TCP_ADDR": "10.0.0.1",
            "EMQTIMERD_SERVICE_HOST": "10.0.0.1",
            "EMQTIMERD_SERVICE_PORT_METRICS": "9846",
            "EMQTIMERD_METRICS_SERVICE_HOST": "10.0.0.1",
            "EMQTIMERD_METRICS_PORT": "tcp://10.0.0.1:9846",
            "EMQTIMERD_METRICS_PORT_9846_TCP_PROTO": "tcp",
            "PATH": "/bin",
        },
        {},
    )


# --- overrides ----------------------------------------------------------------------------------

OVERRIDES = """
queues = ["orders", "bulk-a", "bulk-b", "rest"]
[promote]
limit = 7
[queue.bulk-a]
promote = { interval = "250ms" }
[queue.orders.stalled_check]
mass_expiry = { share = 0.2 }
[[match]]
glob = "bulk-*"
promote = { interval = "5s", limit = 1000 }
[[match]]
glob = "bulk-[b]"
promote = { due_wake = false }
"""


def test_overrides_are_layered(tmp_path: Path) -> None:
    """A queue's own section is stronger than the first match, and that than the general values."""
    settings = loaded(OVERRIDES, tmp_path).settings

    def promote(name: str) -> tuple[float, int, bool]:
        values = settings.for_queue(name).promote
        return values.interval_seconds, values.limit, values.due_wake

    assert promote("rest") == (1.0, 7, True)
    assert promote("bulk-b") == (5.0, 1000, True)
    assert promote("bulk-a") == (0.25, 1000, True)
    assert promote("BULK-a") == (1.0, 7, True)
    orders = settings.for_queue("orders").stalled_check
    assert orders.mass_expiry == MassExpirySettings(share=0.2, at_least=20)
    assert orders.max_stalled == 1


def test_queues_without_a_section_share_their_settings(tmp_path: Path) -> None:
    """Ten thousand queues do not cost ten thousand copies."""
    settings = loaded(OVERRIDES, tmp_path).settings
    assert settings.for_queue("x") is settings.for_queue("y")
    assert settings.for_queue("bulk-x") is settings.for_queue("bulk-y")


@pytest.mark.parametrize(
    ("section", "override"),
    [(PromoteSettings, PromoteOverride), (StalledCheckSettings, StalledCheckOverride)],
)
def test_every_sweep_setting_can_be_overridden(
    section: type[Section], override: type[Section]
) -> None:
    """The override of a section has its settings, of the same kinds, and no others."""
    assert fields(section) == fields(override)
    assert list(section.model_fields) == list(override.model_fields)


def test_overrides_of_queues_chosen_by_hand_are_no_mistake(tmp_path: Path) -> None:
    """`--queue` replaces the list; the file's sections for other queues then just do not count."""
    config = loaded(OVERRIDES, tmp_path, queues=("adhoc", "bulk-a"))
    assert config.settings.queues == ("adhoc", "bulk-a")
    assert list(config.settings.queue) == ["bulk-a"]
    assert config.origins["queues"] == "flag --queue"


def test_an_override_for_a_discovered_queue_is_no_mistake(tmp_path: Path) -> None:
    """With discovery, a section may be for a queue that is not there yet."""
    text = "[discovery]\nenabled = true\n[queue.later.promote]\nlimit = 5"
    assert loaded(text, tmp_path).settings.for_queue("later").promote.limit == 5


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.toml")), ids=lambda file: file.stem)
def test_one_mistake_one_message(file: Path) -> None:
    """Each file holds one mistake; its first line is the message, with … for words of others."""
    expected = re.escape(file.read_text().splitlines()[0].removeprefix("# ")).replace("…", ".+")
    with pytest.raises(ConfigError) as caught:
        load(file, {}, {})
    message = str(caught.value).replace(str(file), "FILE")
    assert re.fullmatch(expected, message), message
    assert SECRET not in message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    """Two sources' worth of mistakes, and relations between what is right."""
    text = """
    shutdown_grace = "1s"
    queues = ["orders", "", "a b"]
    [promote]
    interval = "x"
    limit = 0
    wake = true
    [queue.ordres.promote]
    limit = 5
    [shard]
    index = 9
    """
    environ = {"EMQTIMERD_SHARD__COUNT": "many", "EMQTIMERD_QUEUE_S": "a"}
    found = problems(text, tmp_path, environ, http__listen="nowhere")
    assert [line.split(" ")[0] for line in found] == [
        "environment",
        "queues[1]",
        "queues[2]",
        "promote.interval",
        "promote.limit",
        "promote.wake",
        "shard.count",
        "http.listen",
        "shutdown_grace",
    ]
    # A section for a queue, beside a list of queues with faults, and an index beside a faulty
    # count may be right or wrong: nobody can tell, so nothing is said.


def test_a_mistake_that_another_source_hides_is_still_one(tmp_path: Path) -> None:
    """The file is wrong even while the environment replaces its value."""
    found = problems("[promote]\nlimit = 0", tmp_path, {"EMQTIMERD_PROMOTE__LIMIT": "5"})
    assert found == [
        "promote.limit = 0 (file emqtimerd.toml): must be a whole number from 1 to 100000"
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "PROMOTE__LIMIT",
            "many",
            (
                'promote.limit = "many" (environment EMQTIMERD_PROMOTE__LIMIT): '
                "must be a whole number from 1 to 100000"
            ),
        ),
        (
            "PROMOTE_LIMIT",
            "5",
            (
                "environment EMQTIMERD_PROMOTE_LIMIT: no such setting; did you mean "
                "EMQTIMERD_PROMOTE__LIMIT?"
            ),
        ),
        (
            "URL",
            "redis://:hunter2@db",
            "environment EMQTIMERD_URL: no such setting; did you mean EMQTIMERD_NODE__URL?",
        ),
        (
            "QUEUE__ORDERS__PROMOTE__LIMIT",
            "5",
            (
                "environment EMQTIMERD_QUEUE__ORDERS__PROMOTE__LIMIT: no such setting; overrides "
                "stand in the file, or as one TOML value in EMQTIMERD_QUEUE"
            ),
        ),
        ("FROBNICATE", "hunter2", "environment EMQTIMERD_FROBNICATE: no such setting"),
        (
            "DISCOVERY__ENABLED",
            "",
            (
                'discovery.enabled = "" (environment EMQTIMERD_DISCOVERY__ENABLED): '
                "must be true or false"
            ),
        ),
        (
            "NODE",
            '{ url = "redis://:hunter2@db" }\nqueues = 5',
            "node (environment EMQTIMERD_NODE): must be a table",
        ),
        (
            "SHARD__INDEX",
            "9" * 5000,
            None,
        ),
    ],
)
def test_environment_mistakes(name: str, text: str, expected: str | None) -> None:
    """A variable is named in the message, and its value only where that is safe."""
    (found,) = problems_of({f"EMQTIMERD_{name}": text})
    assert expected is None or found == expected
    assert len(found) < 500
    assert SECRET not in found


def test_flag_mistakes() -> None:
    """A flag is named as the user typed it."""
    assert problems_of(node__url="http://db", promote__speed=5) == [
        "promote.speed (flag --speed): no such setting",
        (
            'node.url = "http://db" (flag --url): does not begin with a known scheme; must be '
            "a URL such as "
            '"redis://127.0.0.1:6379/0", "rediss://host" (TLS), "unix:///run/valkey.sock", '
            '"redis+sentinel://host1,host2/mymaster/0" or "redis+cluster://host1,host2"'
        ),
    ]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("localhost:6379", "localhost:6379"),
        ("localhost", "localhost"),
        ("10.0.0.1", "10.0.0.1"),
        ("rdis://db:6379/0", "rdis://db:6379/0"),
        ("redis://db:port", "redis://***"),
        ("redis://u:hunter2@db:port", "redis://***@***"),
        ("redis://hunter2@db:99999", "redis://***@db:99999"),
        ("redis://:hunter2", "redis://***"),
        ("redis://u:x/hunter2", "redis://***"),
        ("redis://u:hun/ter@2@db1,db2/0", "redis://***@db1,db2/0"),
        ("redis://u:p@db/hunter2", "redis://***@***"),
        ("redis://db?password=hunter2", "redis://***"),
        ("redis://db?password=hunter2@t5", "redis://***@t5"),
        ("redis+cluster://db#hunter2@t5", "redis+cluster://***@t5"),
        ("unix://run/v.sock", "unix://run/v.sock"),
        ("unix://u:hunter2@run/v.sock", "unix://***@run/v.sock"),
        ("redis+sentinel://u:hunter2@[::1]:1/my/hunter2", "redis+sentinel://***@***"),
        ("hunter2", "***"),
        ("u:hunter2", "***"),
        ("Hunter2://db", "***"),
        (" redis://db", "***"),
    ],
)
def test_of_a_wrong_url_only_what_may_be_a_secret_is_masked(url: str, told: str) -> None:
    """Scheme, hosts, ports and database are shown: what was wrong is mostly there."""
    (found,) = problems_of(node__url=url)
    assert found.startswith(f'node.url = "{told}" (flag --url): ')


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("secrets/pw", "secrets/pw"),
        ("./pw", "./pw"),
        ("~/.emq/pw-1", "~/.emq/pw-1"),
        ("pw.txt", "pw.txt"),
        ("hunter2", "***"),
        ("Xk3/9fQ2==", "***"),
        ("Summer.2024", "***"),
    ],
)
def test_a_relative_path_is_shown_and_a_password_in_its_place_is_not(path: str, told: str) -> None:
    """`password_file` is where people put the password itself by mistake."""
    (found,) = problems_of(node__password_file=path)
    assert found.startswith(f'node.password_file = "{told}" (flag --password-file): must be an abs')


def test_a_host_and_port_is_no_url_yet() -> None:
    """What to write is said, with the very host."""
    (found,) = problems_of(node__url="localhost:6379")
    assert 'write "redis://localhost:6379"' in found
    (found,) = problems_of(node__url=" redis://db")
    assert "white space" in found


def test_the_list_of_queues_is_called_queues(tmp_path: Path) -> None:
    """`queue = [...]` is the mistake: one line says so, and not also that nothing is listed."""
    (tmp_path / "e.toml").write_text('queue = ["orders"]\n')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "e.toml", {}, {}, needs_queues=True)
    assert str(caught.value) == (
        f"queue = an array (file {tmp_path}/e.toml): must be a table of tables; "
        "did you mean queues?"
    )


def test_nothing_to_sweep_is_a_problem_only_when_asked() -> None:
    """The daemon needs queues; looking at the configuration does not."""
    with pytest.raises(ConfigError, match=r"^queues = \[\] \(default\): nothing to sweep: list "):
        load(None, {}, {}, needs_queues=True)
    load(None, {"EMQTIMERD_DISCOVERY__ENABLED": "true"}, {}, needs_queues=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"queues = [\n'\xff']", "line 2 is not valid UTF-8"),
        (b"a = " + b"[" * 100_000, "is nested too deeply"),
        (b"a = " + b"1" * 5000, "Exceeds the limit"),
        (b"\0", "line 1, column 1 is not TOML"),
    ],
)
def test_files_that_are_no_toml(content: bytes, reason: str, tmp_path: Path) -> None:
    """Whatever the bytes are, the answer is a sentence."""
    (found,) = problems(content, tmp_path)
    assert found.startswith("file emqtimerd.toml: ")
    assert reason in found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Absent, a directory, too large: the reason, and who named the file."""
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError) as caught:
        load(missing, {}, {})
    assert str(caught.value) == (
        f"file {missing}: cannot be read: No such file or directory (named by flag --config)"
    )
    with pytest.raises(ConfigError, match=r"Is a directory .*environment EMQTIMERD_CONFIG"):
        load(None, {"EMQTIMERD_CONFIG": str(tmp_path)}, {})
    with pytest.raises(ConfigError, match="is larger than 16384 KiB"):
        load(Path("/dev/zero"), {}, {})


def test_ten_thousand_queues_load_quickly_with_sections(tmp_path: Path) -> None:
    """Loading is linear: a section for each of many queues is fine."""
    names = [f"queue-{number}" for number in range(3000)]
    text = f"queues = {names}\n" + "".join(f"[queue.{n}.promote]\nlimit = 5\n" for n in names)
    settings = loaded(text, tmp_path).settings
    assert {settings.for_queue(name).promote.limit for name in names} == {5}


# --- files that others may write, and secrets ---------------------------------------------------


def test_a_config_file_that_anybody_may_write_is_refused(tmp_path: Path) -> None:
    """The file that a link points to is judged, its directory is not."""
    tmp_path.chmod(0o777)
    target, link = tmp_path / "target.toml", tmp_path / "link.toml"
    target.write_text('queues = ["a"]')
    link.symlink_to(target)
    load(link, {}, {})
    target.chmod(0o666)
    with pytest.raises(ConfigError) as caught:
        load(link, {}, {})
    assert str(caught.value) == (
        f"file {link}: may be written by anybody: run chmod o-w {target.resolve()}"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("node.password_file", '[node]\npassword_file = "{}"'),
        (
            "node.tls.key_file",
            '[node]\nurl = "rediss://d"\ntls = {{ cert_file = "/c", key_file = "{}" }}',
        ),
        (
            "node.sentinel.password_file",
            '[node]\nurl = "redis+sentinel://d/m"\nsentinel = {{ password_file = "{}" }}',
        ),
    ],
)
def test_a_secret_file_that_anybody_may_write_is_refused(
    setting: str, text: str, tmp_path: Path
) -> None:
    """It is judged when the configuration is loaded, if it is there by then."""
    secret = tmp_path / "secret"
    text = text.format(secret)
    loaded(text, tmp_path)
    secret.write_text(SECRET)
    loaded(text, tmp_path)
    secret.chmod(0o602)
    (found,) = problems(text, tmp_path)
    assert found == (
        f'{setting} = "secret" (file emqtimerd.toml): may be written by anybody: '
        "run chmod o-w secret"
    )


@pytest.mark.parametrize(
    ("content", "secret"),
    [(b"a b", "a b"), (b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a ", " a ")],
)
def test_read_secret_strips_one_newline(content: bytes, secret: str, tmp_path: Path) -> None:
    """Editors add one; everything else belongs to the secret."""
    file = tmp_path / "secret"
    file.write_bytes(content)
    assert read_secret(file) == secret


def test_read_secret_says_why_not(tmp_path: Path) -> None:
    """Each failure is a sentence that names the file and holds nothing of its content."""
    file = tmp_path / "secret"

    def reason() -> str:
        with pytest.raises(ConfigError) as caught:
            read_secret(file)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert caught.value.__context__ is None
        return str(caught.value).replace(str(file), "FILE")

    assert reason() == 'password_file = "FILE": cannot be read: No such file or directory'
    file.write_bytes(b"\n")
    assert reason() == 'password_file = "FILE": holds no secret: the file is empty'
    file.write_bytes(SECRET.encode() + b"\xff")
    assert reason() == 'password_file = "FILE": is not valid UTF-8'
    file.write_text(SECRET * 10_000)
    assert reason() == 'password_file = "FILE": is larger than 64 KiB'
    file.write_text(SECRET)
    file.chmod(0o666)
    assert "run chmod o-w" in reason()
    file.unlink()
    os.mkfifo(file)
    assert reason() == 'password_file = "FILE": is not a regular file'


def test_the_password_is_in_no_text_of_the_settings(tmp_path: Path) -> None:
    """Neither show, nor repr, nor str has it; only whoever dials can ask for it."""
    config = loaded(f'[node]\nurl = "redis://me:{SECRET}%40@db"', tmp_path)
    for text in (show(config), repr(config), str(config.settings), str(config.settings.node.url)):
        assert SECRET not in text
    assert "redis://me:***@db:6379/0" in show(config)
    password = config.settings.node.url.password
    assert password is not None
    assert password.get_secret_value() == f"{SECRET}@"


# --- addresses and durations --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "topology", "tls", "written"),
    [
        ("redis://h", "standalone", False, "redis://h:6379/0"),
        ("rediss://h:1/2", "standalone", True, "rediss://h:1/2"),
        ("valkey://[::1]:7/", "standalone", False, "valkey://[::1]:7/0"),
        ("valkeys://u@h", "standalone", True, "valkeys://u@h:6379/0"),
        ("redis://:p@h", "standalone", False, "redis://:***@h:6379/0"),
        ("redis://u%40x:p@h", "standalone", False, "redis://u%40x:***@h:6379/0"),
        ("redis://:p@w#?d@h", "standalone", False, "redis://:***@h:6379/0"),
        ("unix:///run/v.sock", "standalone", False, "unix:///run/v.sock"),
        ("unix://u:p@/run/v.sock?db=3", "standalone", False, "unix://u:***@/run/v.sock?db=3"),
        ("unix:///run/@v.sock", "standalone", False, "unix:///run/%40v.sock"),
        (
            "redis+sentinel://user@h1:1,h2/mymaster/4",
            "sentinel",
            False,
            "redis+sentinel://user@h1:1,h2:26379/mymaster/4",
        ),
        (
            "valkeys+sentinel://h1/my",
            "sentinel",
            True,
            "valkeys+sentinel://h1:26379/my/0",
        ),
        ("redis+cluster://h1,h2:1", "cluster", False, "redis+cluster://h1:6379,h2:1"),
        ("rediss+cluster://h1/0", "cluster", True, "rediss+cluster://h1:6379"),
    ],
)
def test_addresses(text: str, topology: str, tls: bool, written: str) -> None:
    """Each scheme is taken apart, and its written form reads back as itself."""
    url = parse_url(text)
    assert (url.topology, url.tls, str(url)) == (topology, tls, written)
    assert str(parse_url(written)) == written


@given(st.floats(min_value=0, max_value=86400))
def test_durations_read_back(seconds: float) -> None:
    """A duration's text reads back as the same number."""
    rounded = round(seconds, 6)
    assert seconds_of(duration_text(rounded)) == rounded


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1000ms", "1s"),
        ("60s", "1m"),
        ("90s", "90s"),
        ("0.5s", "500ms"),
        ("0s", "0s"),
        ("24h", "24h"),
    ],
)
def test_durations_are_written_short(text: str, written: str) -> None:
    """In the largest unit that needs no fraction."""
    assert duration_text(seconds_of(text)) == written


@pytest.mark.parametrize(
    "text",
    ["", "5", "s", "5 s", " 5s", "5s ", "-5s", "+5s", "5S", "1e3s", "5d", ".5s", "5.s", "\u0665s"],
)
def test_what_is_no_duration(text: str) -> None:
    """A number and a unit, nothing before, between or after."""
    with pytest.raises(ValueError, match="a number and a unit"):
        seconds_of(text)


# --- schema -------------------------------------------------------------------------------------


def test_schema_describes_every_setting() -> None:
    """Each has a description, each value a default, and the burial warning stands where it must."""
    document = json.loads(json.dumps(schema()))
    tables = [document, *document["$defs"].values()]
    for table in tables:
        assert table["additionalProperties"] is False
        for name, setting in table["properties"].items():
            assert setting.get("description"), name
    stalled = document["$defs"]["StalledCheckSettings"]["properties"]
    assert stalled["interval"]["default"] == "30s"
    assert re.fullmatch(stalled["interval"]["pattern"], "1.5s")
    assert (
        "with 1, the first counted stall dead-letters it" in stalled["max_stalled"]["description"]
    )
    assert stalled["mass_expiry"]["anyOf"][0] == {"const": False}
    assert "null" not in str(document)
    url = document["$defs"]["NodeSettings"]["properties"]["url"]
    assert url["default"] == "redis://127.0.0.1:6379/0"


def test_every_setting_has_a_variable() -> None:
    """No two settings share one, and none looks like one of Kubernetes'."""
    names = [variable(path) for path in paths_in(Settings)]
    assert len(set(names)) == len(names)
    assert not any(re.search("_(PORT|SERVICE)", name) for name in names)


# --- anything at all ----------------------------------------------------------------------------

KEYS = sorted({str(p) for path in paths_in(Settings) for p in path} | {"orders", "glob", "x"})
SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    # Hypothesis takes words from this very file; a secret alone looks like any other word.
    st.text(max_size=8).filter(lambda text: SECRET not in text),
    st.sampled_from(
        ["1s", "5", "a*", "orders", "info", "/x", "redis://h", "redis+cluster://h/1", "unix://"]
    ),
    # The secret wherever one may be put by mistake: a URL in any place, well or ill formed.
    st.sampled_from(
        [
            f"{scheme}://{login}{SECRET}{rest}"
            for scheme in (*SCHEMES, "http", "reddis")
            for login in ("", ":", "u:", "u:x/", "u:%ff")
            for rest in ("@h", "@h/1", "@h:x", "", "/0@h,", "@h?a=b", "@[::1")
            # With neither a colon before it nor an "@" behind it, it stands where a host does.
            if login or "@" in rest
        ]
    ),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.sampled_from(KEYS), TREES, max_size=5)


def toml(value: object) -> str:
    """A value as TOML, tables inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        plain = set(string.ascii_letters + string.digits + string.punctuation) - set('"\\\\')
        escaped = (c if c in plain else f"\\U{ord(c):08X}" for c in value)
        return '"' + "".join(escaped) + '"'
    return repr(value)


def attempt(file: Path, environ: Mapping[str, str] = {}) -> None:
    """Load: what is accepted must survive being shown, what is refused must hold no secret."""
    refused: ConfigError | None = None
    try:
        config = load(file, environ, {})
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert refused.problems
        text = "".join(traceback.format_exception(refused)) + repr(refused)
        assert SECRET not in text, text
        assert refused.__context__ is None
        return
    url = config.settings.node.url
    if SECRET not in url.username:
        assert SECRET not in f"{url!r} {url}"
    again = file.with_name("again.toml")
    again.write_text(show(config))
    reloaded = load(again, {}, {})
    assert show(reloaded).count("\n") == show(config).count("\n")
    if config.settings.node.url.password is None:
        assert reloaded.settings == config.settings


@given(DOCUMENTS)
def test_any_tree_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    """No TOML tree raises anything but ConfigError, and no secret is ever repeated."""
    file = tmp_path_factory.getbasetemp() / "tree.toml"
    file.write_text("".join(f"{toml(key)} = {toml(value)}\n" for key, value in document.items()))
    attempt(file)


@given(st.lists(st.tuples(st.sampled_from(paths_in(Settings)), TREES), max_size=6))
def test_any_value_in_a_known_place_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[tuple[str, ...], object]]
) -> None:
    """As above, with every key a real one, so that the values are looked at."""
    document: dict[str, Any] = {}
    for path, value in values:
        table = document
        for part in path[:-1]:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[path[-1]] = value
    file = tmp_path_factory.getbasetemp() / "known.toml"
    file.write_text("".join(f"{toml(key)} = {toml(value)}\n" for key, value in document.items()))
    attempt(file)


@given(
    st.dictionaries(
        st.sampled_from([variable(path) for path in paths_in(Settings)] + ["EMQTIMERD_QUEUE__X"]),
        st.one_of(
            st.text().filter(lambda text: SECRET not in text), TREES.map(toml), SCALARS.map(str)
        ),
        max_size=6,
    )
)
def test_any_environment_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> None:
    """No text in a variable raises anything but ConfigError."""
    file = tmp_path_factory.getbasetemp() / "empty.toml"
    file.write_text("")
    attempt(file, environ)


@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode(errors="replace"))))
def test_any_bytes_are_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """Nor do any bytes in the file."""
    file = tmp_path_factory.getbasetemp() / "bytes.toml"
    file.write_bytes(content)
    attempt(file)


def table_of(section: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a section's settings."""
    return st.fixed_dictionaries({}, optional=section)


DURATIONS = st.integers(min_value=6000, max_value=600_000).map(lambda number: f"{number}ms")
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="{}"),
    min_size=1,
    max_size=6,
)
OVERRIDE = table_of(
    {
        "promote": table_of(
            {"interval": DURATIONS, "limit": st.integers(1, 100_000), "due_wake": st.booleans()}
        ),
        "stalled_check": table_of(
            {
                "restart_grace": DURATIONS,
                "max_stalled": st.integers(1, 9),
                "mass_expiry": st.one_of(
                    st.just(value=False),
                    table_of({"share": st.floats(0.001, 1), "at_least": st.integers(1, 9)}),
                ),
            }
        ),
    }
)


@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    overrides=st.lists(OVERRIDE, max_size=4),
    globs=st.lists(NAMES.filter(lambda name: name != "*"), max_size=3, unique=True),
    general=OVERRIDE,
    grace=DURATIONS,
)
def test_what_is_shown_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    overrides: list[dict[str, Any]],
    globs: list[str],
    general: dict[str, Any],
    grace: str,
) -> None:
    """The shown settings are a file that gives the same settings, and every value has an origin."""
    document = general | {
        "queues": names,
        "shutdown_grace": grace,
        "queue": dict(zip(names, overrides, strict=False)),
        "match": [
            override | {"glob": glob} for override, glob in zip(overrides, globs, strict=False)
        ],
    }
    file = tmp_path_factory.getbasetemp() / "valid.toml"
    file.write_text("".join(f"{toml(key)} = {toml(value)}\n" for key, value in document.items()))
    config = load(file, {}, {})
    again = file.with_name("again.toml")
    again.write_text(show(config))
    reloaded = load(again, {}, {})
    assert reloaded.settings == config.settings
    for name in names:
        assert reloaded.settings.for_queue(name) == config.settings.for_queue(name)
    assert set(reloaded.origins) == set(config.origins)
    assert set(reloaded.origins.values()) == {f"file {again}"}


# --- the commands -------------------------------------------------------------------------------


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `emqtimerd config …` under these variables and no others of ours."""

    def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith("EMQTIMERD")}
        monkeypatch.setattr(os, "environ", kept | environ)
        with pytest.raises(SystemExit) as ended:
            app(["config", *arguments])
        return (ended.value.code or 0, *capsys.readouterr())  # type: ignore[return-value]

    return run


def test_show_prints_the_settings_in_force_and_hides_the_password(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """What it prints is a configuration file; queues are not asked for."""
    file = tmp_path / "emqtimerd.toml"
    file.write_text("[promote]\nlimit = 7\n")
    url = f"redis://me:{SECRET}@host:1/0"
    code, out, err = command("show", "--config", str(file), EMQTIMERD_NODE__URL=url)
    assert (code, err) == (0, "")
    assert SECRET not in out
    shown = tomllib.loads(out)
    assert (shown["promote"]["limit"], shown["node"]["url"]) == (7, "redis://me:***@host:1/0")
    assert "limit = 7  # file " in out
    assert "# environment EMQTIMERD_NODE__URL" in out


def test_validate_says_no_more_than_whether_it_would_do(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Exit 0, or 2 with every problem on standard error; nothing to sweep is one."""
    file = tmp_path / "emqtimerd.toml"
    file.write_text('queues = ["orders"]\n')
    assert command("validate", "--config", str(file))[0::2] == (0, "")
    file.write_text('queues = ["a b"]\n[promote]\nlimit = 0\n')
    code, out, err = command("validate", "--config", str(file))
    assert (code, out) == (2, "")
    assert "promote.limit = 0" in err
    assert "a b" in err
    code, out, err = command("validate")
    assert (code, out) == (2, "")
    assert "nothing to sweep" in err
    assert "name one with run --queue" in err, "config validate has no such option"


def test_show_of_what_is_wrong_is_exit_2(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """There are no settings in force then."""
    code, out, err = command("show", "--config", str(tmp_path / "nowhere.toml"))
    assert (code, out) == (2, "")
    assert "nowhere.toml" in err


def test_schema_prints_one_document(command: Callable[..., tuple[int, str, str]]) -> None:
    """For editors; a wrong environment does not matter to it."""
    code, out, err = command("schema", EMQTIMERD_PROMOTE__LIMIT="0")
    assert (code, json.loads(out), err) == (0, json.loads(json.dumps(schema())), "")
