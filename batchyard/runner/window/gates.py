"""The gates between a line of a leased chunk and the engine, in the order in which it passes them.

A gate is one condition. The lines of a chunk follow one another, so those that have no slot wait
where the first of them does. Requests that have a slot wait in the window, at gates that are the
same for all of them: while one is closed, nothing passes, and what waits in front of the window
waits for that gate, too. So the gate that holds a batch is the closed one that is nearest to the
engine.

The code that waits at a gate is where its state is; here are the names, the order and the words.
What waits for less than a second, as lines that are read from the disk do, has no gate here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from batchyard.services.story.wait_words import TOO_SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from batchyard.engine.base import Gate as SharedGate
    from batchyard.runner.window.admission import Admission
    from batchyard.runner.window.backlog import Backlog
    from batchyard.runner.window.crashes import Crashes
    from batchyard.runner.window.refusals import Refusals


class WindowState(Protocol):
    """The part of the window that gates read."""

    @property
    def is_streaming(self) -> bool:
        """Whether the engine takes requests; not while it is started again."""
        ...

    @property
    def may_send(self) -> Callable[[], bool]:
        """Says whether the runner's process still has what it holds."""
        ...

    @property
    def shared(self) -> SharedGate | None:
        """The gate of an engine that others use as well; None: nobody does."""
        ...

    @property
    def refusals(self) -> Refusals:
        """What the engine's server said that it takes."""
        ...

    @property
    def crashes(self) -> Crashes:
        """How many requests may be in an engine that has crashed."""
        ...

    @property
    def in_flight(self) -> int:
        """How many requests are in the engine."""
        ...

    @property
    def sequences(self) -> int:
        """How many the engine makes of these."""
        ...

    @property
    def backlog(self) -> Backlog:
        """Requests that have a slot and are not in the engine."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the next request has to wait for a slot."""
        ...

    def has_in_flight(self, owner: Hashable) -> bool:
        """Whether a request of the owner is in the engine."""
        ...


class ChunkState(Protocol):
    """The part of a chunk that runs that gates read."""

    @property
    def key(self) -> Hashable:
        """The owner of its requests in the window."""
        ...

    @property
    def batch_id(self) -> str:
        """The id of its batch."""
        ...

    @property
    def is_prepared(self) -> bool:
        """Whether its input and its plan have been read."""
        ...

    @property
    def is_held_up(self) -> bool:
        """Whether the object store takes no finished lines of it."""
        ...

    @property
    def awaits_group(self) -> bool:
        """Whether what it has admitted is to be durable before it admits more."""
        ...

    @property
    def awaits_files(self) -> bool:
        """Whether files of its next lines are fetched, or have no room in memory yet."""
        ...

    @property
    def admission(self) -> Admission:
        """Its place in the queue of the window."""
        ...

    @property
    def window(self) -> WindowState:
        """Where its requests go."""
        ...

    @property
    def without_slot(self) -> int:
        """How many of its lines are neither finished nor in the window."""
        ...


S = TypeVar("S")


@dataclass(frozen=True)
class Gate(Generic[S]):
    """A condition for the lines of one chunk, or for all requests that have a slot of the window.

    ``words``: why a batch waits there.
    """

    name: str
    words: str
    is_open: Callable[[S], bool]


ChunkGate = Gate[ChunkState]
WindowGate = Gate[WindowState]

INPUT: Final = ChunkGate(
    "input",
    "its input and its plan are being read",
    lambda chunk: chunk.is_prepared,
)
GROUP: Final = ChunkGate(
    "group",
    "the process that ran it ended unexpectedly, so its lines run again in small groups",
    lambda chunk: not chunk.awaits_group,
)
STORAGE: Final = ChunkGate(
    "storage",
    TOO_SLOW,
    lambda chunk: not chunk.is_held_up,
)
FILES: Final = ChunkGate(
    "files",
    "the files that its lines name are being fetched",
    lambda chunk: not chunk.awaits_files,
)
ROOM: Final = ChunkGate(
    "room",
    "its next line is large and waits until other large lines have left the engine",
    lambda chunk: not chunk.admission.lacks_room,
)
TURN: Final = ChunkGate(
    "turn",
    "other batches of its model go first",
    lambda chunk: not chunk.admission.lacks_turn,
)
SLOT: Final = ChunkGate(
    "slot",
    "the engine is busy with lines of other batches",
    lambda chunk: not (chunk.window.is_full and chunk.admission.is_submitting),
)
RETRY: Final = ChunkGate(
    "retry",
    "its lines had errors that may pass, and are tried again after a pause",
    lambda chunk: not chunk.window.backlog.has_only_pausing(chunk.key),
)
ENGINE: Final = WindowGate(
    "engine",
    "the engine was lost and is being started again",
    lambda window: window.is_streaming,
)
STANDSTILL: Final = WindowGate(
    "standstill",
    "its runner was stopped for a while and is checking which chunks it still has",
    lambda window: window.may_send(),
)
SHARED: Final = WindowGate(
    "shared",
    "others are using the engine, and it has no free place",
    lambda window: window.shared is None or window.shared.is_open,
)
REFUSALS: Final = WindowGate(
    "refusals",
    "the engine's server takes no requests now",
    lambda window: window.refusals.is_open,
)
CRASHES: Final = WindowGate(
    "crashes",
    "the engine crashed, so the lines that were in it run again in small groups",
    lambda window: window.in_flight < window.crashes.limit,
)

BEFORE_WINDOW: Final = (INPUT, GROUP, STORAGE, FILES, ROOM, TURN, SLOT)
"""A line of a chunk passes them one after the other, and has a slot of the window then."""
BEFORE_ENGINE: Final = (ENGINE, STANDSTILL, SHARED, REFUSALS, CRASHES)
"""A request that has a slot is sent as soon as all of them are open at the same moment."""
GATES: Final[tuple[Gate[Any], ...]] = (*BEFORE_WINDOW, RETRY, *BEFORE_ENGINE)


def closed_gate(window: WindowState) -> WindowGate | None:
    """The gate at which requests that have a slot wait; None: the next one is sent."""
    # This is asked for each request.
    for gate in BEFORE_ENGINE:
        if not gate.is_open(window):
            return gate
    return None


def gate_of(chunk: ChunkState) -> ChunkGate | WindowGate | None:
    """The gate that holds the chunk; None: some of its lines are in the engine, or none waits."""
    window = chunk.window
    if window.has_in_flight(chunk.key):
        return None
    if window.backlog.waiting and (closed := closed_gate(window)) is not None:
        return closed
    return gate_before_window(chunk) if RETRY.is_open(chunk) else RETRY


def lines_waiting(window: WindowState, chunks: Iterable[ChunkState]) -> dict[str, int]:
    """How many lines of these chunks wait at each gate, by its name."""
    waiting = dict.fromkeys((gate.name for gate in GATES), 0)
    waiting[RETRY.name] = window.backlog.pausing
    if (closed := closed_gate(window)) is not None:
        waiting[closed.name] = len(window.backlog.queue)
    for chunk in chunks:
        if (gate := gate_before_window(chunk)) is not None:
            waiting[gate.name] += chunk.without_slot
    return waiting


def gate_before_window(chunk: ChunkState) -> ChunkGate | None:
    """Where the first line of the chunk waits that has no slot; None: nowhere."""
    if not chunk.without_slot:
        return None
    return next((gate for gate in reversed(BEFORE_WINDOW) if not gate.is_open(chunk)), None)
