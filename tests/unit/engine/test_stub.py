"""The stub's own abilities: faults, restarts, the log; the rest is the contract's."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import Abort, EngineRequest, NoAnswer
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import EngineLost, EngineStartFailed
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.base import EngineAnswer


def body(**more: Any) -> bytes:
    return json.dumps({"model": "stub-model", **more}).encode()


async def ask(
    engine: StubEngine,
    *bodies: bytes,
    url: str = "/v1/chat/completions",
    timeout: float = 5,  # noqa: ASYNC109
) -> list[EngineAnswer]:
    async def requests() -> AsyncIterator[EngineRequest]:
        for tag, one in enumerate(bodies):
            yield EngineRequest(tag, url, one, f"r{tag}")

    answers = [answer async for answer in engine.stream(requests(), timeout_seconds=timeout)]
    return sorted(answers, key=lambda answer: answer.tag)


async def started(**options: Any) -> StubEngine:
    engine = StubEngine(**options)
    await engine.start()
    return engine


async def test_the_same_bytes_get_the_same_answer() -> None:
    """Whenever and in whichever process they are asked."""
    first = await ask(await started(), body(messages=["a"]), body(messages=["b"]))
    again = await ask(await started(), body(messages=["a"]), body(messages=["b"]))

    assert first == again
    assert first[0].body != first[1].body


@pytest.mark.parametrize(
    ("url", "more", "kind"),
    [
        ("/v1/chat/completions", {"messages": []}, "chat.completion"),
        ("/v1/completions", {"prompt": "x"}, "text_completion"),
        ("/v1/responses", {"input": "x"}, "response"),
        ("/v1/embeddings", {"input": "x"}, "list"),
        ("/v1/score", {"text_1": "x", "text_2": ["y", "z"]}, "list"),
        ("/score", {"queries": "x", "documents": ["y", "z"]}, "list"),
    ],
)
async def test_every_endpoint_has_its_shape(url: str, more: dict[str, Any], kind: str) -> None:
    """The object's kind, the model and the usage are there."""
    answer = json.loads((await ask(await started(), body(**more), url=url))[0].body)

    assert (answer["object"], answer["model"]) == (kind, "stub-model")
    assert answer["usage"]["total_tokens"] > 0


async def test_a_message_has_anthropics_shape() -> None:
    asked = body(max_tokens=4, messages=[])
    answer = json.loads((await ask(await started(), asked, url="/v1/messages"))[0].body)
    assert (answer["type"], answer["role"], answer["model"]) == (
        *("message", "assistant"),
        "stub-model",
    )
    assert answer["content"][0]["text"]
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 4)


async def test_base64_embeddings_are_the_floats() -> None:
    """Little-endian float32, one for each input."""
    engine = await started()
    floats, packed = await ask(
        engine,
        body(input=["a", "b"]),
        body(input=["a", "b"], encoding_format="base64"),
        url="/v1/embeddings",
    )

    expected = json.loads(floats.body)["data"][1]["embedding"]
    data = base64.b64decode(json.loads(packed.body)["data"][1]["embedding"])
    assert list(struct.unpack(f"<{len(expected)}f", data)) == expected


async def test_rerank_sorts_by_relevance() -> None:
    """Best first, each with its index."""
    engine = await started()
    answer = (await ask(engine, body(documents=["a", "b", "c"]), url="/v1/rerank"))[0]

    results = json.loads(answer.body)["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert {result["index"] for result in results} == {0, 1, 2}


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({"text_2": ["y", "z"]}, 2),
        ({"documents": ["y", "z"]}, 2),
        ({"items": "y"}, 1),
        ({"data_2": ["y"]}, 1),
    ],
)
async def test_each_pair_gets_its_score(more: dict[str, Any], count: int) -> None:
    answer = (await ask(await started(), body(**more), url="/v1/score"))[0]
    assert len(json.loads(answer.body)["data"]) == count


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\r\n--x\r\n'
    b"--b--\r\n"
)


