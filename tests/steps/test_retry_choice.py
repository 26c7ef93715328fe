"""Which lines a retry has, and what is changed in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.chains import Stage
from batchyard.errors import RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.lines.body_patch import BodyPatch
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.steps.retry.retry import RetryCaller, accept_retry, retry_batch
from batchyard.steps.retry.retry_lines import LineChoice
from batchyard.store import BatchOptions
from tests.lifecycle import prepare_batch
from tests.steps.conftest import CHAT, chat_line
from tests.steps.test_retry import as_input, begun, ended, input_of

if TYPE_CHECKING:
    from batchyard.store import BatchRecord
    from tests.steps.conftest import Yard

SCHEMA = {"type": "object", "required": ["x"]}
IN_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
LINES = [
    chat_line("plain"),
    chat_line("cut"),
    chat_line("refused"),
    chat_line("other", **IN_SCHEMA),
    chat_line("fits", **IN_SCHEMA),
    chat_line("limited"),
    chat_line("lost"),
]


def answer(custom_id: str, text: str, reason: str = "stop") -> bytes:
    body = {"choices": [{"message": {"content": text}, "finish_reason": reason}]}
    return answered(custom_id, "req_x", 200, json.dumps(body).encode()).line


def refusal(custom_id: str, status: int, **error: Any) -> bytes:
    return answered(custom_id, "req_x", status, json.dumps({"error": error}).encode()).line


async def mixed(yard: Yard, **changes: Any) -> BatchRecord:
    """A batch with answers of all kinds, in the order of the input."""
    return await ended(
        yard,
        as_input(LINES),
        output=b"".join(
            [
                answer("plain", "[1]"),
                answer("cut", "[1", "length"),
                answer("other", '{"y": 1}'),
                answer("fits", '{"x": 1}'),
            ]
        ),
        error=b"".join(
            [
                refusal("refused", 400, type="BadRequestError", code=400),
                refusal("limited", 429, type="requests", code="rate_limit_exceeded"),
                unanswered("lost", NoAnswerCode.SERVER_ERROR).line,
            ]
        ),
        target=BatchStatus.COMPLETED,
        **changes,
    )


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({}, ["refused", "limited", "lost"]),
        ({"codes": {"rate_limit_exceeded", "server_error"}}, ["limited", "lost"]),
        ({"codes": {"400"}}, ["refused"]),
        ({"codes": {"BadRequestError", "429"}}, ["refused", "limited"]),
        ({"finish_reasons": {"length"}}, ["cut"]),
        ({"invalid_json": True}, ["cut", "other"]),
        ({"failed": True, "finish_reasons": {"length"}}, ["cut", "refused", "limited", "lost"]),
        ({"invalid_json": True, "codes": {"server_error"}}, ["cut", "other", "lost"]),
    ],
)
async def test_lines_are_chosen_by_what_became_of_them(
    yard: Yard, choice: dict[str, Any], chosen: list[str]
) -> None:
    first = await mixed(yard)
    second = await retry_batch(yard.services, first.id, choice=LineChoice(**choice).or_failed())
    content = await input_of(yard, second)
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == chosen
    assert set(content.splitlines()) <= set(as_input(LINES).splitlines())


async def test_the_answers_of_a_chain_need_not_fit_the_schemas_of_its_first_stage(
    yard: Yard,
) -> None:
    """They are answers to other requests. What is not JSON is chosen all the same."""
    first = await mixed(yard, then=(Stage(CHAT, "{}"),))
    choice = LineChoice(invalid_json=True)
    second = await retry_batch(yard.services, first.id, choice=choice)
    assert await input_of(yard, second) == as_input(LINES[1:2])


async def test_an_answer_with_a_number_that_is_too_large_ends_no_retry(yard: Yard) -> None:
    """It is well-formed JSON. Lines that are chosen for other answers run again."""
    odd = answered("plain", "req_x", 200, b'{"choices": [], "n": 1e400}').line
    refused = answered("refused", "req_x", 400, b'{"error": {"code": 1e400}}').line
    first = await ended(
        yard,
        as_input(LINES[:3]),
        output=odd + answer("cut", "[1", "length"),
        error=refused,
        target=BatchStatus.COMPLETED,
    )
    by_reason = LineChoice(finish_reasons=frozenset({"length"}), codes=frozenset({"x"}))
    second = await retry_batch(yard.services, first.id, choice=by_reason)
    assert await input_of(yard, second) == as_input(LINES[1:2])
    by_json = LineChoice(invalid_json=True)
    third = await retry_batch(yard.services, first.id, choice=by_json)
    assert await input_of(yard, third) == as_input(LINES[:2])


async def test_a_choice_of_nothing_makes_no_batch_and_leaves_no_file(yard: Yard) -> None:
    first = await mixed(yard)
    before = [key async for key in yard.services.storage.list("")]
    for choice in (LineChoice(codes=frozenset({"x"})), LineChoice(finish_reasons=frozenset("x"))):
        with pytest.raises(RequestRefused, match=f"No request of {first.id} is chosen") as refused:
            await retry_batch(yard.services, first.id, choice=choice)
        assert refused.value.refusal_code == "nothing_to_retry"
    assert [key async for key in yard.services.storage.list("")] == before


async def test_answers_of_a_batch_that_failed_without_any_are_not_chosen(yard: Yard) -> None:
    first = await begun(yard, as_input(LINES))
    await yard.services.store.batches.fail(first.id, [])
    with pytest.raises(RequestRefused, match="No request"):
        await retry_batch(yard.services, first.id, choice=LineChoice(invalid_json=True))
    everything = LineChoice(invalid_json=True, failed=True)
    second = await retry_batch(yard.services, first.id, choice=everything)
    assert await input_of(yard, second) == as_input(LINES)


async def test_a_patch_is_in_each_line_of_the_new_batch_and_not_in_the_old_one(yard: Yard) -> None:
    first = await mixed(yard)
    patch = BodyPatch.of({"max_tokens": 4096, "stop": ["\n"]}, ["messages"])
    second = await retry_batch(yard.services, first.id, patch=patch)
    bodies = [json.loads(line)["body"] for line in (await input_of(yard, second)).splitlines()]
    assert bodies == 3 * [{"model": "stub-model", "max_tokens": 4096, "stop": ["\n"]}]
    assert await input_of(yard, first.id) == as_input(LINES)


async def test_another_model_is_the_one_that_lines_may_name(yard: Yard) -> None:
    first = await mixed(yard, options=BatchOptions(models=("stub-model",)))
    patch = BodyPatch.of({"model": "other-model"}, ())
    second = await accept_retry(yard.services, first.id, patch=patch)
    assert second.options.models == ("other-model",)
    prepared = await prepare_batch(yard.services, second.id)
    assert prepared is not None
    assert prepared.model == "other-model"


async def test_a_patch_that_a_line_cannot_take_makes_no_batch(yard: Yard) -> None:
    first = await mixed(yard)
    before = [key async for key in yard.services.storage.list("")]
    with pytest.raises(RequestRefused, match="not an object") as refused:
        await retry_batch(yard.services, first.id, patch=BodyPatch.of({"model.name": "x"}, ()))
    assert refused.value.param == "set"
    assert [key async for key in yard.services.storage.list("")] == before


async def test_a_client_cannot_send_in_a_retry_what_only_the_operators_file_may_have(
    yard: Yard,
) -> None:
    first = await mixed(yard, options=BatchOptions(any_body=True))
    patch = BodyPatch.of({"chat_template": "{{ x }}"}, ())
    mine = await yard.finish(await retry_batch(yard.services, first.id, patch=patch))
    assert mine.errors is None
    clients = await accept_retry(
        yard.services, first.id, patch=patch, caller=RetryCaller(tenant="default")
    )
    refused = await yard.finish(clients.id)
    assert {error.code for error in refused.errors or ()} == {"unsupported_parameter"}
