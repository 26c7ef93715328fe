"""Several API processes behind nginx and several control workers, as one service to its clients."""

from __future__ import annotations

import asyncio
import io
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from batchyard.store import Quota, RunnerKind
from tests.deployed.conftest import until
from tests.fleet.fleet import APIS, in_thread

if TYPE_CHECKING:
    from tests.fleet.fleet import Fleet, User

MANY_BYTES = 48 * 1024**2
ONE, TWO = APIS


async def test_each_step_of_a_batch_may_be_another_process(user: User) -> None:
    """Parts to both, completed by one, created by the other, polled and downloaded by both."""
    content = user.input(30, "steps")
    one, two, balanced = user.client(ONE), user.client(TWO), user.client()

    def begin() -> Any:
        upload = one.uploads.create(
            bytes=len(content), filename="in.jsonl", mime_type="text/jsonl", purpose="batch"
        )
        first = two.uploads.parts.create(upload.id, data=content[:1000])
        second = one.uploads.parts.create(upload.id, data=content[1000:])
        return two.uploads.complete(upload.id, part_ids=[first.id, second.id]).file

    file = await in_thread(begin)
    batch = await in_thread(user.create, file.id, ONE)
    seen = set()

    async def has_ended() -> bool:
        statuses = [
            (await in_thread(each.batches.retrieve, batch.id)).status
            for each in (two, one, balanced)
        ]
        seen.update(statuses)
        return statuses[-1] == "completed"

    await until(has_ended)
    assert seen <= {"validating", "in_progress", "finalizing", "completed"}
    output = (await in_thread(two.batches.retrieve, batch.id)).output_file_id
    texts = {(await in_thread(each.files.content, output)).text for each in (one, two, balanced)}
    assert [text.count("\n") for text in texts] == [30]
    assert user.executed_again() == 0


async def test_what_one_process_has_changed_is_so_for_the_other_at_once(user: User) -> None:
    """Files, keys, webhook endpoints, idempotency keys: no process has a copy of its own."""
    one, two = user.client(ONE, max_retries=0), user.client(TWO, max_retries=0)
    file = await in_thread(one.files.create, file=user.input(1, "at-once"), purpose="batch")
    assert (await in_thread(two.files.retrieve, file.id)).id == file.id
    again = {"extra_headers": {"Idempotency-Key": "the-same"}}
    created = await asyncio.gather(
        *(in_thread(user.create, file.id, name, **again) for name in APIS * 5)
    )
    assert len({batch.id for batch in created}) == 1
    (endpoint,) = (await in_thread(two.webhooks.list)).data
    await in_thread(two.webhooks.delete, endpoint.id)
    assert (await in_thread(one.webhooks.list)).data == []
    await in_thread(one.files.delete, file.id)
    with pytest.raises(openai.NotFoundError):
        await in_thread(two.files.retrieve, file.id)
    (key,) = [
        key for key in await user.services.store.api_keys.list() if key.tenant == user.engine.model
    ]
    await user.services.store.api_keys.revoke(key.id)
    for client in (one, two):
        with pytest.raises(openai.AuthenticationError):
            await in_thread(client.files.list)


async def test_limits_and_pages_are_those_of_all_processes(user: User) -> None:
    """Of eight batches that are created at the same time, the three that the quota allows."""
    user.engine._latency = 6.0
    quota = Quota(max_active_batches=3)
    await user.services.store.tenants.set_quota(user.engine.model, quota)
    file = await in_thread(user.client().files.create, file=user.input(1, "quota"), purpose="batch")
    with ThreadPoolExecutor(8) as threads:

        def create(number: int) -> str | None:
            client = user.client(APIS[number % 2], max_retries=0)
            try:
                return client.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    extra_headers={"Idempotency-Key": f"quota-{number}"},
                ).id
            except openai.RateLimitError:
                return None

        loop = asyncio.get_running_loop()
        made = await asyncio.gather(
            *(loop.run_in_executor(threads, create, number) for number in range(8))
        )
    accepted = {each for each in made if each}
    assert len(accepted) == 3
    listed: list[str] = []
    while True:
        client = user.client(APIS[len(listed) % 2])
        after = {"after": listed[-1]} if listed else {}
        page = await in_thread(client.batches.list, limit=1, **after)
        listed += [batch.id for batch in page.data]
        if not page.has_more:
            break
    assert set(listed) == accepted
    assert len(listed) == len(accepted)


