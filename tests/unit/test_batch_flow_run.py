"""Flow runs inside of `run-batches`: which calls Prefect gets for one, and how it ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Completed, State

from batchyard.errors import StoreUnavailable
from flows.process import batch_flow_run
from flows.process.batch_flow_run import End, FlowRuns
from flows.process_batch import process_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "batch_1"


class Client(PrefectClient):
    """Takes the calls that Prefect's client would send, and answers as the server does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.flow_ids: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.ends: list[State[Any]] = []
        self.run_id = uuid4()
        self.is_away = False

    async def create_flow(self, flow: Any) -> Any:
        assert flow is process_batch
        self.calls.append("create_flow")
        flow_id = uuid4()
        self.flow_ids.add(str(flow_id))
        return flow_id

    async def request(self, method: Any, path: str, **content: Any) -> httpx.Response:
        self.calls.append(f"{method} {path}")
        wanted = content["json"]
        if wanted["flow_id"] not in self.flow_ids:
            answer = httpx.Response(409, request=httpx.Request("POST", "http://prefect"))
            raise PrefectHTTPStatusError("409", request=answer.request, response=answer)
        self.created.append(wanted)
        run = {**wanted, "id": str(self.run_id), "state": {**wanted["state"], "id": str(uuid4())}}
        return httpx.Response(201, json=run)

    async def set_flow_run_state(
        self, flow_run_id: Any, state: State[Any], force: bool = False
    ) -> Any:
        assert flow_run_id == self.run_id
        assert force
        self.calls.append("set_state")
        if self.is_away:
            raise httpx.ConnectError("away")
        self.ends.append(state)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()

    @asynccontextmanager
    async def get_client() -> AsyncIterator[Client]:
        yield made

    monkeypatch.setattr(batch_flow_run, "get_client", get_client)
    return made


async def run(runs: FlowRuns, work: Any) -> State[Any]:
    return await runs.run(work, name=NAME, tags=["a", NAME], parameters={"batch_id": NAME})


async def test_a_flow_run_costs_two_calls_and_its_flow_one(client: Client) -> None:
    async def work() -> End:
        assert flow_run.id == str(client.run_id)
        assert flow_run.name == NAME
        return End(Completed(message="10 of 10"))

    runs = FlowRuns(process_batch)
    for _ in range(2):
        assert (await run(runs, work)).message == "10 of 10"
    assert client.calls == ["create_flow", *["POST /flow_runs/", "set_state"] * 2]
    created = client.created[0]
    assert (created["name"], created["tags"]) == (NAME, ["a", NAME])
    assert created["parameters"] == {"batch_id": NAME}
    assert created["state"]["type"] == "RUNNING"
    assert [state.message for state in client.ends] == ["10 of 10"] * 2
    assert flow_run.id is None


async def test_a_server_that_lost_its_database_gets_the_flow_again(client: Client) -> None:
    async def work() -> End:
        return End(Completed())

    runs = FlowRuns(process_batch)
    await run(runs, work)
    client.flow_ids.clear()
    await run(runs, work)
    once = ["create_flow", "POST /flow_runs/", "set_state"]
    assert client.calls == [*once, "POST /flow_runs/", *once]


async def test_flow_runs_run_side_by_side(client: Client) -> None:
    are_all_there = asyncio.Barrier(5)

    async def work() -> End:
        await are_all_there.wait()
        return End(Completed())

    runs = FlowRuns(process_batch)
    async with asyncio.timeout(PATIENCE * 10):
        await asyncio.gather(*(run(runs, work) for _ in range(5)))
    assert len(client.created) == len(client.ends) == 5


async def test_the_report_is_shown_beside_the_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the flow run, whose end waits for it, and it costs no time of its own."""
    beside = asyncio.Barrier(2)
    set_state = client.set_flow_run_state
    reporters: list[str | None] = []

    async def set_flow_run_state(*args: Any, **options: Any) -> None:
        await beside.wait()
        await set_state(*args, **options)

    async def report() -> None:
        await beside.wait()
        reporters.append(flow_run.id)

    async def work() -> End:
        return End(Completed(), report)

    monkeypatch.setattr(client, "set_flow_run_state", set_flow_run_state)
    async with asyncio.timeout(PATIENCE * 10):
        await run(FlowRuns(process_batch), work)
    assert reporters == [str(client.run_id)]


async def test_a_flow_run_that_is_stopped_as_it_reports_ends_as_its_work_did(
    client: Client,
) -> None:
    """Otherwise Prefect would show it as running, for good."""
    reports = asyncio.Event()

    async def report() -> None:
        reports.set()
        await asyncio.Event().wait()

    async def work() -> End:
        return End(Completed(message="10 of 10"), report)

    running = asyncio.create_task(run(FlowRuns(process_batch), work))
    async with asyncio.timeout(PATIENCE * 10):
        await reports.wait()
        client.ends.clear()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [state.message for state in client.ends] == ["10 of 10"]


async def test_the_work_has_ended_although_prefect_is_away_or_no_longer_knows_the_flow_run(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Else `batchyard run` would call a completed batch lost, and send no notification."""

    async def work() -> End:
        client.is_away = True
        return End(Completed(message="10 of 10"))

    assert (await run(FlowRuns(process_batch), work)).message == "10 of 10"
    assert client.ends == []
    assert "flow_run.not_changed" in caplog.text


@pytest.mark.parametrize(
    ("error", "end", "message"),
    [
        (StoreUnavailable("The database is away."), "Failed", "The database is away."),
        (ValueError("a prompt"), "Failed", "ValueError"),
        (asyncio.CancelledError(), "Crashed", None),
    ],
)
async def test_an_exception_ends_the_flow_run_and_is_raised(
    client: Client, error: BaseException, end: str, message: str | None
) -> None:
    async def work() -> End:
        raise error

    with pytest.raises(type(error)):
        await run(FlowRuns(process_batch), work)
    (state,) = client.ends
    assert state.name == end
    assert message is None or state.message == message


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StoreUnavailable("away")])
async def test_what_ended_the_work_is_raised_although_prefect_is_away(
    client: Client, error: BaseException
) -> None:
    """A cancellation that became another error would not stop the process."""

    async def work() -> End:
        client.is_away = True
        raise error

    with pytest.raises(type(error)):
        await run(FlowRuns(process_batch), work)
    assert client.calls[-1] == "set_state"


async def test_a_flow_run_that_is_asked_for_again_is_the_same_one(client: Client) -> None:
    """Prefect's client repeats a call whose answer was lost; its server knows the key then."""
    runs = FlowRuns(process_batch)

    async def work() -> End:
        return End(Completed())

    await run(runs, work)
    await run(runs, work)
    keys = [each["idempotency_key"] for each in client.created]
    assert len(set(keys)) == 2
    assert all(keys)
