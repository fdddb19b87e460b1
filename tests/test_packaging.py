"""The packages: what is in them, and how the job core gets into them, or does not."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import missing

from emqtimerd.devnode import COMPILER_ADVICE

ROOT = Path(__file__).resolve().parent.parent
CORE = "emqtimerd/devnode/jobcore"

# What each shell completes, said without its colours and descriptions.
COMPLETIONS = {
    "emqtimerd ": {"run", "once", "check", "config", "devnode", "demo"},
    "emqtimerd once --verb ": {"promote", "stalled-check"},
    "emqtimerd run --conf": {"--config"},
}

# The backend that pip calls, without pip's separate environment, which would need the network.
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what git would clone, as far as packages are made of it."""
    copy = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "emqtimerd",
        copy / "emqtimerd",
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.tmp"),
    )
    for pattern in ("*.toml", "*.py", "*.in", "*.md"):
        for file in ROOT.glob(pattern):
            shutil.copy(file, copy)
    return copy


def build(kind: str, checkout: Path, target: Path, **environment: str) -> tuple[Path, str]:
    """Build a package and return it with all that the build said."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target)],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (package,) = target.iterdir()
    return package, done.stdout + done.stderr


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_an_sdist_carries_the_c_source_and_builds_a_wheel_with_the_job_core(
    checkout: Path, tmp_path: Path
) -> None:
    sdist, _ = build("sdist", checkout, tmp_path / "sdist")
    with tarfile.open(sdist) as file:
        assert not [name for name in file.getnames() if name.endswith(".so")]
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / f"{CORE}.c").is_file()

    wheel, _ = build("wheel", unpacked, tmp_path / "wheel")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "emqtimerd").rglob("*.py")}
    assert names(wheel) == sources | {f"{CORE}.so", "emqtimerd/py.typed"}


@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_without_a_compiler_the_rest_is_built_and_the_advice_is_said_twice(
    compiler: str, checkout: Path, tmp_path: Path
) -> None:
    """Once by the build, and once by the package when the job core is asked for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    if compiler == "broken":
        (tools / "gcc").write_text("#!/bin/sh\necho stdint.h: not there >&2\nexit 1\n")
        (tools / "gcc").chmod(0o755)
    wheel, said = build("wheel", checkout, tmp_path / "wheel", PATH=str(tools), CC="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert f"{CORE}.so" not in names(wheel)
    assert COMPILER_ADVICE in said
    assert "cc: No such file or directory" in said
    assert ("stdint.h: not there" in said) == (compiler == "broken")

    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    code = "from emqtimerd.devnode import DevNode; DevNode().start()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    environment.pop("EMQ_JOBCORE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "JobCoreMissing" in done.stderr
    assert COMPILER_ADVICE in done.stderr


def test_a_job_core_that_cannot_be_built_anew_does_not_stay_in_its_old_form(
    checkout: Path,
) -> None:
    module = checkout / f"{CORE}.so"
    command = [sys.executable, "setup.py", "--quiet", "build_jobcore", "--inplace"]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    assert module.is_file()
    environment = os.environ | {"PATH": "/nonexistent"}
    environment.pop("CC", None)
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, env=environment)
    assert not module.exists()


def test_a_compiler_that_is_named_and_missing_has_no_stand_in(
    checkout: Path, tmp_path: Path
) -> None:
    """Else a wheel for one processor would carry a job core for another."""
    wheel, said = build("wheel", checkout, tmp_path / "wheel", CC="aarch64-no-such-gcc")
    assert f"{CORE}.so" not in names(wheel)
    assert "aarch64-no-such-gcc: No such file or directory" in said


def test_cc_may_carry_arguments_and_cflags_come_last(checkout: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >{seen}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    build("wheel", checkout, tmp_path / "wheel", CC=f"{compiler} -g0", CFLAGS="-DX=1", LDFLAGS="-s")
    words = seen.read_text().split()
    assert words[0] == "-g0"
    assert words.index("-O2") < words.index("-DX=1") < words.index("-s")


# --- completion ---------------------------------------------------------------------------------


@pytest.fixture
def completion(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the file of a shell by the documented line."""
    text = (ROOT / "docs" / "packaging.md").read_text()
    program = tmp_path / "bin" / "emqtimerd"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom emqtimerd.__main__ import main\nmain()\n")
    program.chmod(0o755)

    def make(shell: str) -> Path:
        if shutil.which(shell) is None:
            missing(f"{shell} is not here: apt-get install {shell}")
        (line,) = re.findall(rf"^    (.*source_{shell} .*)$", text, re.MULTILINE)
        command, _, target = line.rpartition(" > /usr/share/")
        file = tmp_path / Path(target).name
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=shell_environment(file), capture_output=True, check=True
        )
        file.write_bytes(done.stdout)
        return file

    return make


def shell_environment(file: Path) -> dict[str, str]:
    """Where the program is, and a home without anybody's settings."""
    home = {"HOME": str(file.parent), "XDG_CONFIG_HOME": str(file.parent), "TERM": "dumb"}
    return os.environ | home | {"PATH": f"{file.parent}/bin:{os.environ['PATH']}"}


def ask_shell(shell: str, script: str, file: Path) -> str:
    done = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else []), "-c", script],
        env=shell_environment(file),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,  # for zsh, which waits for words on its terminal
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_bash_completes(completion: Callable[[str], Path]) -> None:
    file = completion("bash")
    for line, wanted in COMPLETIONS.items():
        words = line.split(" ")
        script = (
            f"source {file}\nCOMP_WORDS=({' '.join(words)} ) COMP_CWORD={len(words) - 1}\n"
            "_emqtimerd_completion emqtimerd\nprintf '%s\\n' \"${COMPREPLY[@]}\""
        )
        assert set(ask_shell("bash", script, file).split()) == wanted


def test_fish_completes(completion: Callable[[str], Path]) -> None:
    file = completion("fish")
    for line, wanted in COMPLETIONS.items():
        found = ask_shell("fish", f"source {file}; complete -C'{line}'", file)
        assert {entry.split("\t")[0] for entry in found.splitlines()} == wanted


def test_zsh_completes_at_the_first_key(completion: Callable[[str], Path]) -> None:
    """In a terminal, since zsh completes nowhere else: each line in a shell that is new."""
    file = completion("zsh")
    for line, wanted in COMPLETIONS.items():
        # Sorted as zsh shows them. What is not shown is waited for in vain.
        last = max(wanted)
        script = f"""
            zmodload zsh/zpty
            zpty shell zsh -f -i
            zpty -w shell 'fpath=({file.parent} $fpath); autoload -Uz compinit; compinit -u -D'
            zpty -w shell 'PS1= LISTMAX=1000; print -r -- REA''DY'
            zpty -r -m shell before '*READY*'
            zpty -w -n shell $'{line}\t'
            zpty -r -m shell seen '*[^a-z]{last}[^a-z]*'
            print -r -- "$seen"
        """
        assert wanted <= set(re.findall(r"[\w-]+", ask_shell("zsh", script, file)))
