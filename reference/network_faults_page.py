"""docs/reference/network-faults.md: what a network may do between two processes, and what holds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from reference.markdown import table

TABLE: Final = Path(__file__).with_name("network_faults.toml")
_PAGE: Final = """\
# Faults of the network

Each row is one request or statement in the life of a batch. In each of its cells the network does \
one thing to it: it loses the request before the server has it, or the answer after the server has \
done what was asked; it cuts either of them in the middle, delays the answer for longer than a \
lease, or delivers the request twice. Then the batch must end as if nothing had happened: every \
`custom_id` is once in the results, with its own answer; the counts are right; the webhook arrives \
under one id; when the files are deleted, no object, no row and no lease is left. Where the \
connection is to Prefect's server, each request is executed once, and every flow run ends in \
Prefect as its batch does in the database.

[`tests/network/test_cells.py`](../../tests/network/test_cells.py) runs the cells with PostgreSQL, \
an S3 server, an API and processes of the product behind proxies that know requests and \
statements; [`test_prefect_cells.py`](../../tests/network/test_prefect_cells.py) runs those of \
Prefect with a real Prefect server, workers and flow runs. `make test-slow` runs all {all}, \
`make test-deployed` some, and fails where a cell differs from what is written here.

{rows}
## What a client may notice

{notes}
## What breaks

{broken}
"""
_CONNECTIONS: Final = {
    "database": "PostgreSQL",
    "store": "S3",
    "receiver": "a receiver of webhooks",
    "engine": "a remote engine",
    "client": "from the client to the API",
    "prefect": "Prefect's server",
}


def page() -> str:
    """The whole page."""
    read = tomllib.loads(TABLE.read_text())
    rows, notes, broken, count = [], [], [], 0
    for row in read["row"]:
        faults = faults_of(read, row)
        count += len(faults)
        known = row.get("broken", {})
        holds = "all hold" if not known else f"{len(faults) - len(known)} of {len(faults)} hold"
        life = row.get("life", "batch")
        where = row["window"] if life == "batch" else f"{row['window']} ({life})"
        rows.append((where, row["what"], _CONNECTIONS[row["connection"]], ", ".join(faults), holds))
        notes += [(row["what"], fault, text) for fault, text in row.get("notes", {}).items()]
        broken += [(row["what"], fault, text) for fault, text in known.items()]
    words = ("what happens", "fault", "what is seen")
    return (
        _PAGE.format(
            all=count,
            rows=table(("window", "what happens", "connection", "faults", "outcome"), rows),
            notes=table(words, notes) or "Nothing.\n",
            broken=table(words, broken) or "Nothing that is known.\n",
        ).rstrip("\n")
        + "\n"
    )


def faults_of(read: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """The faults of a row: those of its connection, and its own."""
    return [*row.get("faults", read["faults"][row["connection"]]), *row.get("also", ())]
