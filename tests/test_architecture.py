"""The rules that hold the house up, checked by machine: imports, names, and what the docs draw."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from batchyard import lifecycle

ROOT = Path(__file__).resolve().parent.parent
OUR_FOLDERS = (
    "batchyard",
    "blocks",
    "tasks",
    "flows",
    "infra",
    "requirements",
    "benchmarks",
    "reference",
)
PACKAGES = ("batchyard", "blocks", "tasks", "flows", "commands")
MOST_FILES = 20
MOST_LINES = 450
GROWING = ROOT / "batchyard/store/migrations/versions"
"""Each change of the tables adds a file."""
BUCKET_NAMES = {"common", "helper", "helpers", "misc", "models", "types", "util", "utils"}
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))

SELDOM_NEEDED = {
    *("aiosmtplib", "alembic", "boto3", "botocore", "fastapi", "jinja2", "jsonschema", "numpy"),
    *("opentelemetry", "prefect", "prometheus_client", "pyarrow", "urllib3", "uvicorn", "yaml"),
}
RUN_BY_THE_ENGINE = [
    *sorted((ROOT / "batchyard/engine/middleware").glob("*.py")),
    ROOT / "batchyard/processes/child_loop.py",
]
"""These run in the engine's environment, where Batchyard is not installed."""


def from_root(path: Path) -> str:
    return str(path.relative_to(ROOT))


class InTheEngine(ast.NodeTransformer):
    """Leaves out what is imported only where a file is a part of Batchyard's package."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if "__package__" in ast.unparse(node.test) else node


def modules_of(tree: ast.AST) -> set[str]:
    """Top-level names of what the file imports; a relative import counts as ours."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0] if node.level == 0 else "batchyard")
    return names


def defined_tests(path: Path) -> list[str]:
    """Names of the test functions and classes in the file, methods included."""
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, definitions)
    ]
    return [node.name for node in nodes if node.name.lower().startswith("test")]


def imported_for(words: list[str]) -> set[str]:
    """What a process has imported when it is about to run the command that ``words`` name."""
    code = "import sys; from batchyard.cli import make_command; make_command(sys.argv[1:]); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(*sys.modules)", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_the_list_of_commands_needs_none_of_them() -> None:
    """The modules of all commands, and what they import, take four times as long as the list."""
    imported = imported_for(["--help"])
    assert not {"aiohttp", "pydantic", "sqlalchemy", *SELDOM_NEEDED} & imported
    assert not {"batchyard.cli.batches.show", "batchyard.settings", "commands.run"} & imported


@pytest.mark.parametrize("words", [["list"], ["keys", "list"], ["show", "b"], ["migrate"]])
def test_a_command_starts_without_what_few_commands_need(words: list[str]) -> None:
    """Together they take as long to import as all the rest; one of them is enough to notice."""
    others = {"commands.run", "batchyard.cli.batches.estimate", "batchyard.cli.operate.serve"}
    assert not {"aiohttp", *SELDOM_NEEDED, *others} & imported_for(words)


