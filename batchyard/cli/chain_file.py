"""``--chain FILE``: the further stages of a batch, as TOML::

[[then]]
endpoint = "/v1/embeddings"
model = "bge-m3"
template_file = "embed.json.j2"
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from batchyard.chains import stages_of
from batchyard.errors import RequestRefused

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.chains import Stage


def read_chain(path: Path | None) -> tuple[Stage, ...]:
    """The stages; none for no file. A ``template_file`` is next to it.

    Raises :class:`~batchyard.errors.RequestRefused`.
    """
    if path is None:
        return ()
    try:
        asked = tomllib.loads(path.read_text()).get("then")
        return stages_of([_with_template(path, each) for each in asked or ()])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _refused(f"{path} cannot be read as a chain: {error}.") from None


def _with_template(path: Path, stage: dict[str, Any]) -> dict[str, Any]:
    stage = dict(stage)
    name = stage.pop("template_file", None)
    return stage if name is None else {**stage, "template": (path.parent / name).read_text()}


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="chain", code="invalid_value")
