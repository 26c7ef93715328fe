"""Options that several commands have, each declared once, so that it means the same in all."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from batchyard.batch.batch_options import OPTIONS, Value, parameter, with_parameters
from batchyard.locations.location import parse_location

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

    from batchyard.batch.batch_options import BatchOption

C = TypeVar("C", bound="Callable[..., Any]")

DEFAULT_PORT: Final = 8000
"""Of the API."""
PORT_VARIABLE: Final = "BATCHYARD_API_PORT"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise typer.BadParameter(f"{path} cannot be read: {why}") from None


BATCH = typer.Argument(metavar="BATCH", help="A batch's id, for example batch_0123….")
INPUT_FILE = typer.Option(
    *("--input-file", "-i"),
    parser=parse_location,
    metavar="PLACE",
    help="The input: path, s3://bucket/key or http(s) URL. With --template a dataset: Parquet, "
    "Arrow or JSON lines, also a folder or a pattern of such files.",
)
OUTPUT_FILE = typer.Option(
    *("--output-file", "-o"),
    parser=parse_location,
    metavar="PLACE",
    help="Where results go: path, s3://bucket/key or presigned PUT URL. If it ends in .parquet, "
    "they are joined to the dataset's rows.",
)
ERRORS = typer.Option(
    *("--errors", "-e"),
    parser=parse_location,
    metavar="PLACE",
    help="Where failed lines go: path, s3://bucket/key or presigned PUT URL.",
)
TEMPLATE = typer.Option(
    parser=_read_text,
    metavar="FILE",
    help="A Jinja2 template that makes a request's body from each row of a dataset. The endpoint "
    "is --endpoint, or /v1/chat/completions.",
)
ENDPOINT = typer.Option(help="Refuse lines for another endpoint. Default: any endpoint.")
COMPLETION_WINDOW = typer.Option(
    help="Time limit: a number and m, h or d, at most 30d unless a setting says otherwise. "
    "`background`: run only when nothing else wants the engine, without a promise."
)
METADATA = typer.Option(help="key=value; you may repeat this option.")
TENANT = typer.Option(help="The tenant's name.")
CLIENT_RULES = typer.Option(
    "--client-rules/--no-client-rules",
    help="Refuse the fields and media URLs that clients of the API may not send.",
)


def of_batch(command: C) -> C:
    """The command with all options of a batch; it gets them as ``**options``."""
    return with_parameters(command, [_parameter(option) for option in OPTIONS])


def _parameter(option: BatchOption) -> inspect.Parameter:
    if option.value is Value.FLAG:
        return parameter(option, Annotated[bool, _flag(option)], False)
    if option.value is Value.OBJECT:
        given = typer.Option(help=option.command, parser=_read_object, metavar="JSON")
        return parameter(option, Annotated[dict[str, Any] | None, given], None)
    return parameter(option, Annotated[str | None, typer.Option(help=option.command)], None)


def _read_object(text: str) -> dict[str, Any]:
    """Of JSON, or of the file whose path stands behind an @."""
    try:
        found = msgspec.json.decode(_read_bytes(text[1:]) if text[:1] == "@" else text)
    except OSError as error:
        raise typer.BadParameter(f"{text[1:]} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"It is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise typer.BadParameter('It is not an object: give {"finish_reasons": ["length"], …}.')
    return found


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)


def _flag(option: BatchOption) -> Any:
    # Without the name Typer would add one that says no.
    return typer.Option(f"--{option.name.replace('_', '-')}", help=option.command)


DEDUPLICATE = next(_flag(option) for option in OPTIONS if option.name == "deduplicate")
