"""What live requests used is in the database once, whatever happens to the database's replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from batchyard.engine.base import LivePromise
from batchyard.engine.live_answers import AnswerMeter
from batchyard.errors import StoreUnavailable
from batchyard.runner.live.live_counts import Outcome
from batchyard.runner.live.live_server import LiveRequests

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


@pytest.mark.parametrize("is_made", [True, False], ids=["reply lost", "commit lost"])
async def test_what_may_have_been_counted_is_counted_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    live = LiveRequests(yard.services, yard.engine, LivePromise(), "a runner", lambda _: None)
    commit = AsyncConnection.commit

    async def commit_without_a_reply(connection: AsyncConnection) -> None:
        if is_made:
            await commit(connection)
        raise ConnectionResetError

    def answer() -> None:
        meter = AnswerMeter(request_bytes=10, hide_usage=False)
        live.counts.ended("a", "stub-model", "/v1/embeddings", Outcome.COMPLETED, meter)

    answer()
    with monkeypatch.context() as patched:
        patched.setattr(AsyncConnection, "commit", commit_without_a_reply)
        with pytest.raises(StoreUnavailable):
            await live._count()
    answer()
    await live._count()
    await live._count()
    (total,) = await yard.services.store.usage.totals(start=0, end=2**40, width_seconds=3600)
    assert total.requests == 2
