"""docs/reference/logs.md: the two forms of the log, its events and their fields."""

from __future__ import annotations

import ast
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.logs import Event
from batchyard.logs.rotation import KEPT, MAX_BYTES
from batchyard.logs.setup import formatter_for
from batchyard.logs.vocabulary import EVENTS, FIELDS
from reference.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.logs.setup import Format

_ROOT: Final = Path(__file__).parents[1]
_PRODUCT: Final = ("batchyard", "commands", "flows", "tasks", "blocks")
_LOGGER: Final = "log"
"""What every module calls its event logger."""
_LEVELS: Final = ("debug", "info", "warning", "error")
_NO_FIELDS: Final = {"cause", "for_flow_run"}
_THROUGH: Final = {"_warn_once": ("warning",), "tell": ("info", "warning")}
"""Functions that hand an event on, and the levels that they use."""

_PAGE: Final = """\
# Logs

The API, the workers and their flow runs log *events*: a name that stays the same, fields, and a \
text for people. `BATCHYARD_LOG__FORMAT` is `text` (the default) or `json`, and \
`BATCHYARD_LOG__LEVEL` the lowest level that is logged. No event has a secret, a prompt, an answer \
or the query of a URL.

As text, a line has the time, the level, the logger and the event:

<!-- not run: made by the code itself -->
```text
{text}
```

As JSON, a line is an object with `time` (UTC), `level`, `logger`, `event`, `message` and the \
event's fields. An exception adds `traceback`; a record of a Prefect flow run has `flow_run`. \
Records of libraries have no `event`:

<!-- not run: made by the code itself -->
```json
{json}
```

| process | where its log is |
|---|---|
| `batchyard serve` | standard error |
| `batchyard up` | `logs/` in `BATCHYARD_HOME`, a file for each process. At {size} MiB a file is \
begun anew; {kept} earlier ones are kept, `api.log.1` is the latest |
| `batchyard worker` | standard error: what it uses, and what Prefect's worker logs |
| a flow run | Prefect, with the flow run; of a container or a pod also its standard error |
| an engine | `logs/engine-NAME.log` in `BATCHYARD_HOME`, as vLLM writes it; at its start it is \
begun anew if it has {size} MiB. If it crashes, the errors at its end are also `engine.log` \
events of the flow run |

## Events

{events}
## Fields

{fields}"""
_EXAMPLE: Final = Event(
    "chunk.failed", {"batch": "batch_6b2f", "chunk": 3, "strikes": 1}, "the engine has ended"
)
_EXAMPLE_LOGGER: Final = "batchyard.runner.claims.releases"
_EXAMPLE_TIME: Final = 1_795_379_467.412


@dataclass(slots=True)
class Use:
    """How the code logs one event."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def uses() -> dict[str, Use]:
    """Every event that the product logs, by name."""
    found: dict[str, Use] = {}
    for folder in _PRODUCT:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            for call, levels in _calls(ast.parse(path.read_text())):
                name = call.args[0]
                if not isinstance(name, ast.Constant):
                    continue  # in a function that hands it on
                use = found.setdefault(str(name.value), Use())
                use.levels.update(levels)
                use.fields.update(_fields_of(call))
    return found


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=level)) if (
                name == _LOGGER and level in _LEVELS
            ):
                yield node, (level,)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _THROUGH:
                yield node, _THROUGH[name]


def _fields_of(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in _NO_FIELDS:
            yield keyword.arg


def page() -> str:
    """The page."""
    found = uses()
    events = [
        (f"`{name}`", ", ".join(level for level in _LEVELS if level in found[name].levels), text)
        for name, text in EVENTS.items()
    ]
    fields = [(f"`{name}`", text) for name, text in FIELDS.items()]
    return _PAGE.format(
        text=_example("text"),
        json=_example("json"),
        size=MAX_BYTES >> 20,
        kept=KEPT,
        events=table(("event", "level", "what happened"), events),
        fields=table(("field", "value"), fields),
    )


def _example(form: Format) -> str:
    record = logging.makeLogRecord(
        {
            "name": _EXAMPLE_LOGGER,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": _EXAMPLE,
            "created": _EXAMPLE_TIME,
            "msecs": 412,
        }
    )
    formatter = formatter_for(form)
    formatter.converter = time.gmtime  # the same page on every machine
    return formatter.format(record)
