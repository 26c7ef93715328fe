"""The deliverer: leases what is due in the outbox, attempts it, and writes down how it went.

A crash ends the leases a few seconds later, and another process makes the attempt again: receivers
tell copies by the ``webhook-id``, which is the delivery's for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from batchyard import intervals
from batchyard.delivery.channel import TIMEOUT_SECONDS
from batchyard.delivery.messenger import Messenger
from batchyard.delivery.schedule import SCHEDULE_SECONDS, Verdict, verdict
from batchyard.errors import BatchyardError, LeaseLost, RecordNotFound, StoreError
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.notify.outcome import SendOutcome
from batchyard.services.leases.renewal import renewing
from batchyard.services.patience import patiently
from batchyard.store import Attempt, DeliveryLimits, DeliveryStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.services.services import Services
    from batchyard.store import DeliveryClaim, DeliveryRecord

__all__ = ["SCHEDULE_SECONDS", "AttemptFailed", "Delivered", "Deliverer"]

log = event_logger(__name__)

_AT_ONCE: Final = 64
_LIMITS: Final = DeliveryLimits(per_destination=4, per_tenant=16, files=16, files_per_tenant=4)
"""So that a receiver that takes its time, a tenant with many such receivers, and files that take
hours leave room for the others."""
_LEASE_SECONDS: Final = 6.0
"""After a crash another deliverer begins so much later. Shorter than an attempt may take: it is
renewed meanwhile."""
_RENEW_SECONDS: Final = 2.0
_DRAIN_SECONDS: Final = TIMEOUT_SECONDS + 5.0


class AttemptFailed(Exception):
    """An attempt that was not accepted, to be shown. In our words, without secrets."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the attempts that a deliverer has made."""

    delivered: int = 0
    to_try_again: int = 0
    """Attempts that failed and will be repeated."""
    failed: int = 0
    """Attempts that failed for good."""


