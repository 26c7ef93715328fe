"""How deeply JSON may be nested. Pure."""

from __future__ import annotations

from typing import Any, Final

MAX_DEPTH: Final = 64
"""What is nested deeper can be read here and not there: parsers and writers are recursive, and give
up at depths of their own."""


def is_deeper_than(value: Any, limit: int) -> bool:
    """Whether ``value`` nests deeper than ``limit`` containers."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
