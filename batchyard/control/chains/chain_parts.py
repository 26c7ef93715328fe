"""Lines that wait for the next stage of their chain, and the batches that are made of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from batchyard.control.hidden_batches import make_hidden_batch
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.sequences import prompts_in
from batchyard.logs import event_logger
from batchyard.store import HiddenFor, NewBatch
from batchyard.store.tables.chain import ChainPart

if TYPE_CHECKING:
    from batchyard.batch.chains import Stage
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

LEAST_LINES: Final = 256
"""A part is a flow run, which takes a quarter of a second of a core."""
MOST_LINES: Final = 8192
_MOST_BYTES: Final = 32 * 1024**2
_GROWTH: Final = 8
"""A part has this fraction of the lines that went before it, so a large chain has few parts."""
_OPEN_PARTS: Final = 4
"""While so many parts of a stage run, lines wait until they are enough."""
PATIENCE_SECONDS: Final = 0.5
"""How long the first line of a part waits for others, at the beginning of a chain: what the engine
has in its cache is used best at once."""
_MOST_PATIENCE_SECONDS: Final = 30.0
_PATIENCE_SHARE: Final = 0.02
"""The part of the time that the chain has run."""


@dataclass(slots=True)
class WaitingLines:
    """Rendered lines of one stage that are in no part yet."""

    stage: int
    most_bytes: int
    """The most bytes of a part: it is stored as the input of a batch."""
    most_inputs: int
    """Embedding inputs of a part, which would be refused as a whole."""
    given: int = 0
    """Lines of the stage that are in a part."""
    ordinals: list[int] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    inputs: int = 0
    since: float = 0.0
    """When the first of them came, by the monotonic clock."""

    @classmethod
    def of_chain(cls, services: Services, chain: BatchRecord, stage: int) -> Self:
        """None yet, under the limits of an input file of the chain's owner."""
        limits = services.settings.limits
        most_inputs = limits.to_limits(of_client=chain.options.public_urls).max_embedding_inputs
        return cls(stage, min(_MOST_BYTES, limits.max_bytes), most_inputs)

    def add(self, ordinal: int, line: bytes, inputs: int) -> None:
        """One more waits, with so many embedding inputs."""
        if not self.lines:
            self.since = time.monotonic()
        self.ordinals.append(ordinal)
        self.lines.append(line)
        self.size_bytes += len(line)
        self.inputs += inputs

    def clear(self) -> None:
        """All of them are in a part now."""
        self.given += len(self.lines)
        self.ordinals, self.lines, self.size_bytes, self.inputs = [], [], 0, 0

    def has_room_for(self, line: bytes, inputs: int) -> bool:
        """Whether a part of them and this line is not too large."""
        size_bytes, inputs = self.size_bytes + len(line), self.inputs + inputs
        return size_bytes <= self.most_bytes and inputs <= self.most_inputs

    @property
    def is_full(self) -> bool:
        """Whether they are as many as a part may have."""
        return len(self.lines) >= MOST_LINES or self.size_bytes >= self.most_bytes

    def is_due(self, *, open_parts: int, ran_seconds: float) -> bool:
        """Whether to make a part of them, though more may come."""
        if self.is_full or len(self.lines) >= max(LEAST_LINES, self.given // _GROWTH):
            return True
        patience = min(max(PATIENCE_SECONDS, ran_seconds * _PATIENCE_SHARE), _MOST_PATIENCE_SECONDS)
        waited = time.monotonic() - self.since
        return bool(self.lines) and waited >= patience and open_parts < _OPEN_PARTS


class _Body(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()


class _Line(msgspec.Struct):
    body: _Body


_decode_line = msgspec.json.Decoder(_Line).decode


def inputs_of(endpoint: str, line: bytes, most: int) -> int:
    """For how many of the embedding inputs that a file may have a request counts; ``most`` for
    one that may have as many or more, and is a part by itself.

    As :func:`~batchyard.lines.lines.embedding_inputs`, but no values are made of a client's text.
    """
    if not ENDPOINTS[endpoint].limits_inputs:
        return 0
    if line.count(b",") >= most:
        return most
    return prompts_in(_decode_line(line).body.input)


async def make_part(
    services: Services, chain: BatchRecord, stage: Stage, waiting: WaitingLines, epoch: int
) -> tuple[NewBatch, ChainPart]:
    """Make a batch of what waits. All of it is durable, or nothing.

    Raises :class:`~batchyard.errors.LeaseLost`, and
    :class:`~batchyard.errors.TransitionConflict` where the chain no longer runs.
    """
    wanted = _batch_of(chain, stage)
    ordinals = np.array(waiting.ordinals, dtype="<u4").tobytes()
    part = ChainPart(batch_id=wanted.id, chain_id=chain.id, stage=waiting.stage, ordinals=ordinals)
    batch = await make_hidden_batch(
        services,
        wanted,
        waiting.lines,
        filename=f"{chain.id}_stage{waiting.stage + 1}.jsonl",
        expires_at=chain.expires_at,
        record=partial(services.store.chains.add_part, part, epoch=epoch),
    )
    log.info("chain.part_made", batch=chain.id, part=batch.id, requests=len(waiting.lines))
    return batch, part


def _batch_of(chain: BatchRecord, stage: Stage) -> NewBatch:
    model = stage.model or chain.model
    options = msgspec.structs.replace(
        chain.options.as_asked(),
        mixed_endpoints=False,
        mixed_models=False,
        models=(model,) if model else (),
        error_threshold=None,
        # That of the chain has the lines of its parts.
        ledger=False,
        is_rendered=False,
    )
    return NewBatch(
        tenant=chain.tenant,
        endpoint=stage.endpoint,
        completion_window=chain.completion_window,
        options=options,
        output_lifetime_seconds=chain.output_lifetime_seconds,
        hidden_for=HiddenFor.CHAIN,
        part_of=chain.id,
    )
