"""``--chain FILE``: the further stages of a batch, as TOML::

[[then]]
endpoint = "/v1/embeddings"
model = "bge-m3"
template_file = "embed.json.j2"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from batchyard.errors import RequestRefused


def read_chain(file: str) -> list[dict[str, Any]]:
    """The stages that the file names. A ``template_file`` is next to it.

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
