"""docs/reference/events.md: the events that Prefect and receivers of webhooks get."""

from __future__ import annotations

from typing import Final

from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.notify.event import EVENT_TYPES
from reference.markdown import table

_PAGE: Final = """\
# Events

## Events in Prefect

For [automations](../how-to/react-in-prefect.md). The resource is `batchyard.batch.` and the \
batch's id.

{prefect}
## Webhook events

For [receivers](../how-to/receive-webhooks.md), in OpenAI's shape. Other types are refused when an \
endpoint is created.

{webhooks}
"""


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
    return _PAGE.format(
        prefect=table(("event", "when"), [*statuses, ("`batch.deadline_at_risk`", at_risk)]),
        webhooks=table(
            ("type", "when"),
            [(f"`{each}`", _when(each)) for each in EVENT_TYPES],
        ),
    )


def _when(event: str) -> str:
    of, _, end = event.partition(".")
    return f"a batch is `{end}`" if of == "batch" else f"a background response is `{end}`"
