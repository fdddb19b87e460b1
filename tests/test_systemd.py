"""The units, as far as they can be tried without a systemd: read, judged by its tools, and walked.

Their very command lines run with their environment; a socket of the test's own is the manager.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest
from conftest import connect, wait_until
from sandbox import Sandbox

from emqtimerd.config import load
from emqtimerd.devnode import DevNode
from emqtimerd.jobs import Jobs
from emqtimerd.ledger import Ledger
from emqtimerd.notify import Notifier
from emqtimerd.sweeper import Blocked, Failure, SweepResult

ROOT = Path(__file__).resolve().parent.parent
SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = ("emqtimerd.service", "emqtimerd@.service")
PROGRAM = "/opt/emqtimerd/bin/emqtimerd"
PASSWORD = "pa55-of-the-test"

Message = dict[str, str]


# --- a unit -------------------------------------------------------------------------------------


class Unit:
    """A unit with its drop-ins, its specifiers expanded for one instance."""

    def __init__(self, *files: str, instance: str = "", credentials: str = "") -> None:
        self._values: dict[str, list[str]] = {}
        for file in files:
            for line in (SYSTEMD / file).read_text().splitlines():
                if "=" not in line or line.startswith("#"):
                    continue
                name, _, value = line.partition("=")
                if not value:
                    # An empty value takes back what was said so far.
                    self._values[name] = []
                else:
                    value = value.replace("%i", instance).replace("%d", credentials)
                    self._values.setdefault(name, []).append(value)

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def one(self, name: str) -> str:
        (value,) = self.all(name)
        return value

    def seconds(self, name: str) -> float:
        return float(self.one(name).removesuffix("s"))

    @property
    def environment(self) -> dict[str, str]:
        unset = self.all("UnsetEnvironment")
        pairs = (
            word.split("=", 1) for line in self.all("Environment") for word in shlex.split(line)
        )
        return {name: value for name, value in pairs if name not in unset}


class Manager:
    """The side of the service manager: a socket that notes who says what, and the environment."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(address)
        self._socket.settimeout(0)
        self.heard: list[tuple[float, int, Message]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def listen(self) -> list[Message]:
        """All messages so far."""
        while True:
            try:
                data, extra, _, _ = self._socket.recvmsg(8192, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return [message for _, _, message in self.heard]
            # systemd drops what is longer.
            assert len(data) <= 4096
            (sender, _, _) = struct.unpack("3i", extra[0][2])
            pairs = (line.split("=", 1) for line in data.decode().split("\n"))
            self.heard.append((time.monotonic(), sender, dict(pairs)))

    def wait_for(self, start: int = 0, timeout: float = 30.0, **wanted: str) -> int:
        """Wait for a message with these values, each a pattern, and return its number."""

        def found() -> list[int]:
            return [
                number
                for number, message in enumerate(self.listen()[start:], start)
                if all(re.fullmatch(p, message.get(n, "")) for n, p in wanted.items())
            ]

        wait_until(found, f"a message with {wanted}; heard: {self.listen()[start:]}", timeout)
        return found()[0]

    def pings(self, start: int = 0) -> list[float]:
        self.listen()
        return [when for when, _, message in self.heard[start:] if "WATCHDOG" in message]


class Service:
    """A unit that runs in a directory of the test's own, as /etc and /opt would be."""

    def __init__(self, unit: Unit, root: Path) -> None:
        self.unit = unit
        self.root = root
        self.manager = Manager(str(root / "notify"))
        self.process: subprocess.Popen[str] | None = None

    def command(self, line: str) -> list[str]:
        """A command line of the unit, as it is run here."""
        words = shlex.split(line.replace("$MAINPID", str(self.process.pid if self.process else 0)))
        if words[0] == PROGRAM:
            words[:1] = [sys.executable, "-m", "emqtimerd"]
        return [self.here(word) if word.startswith("/etc/") else word for word in words]

    def here(self, path: str) -> str:
        return str(self.root / path.lstrip("/"))

    @property
    def environment(self) -> dict[str, str]:
        # Like systemd's: nothing of the caller's but what finds this Python and its packages.
        kept = ("PYTHONPATH", "PATH", "EMQ_TEST_SESSION")
        own = {name: os.environ[name] for name in kept if name in os.environ}
        return own | self.unit.environment | {"NOTIFY_SOCKET": str(self.root / "notify")}

    def start(self, watchdog_seconds: float | None = None, *, driver: str = "") -> None:
        """Run ExecStart; a driver is Python that goes before it."""
        environment = self.environment
        usec = int((watchdog_seconds or self.unit.seconds("WatchdogSec")) * 1_000_000)
        words = self.command(self.unit.one("ExecStart"))
        if driver:
            code = f"{driver}\nfrom emqtimerd.__main__ import main\nmain()"
            words = [sys.executable, "-c", code, *words[3:]]
        # The PID is known only to the process itself, before it becomes the daemon.
        shell = f'WATCHDOG_PID=$$ WATCHDOG_USEC={usec} exec "$@"'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", shell, "sh", *words],
            env=environment,
            cwd="/",
            text=True,
            stderr=subprocess.PIPE,
        )

    def reload(self) -> subprocess.CompletedProcess[str] | None:
        """Run the ExecReload lines; return the one that failed, after which systemd stops."""
        for line in self.unit.all("ExecReload"):
            done = subprocess.run(
                self.command(line),
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return done
        return None

    def send(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def end(self, timeout: float = 15.0) -> tuple[int, str]:
        """Wait for the process, and return its exit code and all that it logged."""
        assert self.process
        _, log = self.process.communicate(timeout=timeout)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.manager.__exit__()


Start = Callable[..., Service]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    """Makes services; their credential directory is as systemd would fill it."""
    made: list[Service] = []

    def make(*files: str, url: str, settings: str = "", instance: str = "") -> Service:
        credentials = tmp_path / "credentials"
        unit = Unit(*(files or UNITS[:1]), instance=instance, credentials=str(credentials))
        service = Service(unit, tmp_path)
        made.append(service)
        config = Path(service.here(unit.one("ExecStart").split()[-1]))
        config.parent.mkdir(parents=True)
        config.write_text(configuration(url, settings))
        for line in unit.all("LoadCredential"):
            credentials.mkdir()
            name, _, source = line.partition(":")
            Path(service.here(source)).write_text(PASSWORD + "\n")
            shutil.copy(service.here(source), credentials / name)
        return service

    yield make
    for service in made:
        service.close()


def configuration(url: str, settings: str = "", queues: str = '"orders"') -> str:
    return (
        f'queues = [{queues}]\n[node]\nurl = "{url}"\ntimeout = "1s"\n'
        f'[http]\nlisten = "127.0.0.1:0"\n{settings}'
    )


def config_file(service: Service) -> Path:
    return Path(service.here(service.unit.one("ExecStart").split()[-1]))


# --- what systemd's own tools say ---------------------------------------------------------------


@pytest.fixture
def analyze() -> Callable[..., subprocess.CompletedProcess[str]]:
    """systemd-analyze, which reads files and asks no running systemd."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        reason = "systemd-analyze is not here: apt-get install systemd"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(tool), *words], capture_output=True, text=True, check=False)

    return run


def test_systemd_finds_nothing_to_say_about_the_units(
    analyze: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Verified in a root that has what the README has people put there, and systemd's targets."""
    units, targets = tmp_path / "etc/systemd/system", tmp_path / "usr/lib/systemd/system"
    for directory in (units, targets, tmp_path / "opt/emqtimerd/bin", tmp_path / "bin"):
        directory.mkdir(parents=True)
    for target in Path("/lib/systemd/system").glob("*.target"):
        shutil.copy(target, targets)
    for file in UNITS:
        shutil.copy(SYSTEMD / file, units)
    for program in (PROGRAM, "/bin/kill"):
        (tmp_path / program[1:]).write_text("#!/bin/sh\n")
        (tmp_path / program[1:]).chmod(0o755)
    for name in ("", "@orders"):
        for drop_in in (False, True):
            if drop_in:
                directory = units / f"emqtimerd{name[:1]}.service.d"
                directory.mkdir()
                shutil.copy(SYSTEMD / "without-password.conf", directory)
            done = analyze("verify", "--man=no", f"--root={tmp_path}", f"emqtimerd{name}.service")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("file", UNITS)
def test_the_exposure_is_at_most_one_and_two_tenths(
    analyze: Callable[..., subprocess.CompletedProcess[str]], file: str
) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(SYSTEMD / file))
    level = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level, done.stderr
    assert float(level[1]) <= 1.2


def readme_lines() -> list[str]:
    """Every command of the README, with its comment."""
    return re.findall(r"^    (\S.*)$", (SYSTEMD / "README.md").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
def test_the_readme_installs_it(start_node: Callable[..., DevNode], tmp_path: Path) -> None:
    """Its lines run as they stand, in a copy of this machine's root; then systemd reads the units.

    What needs a running systemd or the Debian archive is only noted. pip takes the package from
    the checkout as always; its dependencies are borrowed from this test's own environment.
    """
    node = start_node()
    with connect(node) as client:
        client.config_set("requirepass", PASSWORD)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    python = Path(sysconfig.get_config_var("BINDIR"))
    with Sandbox(tmp_path / "sandbox") as sandbox:
        environment = {
            "PATH": f"/stubs:{python}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
            # pip reads these as its flags, of which the second one means the opposite of its name.
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
        }
        checkout = "/checkout"
        sources = " ".join(
            str(ROOT / name)
            for name in ("emqtimerd", "deploy", "pyproject.toml", "setup.py", "README.md")
        )
        script = f"""
            mkdir /stubs {checkout}
            cp -r {sources} {checkout}
            for program in apt-get systemctl; do
                printf '#!/bin/sh\\necho "$0 $*" >>/stubs/said\\n' >/stubs/$program
                chmod +x /stubs/$program
            done
            rm -rf /opt/emqtimerd /etc/emqtimerd
            cd {checkout}/deploy/systemd
            python3() {{ {python}/python3.{sys.version_info.minor} "$@"; }}
        """
        edits = {
            "then name your node": f"sed -i s,127.0.0.1:6379,127.0.0.1:{node.port}, "
            "/etc/emqtimerd/emqtimerd.toml",
            "then write the password": f"echo {PASSWORD} >/etc/emqtimerd/password",
        }
        script += "umask 022\n"
        for line in readme_lines():
            if "without-password.conf" not in line:
                script += f"{line}\n"
                script += "".join(f"{edit}\n" for words, edit in edits.items() if words in line)
        sandbox.shell(script, environment)
        said = sandbox.shell("cat /stubs/said", environment)
        assert said.replace("/stubs/", "").splitlines() == [
            "apt-get install python3-venv",
            "systemctl daemon-reload",
            "systemctl enable --now emqtimerd",
            "systemctl status emqtimerd",
        ]
        if shutil.which("systemd-analyze"):
            units = "emqtimerd.service emqtimerd@orders.service"
            verify = f"systemd-analyze verify --man=no {units} 2>&1"
            assert sandbox.shell(verify, environment) == ""
        modes = sandbox.shell("stat -c '%a %U %n' /etc/emqtimerd/*", environment)
        assert modes.splitlines() == [
            "644 root /etc/emqtimerd/emqtimerd.toml",
            "600 root /etc/emqtimerd/password",
        ]


# --- the text -----------------------------------------------------------------------------------


def test_the_template_is_the_unit_for_one_of_several_nodes() -> None:
    """Line for line the same, but for the names that tell instances apart."""
    plain, template = ((SYSTEMD / file).read_text().splitlines()[2:] for file in UNITS)
    for one, other in zip(plain, template, strict=True):
        if not one.startswith("Description="):
            named = one.replace("/emqtimerd.toml", "/%i.toml")
            assert other == named.replace(":/etc/emqtimerd/password", ":/etc/emqtimerd/%i.password")


def test_the_password_is_lent_and_never_in_the_environment_or_on_the_command_line() -> None:
    unit = Unit(UNITS[0], credentials="/run/credentials/emqtimerd.service")
    assert unit.one("LoadCredential") == "password:/etc/emqtimerd/password"
    path = unit.environment["EMQTIMERD_NODE__PASSWORD_FILE"]
    assert path == "/run/credentials/emqtimerd.service/password"
    assert "password" not in unit.one("ExecStart")


def test_the_drop_in_for_nodes_without_a_password_takes_both_lines_back() -> None:
    for file in UNITS:
        unit = Unit(file, "without-password.conf", instance="orders", credentials="/c")
        assert unit.all("LoadCredential") == []
        assert "EMQTIMERD_NODE__PASSWORD_FILE" not in unit.environment


def test_the_example_is_a_valid_configuration_with_room_for_the_grace() -> None:
    example = SYSTEMD / "emqtimerd.toml"
    settings = load(example, {}, {}, needs_queues=True).settings
    assert settings.queues == ("orders", "emails")
    # What is commented out are the defaults.
    text = re.sub(r"^# (?=\[|\w+ = )", "", example.read_text(), flags=re.MULTILINE)
    tomllib.loads(text)
    shown = tuple(f"{name} =" for name in ("interval", "max_stalled", "username"))
    assert all(name in text for name in shown)
    unit = Unit(UNITS[0])
    assert unit.seconds("TimeoutStopSec") > settings.shutdown_grace_seconds


def test_the_command_lines_are_those_that_the_program_has() -> None:
    """Type=notify wants the daemon itself as the main process, not a shell around it."""
    unit = Unit(UNITS[1], instance="orders")
    assert unit.one("Type") == "notify"
    assert unit.one("ExecStart") == f"{PROGRAM} run --config /etc/emqtimerd/orders.toml"
    assert unit.all("ExecReload")[-1] == "/bin/kill -HUP $MAINPID"


# --- a life under the unit ----------------------------------------------------------------------


@pytest.mark.parametrize(("file", "instance"), [(UNITS[0], ""), (UNITS[1], "orders")])
def test_a_unit_from_start_to_stop(  # noqa: PLR0915 - one life, in its order
    file: str, instance: str, start_node: Callable[..., DevNode], service: Start
) -> None:
    """READY, pings, moved jobs in STATUS, a good reload, bad ones, SIGTERM."""
    node = start_node()
    url = f"redis://127.0.0.1:{node.port}"
    with connect(node) as client:
        Jobs(client, "orders").schedule(b"", in_ms=0)
        client.config_set("requirepass", PASSWORD)
    unit = service(file, instance=instance, url=url)
    unit.start(watchdog_seconds=1)
    manager = unit.manager
    assert unit.process

    ready = manager.wait_for(READY="1")
    assert ready == 0, "the first word is READY"
    assert "1 queues" in manager.listen()[0]["STATUS"]
    manager.wait_for(STATUS="ready; 1 queues, 1 jobs moved")
    wait_until(lambda: len(manager.pings()) >= 5, "pings")

    # A good reload.
    config_file(unit).write_text(configuration(url, queues='"orders", "emails"'))
    before, now_usec = len(manager.listen()), time.monotonic_ns() // 1000
    assert unit.reload() is None
    reloading = manager.wait_for(before, RELOADING="1")
    assert now_usec < int(manager.listen()[reloading]["MONOTONIC_USEC"]) < now_usec + 10_000_000
    ready = manager.wait_for(reloading, READY="1")
    assert "2 queues" in manager.listen()[ready]["STATUS"]

    # A file with a mistake: the reload fails before the daemon hears of it.
    config_file(unit).write_text(configuration(url, "[promote]\nintervall = 3\n"))
    failed = unit.reload()
    assert failed is not None
    assert failed.returncode == 2
    assert "promote.intervall" in failed.stderr

    # And when the daemon is told all the same, and when the file is gone: all goes on as before.
    for gone in (False, True):
        if gone:
            config_file(unit).unlink()
        before = len(manager.listen())
        unit.send(signal.SIGHUP)
        reloading = manager.wait_for(before, RELOADING="1")
        ready = manager.wait_for(reloading, READY="1")
        status = manager.listen()[ready]["STATUS"]
        assert "reload refused: " in status
        assert "2 queues" in status
        assert PASSWORD not in str(manager.listen())

    # Repaired.
    config_file(unit).write_text(configuration(url))
    before = len(manager.listen())
    assert unit.reload() is None
    ready = manager.wait_for(before, READY="1")
    assert manager.listen()[ready]["STATUS"] == "ready; 1 queues, 1 jobs moved"

    before = len(manager.listen())
    unit.send(signal.SIGTERM)
    code, log = unit.end()
    assert code == 0, log
    stopping = manager.wait_for(before, STOPPING="1")
    assert "READY" not in str(manager.listen()[stopping:])
    assert {sender for _, sender, _ in manager.heard} == {unit.process.pid}, "NotifyAccess=main"
    # Asked for at least twice within the limit; a busy machine is given the rest of it.
    pings = manager.pings()
    gaps = [later - earlier for earlier, later in pairwise(pings)]
    assert sorted(gaps)[len(gaps) // 2] < 0.5
    assert PASSWORD not in log


def test_a_burst_of_hangups_ends_in_ready(node: DevNode, service: Start) -> None:
    unit = service(UNITS[0], "without-password.conf", url=node.url)
    unit.start()
    unit.manager.wait_for(READY="1")
    for _ in range(20):
        unit.send(signal.SIGHUP)
    unit.manager.wait_for(1, READY="1")
    unit.send(signal.SIGTERM)
    assert unit.end()[0] == 0
    words = [word for message in unit.manager.listen() for word in message if word != "STATUS"]
    states = [word for word in words if word in ("READY", "RELOADING")]
    # The stop may come in the middle of the last one.
    assert states == ["READY", *["RELOADING", "READY"] * len(states)][: len(states)]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("[promote]\nlimit = 0\n", "promote.limit"),
        ("[shard]\nindex = 3\ncount = 2\n", "shard"),
        ("not toml", "emqtimerd.toml"),
    ],
)
def test_a_mistake_in_the_configuration_ends_it_for_good(
    settings: str, told: str, service: Start
) -> None:
    unit = service(url="redis://127.0.0.1:1", settings=settings)
    unit.start()
    code, log = unit.end()
    assert str(code) in unit.unit.one("RestartPreventExitStatus").split()
    assert told in log
    assert unit.manager.listen() == []


def test_a_port_in_use_ends_it_for_good(service: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unit = service(url="redis://127.0.0.1:1")
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        text = config_file(unit).read_text().replace("127.0.0.1:0", listen)
        config_file(unit).write_text(text)
        unit.start()
        code, log = unit.end()
    assert str(code) in unit.unit.one("RestartPreventExitStatus").split()
    assert listen in log
    assert unit.manager.listen() == []


def test_it_starts_pings_and_says_so_while_the_node_is_away(
    start_node: Callable[..., DevNode], service: Start
) -> None:
    """READY does not wait for a node; an outage, silent or not, is in STATUS and ends nothing."""
    node = start_node()
    node.stop()
    unit = service(UNITS[0], "without-password.conf", url=node.url)
    unit.start(watchdog_seconds=0.8)
    manager = unit.manager
    manager.wait_for(READY="1", timeout=5)
    manager.wait_for(STATUS=rf"node 127\.0\.0\.1:{node.port} is not reached yet: .*last fault .*")
    node.start()
    manager.wait_for(STATUS="ready; .*last fault 20.*")
    assert node.pid
    os.kill(node.pid, signal.SIGSTOP)
    try:
        silent = len(manager.listen())
        manager.wait_for(silent, STATUS=".*is down for .*", timeout=20)
        # Until then, and beyond it, the watchdog was fed.
        wait_until(lambda: len(manager.pings(silent)) > 10, "pings in the outage")
        pings = manager.pings(silent)
        gaps = [later - earlier for earlier, later in pairwise(pings)]
        assert sorted(gaps)[len(gaps) // 2] < 0.4
    finally:
        os.kill(node.pid, signal.SIGCONT)
    unit.send(signal.SIGTERM)
    assert unit.end()[0] == 0


def test_a_scheduler_that_stands_still_is_reported_by_silence(
    node: DevNode, service: Start, tmp_path: Path
) -> None:
    """The main loop turns all the while; that alone is no sign of life."""
    unit = service(UNITS[0], "without-password.conf", url=node.url)
    # It beats until it is told; then its thread does nothing more.
    told = tmp_path / "told"
    unit.start(
        watchdog_seconds=0.5,
        driver="import os, time; from emqtimerd.ledger import Ledger; beat = Ledger.beat\n"
        "def once_alive(self):\n"
        f"    if os.path.exists({str(told)!r}): time.sleep(3600)\n"
        "    beat(self)\n"
        "Ledger.beat = once_alive",
    )
    manager = unit.manager
    manager.wait_for(READY="1")
    wait_until(lambda: len(manager.pings()) >= 3, "pings while it beats")
    told.touch()
    wait_until(lambda: time.monotonic() - manager.pings()[-1] > 1.5, "silence")
    # The manager's answer. The unit has every thread say where it stood.
    unit.send(signal.SIGABRT)
    code, log = unit.end()
    assert code == -signal.SIGABRT
    assert "Current thread" in log
    assert "once_alive" in log


# --- the notifier by itself ---------------------------------------------------------------------


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, socket_path: Path) -> str:
    """A socket's name as the environment has it."""
    return str(socket_path) if request.param == "path" else f"@emqtimerd-test-{os.getpid()}"


def test_it_speaks_to_paths_and_abstract_sockets(address: str) -> None:
    with Manager(address.replace("@", "\0")) as manager:
        notifier = Notifier({"NOTIFY_SOCKET": address})
        notifier.ready("one")
        notifier.status("one")
        notifier.status("two")
        notifier.stopping("three")
        assert manager.listen() == [
            {"READY": "1", "STATUS": "one"},
            {"STATUS": "two"},
            {"STOPPING": "1", "STATUS": "three"},
        ]


def test_a_status_is_one_harmless_line_of_bounded_length(socket_path: Path) -> None:
    with Manager(str(socket_path)) as manager:
        notifier = Notifier({"NOTIFY_SOCKET": str(socket_path)})
        notifier.ready("a\nSTOPPING=1\u2028b\x1b[2J\udcff" + "ü" * 10_000)
        (message,) = manager.listen()
        assert message["READY"] == "1"
        assert re.fullmatch(r"a STOPPING=1 b \[2J ü{400,500}", message["STATUS"])


@pytest.mark.parametrize("name", ["", "relative", "/nowhere/socket", "/" + "x" * 120, "@gone"])
def test_a_missing_or_dead_socket_stops_nothing(name: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"})
    notifier.ready("")
    notifier.reloading()
    notifier.alive()
    notifier.stopping("")
    Notifier({}).ready("")


def test_a_change_of_state_waits_for_a_busy_manager_and_a_status_does_not(
    socket_path: Path,
) -> None:
    with Manager(str(socket_path)) as manager:
        notifier = Notifier({"NOTIFY_SOCKET": str(socket_path)})
        sent = 2_000
        start = time.monotonic()
        for number in range(sent):
            notifier.status(str(number))
            assert time.monotonic() - start < 30, "no waiting"
        start = time.monotonic()
        notifier.ready("full")
        assert time.monotonic() - start > 0.5
        heard = len(manager.listen())
        assert heard < sent
        notifier.ready("room")
        assert manager.listen()[-1] == {"READY": "1", "STATUS": "room"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "x"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "1.5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "\u0663"}, None),
        ({"WATCHDOG_PID": "42"}, None),
    ],
)
def test_the_watchdog_is_fed_if_it_is_ours(
    environ: dict[str, str], expected: float | None, socket_path: Path
) -> None:
    with Manager(str(socket_path)) as manager:
        notifier = Notifier(environ | {"NOTIFY_SOCKET": str(socket_path)}, pid=42)
        assert notifier.watchdog_seconds == expected
        for _ in range(10):
            notifier.alive()
        # Not more often than it is of use.
        assert manager.listen() == ([{"WATCHDOG": "1"}] if expected else [])


# --- what STATUS says ---------------------------------------------------------------------------


def test_status_tells_queues_moves_and_the_last_fault_in_a_line() -> None:
    ledger = Ledger(monotonic=lambda: 1_000.0, wall=lambda: 1_700_000_000.0)
    ledger.set_queues(["orders", "emails"])
    assert ledger.status() == "no node is known yet; 2 queues, 0 jobs moved"
    moved = SweepResult("orders", "promote", passes=1, promoted=3, finished_at=1.0)
    failure = Failure("NOPERM", "NOPERM no permission")
    refused = SweepResult("emails", "promote", failure=failure)
    ledger.record("promote", [moved, refused], 0.1)
    tail = "last fault 2023-11-14T22:13:20Z: promote of emails: NOPERM no permission"
    assert ledger.status() == f"no node is known yet; 2 queues, 3 jobs moved; {tail}"
    blocked = SweepResult("orders", "stalled_check", blocked=Blocked(b"JOB\n1", "EMQSTATE no"))
    ledger.record("stalled_check", [blocked], 0.1)
    assert ledger.status().endswith("stalled_check of orders: blocked by JOB\\n1: EMQSTATE no")
    ledger.reloaded("first problem\nsecond problem")
    assert "; reload refused: first problem; " in ledger.status()
    ledger.reloaded()
    assert "reload" not in ledger.status()
