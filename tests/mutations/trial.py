"""One mutation on trial: a copy of the tree, the change in it, the tests that should notice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tests.mutations.catalogue import BadMutation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.mutations.catalogue import Mutation

_SHARED = (".venv", ".venv-engine", ".models")
"""Not copied: environments, and what was made once. Nothing here writes to them."""
_TEST_SECONDS = 60
_END_SECONDS = 20
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PASSED, _FAILED = 0, 1
"""Pytest's exit statuses; the others say that there was no verdict."""


class Verdict(StrEnum):
    """What became of a mutation."""

    KILLED = "killed"
    """A test failed."""
    SURVIVED = "survived"
    """Every test passed."""
    TIMED_OUT = "timed out"
    """The tests did not end in time. It counts as noticed: a person would not wait, either."""
    BROKEN = "broken"
    """There was no verdict: the mutation could not be made, or the tests did not even start."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``detail``: the test that failed first, or why there was no verdict."""

    mutation: Mutation
    verdict: Verdict
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TestRun:
    """``status`` is pytest's; None: it was ended after its time."""

    status: int | None
    seconds: float
    output: str

    @property
    def first_failure(self) -> str:
        found = _FIRST_FAILURE.search(self.output)
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Tree:
    """A copy of the repository in ``folder``, to be changed and changed back."""

    folder: Path

    @classmethod
    def copy_of(cls, root: Path, folder: Path, files: Iterable[str]) -> Tree:
        """Copy ``files`` of ``root``; environments are linked."""
        for name in files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target, follow_symlinks=False)
        for name in _SHARED:
            if (root / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to((root / name).resolve())
        return cls(folder)

    def judge(self, mutation: Mutation, limit_seconds: float) -> Outcome:
        """What its tests say of the mutation; the tree is as before afterwards."""
        began = time.monotonic()
        try:
            with self._changed(mutation):
                run = self.run_tests(
                    mutation.tests, limit_seconds, on_postgres=mutation.on_postgres
                )
        except BadMutation as error:
            return Outcome(mutation, Verdict.BROKEN, time.monotonic() - began, str(error))
        if run.status is None:
            return Outcome(mutation, Verdict.TIMED_OUT, run.seconds, f"after {limit_seconds:.0f} s")
        if run.status == _PASSED:
            return Outcome(mutation, Verdict.SURVIVED, run.seconds)
        if run.status == _FAILED:
            return Outcome(mutation, Verdict.KILLED, run.seconds, run.first_failure)
        detail = f"pytest ended with status {run.status}: {run.output[-2000:]}"
        return Outcome(mutation, Verdict.BROKEN, run.seconds, detail)

    def run_tests(
        self, tests: Sequence[str], limit_seconds: float, *, on_postgres: bool = False
    ) -> TestRun:
        """Run ``tests`` up to the first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "--tb=line"]
        command += ["-p", "no:cacheprovider", f"--timeout={_TEST_SECONDS}"]
        command += [f"--basetemp={self.folder / '.tests'}"]
        if not on_postgres:
            # What both databases show, the one that is there at once shows sooner.
            command += ["-k", "not postgres"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *tests],
            cwd=self.folder,
            # The environment's own Batchyard is the original; the copy comes before it. And a
            # service that is missing must fail its tests: those that are skipped notice nothing.
            env=os.environ | {"PYTHONPATH": str(self.folder), "CI": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            output, status = "", None
            # So that fixtures stop the servers that they have started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END_SECONDS)
        finally:
            # Whatever is left of it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return TestRun(status, time.monotonic() - began, output)

    def imports(self, package: str) -> bool:
        """Whether tests of this tree get its own ``package``, and not the original."""
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}; print({package}.__file__)"],
            cwd=self.folder.parent,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.startswith(f"{self.folder}{os.sep}")

    @contextlib.contextmanager
    def _changed(self, mutation: Mutation) -> Iterator[None]:
        path = mutation.file_in(self.folder)
        original = path.read_text()
        path.write_text(mutation.applied_to(original))
        _forget_compiled(path)
        try:
            yield
        finally:
            path.write_text(original)
            _forget_compiled(path)


def _forget_compiled(path: Path) -> None:
    """Python tells a changed file by its time, to the second, and its size: both may be equal."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
