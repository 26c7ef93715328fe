"""Other people's words, as a message or a table may show them. Pure."""

from __future__ import annotations


def printable(text: str, instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """``text`` without line ends, control characters and invisible signs; ``instead`` of each."""
    return "".join(each if each.isprintable() else instead for each in text)
