"""What was asked of a batch, as its row keeps it: JSON, so that one more needs no migration."""

from __future__ import annotations

import msgspec

from batchyard.batch.batch_options import OnInvalid, Validation
from batchyard.batch_error import InputPart
from batchyard.results.line_errors import ErrorCount
from batchyard.results.output_rules import OnInvalidOutput


class UrlFacts(msgspec.Struct, frozen=True):
    """What is known of a URL that a result file goes to. Nothing of it is a secret."""

    expires_at: int | None = None
    """The expiry in Unix seconds; None: the URL does not say."""
    doubt: str | None = None
    """Why it could not be asked whether it takes the file."""


class Kept(msgspec.Struct, frozen=True):
    """How many lines of a retry have the answer of an earlier batch."""

    completed: int = 0
    failed: int = 0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.completed + self.failed


class BatchOptions(msgspec.Struct, frozen=True):
    """What a batch may contain beyond OpenAI's rules."""

    mixed_endpoints: bool = False
    mixed_models: bool = False
    models: tuple[str, ...] = ()
    """The only names that lines may carry; empty: any."""
    public_urls: bool = False
    """A client of the API created it: its URLs must lead to public addresses, and the limits of
    one input file apply to it."""
    deduplicate: bool = False
    """Identical deterministic requests run once."""
    ledger: bool = False
    """What each line used and cost is kept beside the results."""
    any_body: bool = False
    """Its bodies are the operator's own: no field and no URL in them are refused."""
    error_threshold: str | None = None
    """When it is stopped because too many requests fail, for :class:`.ErrorThreshold`."""
    traceparent: str | None = None
    """The span that created it; see :mod:`batchyard.logs.tracing`."""
    urls: dict[str, UrlFacts] = {}
    """What is known of its URLs, by ``output`` and ``error``."""
    on_invalid: OnInvalid = OnInvalid.FAIL
    validation: Validation = Validation.BASIC
    on_invalid_output: OnInvalidOutput | None = None
    """What runners do with answers that are not what was asked for; None: nothing."""
    parts: tuple[InputPart, ...] = ()
    """The files that are joined to its input, in this order; empty: it is not joined. Those of
    places are known when they are joined."""
    is_rendered: bool = False
    """Its input is made of a dataset by a template."""
    merges: bool = False
    """It is a retry with all lines of the batch before it, and keeps answers of that."""
    kept: Kept = Kept()
    fields: dict[str, dict[str, int]] = {}
    """How many lines have each field, by endpoint, known once it is planned."""
    ignored: dict[str, int] = {}
    """The fields among these that its engine ignores, known once it runs."""
    fewer_answers: int = 0
    """Lines that got fewer answers than they ask for, at least."""
    batch_invariant: bool | None = None
    """Whether all engines that had lines of it are batch-invariant; None: none had any yet."""
    bounds: dict[str, float] = {}
    """Seconds for which each :class:`~batchyard.batch.bounds.Bound` held."""
    adapters: tuple[str, ...] = ()
    """Adapters of its model that its lines name, known once it is planned."""
    error_counts: tuple[ErrorCount, ...] = ()
    """Why lines of it failed, once it has ended: the commonest first."""

    def as_asked(self) -> BatchOptions:
        """The same for another batch, of which nothing is known yet."""
        return msgspec.structs.replace(
            self,
            urls={},
            parts=(),
            kept=Kept(),
            fields={},
            ignored={},
            fewer_answers=0,
            batch_invariant=None,
            bounds={},
            adapters=(),
            error_counts=(),
        )
