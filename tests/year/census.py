"""What an installation has at one time: rows, bytes, files, and the memory of its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

import batchyard.store  # noqa: F401 - it defines the tables
from batchyard.database.columns import Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

TABLES = sorted(Row.metadata.tables)
_SQLITE_BYTES = """
    SELECT coalesce(sum(pgsize - unused), 0) FROM dbstat WHERE aggregate = TRUE AND name IN
    (SELECT name FROM sqlite_schema WHERE tbl_name = :name)
"""
_POSTGRES_BYTES = "SELECT pg_total_relation_size(CAST(:name AS regclass))"


@dataclass(frozen=True, slots=True)
class Census:
    """The counts of one evening."""

    day: int
    rows: Mapping[str, int]
    table_bytes: Mapping[str, int]
    """With the indexes; on SQLite without what is free in their pages."""
    database_bytes: int
    files: Mapping[str, int]
    """In the home, by what they belong to."""
    file_bytes: Mapping[str, int]
    memory: Mapping[str, int] = field(default_factory=dict)
    """The resident bytes of processes, by their name."""


async def take(day: int, database: Database, home: Path, pids: Mapping[str, int]) -> Census:
    """Count everything."""

    async def count(connection: AsyncConnection) -> tuple[dict[str, int], dict[str, int], int]:
        rows, sizes = {}, {}
        of_table = _SQLITE_BYTES if database.is_sqlite else _POSTGRES_BYTES
        for name in TABLES:
            found = await connection.execute(text(f"SELECT count(*) FROM {name}"))  # noqa: S608 - ours
            rows[name] = int(found.scalar_one())
            found = await connection.execute(text(of_table), {"name": name})
            sizes[name] = int(found.scalar_one())
        of_all = (
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
            if database.is_sqlite
            else "SELECT pg_database_size(current_database())"
        )
        return rows, sizes, int((await connection.execute(text(of_all))).scalar_one())

    rows, sizes, total = await database.read(count)
    counted = _files(home)
    return Census(
        day,
        rows,
        sizes,
        total,
        {name: len(sizes) for name, sizes in counted.items()},
        {name: sum(sizes) for name, sizes in counted.items()},
        {name: _resident_bytes(pid) for name, pid in pids.items()},
    )


def table(found: list[Census]) -> str:
    """One line for each thing, with a column for each day."""

    def line(name: str, *values: object) -> str:
        return f"  {name:28}" + "".join(f"{value:>12}" for value in values)

    lines = [line("day", *(each.day for each in found), "KB at end")]
    lines += [
        line(
            name,
            *(f"{each.rows[name]:,}" for each in found),
            f"{found[-1].table_bytes[name] / 1000:,.0f}",
        )
        for name in TABLES
    ]
    lines.append(line("database, KB", *(f"{each.database_bytes // 1000:,}" for each in found)))
    for name in found[0].files:
        lines.append(line(f"{name}, files", *(f"{each.files[name]:,}" for each in found)))
        kilobytes = (f"{each.file_bytes[name] / 1000:,.0f}" for each in found)
        lines.append(line(f"{name}, KB", *kilobytes))
    for name in found[0].memory:
        memory = (f"{each.memory[name] / 2**20:,.1f}" for each in found)
        lines.append(line(f"{name}, MiB resident", *memory))
    return "\n".join(lines)


def _files(home: Path) -> dict[str, list[int]]:
    """The sizes of all files but the database's, by what they belong to."""
    sizes: dict[str, list[int]] = {name: [] for name in ("objects", "logs", "scratch", "others")}
    for path in home.rglob("*"):
        first = path.relative_to(home).parts[0]
        if first.startswith("batchyard.db"):
            continue
        name = "scratch" if first.startswith("scratch-") else first
        try:
            size = path.stat().st_size if path.is_file() else None
        except FileNotFoundError:
            continue
        if size is not None:
            sizes[name if name in sizes else "others"].append(size)
    return sizes


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024
