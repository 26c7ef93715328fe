"""How fast a batch ran, as its flow run has seen it: for its progress and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from batchyard.store import ChunkSummary

_MOST_SAMPLES: Final = 240
"""More than a plot can show. Where a batch runs for longer, every second one is dropped."""


class Sample(NamedTuple):
    """The totals of a batch at one moment, ``seconds`` after its flow run began to watch."""

    seconds: float
    answered: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Rate(NamedTuple):
    """What happened between two samples; ``seconds`` is the moment of the later one."""

    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    hit_rate: float | None
    """The share of the input tokens that the engine had in its cache; None without any."""


@dataclass(slots=True)
class RunHistory:
    """Samples of a running batch, at least a look apart."""

    samples: list[Sample] = field(default_factory=list)
    busy_from: float | None = None
    """When a runner had a chunk of the batch, or an answer was there, for the first time."""
    ended: float | None = None
    """When nothing more of the batch was to run; set it before the last sample."""
    _began: float = field(default_factory=lambda: monotonic())  # noqa: PLW0108 - tests set the clock
    _step: int = 1
    _looks: int = 0

    @property
    def now(self) -> float:
        """Seconds since the flow run began to watch."""
        return monotonic() - self._began

    def see(self, chunks: ChunkSummary) -> None:
        """Add a sample, unless the ones before are close enough together."""
        usage = chunks.usage
        sample = Sample(
            self.now,
            chunks.completed + chunks.failed,
            usage.input_tokens,
            usage.input_tokens_details.cached_tokens,
            usage.output_tokens,
        )
        if self.busy_from is None and (chunks.leased or self._has_grown(sample)):
            # It began after the look before; a speed that is too low is better than one too high.
            self.busy_from = self.samples[-1].seconds if self.samples else 0.0
        self._looks += 1
        if self._looks % self._step and self.ended is None:
            return
        self.samples.append(sample)
        if len(self.samples) > _MOST_SAMPLES:
            del self.samples[1::2]
            self._step *= 2

    def rates(self) -> list[Rate]:
        """What happened from each sample to the next, while the batch was running."""
        busy_from = self.busy_from if self.busy_from is not None else float("inf")
        samples = [each for each in self.samples if each.seconds >= busy_from]
        return [_rate(a, b) for a, b in pairwise(samples)]

    def overall(self) -> Rate | None:
        """From the first moment with a runner to the end; None where nothing ran."""
        if self.busy_from is None or not self.samples or self.ended is None:
            return None
        before = [each for each in self.samples if each.seconds <= self.busy_from]
        return _rate((before or self.samples)[-1 if before else 0], self.samples[-1])

    def _has_grown(self, sample: Sample) -> bool:
        return bool(self.samples) and sample.answered > self.samples[-1].answered


def _rate(before: Sample, after: Sample) -> Rate:
    seconds = max(0.001, after.seconds - before.seconds)
    prompt = after.input_tokens - before.input_tokens
    return Rate(
        after.seconds,
        (after.answered - before.answered) / seconds,
        (after.output_tokens - before.output_tokens) / seconds,
        (after.cached_tokens - before.cached_tokens) / prompt if prompt > 0 else None,
    )
