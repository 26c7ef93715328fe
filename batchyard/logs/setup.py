"""How log records are written: one line of text, or one line of JSON, each.

Processes of ours take :func:`logging_config`. Prefect configures logging in its own, from the
environment: :func:`prefect_variables` has it write its records, and ours, with our formatter.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

from batchyard.logs import Event

Format = Literal["text", "json"]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PREFECTS_FIELDS: Final = {"flow_run_id": "flow_run", "task_run_name": "task"}
"""What Prefect adds to records of flow runs, and our names for it."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    ``time`` (UTC, milliseconds), ``level``, ``logger`` and ``message`` are in each. A record of an
    event has ``event`` and its fields, too, and one with an exception ``traceback``. A field whose
    name is one of these has ``_`` after it.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Prefect hands in a format, a date format and a style, which JSON has no use for."""
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line. Values that JSON does not know are written as text."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Event):
            entry |= {"event": record.msg.name, "message": record.msg.text}
            for name, value in record.msg.fields.items():
                entry[f"{name}_" if name in entry else name] = value
        else:
            entry["message"] = record.getMessage()
        for theirs, ours in _PREFECTS_FIELDS.items():
            if (value := getattr(record, theirs, None)) is not None:
                entry.setdefault(ours, value)
        if record.exc_info and record.exc_info[0] is not None:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def formatter_for(form: Format) -> logging.Formatter:
    """The formatter that writes records in this form."""
    return JsonFormatter() if form == "json" else logging.Formatter(_TEXT)


def logging_config(form: Format, level: Level) -> dict[str, Any]:
    """A configuration for :func:`logging.config.dictConfig`: to stderr, libraries' warnings too."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter_for, "form": form}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {"batchyard": {"level": level}},
    }


def prefect_variables(form: Format) -> dict[str, str]:
    """Environment variables with which Prefect's processes write their logs in this format."""
    if form == "text":
        return {}
    return {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
        "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": f"{JsonFormatter.__module__}.JsonFormatter",
    }
