"""Prometheus' text format: several pages merged into one.

Line by line, with work in proportion to the page: prometheus_client's own parser needs 88 ms for a
page of vLLM's, and time that grows with the square of a label's escaped quotes. What is passed on
is what Prometheus accepts, because it refuses a whole page for a single bad line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batchyard.metrics.metric_families import Family

    Sample = tuple[str, Mapping[str, str], float]
    """What follows the family's name, the labels, the value."""

OUR_PREFIX: Final = "batchyard_"
"""Metrics and labels with this prefix are ours; an engine's page cannot have them."""
MAX_LINES: Final = 50_000
"""The most lines of one page; vLLM's has 700."""
MAX_LINE_CHARACTERS: Final = 16_384

# Possessive (`*+`): what has matched is never looked at again, so no text takes long.
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*+"
_QUOTED = r'"(?:[^"\\\n\x00]|\\["\\n])*+"'
_NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?"
_SAMPLE = re.compile(
    rf"({_NAME})"
    rf"(?:\{{((?:{_LABEL_NAME}={_QUOTED}(?:,|(?=\}})))*+)\}})?"
    rf"[ \t]++({_NUMBER}|[-+]?Inf|NaN)"
    r"(?:[ \t]++-?\d++)?[ \t]*+",
    re.ASCII,
)
_LABELS = re.compile(rf"({_LABEL_NAME})={_QUOTED}", re.ASCII)
_HELP = re.compile(rf"# HELP ({_NAME}) ([^\n\x00]*+)", re.ASCII)
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)", re.ASCII)
_SUFFIXES: Final = {
    "histogram": ("", "_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}
_UNTYPED: Final = "untyped"


@dataclass(slots=True)
class _Family:
    kind: str
    help: str | None
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Added:
    """What has become of the lines of a page: samples that were taken, lines that were not."""

    samples: int = 0
    refused: int = 0


class MergedPage:
    """Pages in Prometheus' text format, merged: each family is there once, with its samples."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._owners: dict[str, str] = {}
        """The family of each name that samples may have."""

    def __str__(self) -> str:
        lines: list[str] = []
        for name, family in self._families.items():
            if family.lines:
                if family.help is not None:
                    lines.append(f"# HELP {name} {family.help}")
                lines.append(f"# TYPE {name} {family.kind}")
                lines += family.lines
        return "\n".join([*lines, ""])

    def put(self, family: Family, samples: Iterable[Sample]) -> None:
        """Add a metric of ours, unless there is no sample of it."""
        lines = [
            f"{family.name}{suffix}{{{label_text(labels)}}} {value!r}"
            for suffix, labels, value in samples
        ]
        self._families[family.name] = _Family(family.kind, family.help, lines)

    def add(self, text: str, labels: Mapping[str, str]) -> Added:
        """Add a page of another program, with ``labels`` in each sample, and without its bad lines.

        Time stamps are dropped. So are samples of a family that has another type on an earlier
        page, and those with the name of a metric or label of ours.
        """
        before = label_text(labels)
        samples = refused = 0
        kinds: dict[str, str] = {}
        helps: dict[str, str] = {}
        lines = text.split("\n")
        for line in lines[:MAX_LINES]:
            if not line:
                continue
            is_good = len(line) <= MAX_LINE_CHARACTERS
            if line[0] == "#":
                is_good = is_good and self._describe(line, kinds, helps)
            else:
                is_good = is_good and self._take(line, before, kinds)
                samples += is_good
            refused += not is_good
        return Added(samples, refused + len(lines[MAX_LINES:]))

    def _describe(self, line: str, kinds: dict[str, str], helps: dict[str, str]) -> bool:
        """Read a comment; False for one that must not be followed."""
        if found := _HELP.fullmatch(line):
            helps.setdefault(found[1], found[2])
            return True
        if not (found := _TYPE.fullmatch(line)):
            return not line.startswith(("# HELP ", "# TYPE "))
        name, kind = found[1], found[2]
        if name.startswith(OUR_PREFIX) or name in kinds:
            return False
        family = self._families.get(name) or self._begin(name, kind, helps.get(name))
        if family is None or family.kind != kind:
            return False
        kinds[name] = kind
        return True

    def _begin(self, name: str, kind: str, text: str | None) -> _Family | None:
        """A new family; None if another one has such samples."""
        names = [name + suffix for suffix in _SUFFIXES.get(kind, ("",))]
        if any(each in self._owners for each in names):
            return None
        self._owners |= dict.fromkeys(names, name)
        self._families[name] = _Family(kind, text)
        return self._families[name]

    def _take(self, line: str, before: str, kinds: Mapping[str, str]) -> bool:
        """Add a sample; False for a bad one."""
        if not (found := _SAMPLE.fullmatch(line)):
            return False
        name, own, value = found[1], found[2] or "", found[3]
        if name.startswith(OUR_PREFIX) or not _may_have(own):
            return False
        if not value.endswith(("Inf", "NaN")) and math.isinf(float(value)):
            return False  # Prometheus refuses a page with a number that is no float
        owner = self._owners.get(name, name)
        family = self._families.get(owner) or self._begin(name, _UNTYPED, None)
        if family is None or family.kind != kinds.get(owner, _UNTYPED):
            return False
        labels = ",".join(filter(None, (before, own.removesuffix(","))))
        family.lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")
        return True


def label_text(labels: Mapping[str, str]) -> str:
    """The labels as they are written between braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    value = value.replace("\x00", "")
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _may_have(labels: str) -> bool:
    names = _LABELS.findall(labels)
    return len(set(names)) == len(names) and not any(
        name.startswith((OUR_PREFIX, "__")) for name in names
    )
