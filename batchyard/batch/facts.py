"""A batch's facts in words, each with its name. Every place that shows a batch picks from them.

What names a user, a file's place or a price is not among them: not every place may show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from batchyard.logs.time_words import duration, moment
from batchyard.results.line_errors import count_words
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.batch_error import BatchError
    from batchyard.results.line_errors import ErrorCount
    from batchyard.wire import Batch


def facts_of(batch: Batch, errors: Sequence[ErrorCount] = ()) -> dict[str, str]:
    """All that there is to say, in its order. ``errors``: why lines failed, by code."""
    end, usage = ended_at(batch), batch.usage
    copies = usage.deduplicated_requests
    facts = {
        "Created": moment(batch.created_at),
        "Ended": moment(end) if end is not None else "",
        "Duration": duration(max(0, end - batch.created_at), exact=True) if end is not None else "",
        "Window": f"{batch.completion_window}, until {moment(batch.expires_at)}",
        "Requests": _request_words(batch, has_ended=end is not None),
        "Failed with": count_words(errors),
        "Copies": f"{copies:,} with the answer of an identical request" if copies else "",
        "Tokens": token_words(
            usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
        ),
        "Limited": "" if batch.limited_by is msgspec.UNSET else batch.limited_by,
        "Batch-invariant": "" if batch.batch_invariant is msgspec.UNSET else "yes",
        "Endpoint": batch.endpoint,
        "Model": batch.model or "",
        "Results": batch.output_file_id or "",
        "Errors": batch.error_file_id or "",
    }
    return {name: text for name, text in facts.items() if text}


def _request_words(batch: Batch, *, has_ended: bool) -> str:
    counts = batch.request_counts
    left = counts.total - counts.completed - counts.failed
    words = f"{counts.completed:,} succeeded, {counts.failed:,} failed"
    if not has_ended:
        return f"{words}, {left:,} left" if counts.total else ""
    unanswered = f", {left:,} unanswered" if left > 0 else ""
    return f"{words}{unanswered}, {counts.total:,} in all"


def token_words(inputs: int, cached: int, outputs: int) -> str:
    """``34,000 in (20,000 from cache), 5,600 out``; empty: none yet."""
    return f"{inputs:,} in ({cached:,} from cache), {outputs:,} out" if inputs or outputs else ""


def error_words(error: BatchError) -> str:
    """``line 3: invalid_json_line: …``; without the line, where the error has none."""
    where = f"line {error.line}: " if error.line is not None else ""
    return f"{where}{error.code}: {error.message}"