def test_imports_point_down() -> None:
    """Every import contract of pyproject.toml is kept."""
    lint_imports = str(Path(sys.executable).with_name("lint-imports"))
    done = subprocess.run(lint_imports, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_about_the_architecture_has_the_rows_of_the_contracts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages, product = settings["tool"]["importlinter"]["contracts"][:2]
    rows = [set(row.split(" | ")) for row in packages["layers"][:-1] + product["layers"]]
    page = (
        (ROOT / "docs/architecture.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    )
    names = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", each)) for each in names] == rows


def test_no_two_files_import_each_other() -> None:
    """Not even for types: whoever reads one of them would have to read both."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    order = TopologicalSorter(
        {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    )
    order.prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_more_files_than_a_reader_can_hold(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")} - {GROWING}
    full = {from_root(each): len(list(each.glob("*.py"))) for each in folders}
    assert {name: number for name, number in full.items() if number > MOST_FILES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_longer_than_a_reader_can_hold(package: str) -> None:
    lengths = {
        from_root(path): len(path.read_text().splitlines())
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("path", RUN_BY_THE_ENGINE, ids=from_root)
def test_engine_side_code_needs_nothing_installed(path: Path) -> None:
    """What runs inside the engine's process imports what is there: vLLM's server is Starlette."""
    siblings = {each.stem for each in RUN_BY_THE_ENGINE}
    tree = InTheEngine().visit(ast.parse(path.read_text()))
    assert modules_of(tree) <= sys.stdlib_module_names | siblings | {"starlette"}


@pytest.mark.parametrize("path", TEST_FILES, ids=from_root)
def test_every_test_file_holds_a_test(path: Path) -> None:
    """A file named like a test but without one would pass for ever, unnoticed."""
    assert defined_tests(path)


def test_no_file_is_a_bucket() -> None:
    """Files and folders are named for what is in them, not "utils"."""
    paths = [path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [path for path in paths if path.suffix == ".py" or path.is_dir()]
    assert [from_root(path) for path in paths if path.stem in BUCKET_NAMES] == []


@pytest.mark.parametrize("folder", ["batchyard", "blocks", "tasks", "flows", "commands"])
def test_what_silences_a_checker_says_why(folder: str) -> None:
    """Behind its rule, or in a line above to which it points."""
    silences = re.compile(r"# (?:ruff: )?noqa|# type: ignore")
    explained = re.compile(r"(?:noqa: [A-Z0-9, ]+ [-—]|type: ignore\[[\w, -]+\] +#) \S")
    bare = [
        f"{from_root(path)}:{number}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if silences.search(line) and not explained.search(line)
    ]
    assert bare == []


def test_lifecycle_diagram_is_drawn_from_the_table() -> None:
    """docs/architecture.md shows what `batchyard.lifecycle.mermaid()` returns, to the letter."""
    text = (ROOT / "docs/architecture.md").read_text()
    _, after = text.split("<!-- lifecycle: begin -->\n")
    shown, _ = after.split("<!-- lifecycle: end -->")
    assert shown == f"```mermaid\n{lifecycle.mermaid()}\n```\n"


def has_prefects_task(tree: ast.Module) -> bool:
    """Whether a function in the file is decorated with `task`, which is imported from Prefect."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "prefect"
        for alias in node.names
        if alias.name == "task"
    }
    decorators = [
        ast.unparse(each.func if isinstance(each, ast.Call) else each)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in node.decorator_list
    ]
    return bool(imported & set(decorators))


@pytest.mark.parametrize("path", sorted((ROOT / "tasks").glob("*.py")), ids=from_root)
def test_a_task_is_prefects_or_says_at_once_that_it_is_not(path: Path) -> None:
    tree = ast.parse(path.read_text())
    first_line = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert has_prefects_task(tree) or "Not Prefect's `@task`" in first_line


_STATE = re.compile(r"\*\*State:\*\* (?P<state>accepted|withdrawn|replaced by \[\d+\])[., ]")


def test_every_decision_says_its_state_in_its_third_line() -> None:
    for path in _decisions():
        title, blank, state = path.read_text().splitlines()[:3]
        assert title.startswith(f"# {int(path.name[:4])}. "), path.name
        assert not blank, path.name
        assert _STATE.match(state), path.name


def test_every_decision_is_in_one_table_of_the_index() -> None:
    """In the order of the numbers within a table, with its title and its state."""
    index = (ROOT / "docs/adr/README.md").read_text()
    row = re.compile(
        r"^\| (\d+) \| \[(.+)\]\((\d.*\.md)\)(?: ★)? \| \**([^*|]+?)\** \|$", re.MULTILINE
    )
    listed = []
    for section in index.split("\n## ")[1:]:
        rows = row.findall(section)
        assert [int(number) for number, *_ in rows] == sorted(int(number) for number, *_ in rows)
        listed += rows
    assert sorted(name for _, _, name, _ in listed) == [path.name for path in _decisions()]
    for number, title, name, state in listed:
        first, _, third = (ROOT / "docs/adr" / name).read_text().splitlines()[:3]
        assert first == f"# {number}. {title}", name
        stated = _STATE.match(third)
        assert stated is not None, name
        assert state.startswith(stated["state"]), name
        assert ("replaced" in state) == ("replaced" in third.split(":** ")[1].split(":")[0]), name


def test_the_decisions_to_read_first_are_ten_and_marked() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    _, first = index.split("## Read these first\n")
    first, tables = first.split("\n## ", 1)
    names = re.findall(r"\]\((\d.*?\.md)\)", first)
    assert len(names) == 10
    assert sorted(names) == sorted(re.findall(r"\]\((\d[^)]*\.md)\) ★", tables))


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
