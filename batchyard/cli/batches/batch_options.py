"""The options of a batch in commands, and what was given for them."""

from __future__ import annotations

import codecs
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from batchyard.batch.batch_options import Value, options_of, parameter, with_parameters
from batchyard.errors import RequestRefused
from batchyard.steps.create.create import request_of

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Sequence

    from batchyard.batch.batch_options import BatchOption, Door
    from batchyard.steps.create.create import BatchRequest

C = TypeVar("C", bound="Callable[..., Any]")


def of_batch(door: Door) -> Callable[[C], C]:
    """The command with the options of a batch that it offers; it gets them as ``**options``."""

    def with_options(command: C) -> C:
        return with_parameters(command, [_parameter(each, door) for each in options_of(door)])

    return with_options


def asked(of_batch: dict[str, Any], **own: Any) -> BatchRequest:
    """What the command asks for, by what was given for the options, and by its ``own`` fields."""
    return request_of(of_batch | {"metadata": parse_metadata(of_batch["metadata"])}, **own)


def parse_metadata(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """``["team=search"]`` to ``{"team": "search"}``; None for none.

    Raises :class:`~batchyard.errors.RequestRefused` for a pair without ``=``.
    """
    metadata = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise RequestRefused(
                f"--metadata {pair} is not of the form key=value.",
                param="metadata",
                code="invalid_value",
            )
        metadata[key] = value
    return metadata or None


def _parameter(option: BatchOption, door: Door) -> inspect.Parameter:
    annotation, how = _KINDS.get(option.value, (str, {}))
    default = False if option.value is Value.FLAG else option.default
    if option.choices is not None:
        annotation, default = option.choices, next(iter(option.choices)).value
    # Without its name Typer would add to a flag one that says no.
    name = f"--{(option.flag or option.name).replace('_', '-')}"
    given = typer.Option(name, help=option.help(door), **how)
    return parameter(option, Annotated[annotation | None, given], default)


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


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise typer.BadParameter(f"{path} cannot be read: {why}") from None


def read_chain(file: str) -> list[dict[str, Any]]:
    """The stages that a TOML file names. A ``template_file`` is next to it::

        [[then]]
        endpoint = "/v1/embeddings"
        model = "bge-m3"
        template_file = "embed.json.j2"

    Raises :class:`~batchyard.errors.RequestRefused`, for a file without a stage too.
    """
    path = Path(file)
    try:
        asked = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if unknown := sorted(asked.keys() - {"then"}):
            raise _refused(f"{path} has no '{unknown[0]}': each stage begins with [[then]].")
        stages = [_with_template(path, each) for each in asked.get("then", ())]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _refused(f"{path} cannot be read as a chain: {error}.") from None
    if not stages:
        raise _refused(f"{path} has no stage: each stage begins with [[then]].")
    return stages


def _with_template(path: Path, stage: dict[str, Any]) -> dict[str, Any]:
    stage = dict(stage)
    name = stage.pop("template_file", None)
    if name is None:
        return stage
    return {**stage, "template": (path.parent / name).read_text(encoding="utf-8-sig")}


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="chain", code="invalid_value")


_KINDS: dict[Value, tuple[Any, dict[str, Any]]] = {
    Value.FLAG: (bool, {}),
    Value.NUMBER: (int, {}),
    Value.PAIRS: (list[str], {}),
    Value.TEMPLATE: (str, {"parser": _read_text, "metavar": "FILE"}),
    Value.OBJECTS: (str, {"parser": read_chain, "metavar": "FILE"}),
    Value.OBJECT: (str, {"parser": _read_object, "metavar": "JSON"}),
}
"""The type of a value on the command line, and how it is read; of all others: a text."""
