"""Chains while the processes that run them are killed: each line goes through each stage once."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from batchyard.batch.chains import Stage
from batchyard.lifecycle import BatchStatus
from tests.faults.site import lines

if TYPE_CHECKING:
    from tests.faults.nursery import Nursery
    from tests.faults.site import Site

_NEXT = '{"max_tokens": 4, "messages": {{ (request.messages * 2) | tojson }}}'
STAGES = (Stage("/v1/chat/completions", _NEXT), Stage("/v1/chat/completions", _NEXT))


@pytest.fixture
def lease_seconds() -> float:
    return 2.0


async def test_whatever_is_killed_every_line_has_the_last_stages_answer(
    either_site: Site, nursery: Nursery
) -> None:
    site = either_site
    control = await site.start(nursery, "control")
    runner = await site.start(nursery, "runner", latency=0.1, max_num_seqs=4)
    asked = await site.create(lines(60), then=STAGES)
    for count in (1, 20):
        await site.answered(asked, count)
        await nursery.signal(control, signal.SIGKILL)
        await nursery.signal(runner, signal.SIGKILL)
        control = await site.start(nursery, "control")
        runner = await site.start(nursery, "runner", latency=0.05, max_num_seqs=8)
    await site.ended(asked, seconds=60)
    batch = await site.check(asked)
    assert batch.status is BatchStatus.COMPLETED, site.log_tail()
    assert batch.counts.completed == 60
    parts = await site.services.store.chains.summaries(asked.id)
    assert [sum(p.lines for p in parts if p.stage == n) for n in (1, 2)] == [60, 60]
    bodies = [each["response"]["body"] for each in await site.results(batch.output_file_id)]
    assert all(each["usage"]["prompt_tokens"] for each in bodies)
