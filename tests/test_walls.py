"""Features that stay optional: which files outside their own folders know of them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("batchyard", "blocks", "tasks", "flows", "commands")
CONTRACT = "Wall: "
"""What the names of the import contracts in pyproject.toml begin with that list the rooms."""
NEVER_MOVED = "batchyard.store.migrations.versions"


class Wall(NamedTuple):
    """``words`` is found in the names by which code knows the feature.

    An attribute is written with its dot. ``most_files``: how many outside its rooms have such a
    name. ``others``: modules that mean something else by the same word.
    """

    words: str
    most_files: int
    others: tuple[str, ...] = ()


WALLS = {
    "chains": Wall(
        r"(?i)(?<!^\.)chain|stage",
        18,
        ("batchyard.cli.terminal.progress", "batchyard.engine.vllm.engine_log"),
    ),
    "live requests": Wall(
        r"(^|[._])live_(?!flow|running|columns)[a-z]|Live(?!Batch)[A-Z]|(^|\.)LIVE_|(count|with|engines)_live$"
        r"|(api|runner)\.live(\.|$)",
        19,
    ),
    "datasets": Wall(r"(?i)dataset|is_rendered|pyarrow", 17, ("batchyard.storage.hub_repository",)),
    "hub": Wall(r"Hub[A-Z]|HUB|hub_|\bhub$", 4, ("batchyard.engine",)),
    "background responses": Wall(
        r"accept_response|Response(Status|Groups)|response_groups|Responses$|insert_response_"
        r"|RESPONSES|unplanned_responses|batch\.responses$|store\.responses?\b|^\.responses$",
        13,
        ("batchyard.api.http.route", "batchyard.api.live.live", "batchyard.lines.body_policy"),
    ),
    "message batches": Wall(
        r"(?i:message_?(batch|request|result|shape))|for_messages|api\.messages", 8
    ),
    "hours": Wall(
        r"(?i)(?<!has_)(?<!24_)hours(?!_left)",
        17,
        ("batchyard.logs.time_words", "batchyard.page.new_batch"),
    ),
    "deep validation": Wall(
        r"Deep[A-Z]|DEEP|^\.?(is_)?deep$|deep_[cv]|(?i:prompt_?count)",
        13,
    ),
    "slurm": Wall(r"(?i)slurm", 7),
    "several machines": Wall(
        r"engine_node|^\.?_?nodes$|nodes_port|^Nodes$|vllm\.nodes",
        2,
        (
            "batchyard.api.http.body",
            "batchyard.lines.templates",
            "batchyard.plan.roots",
            "batchyard.store.tables.batch_roots",
            "commands.slurm.job_script",
        ),
    ),
}


def rooms() -> dict[str, list[str]]:
    """The modules and folders of each feature: what its import contract protects."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {
        each["name"].removeprefix(CONTRACT): each["protected_modules"]
        for each in contracts["contracts"]
        if each["name"].startswith(CONTRACT)
    }


def is_in(module: str, folders: list[str]) -> bool:
    return any(f"{module}.".startswith(f"{each}.") for each in folders)


def names_in(path: Path) -> set[str]:
    """Each name in the file's code and each string that could be one; nothing of other texts."""
    names: set[str] = set()
    of_itertools: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(f".{node.attr}")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module == "itertools":
            of_itertools |= {each.name for each in node.names}
        else:
            values = [value for _, value in ast.iter_fields(node)]
            flat = [
                each for value in values for each in (value if isinstance(value, list) else [value])
            ]
            names |= {each for each in flat if isinstance(each, str)}
    return names - of_itertools


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): names_in(path)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not is_in(module_of(path), [NEVER_MOVED])
}


@pytest.mark.parametrize("feature", WALLS)
def test_few_files_outside_its_folders_name_an_optional_feature(feature: str) -> None:
    """If there are more: move what is new into a folder of the feature, or let the file that knows
    the feature already tell the others what they need in words of their own. Lower the limit
    whenever fewer files are left."""
    wall = WALLS[feature]
    own = [*rooms()[feature], *wall.others]
    found = [
        module
        for module, names in MODULES.items()
        if not is_in(module, own) and any(re.search(wall.words, name) for name in names)
    ]
    assert len(found) <= wall.most_files, f"{feature} in {len(found)} files: {', '.join(found)}"


def test_the_table_of_walls_has_the_rooms_that_the_contracts_protect() -> None:
    """docs/architecture.md, a row for each feature."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| (`(?:batchyard|commands)/.+) \|$", text, re.MULTILINE)
    drawn = {
        feature: [each.removesuffix("/").removesuffix(".py").replace("/", ".") for each in found]
        for feature, found in ((name, re.findall("`(.+?)`", cell)) for name, cell in rows)
    }
    assert drawn == rooms()
    assert drawn.keys() == WALLS.keys()