async def test_an_api_process_that_is_killed_in_an_upload_costs_a_retry(
    fleet: Fleet, user: User
) -> None:
    """OpenAI's client sends it again, and nginx gives it to the other process."""
    content = user.input(20_000, "upload", padding=500)
    file = SlowFile(content)
    next_one = await in_thread(_next_in_turn, fleet, user)
    sending = asyncio.create_task(
        in_thread(user.client().files.create, file=("in.jsonl", file), purpose="batch")
    )
    await until(lambda: _is_read(file))
    fleet.cut_power(next_one)
    file.is_slow = False
    done = await sending
    assert file.readings > 1
    assert (await in_thread(user.client().files.content, done.id)).content == content


async def test_an_api_process_that_is_killed_in_a_download_costs_a_retry(
    fleet: Fleet, user: User
) -> None:
    """The client sees that something is missing, and gets all of it from the other process."""
    content = user.input(20_000, "download", padding=1000)
    client = user.client()
    file = await in_thread(client.files.create, file=("in.jsonl", content), purpose="batch")

    def broken_off() -> int:
        headers = {"authorization": f"Bearer {user.key}"}
        url = f"{fleet.url()}/files/{file.id}/content"
        received = 0
        with httpx.stream("GET", url, headers=headers, verify=fleet.nginx.context) as response:
            name = fleet.api_of(response)
            try:
                for part in response.iter_raw():
                    if not received:
                        fleet.cut_power(name)
                        time.sleep(0.2)
                    received += len(part)
            except httpx.RemoteProtocolError:
                return received
        raise AssertionError("nothing was missing")

    assert 0 < await in_thread(broken_off) < len(content)
    assert (await in_thread(client.files.content, file.id)).content == content


async def test_a_control_machine_that_loses_power_costs_no_batch_anything(
    fleet: Fleet, user: User
) -> None:
    """The other one continues: no request runs twice, and each webhook is delivered once."""
    quick = user.engine._latency
    # No batch ends before: a webhook that is sent while its sender dies is sent again.
    user.engine._latency = 1.0
    batches = [await in_thread(user.submit, 120, f"power-{number}") for number in range(3)]
    await user.answered(batches[0], 20)
    fleet.cut_power(await _control_at_work(fleet, user))
    user.engine._latency = quick
    await user.completed(*batches)
    assert user.executed_again() == 0
    ids = await user.webhooks_of(*batches)
    assert len(ids) == len(set(ids)) == len(batches)


async def _control_at_work(fleet: Fleet, user: User) -> str:
    """The control worker whose flow run holds batches."""
    runners = user.services.store.runners
    (row, *_) = await runners.live(kind=RunnerKind.BATCHES, within_seconds=60)
    return fleet.machine_of(str(row.flow_run_id))


def _next_in_turn(fleet: Fleet, user: User) -> str:
    """The API process that nginx gives the next request to."""
    headers = {"authorization": f"Bearer {user.key}"}
    answer = httpx.get(f"{fleet.url()}/files", headers=headers, verify=fleet.nginx.context)
    (other,) = set(APIS) - {fleet.api_of(answer)}
    return other


async def _is_read(file: SlowFile) -> bool:
    return file.tell() > len(file.getbuffer()) // 20


class SlowFile(io.BytesIO):
    """A file that is read slowly, until it is not; ``readings`` counts those from its start."""

    is_slow = True
    readings = 0

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() == 0:
            self.readings += 1
        if self.is_slow:
            time.sleep(0.01)
        return super().read(size)
