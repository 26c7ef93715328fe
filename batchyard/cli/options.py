"""Options that several commands have, each declared once, so that it means the same in all."""

from __future__ import annotations

import typer

from batchyard.storage.location import parse_location

BATCH = typer.Argument(metavar="BATCH", help="A batch's id, for example batch_0123….")
INPUT_FILE = typer.Option(
    *("--input-file", "-i"),
    parser=parse_location,
    metavar="<str>",
    help="The input: path, s3://bucket/key or http(s) URL.",
)
OUTPUT_FILE = typer.Option(
    *("--output-file", "-o"),
    parser=parse_location,
    metavar="<str>",
    help="Where results go: path, s3://bucket/key or presigned PUT URL.",
)
ERRORS = typer.Option(
    *("--errors", "-e"),
    parser=parse_location,
    metavar="<str>",
    help="Where failed lines go: path, s3://bucket/key or presigned PUT URL.",
)
ENDPOINT = typer.Option(help="Refuse lines for another endpoint. Default: any endpoint.")
COMPLETION_WINDOW = typer.Option(help="Time limit: a number and m, h or d, at most 30d.")
METADATA = typer.Option(help="key=value; you may repeat this option.")
TENANT = typer.Option(help="Tenant name.")
WEBHOOK_URL = typer.Option(help="An https URL that is notified when the batch ends.")
NOTIFY_EMAIL = typer.Option(help="An address that gets an e-mail when the batch ends.")
CLIENT_RULES = typer.Option(
    "--client-rules/--no-client-rules",
    help="Refuse the fields and media URLs that clients of the API may not send.",
)
DEDUPLICATE = typer.Option("--deduplicate", help="Run identical deterministic requests only once.")
