"""The body of ``POST /batches/{id}/retry``: which lines run again, and with what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from batchyard.api.http.json_body import Boolean, RequestBody, Text, Texts
from batchyard.lines.body_patch import MOST_PATHS, BodyPatch
from batchyard.steps.retry.retry_lines import LineChoice

if TYPE_CHECKING:
    from collections.abc import Sequence


class RetryBatch(RequestBody):
    """Which lines of the batch run again, and what is changed in them.

    Without `failed`, `codes`, `finish_reasons` and `invalid_json` these are all failed lines. With
    several of them, a line runs again if one of them holds.
    """

    set: dict[str, Any] | None = Field(
        default=None,
        max_length=MOST_PATHS,
        description="Fields of each body and their new values, for example "
        '`{"max_tokens": 4096}`. Dots lead into nested objects.',
    )
    unset: Texts | None = Field(default=None, description="Fields to remove from each body.")
    failed: Boolean | None = Field(default=None, description="All lines of the error file.")
    codes: Texts | None = Field(
        default=None,
        description="Lines of the error file with one of these codes, error types or HTTP "
        "statuses.",
    )
    finish_reasons: Texts | None = Field(
        default=None,
        description="Lines whose answers ended with one of these; `length`: they were cut off.",
    )
    invalid_json: Boolean | None = Field(
        default=None,
        description="Lines whose answers are not JSON, or do not fit the JSON schema in their "
        "request.",
    )
    merge: Boolean | None = Field(
        default=None,
        description="The new batch has all lines: the others keep their results, which are in its "
        "files too.",
    )
    completion_window: Text | None = Field(
        default=None, description="Instead of the window of the first batch."
    )

    @property
    def choice(self) -> LineChoice:
        """The lines that are asked for."""
        return LineChoice(
            failed=bool(self.failed),
            codes=frozenset(self.codes or ()),
            finish_reasons=frozenset(self.finish_reasons or ()),
            invalid_json=bool(self.invalid_json),
        ).or_failed()

    def patch(self) -> BodyPatch:
        """What is to be changed. Raises :class:`~batchyard.errors.RequestRefused`."""
        removed: Sequence[str] = self.unset or ()
        return BodyPatch.of(self.set or {}, removed)