@pytest.mark.parametrize(
    ("form", "status"),
    [
        (FORM % b"stub-model", 200),
        (FORM % b"another", 404),
        (b"", 400),
        (b"{}", 400),
        (b"--b\r\nx\r\n--b--", 400),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n--b--', 400),
    ],
)
async def test_audio_is_taken_as_a_form_and_not_otherwise(form: bytes, status: int) -> None:
    engine, url = await started(), "/v1/audio/transcriptions"

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, url, form, "r1", "multipart/form-data;boundary=b")

    answers = [answer.status async for answer in engine.stream(requests(), timeout_seconds=5)]

    assert answers == [status]
    assert [answer.status for answer in await ask(engine, body(), url=url)] == [400]


async def test_a_fault_ends_after_its_times() -> None:
    """Two 429s with a Retry-After, then well."""
    fault = Fault(FaultKind.ANSWER, status=429, retry_after_seconds=2.0, times=2)
    engine = await started(faults=[fault])

    answers = [(await ask(engine, body()))[0] for _ in range(3)]

    assert [answer.status for answer in answers] == [429, 429, 200]
    assert answers[0].retry_after_seconds == 2.0


async def test_a_fault_strikes_only_what_it_matches() -> None:
    """By the body."""
    engine = await started(faults=[Fault(FaultKind.ANSWER, lambda one: b"bad" in one)])

    answers = await ask(engine, body(messages=["good"]), body(messages=["bad"]))

    assert [answer.status for answer in answers] == [200, 500]


async def test_a_body_can_be_malformed() -> None:
    """What comes back is exactly what the fault says."""
    engine = await started(faults=[Fault(FaultKind.ANSWER, status=200, body=b'{"cut')])

    assert (await ask(engine, body()))[0].body == b'{"cut'


async def test_a_hanging_request_times_out_and_a_lost_one_has_no_answer() -> None:
    """Both are no answers; the engine lives."""
    faults = [
        Fault(FaultKind.HANG, lambda one: b"hang" in one),
        Fault(FaultKind.CONNECTION_LOST, lambda one: b"lost" in one),
    ]
    engine = await started(faults=faults)

    answers = await ask(engine, body(messages=["hang"]), body(messages=["lost"]), timeout=0.05)

    reasons = [answer.no_answer for answer in answers]
    assert reasons == [NoAnswer.TIMEOUT, NoAnswer.CONNECTION_LOST]
    (answer,) = await ask(engine, body(messages=["hello"]))
    assert answer.status == 200


async def test_an_aborted_request_is_counted_and_gives_its_place_to_the_next() -> None:
    """Running, waiting for its turn or just admitted; the last was never executed."""
    engine = await started(max_num_seqs=1, faults=[Fault(FaultKind.HANG, lambda one: b"h" in one)])

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        for tag in (1, 2):
            yield EngineRequest(tag, "/v1/completions", body(prompt="hh"), f"r{tag}")
        await asyncio.sleep(0.05)
        yield Abort(2)
        yield Abort(1)
        yield EngineRequest(3, "/v1/completions", body(prompt="hh"), "r3")
        yield Abort(3)

    answers = [answer async for answer in engine.stream(requests(), timeout_seconds=5)]

    assert {answer.tag: answer.no_answer for answer in answers} == dict.fromkeys(
        (1, 2, 3), NoAnswer.ABORTED
    )
    assert (engine.executed, engine.running, engine.aborted) == (1, 0, 2)


async def test_a_poison_request_kills_it_until_it_is_started_again() -> None:
    """Each time it is executed."""
    poison = body(messages=["poison"])
    engine = await started(faults=[Fault(FaultKind.DEATH, lambda one: one == poison)])

    for _ in range(2):
        with pytest.raises(EngineLost):
            await ask(engine, poison)
        with pytest.raises(EngineLost):
            await ask(engine, body())
        await engine.start()
    assert (await ask(engine, body()))[0].status == 200


