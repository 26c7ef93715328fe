"""Have mutmut make every small wrong change of some files, and print those that no test notices.

::

    python -m tests.mutations.of_a_diff                  # what differs from main, uncommitted too
    python -m tests.mutations.of_a_diff v0.2.0           # from another commit
    python -m tests.mutations.of_a_diff batchyard/schedule/turns.py tests/unit/test_turns.py

The tests are those that import a changed module, those that the lists name for it, and those that
were given; they run on SQLite. mutmut works in a copy of the tree. It changes plain functions and
methods, but neither decorated ones nor what child processes run. Survivors that only change a text
are counted, and not shown. The others are for a person to judge: many are harmless. The exit status
is 0 if there are none.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutations.catalogue import read_mutations
from tests.mutations.trial import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
PACKAGES = ("batchyard", "blocks", "commands", "flows", "tasks")
_QUICK = "not slow and not containers and not engines and not vllm and not alone"
_SURVIVOR = re.compile(r"^\s*(\S+): survived$", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="make mutate-diff", description=__doc__)
    parser.add_argument("words", nargs="*", help="a commit, or files of the product and of tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    given = [word for word in asked.words if word.endswith(".py")]
    product = [file for file in given if file.startswith(PACKAGES)]
    bases = [word for word in asked.words if word not in given] or ["main"]
    changed = product or list(_changed_since(bases[0]))
    tests = sorted({file for file in given if file not in product} or which_tests(changed))
    if not (changed and tests):
        print(f"nothing to do: {len(changed)} files of the product, {len(tests)} of tests")
        return 0
    print("changed:", *changed, "\ntests:", *tests, flush=True)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        survivors = _run(Path(folder), changed, tests, asked.jobs)
    shown = [difference for difference in survivors if not is_only_of_a_text(difference)]
    print(*shown, sep="\n")
    print(f"{len(shown)} survived, and {len(survivors) - len(shown)} that only change a text")
    return 1 if shown else 0


def is_only_of_a_text(difference: str) -> bool:
    """mutmut writes XX around a text, or changes its case."""
    removed, added = (
        re.findall(rf"^{sign}(?!{sign})(.*)", difference, re.MULTILINE) for sign in ("-", r"\+")
    )
    plain = [line.replace("XX", "").lower() for line in added]
    return plain == [line.lower() for line in removed]


def _module_of(file: str) -> str:
    """The dotted name of a file of Python."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _changed_since(base: str) -> Iterator[str]:
    start = _git("merge-base", base, "HEAD")[0]
    return filter(_is_product, _git("diff", "--name-only", "--diff-filter=d", start))


def _is_product(file: str) -> bool:
    return file.endswith(".py") and file.partition("/")[0] in PACKAGES


def which_tests(files: Iterable[str]) -> set[str]:
    """Those that import one of the files, or that the lists name for it."""
    modules = {_module_of(file) for file in files}
    found = _git("ls-files", "tests/**/test_*.py", "tests/test_*.py")
    chosen = {path for path in found if modules & _imports_of((ROOT / path).read_text())}
    for mutation in read_mutations():
        if mutation.place.partition(":")[0] in modules:
            chosen |= mutation.test_files
    return chosen


def _imports_of(source: str) -> set[str]:
    """The dotted names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _run(folder: Path, changed: Sequence[str], tests: Sequence[str], jobs: int) -> list[str]:
    """The survivors, as differences."""
    files = [
        name for name in _git("ls-files", "-co", "--exclude-standard") if (ROOT / name).is_file()
    ]
    Tree.copy_of(ROOT, folder, files)
    others = sorted({name.partition("/")[0] for name in files} - {*PACKAGES, "tests"})
    settings = {
        "source_paths": PACKAGES,
        "only_mutate": changed,
        "also_copy": others,
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ("-m", _QUICK, "-k", "not postgres", "-p", "no:cacheprovider"),
    }
    lines = [f"{key}=\n" + "".join(f"    {each}\n" for each in settings[key]) for key in settings]
    (folder / "setup.cfg").write_text("[mutmut]\n" + "".join(lines))
    mutmut = [sys.executable, "-m", "mutmut"]
    subprocess.run([*mutmut, "run", "--max-children", str(jobs)], cwd=folder, check=True)
    results = subprocess.check_output([*mutmut, "results"], cwd=folder, text=True)
    return [
        subprocess.check_output([*mutmut, "show", name], cwd=folder, text=True)
        for name in _SURVIVOR.findall(results)
    ]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
