"""What the product's processes log: named events with fields, as text or as JSON.

``log = event_logger(__name__)``, then ``log.warning("chunk.lost", describe(error), chunk=key)``.
The names and fields are the tables of :mod:`batchyard.logs.vocabulary`, so that a search or an
alert on a name finds every case. Neither a field nor the text may hold a secret, a prompt, an
answer, or a URL's query.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, TypeAlias

_Cause: TypeAlias = BaseException | None
_ROOT: Final = "batchyard"
_CALLER: Final = 3
"""Frames from logging's own up to the caller of an event logger's method."""


@dataclass(frozen=True, slots=True)
class Event:
    """The message of a log record: a name, its fields, and a text for people."""

    name: str
    fields: dict[str, object]
    text: str

    def __str__(self) -> str:
        fields = [f"{key}={value}" for key, value in self.fields.items()]
        return _in_one_line(" ".join(filter(None, (self.name, *fields, self.text))))


def _in_one_line(text: str) -> str:
    r"""``text`` with ``\n``, ``\x1b`` and the like in place of line ends and control characters.

    A client's URL may have them: a line of its own would look like one of ours, and a terminal that
    shows the log would obey the others.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class EventLogger:
    """Logs events by name through the standard library's logger of the same name."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(
        self, event: str, text: object = "", /, *, cause: _Cause = None, **fields: object
    ) -> None:
        """What only a developer needs; ``cause`` is logged with its traceback."""
        self._log(logging.DEBUG, event, text, cause, fields)

    def info(
        self, event: str, text: object = "", /, *, for_flow_run: str | None = None, **fields: object
    ) -> None:
        """What happened as it should. ``for_flow_run``: whose log in Prefect has it."""
        self._log(logging.INFO, event, text, None, fields, flow_run_id=for_flow_run)

    def warning(self, event: str, text: object = "", /, **fields: object) -> None:
        """What went wrong and is handled."""
        self._log(logging.WARNING, event, text, None, fields)

    def error(
        self, event: str, text: object = "", /, *, cause: _Cause = None, **fields: object
    ) -> None:
        """What an operator must look at; ``cause`` is logged with its traceback."""
        self._log(logging.ERROR, event, text, cause, fields)

    def _log(
        self,
        level: int,
        event: str,
        text: object,
        cause: _Cause,
        fields: dict[str, object],
        *,
        flow_run_id: str | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            message = Event(event, fields, str(text))
            extra = {"flow_run_id": flow_run_id} if flow_run_id is not None else None
            self._logger.log(level, message, exc_info=cause, extra=extra, stacklevel=_CALLER)


def event_logger(name: str) -> EventLogger:
    """The event logger of the module ``name``, below the logger ``batchyard``.

    That one has the level and, in flow runs, Prefect's handler; flows and commands are elsewhere.
    """
    return EventLogger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")
