"""docs/reference/errors.md: every error code, from ``error_codes.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reference import error_codes
from reference.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reference.error_codes import Code

_PAGE: Final = """\
# Errors

Every error code, where it occurs, what it means and what to do. The message with a code names \
the thing that failed; it contains no secret, no URL query and no prompt.

## Lines of the error file

A failed request does not fail its batch. It becomes a line of the [error \
file](../input-format.md#the-result-files). If the engine answered, the line has that answer, with \
the engine's own status and error. Otherwise the line has one of these codes:

{lines}
## The input of a batch

Entries of `errors.data` of a batch that failed because of its input. A file with one bad line is \
refused before anything runs, and every bad line is listed, with its number. `batchyard estimate` \
lists the same without a batch.

{input}
## Batches that fail

The one entry of `errors.data` of a batch that could not be run, or not to its end. It keeps the \
lines that were finished. `batchyard run` also ends with these.

{batch}
## Warnings of a batch

Entries of `warnings` of a batch, which OpenAI's API does not have. They do not stop it.

{warnings}
## Answers of the API

`error.code` of an answer. [The API](api.md) has the other status codes, which have no code: 401 \
without a key, 404 for an object that the tenant does not have, 408, 409, 415 and 500. A 500 is a \
defect of Batchyard, and the API's log has its traceback under the `x-request-id`. OpenAI's SDKs \
try 408, 409, 429 and 5xx again by themselves, unless `x-should-retry` is `false`.

{api}
## Refusals of commands

Commands print the sentence and not the code, and exit with status 1. Besides those above:

{commands}"""


def page() -> str:
    """The whole page."""
    return _PAGE.format(
        lines=_codes(error_codes.LINES),
        input=_codes(error_codes.INPUT),
        batch=_codes(error_codes.BATCH),
        warnings=_codes(error_codes.WARNINGS),
        api=table(
            ("code", "status", "meaning", "what to do"),
            [
                (f"`{each.code}`", each.status, each.meaning, each.remedy)
                for each in error_codes.API
            ],
        ),
        commands=_codes(error_codes.COMMANDS),
    )


def _codes(codes: Iterable[Code]) -> str:
    rows = [(f"`{each.code}`", each.meaning, each.remedy) for each in codes]
    return table(("code", "meaning", "what to do"), rows)
