"""What several commands take, declared once: the same name means the same everywhere."""

from __future__ import annotations

import typer

BATCH = typer.Argument(metavar="BATCH", help="A batch's id, for example batch_0123….")
INPUT_FILE = typer.Option("--input-file", "-i", help="Path, s3://bucket/key or http(s) URL.")
OUTPUT_FILE = typer.Option("--output-file", "-o", help="Likewise; a presigned URL takes a PUT.")
ERRORS = typer.Option("--errors", "-e", help="Where failed lines go.")
ENDPOINT = typer.Option(help="Refuse lines for another endpoint. Default: mix.")
COMPLETION_WINDOW = typer.Option(help="A number and m, h or d, for example 24h; at most 30d.")
METADATA = typer.Option(help="key=value; may be given several times.")
TENANT = typer.Option(help="Whose.")
WEBHOOK_URL = typer.Option(help="An https URL that is told of the batch's end.")
NOTIFY_EMAIL = typer.Option(help="An address that is told of the batch's end.")
CLIENT_RULES = typer.Option(
    "--client-rules/--no-client-rules",
    help="Refuse the fields and media URLs that clients of the API may not send.",
)
DEDUPLICATE = typer.Option(
    "--deduplicate", help="Run identical deterministic requests once, for all their lines."
)
