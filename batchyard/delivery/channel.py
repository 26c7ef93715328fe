"""A channel: one way in which a delivery reaches its receiver.

A new one is a module that fulfils this protocol, its row in ``messenger``, and in
``batch_options`` its kind and the option by which a batch names a receiver. The outbox needs no
more: it stores the receivers of every channel alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from batchyard.notify.outcome import SendOutcome
    from batchyard.store import DeliveryClaim

Message = TypeVar("Message")

TIMEOUT_SECONDS: Final = 15.0
"""How long a webhook's receiver or a mail server may take."""
AT_MOST_SECONDS: Final = 30.0


class Channel(Protocol[Message]):
    """Composes from the database at the moment of an attempt, and sends.

    The destination is in the claim: the outbox wrote it down. Neither method raises anything but
    :class:`~batchyard.errors.StoreError`.
    """

    @property
    def at_most_seconds(self) -> float:
        """An attempt that takes longer has a defect: it must not hold its place for ever."""
        ...

    async def compose(self, claim: DeliveryClaim) -> Message | SendOutcome:
        """What is sent; an answer where nothing can be, or nowhere."""
        ...

    async def send(
        self, claim: DeliveryClaim, message: Message, traceparent: str | None
    ) -> SendOutcome:
        """Make the attempt. ``traceparent``: what receivers that trace may continue."""
        ...