async def test_it_can_die_after_so_many_requests() -> None:
    """``skip`` lets the first ones pass."""
    engine = await started(faults=[Fault(FaultKind.DEATH, skip=3, times=1)])

    assert len(await ask(engine, *[body()] * 3)) == 3
    with pytest.raises(EngineLost):
        await ask(engine, body())


async def test_a_frozen_engine_answers_nothing_until_it_is_started_again() -> None:
    """Nor does its work go on: what it ran, what waits and what comes are the same to it."""
    freeze = Fault(FaultKind.FREEZE, lambda one: b"freeze" in one, times=1)
    engine = await started(faults=[freeze], latency=0.02, max_num_seqs=2)
    bodies = [body(prompt="freeze"), *[body()] * 4]

    answers = await ask(engine, *bodies, timeout=0.2)
    before = await engine.work_done()
    late = await ask(engine, body(), timeout=0.05)

    assert {one.no_answer for one in [*answers, *late]} == {NoAnswer.TIMEOUT}
    assert await engine.work_done() == before
    await engine.start()
    assert (await ask(engine, body()))[0].status == 200


async def test_a_request_that_hangs_does_no_work() -> None:
    """The one beside it does."""
    engine = await started(faults=[Fault(FaultKind.HANG, lambda one: b"h" in one)], latency=60)
    moved = []
    for one in (body(prompt="h"), body(messages=[])):
        stream = asyncio.create_task(ask(engine, one, url="/v1/completions"))
        await asyncio.sleep(0.02)
        moved.append(await engine.work_done() != await engine.work_done())
        stream.cancel()

    assert moved == [False, True]


async def test_a_start_ends_what_ran_before_it() -> None:
    """Unanswered, though nobody has stopped it."""
    engine = await started(latency=60)
    stream = asyncio.create_task(ask(engine, body(), timeout=60))
    await asyncio.sleep(0.02)

    await engine.start()

    with pytest.raises(EngineLost):
        await asyncio.wait_for(stream, PATIENCE * 10)


async def test_death_takes_other_streams_too() -> None:
    """Everything in flight is lost, at once."""
    engine = await started(latency=30.0)
    stream = asyncio.create_task(ask(engine, body(), timeout=60))
    await asyncio.sleep(0.02)

    engine.kill()

    with pytest.raises(EngineLost):
        await asyncio.wait_for(stream, PATIENCE * 10)


async def test_a_death_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not once more for each request that was in flight."""
    engine = await started(latency=60)
    asyncio.get_running_loop().call_later(0.05, engine.kill)

    with pytest.raises(EngineLost):
        await ask(engine, *[body()] * 8)

    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_no_more_than_its_sequences_run_at_once() -> None:
    """The rest wait for a slot."""
    engine = await started(latency=0.001, max_num_seqs=4)
    await ask(engine, *(body(messages=[n]) for n in range(40)))

    assert engine.peak_running == 4


async def test_the_log_is_a_witness_of_every_execution(tmp_path: Path) -> None:
    """In memory and, for whoever outlives the process, in a file."""
    engine = await started(log_path=tmp_path / "witness")
    await ask(engine, body(messages=["a"]), body(messages=["a"]), body(messages=["b"]))

    hashes = [line.split()[1] for line in (tmp_path / "witness").read_text().splitlines()]
    assert [request.tag for request in engine.log] == [0, 1, 2]
    assert (engine.executed, len(hashes), len(set(hashes))) == (3, 3, 2)


async def test_a_start_can_fail() -> None:
    """As often as it is told to."""
    engine = StubEngine(start_failures=1)
    with pytest.raises(EngineStartFailed):
        await engine.start()
    await engine.start()
    (answer,) = await ask(engine, body())
    assert answer.status == 200
