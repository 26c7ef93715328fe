"""Options that several commands have, each declared once, so that it means the same in all."""

from __future__ import annotations

from typing import Final

import typer

from batchyard.locations.location import parse_location

DEFAULT_PORT: Final = 8000
"""The port of the API."""
PORT_VARIABLE: Final = "BATCHYARD_API_PORT"


BATCH = typer.Argument(metavar="BATCH", help="A batch's id, for example batch_0123….")
INPUT_FILE = typer.Option(
    *("--input-file", "-i"),
    parser=parse_location,
    metavar="PLACE",
    help="The input: path, s3://bucket/key (or az://, gs://, hf://) or http(s) URL, which may be "
    "compressed with gzip or zstd. With --template a dataset: Parquet, "
    "Arrow or JSON lines, also a folder or a pattern of such files.",
)
OUTPUT_FILE = typer.Option(
    *("--output-file", "-o"),
    parser=parse_location,
    metavar="PLACE",
    help="Where results go: path, s3://bucket/key (or az://, gs://, hf://) or presigned PUT URL. "
    "If it ends in .gz or .zst, they are compressed; if in .parquet, joined to the dataset's rows.",
)
ERRORS = typer.Option(
    *("--errors", "-e"),
    parser=parse_location,
    metavar="PLACE",
    help="Where failed lines go, in the same way as results; not to .parquet.",
)
TENANT = typer.Option(help="The tenant's name.")
ONLY_TENANT = typer.Option(help="Only this tenant.")
LIMIT = typer.Option(help="How many to list, newest first.", min=1, max=10_000)
CLIENT_RULES = typer.Option(
    "--client-rules/--no-client-rules",
    help="Refuse the fields and media URLs that clients of the API may not send.",
)
