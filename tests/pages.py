"""The blocks of code in the documentation, by the names that pages give them.

A comment stands on the line above a block. It says which test runs the block, and under which name,
or what a test checks of a block that is not run, or why neither is so::

    <!-- run by tests/up/test_guide.py: upload -->
    <!-- checked by tests/test_blocks.py: worker; it would not end -->
    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<comment>[^\n]*) -->\n(?P=indent))?```(?P<language>\w*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(
    r"(?P<how>run|checked) by (?P<test>[\w/.]+): (?P<name>[\w-]+)(?:; (?P<why>.+))?"
    r"|not run: (?P<reason>.+)"
)


@dataclass(frozen=True)
class Block:
    """A block of a page, as it is printed there. ``test`` and ``name`` are of those with a test."""

    page: str
    language: str
    text: str
    comment: str
    test: str | None = None
    name: str | None = None
    reason: str | None = None
    """Why it is not run."""

    @property
    def is_accounted_for(self) -> bool:
        return self.test is not None or self.reason is not None

    @property
    def commands(self) -> list[str]:
        """The command lines, each without a prompt and whole, if it was broken up."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith(("$ ", "# "))]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of the page, in their order."""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        comment = _COMMENT.fullmatch(match["comment"] or "")
        parts = comment.groupdict() if comment else {}
        why = parts.get("reason") or (parts.get("why") if parts.get("how") == "checked" else None)
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                language=match["language"],
                text=textwrap.dedent(match["text"]),
                comment=match["comment"] or "",
                test=parts.get("test"),
                name=parts.get("name"),
                reason=why,
            )
        )
    return found


def block(page: str, name: str) -> str:
    """The text of the block with this name on the page; the page is named from the root."""
    (found,) = (each for each in blocks_of(ROOT / page) if each.name == name)
    return found.text


def replaced(text: str, examples: Mapping[str, str]) -> str:
    """The text with other ids and addresses. Each of its examples must be there."""
    for example, ours in examples.items():
        assert example in text, f"{example} is not in:\n{text}"
        text = text.replace(example, ours)
    return text


def words_of(command: str) -> list[str]:
    """The arguments of a `batchyard` command line, without variables, pipes and redirections."""
    found = re.match(r"(?:[A-Z_]+=\S+ )*(?:[\w./-]*/)?batchyard (.*)", command)
    words = shlex.split(found[1], comments=True) if found else []
    end = next((at for at, word in enumerate(words) if word in {"|", ">", "&&", "||"}), len(words))
    return words[:end]