class Deliverer:
    """Use as an async context manager; at its end what was not attempted is given back.

    ``attempt`` is given each attempt and its delivery, and awaits it: to show it somewhere.
    """

    def __init__(
        self,
        services: Services,
        *,
        owner: str | None = None,
        attempt: Callable[[Callable[[], Awaitable[None]], DeliveryRecord], Awaitable[None]]
        | None = None,
    ) -> None:
        self._services = services
        self._owner = owner or _new_owner()
        self._attempt = attempt
        self._messenger = Messenger(services)
        self._in_flight: dict[asyncio.Task[None], str] = {}
        """Attempts, and the owner that each was leased to."""
        self._background: list[asyncio.Task[None]] = []
        self._attempt_ended = asyncio.Event()
        self._closing: contextlib.AsyncExitStack
        self._seconds_to_next: float | None = None
        self._drains_until: float | None = None
        self._ends: Counter[DeliveryStatus] = Counter()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._messenger)
            await stack.enter_async_context(
                renewing(self._renew, every_seconds=_RENEW_SECONDS, what=self._owner)
            )
            self._closing = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        owners = {self._owner, *self._in_flight.values()}
        tasks = [*self._background, *self._in_flight]
        for task in tasks:
            task.cancel()
        async with self._closing:
            if tasks:
                await asyncio.wait(tasks)
            for owner in owners:
                with contextlib.suppress(StoreError):
                    await self._services.store.deliveries.release(owner)

    @property
    def counts(self) -> Delivered:
        """The counts of all attempts up to now."""
        return Delivered(
            self._ends[DeliveryStatus.DELIVERED],
            self._ends[DeliveryStatus.PENDING],
            self._ends[DeliveryStatus.FAILED],
        )

    @property
    def is_busy(self) -> bool:
        """Whether attempts are under way, or due before an idle runner would end.

        Once drained: whether it is worth waiting for those under way.
        """
        if self._drains_until is not None:
            return bool(self._in_flight) and time.monotonic() < self._drains_until
        is_due_soon = (
            self._seconds_to_next is not None
            and self._seconds_to_next <= self._services.settings.runner_idle_seconds
        )
        return bool(self._in_flight) or is_due_soon

    def start(self) -> None:
        """Deliver what is due from now on, beside whatever else happens."""
        self._background.append(asyncio.create_task(self._keep_delivering(), name="deliverer"))

    def drain(self) -> None:
        """Lease no further deliveries; see :attr:`is_busy`."""
        if self._drains_until is None:
            self._drains_until = time.monotonic() + _DRAIN_SECONDS

    async def deliver_due(self, limit_seconds: float = 600.0) -> Delivered:
        """Attempt everything that is due now or becomes due meanwhile; what became of it.

        After about ``limit_seconds`` nothing more is begun, and what is under way is given back.
        Raises :class:`~batchyard.errors.StoreError`.
        """
        began = time.monotonic()
        # None is begun that could not come to its end.
        begins_until = began + max(0.0, limit_seconds - TIMEOUT_SECONDS)
        is_first = True
        while (now := time.monotonic()) < began + limit_seconds:
            self._attempt_ended.clear()
            was_idle = not self._in_flight
            begun = await self._begin_attempts() if is_first or now < begins_until else 0
            if was_idle and not begun:
                break
            is_first = False
            if self._in_flight:
                await self._until_attempt_ends(began + limit_seconds - time.monotonic())
        return self.counts

    # -- who attempts what --------------------------------------------------------------------

    async def _keep_delivering(self) -> None:
        while self._drains_until is None:
            self._attempt_ended.clear()
            try:
                await self._begin_attempts()
            except Exception as error:  # noqa: BLE001 - nothing else here delivers
                log.warning("deliveries.not_claimed", describe(error))
            await self._until_attempt_ends(intervals.POLL_SECONDS)

    async def _begin_attempts(self) -> int:
        """How many were begun."""
        room = _AT_ONCE - len(self._in_flight)
        if room <= 0:
            return 0
        deliveries = self._services.store.deliveries
        # A look is cheap, a claim is a write.
        self._seconds_to_next = await deliveries.seconds_to_next()
        if self._seconds_to_next is None or self._seconds_to_next > 0:
            return 0
        owner = self._owner
        try:
            claims = await deliveries.claim(
                owner, lease_seconds=_LEASE_SECONDS, limit=room, limits=_LIMITS
            )
        except Exception:
            # It may have been written, and it is unknown here what it leased.
            self._let_leases_end()
            raise
        for claim in claims:
            task = asyncio.create_task(self._run(claim, owner), name=claim.delivery.id)
            self._in_flight[task] = owner
            task.add_done_callback(self._forget)
        return len(claims)

    def _let_leases_end(self) -> None:
        """Those that no process works on: the old name is renewed while an attempt has it."""
        self._owner = _new_owner()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        self._attempt_ended.set()

    async def _until_attempt_ends(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._attempt_ended.wait()

    async def _renew(self) -> None:
        deliveries = self._services.store.deliveries
        # Together: one that fails does not keep the others from being renewed.
        owners = set(self._in_flight.values())
        await asyncio.gather(*(deliveries.renew(owner, _LEASE_SECONDS) for owner in owners))

    # -- one attempt --------------------------------------------------------------------------

    async def _run(self, claim: DeliveryClaim, owner: str) -> None:
        is_begun = False

        async def attempt() -> None:
            nonlocal is_begun
            is_begun = True
            await self._make(claim, owner)

        if self._attempt is not None:
            try:
                await self._attempt(attempt, claim.delivery)
            except AttemptFailed:
                pass
            except Exception as error:  # noqa: BLE001 - showing it is not what matters
                log.warning("delivery.not_shown", type(error).__name__, delivery=claim.delivery.id)
        if not is_begun:
            with contextlib.suppress(AttemptFailed):
                await attempt()

    async def _make(self, claim: DeliveryClaim, owner: str) -> None:
        """Raises :class:`AttemptFailed`, once that is written down."""
        began = time.monotonic()
        answer = await self._answer(claim)
        duration_ms = round((time.monotonic() - began) * 1000)
        attempt = Attempt(
            duration_ms=duration_ms, status_code=answer.status_code, error=answer.error
        )
        end = verdict(claim.delivery, answer)
        if not await self._record(claim, attempt, end, owner):
            return
        self._ends[end.status] += 1
        _log(claim.delivery, attempt, end)
        if end.disables_endpoint:
            await self._disable_endpoint(claim.delivery, str(answer.error))
        if not answer.is_accepted:
            raise AttemptFailed(answer.error)

    async def _record(
        self, claim: DeliveryClaim, attempt: Attempt, end: Verdict, owner: str
    ) -> bool:
        """Whether the attempt counts."""

        async def record() -> None:
            await self._services.store.deliveries.record(
                claim,
                attempt,
                owner=owner,
                status=end.status,
                again_after_seconds=end.again_after_seconds,
                tell_owner=end.tell_owner,
            )

        try:
            # Ours for as long as it is renewed: without its record no process would try again.
            await patiently(record, f"the record of {claim.delivery.id}")
        except (LeaseLost, RecordNotFound):
            # Another has it, or its end was decided meanwhile.
            return False
        except StoreError as error:
            log.warning("delivery.not_recorded", error, delivery=claim.delivery.id)
            self._let_leases_end()
            return False
        return True

    async def _disable_endpoint(self, delivery: DeliveryRecord, reason: str) -> None:
        """Where this fails, the next event meets the same answer."""
        try:
            if delivery.endpoint_id is not None:
                await self._services.store.webhook_endpoints.disable(delivery.endpoint_id, reason)
        except StoreError as error:
            log.warning("endpoint.not_disabled", error, endpoint=delivery.endpoint_id)

    async def _answer(self, claim: DeliveryClaim) -> SendOutcome:
        try:
            return await patiently(lambda: self._messenger.send(claim), claim.delivery.id)
        except BatchyardError as error:
            return SendOutcome(error=str(error))
        except Exception as error:  # noqa: BLE001 - a defect of ours must not hold its place
            # Only the name: its text may hold anything.
            return SendOutcome(error=f"the attempt could not be made ({type(error).__name__})")


def _log(delivery: DeliveryRecord, attempt: Attempt, end: Verdict) -> None:
    tell = log.warning if attempt.error else log.info
    tell(
        "delivery.attempted",
        attempt.error or "",
        delivery=delivery.id,
        event=delivery.event_type,
        batch=delivery.batch_id,
        destination=delivery.destination,
        http_status=attempt.status_code,
        ms=attempt.duration_ms,
        status=end.status.value,
    )


def _new_owner() -> str:
    return f"deliverer_{secrets.token_hex(16)}"
