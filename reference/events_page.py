"""docs/reference/events.md: what Batchyard tells of itself: Prefect's events, webhooks, logs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.notify.event import EVENT_TYPES
from reference.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).parents[1]
_PRODUCT: Final = ("batchyard", "commands", "flows", "tasks")
_LEVELS: Final = {
    "info": "INFO",
    "log": "INFO or WARNING",
    "warning": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
}

_PAGE: Final = """\
# Events and logs

## Events in Prefect

For [automations](../how-to/react-in-prefect.md). The resource is `batchyard.batch.` and the \
batch's id.

{prefect}
## Webhook events

For [receivers](../how-to/receive-webhooks.md), in OpenAI's shape. Other types are refused when an \
endpoint is created.

{webhooks}
## Logs

| process | where its log is |
|---|---|
| `batchyard serve` | standard error |
| `batchyard up` | `logs/` in `BATCHYARD_HOME`, a file for each process |
| a worker | standard output: what it uses, and the log lines of its flow runs |
| a flow run | Prefect, with the flow run; also in the worker's output |
| an engine | `logs/engine-NAME.log` in `BATCHYARD_HOME`. If it crashes, the errors at its end are \
also `engine.log` lines of the flow run |

A line has the time, the level, the logger and the message. The logger is the module below \
(`batchyard.runner.run`). A message begins with a key that stays the same, and most go on with \
`name=value`. Prompts, answers, secrets and queries of URLs are in no line. Levels are INFO and \
above. The last column has the message as it is in the code; `…` stands for a value.

{logs}"""


def page() -> str:
    """The whole page."""
    ends = {f"batch.{status.value}" for status in TERMINAL}
    statuses = [
        (f"`batch.{status.value}`", "the batch ended" if f"batch.{status.value}" in ends else when)
        for status in BatchStatus
        for when in [
            "the batch was created"
            if status is BatchStatus.VALIDATING
            else "it entered this status"
        ]
    ]
    at_risk = "every forecast for five minutes is later than the batch's deadline; once at most"
    rows = [(line.level, f"`{line.key}`", f"`{line.logger}`", f"`{line.text}`") for line in lines()]
    return _PAGE.format(
        prefect=table(("event", "when"), [*statuses, ("`batch.deadline_at_risk`", at_risk)]),
        webhooks=table(
            ("type", "when"),
            [(f"`{each}`", f"a batch is `{each.partition('.')[2]}`") for each in EVENT_TYPES],
        ),
        logs=table(("level", "key", "logger", "message"), rows),
    )


class LogLine(NamedTuple):
    """A call of a logger in the code."""

    key: str
    level: str
    logger: str
    text: str


def lines() -> list[LogLine]:
    """Every call of a logger in the product, by key."""
    found = {
        each
        for folder in _PRODUCT
        for path in (_ROOT / folder).rglob("*.py")
        for each in _lines_of(path)
    }
    return sorted(found)


def _lines_of(path: Path) -> Iterator[LogLine]:
    module = ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="logger" | "ours"), attr=level),
                args=[*arguments],
            ) if level in _LEVELS:
                text = next(
                    (each.value for each in arguments if isinstance(each, ast.Constant)), None
                )
                if text is None:
                    continue
                message = re.sub(r"%[.\d]*[a-z]", "…", text)
                yield LogLine(message.split()[0], _LEVELS[level], module, message)
