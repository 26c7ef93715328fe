"""The cells of the table, and what each is known to do."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reference.network_faults_page import TABLE, faults_of
from tests.network.faults import Fault, Wrong

if TYPE_CHECKING:
    from collections.abc import Sequence

HOLDS: Final = "holds"


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault in one exchange of one life; ``outcome``: HOLDS, or what breaks."""

    window: str
    what: str
    connection: str
    matches: str
    wrong: Wrong
    life: str
    outcome: str
    note: str
    """What a client may notice though it holds."""
    is_short: bool
    nth: int = 1
    delay_seconds: float = 3.0

    @property
    def name(self) -> str:
        return f"{self.what}: {self.wrong}"

    @property
    def fault(self) -> Fault:
        return Fault(self.wrong, self.matches, self.nth, self.delay_seconds)


def read_cells() -> Sequence[Cell]:
    """All of them, in the order of the table."""
    table = tomllib.loads(TABLE.read_text())
    cells = []
    for row in table["row"]:
        broken = row.get("broken", {})
        names = faults_of(table, row)
        unknown = {*broken, *row.get("notes", ()), *row.get("short", ())} - set(names)
        assert not unknown, f"{row['what']}: {unknown}"
        cells += [
            Cell(
                row["window"],
                row["what"],
                row["connection"],
                row["matches"],
                Wrong(name),
                row.get("life", "batch"),
                broken.get(name, HOLDS),
                row.get("notes", {}).get(name, ""),
                name in row.get("short", ()),
                row.get("nth", 1),
                table["delay_seconds"][row["connection"]],
            )
            for name in names
        ]
    return cells
