"""Options of our engines that Batchyard had before, and what to tell those who still set them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

WITHDRAWN: Final[dict[str, tuple[object, str]]] = {
    "tune": (
        False,
        "Leave it out. To find faster options of vLLM, compare them with `make bench-gpu`.",
    ),
    "kv_offload": (
        0.0,
        "Use vLLM's own options: --kv-offloading-size 40 --kv-offloading-backend native.",
    ),
    "speculation": (
        "none",
        "Use vLLM's own option: --speculative-config.",
    ),
}
"""By the field of a vLLM engine block: the value that asked for nothing, and what to do."""


def field_of(option: str) -> str:
    """The field that an option of a command line stood for: ``--kv-offload`` is ``kv_offload``."""
    return option.removeprefix("--").replace("-", "_") if option.startswith("--") else ""


def why_withdrawn(field: str, name: str) -> str:
    """The message about a field of :data:`WITHDRAWN`, which its user knows by this name."""
    return f"{name} was withdrawn and has no effect. {WITHDRAWN[field][1]}"


def asked_in_vain(fields: Mapping[str, Any]) -> list[str]:
    """Which of the fields were withdrawn, and ask for something."""
    return [
        field
        for field, (nothing, _) in WITHDRAWN.items()
        if field in fields and fields[field] != nothing
    ]
