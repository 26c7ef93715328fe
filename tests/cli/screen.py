"""What a terminal shows of what was written to it."""

from __future__ import annotations

import re


def drawn(text: str) -> list[str]:
    """What is left of ``text`` on a screen: knows only the control sequences that rich uses."""
    lines, row, column = [""], 0, 0
    for match in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", text):
        parameter, command, carriage_return, line_feed, words = match.groups()
        if command == "A":
            row = max(0, row - int(parameter or 1))
        elif command == "K":
            lines[row] = "" if parameter == "2" else lines[row][:column]
        elif carriage_return:
            column = 0
        elif line_feed:
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif words:
            before = lines[row].ljust(column)
            column += len(words)
            lines[row] = before[: column - len(words)] + words + before[column:]
    return [line.rstrip() for line in lines]
