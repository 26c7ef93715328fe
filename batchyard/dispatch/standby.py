"""The flow run that takes over from one that works without end, if its process is lost.

It is scheduled in Prefect a short time from now, and postponed again and again by the process
that works. If that process ends, or hangs, or loses its machine, nothing postpones it any more,
and a worker starts it: on any machine, and after the same short time.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from batchyard.dispatch.prefect_api import RECONCILE, PrefectApi
from batchyard.errors import DispatchFailed, SettingsError

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_answers import FlowRun

SECONDS = 30.0
"""From the last call that postponed it until it starts.

Workers start processes ten seconds early, which then wait: so a call every ten seconds is in time
even when one of them fails.
"""


async def start_reconciler(api: PrefectApi) -> None:
    """Start a flow run of ``reconcile``, when a worker starts. It does not wait for a standby.

    One that finds another at work makes a pass and ends. The flow run that reconciles and the one
    that stands by may both be lost with the worker that had taken them, and batches would wait for
    the schedule.
    """
    with contextlib.suppress(DispatchFailed, SettingsError):  # it is not deployed yet
        await api.start(RECONCILE, {}, name="reconcile")


class Standby:
    """The next flow run of ``deployment``, as ``flow/deployment``; it has no parameters.

    ``run_id`` is the flow run that works now: what another one has left for it stands by for it.
    Its methods raise :class:`~batchyard.errors.DispatchFailed` and
    :class:`~batchyard.errors.SettingsError`.
    """

    def __init__(self, api: PrefectApi, deployment: str, run_id: str | None = None) -> None:
        self._api = api
        self._deployment = deployment
        self._left = None if run_id is None else self._key_after(run_id)
        self._id: str | None = None

    async def postpone(self) -> None:
        """Let it start in ``SECONDS`` from now. Make it, if there is none."""
        if self._id is None or not await self._api.postpone(self._id, SECONDS):
            self._id = await self._make()
            # One that was left for this flow run may be about to start.
            await self._api.postpone(self._id, SECONDS)

    async def start_now(self) -> None:
        """Let it start at once, or make one that does: the caller is about to end.

        One that has begun already does not count. The same signal may be about to end it, too.
        So may the next one, while its process loads and cannot make another: for this case one
        more starts in ``SECONDS``, unless the next one postpones it.
        """
        if self._id is None or not await self._api.postpone(self._id, 0.0):
            self._id = await self._make()
            await self._api.postpone(self._id, 0.0)
        await self._start(self._key_after(self._id))

    async def _make(self) -> str:
        # Flow runs that fail one after the other, each of which makes the next, must not become
        # more and more: of those that ask in the same half minute, all get the same one.
        key = self._left or f"{self._deployment} standby {math.floor(time.time() / SECONDS)}"
        self._left = None
        run = await self._start(key)
        if run.state != "SCHEDULED" or run.pool is None:
            run = await self._start(None)  # that one is the caller, has ended, or has no pool
        return run.id

    def _key_after(self, run_id: str) -> str:
        return f"{self._deployment} after {run_id}"

    async def _start(self, key: str | None) -> FlowRun:
        name = self._deployment.partition("/")[0]
        return await self._api.start(
            self._deployment, {}, name=name, key=key, after_seconds=SECONDS
        )
