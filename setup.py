"""Compiles the job core into the package; everything else about it is in pyproject.toml.

The job core is a module for the Valkey server, not for Python: it needs a C compiler and no Python
headers, and one build serves every Python version. A machine without a compiler still gets the
whole Python package.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
SOURCE = Path("emqtimerd", "devnode", "jobcore.c")
MODULE = SOURCE.with_suffix(".so")
# No -Werror: a warning of a compiler that we never met must not cost a user the module. `make lint`
# has it.
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")

# The advice at build time and the one at use are one text.
sys.path.insert(0, str(ROOT))
from emqtimerd.devnode.parts import COMPILER_ADVICE  # noqa: E402  (needs the line above)


class CompilerError(Exception):
    """No compiler made the job core; the text says what each one answered."""


def compile_jobcore(target: Path) -> None:
    """Compile the job core to `target`, with $CC or, if none is named, the first of cc, gcc and
    clang that can.

    A compiler that is named has no stand-in: it may be meant for another processor. $CFLAGS and
    $LDFLAGS come last, as distributions and cross builds expect.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    compilers = [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]
    extra = shlex.split(f"{os.environ.get('CFLAGS', '')} {os.environ.get('LDFLAGS', '')}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a server that runs from the old file keeps it.
    unfinished = target.with_name(target.name + ".tmp")
    answers = []
    for compiler in compilers:
        command = [*compiler, *FLAGS, *extra, "-o", str(unfinished), str(ROOT / SOURCE)]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            answers.append(f"{compiler[0]}: {error.strerror}")
            continue
        if done.returncode == 0:
            sys.stderr.write("\n".join([*answers, done.stderr]))
            unfinished.replace(target)
            return
        answers.append(f"{shlex.join(command)}\n{done.stderr.rstrip()}")
    unfinished.unlink(missing_ok=True)
    raise CompilerError("\n".join(answers))


class build_jobcore(Command):  # noqa: N801  (setuptools takes the command's name from the class)
    """One step of `build`: the job core, in the build tree, or beside its source for a checkout."""

    description = "compile the job core (a module for the Valkey server)"
    user_options = [("inplace", "i", "put the module beside its source")]  # noqa: RUF012
    boolean_options = ["inplace"]  # noqa: RUF012
    editable_mode = False

    def initialize_options(self) -> None:
        self.inplace = False
        self.build_lib: str | None = None
        self.built = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def target(self) -> Path:
        if self.inplace or self.editable_mode or self.build_lib is None:
            return ROOT / MODULE
        return Path(self.build_lib) / MODULE

    def run(self) -> None:
        try:
            compile_jobcore(self.target())
            self.built = True
        except CompilerError as error:
            # A module of an older source must not stand in for the one that could not be built.
            self.target().unlink(missing_ok=True)
            sys.stderr.write(f"{error}\n\nThe job core was not built. {COMPILER_ADVICE}\n")

    def get_outputs(self) -> list[str]:
        return [str(self.target())] if self.built else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(SOURCE)]


class platform_wheel(bdist_wheel):  # noqa: N801
    """A wheel named for its platform alone, since the job core knows nothing of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        step = cast("build_jobcore", self.get_finalized_command("build_jobcore"))
        # Only the name: without extensions of Python's own, the files belong where pure ones do.
        self.root_is_pure = not step.built
        platform = super().get_tag()[2]
        self.root_is_pure = True
        return "py3", "none", platform


build.sub_commands.append(("build_jobcore", None))
setup(cmdclass={"build_jobcore": build_jobcore, "bdist_wheel": platform_wheel})
