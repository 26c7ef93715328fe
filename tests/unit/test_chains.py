"""What a chain makes of a line with an answer, and which chains are refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from batchyard.batch.chains import (
    MAX_STAGES,
    Stage,
    check_stages,
    line_or_refusal,
    of_stage,
    stages_of,
    variables_of,
)
from batchyard.errors import RequestRefused
from batchyard.lines.templates import BodyNotMade
from batchyard.results.results import NoAnswerCode, answered, unanswered

FIRST = b'{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"model": "m", "n": 1}}'


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choices": [{"message": {"content": "chat"}}]}, "chat"),
        ({"choices": [{"text": "completion"}]}, "completion"),
        ({"output": [{"type": "message", "content": [{"text": "response"}]}]}, "response"),
        (
            {"type": "message", "content": [{"type": "text", "text": "messages"}]},
            "messages",
        ),
        ({"data": [{"embedding": [1.0]}]}, None),
        ([], None),
    ],
)
def test_a_template_has_the_text_of_every_kind_of_answer(answer: object, text: str | None) -> None:
    asked = b'{"custom_id": "a", "body": {"n": 2}}'
    line = answered("a", "req_1", 200, json.dumps(answer).encode()).line
    found = json.loads(msgspec.json.encode(variables_of(asked, line, FIRST)))
    assert found == {
        "request": {"n": 2},
        "response": answer,
        "content": text,
        "custom_id": "a",
        "first": {"model": "m", "n": 1},
    }


def test_a_body_gets_the_stages_model_and_may_not_name_another() -> None:
    made = line_or_refusal("é", "/v1/embeddings", b'{"input":[1.50,"x"]}', "bge")
    assert made == (
        '{"custom_id":"é","method":"POST","url":"/v1/embeddings",'
        '"body":{"input":[1.50,"x"],"model":"bge"}}\n'.encode()
    )
    own = line_or_refusal("a", "/v1/embeddings", b'{"model":"bge"}', "bge")
    assert isinstance(own, bytes)
    other = line_or_refusal("a", "/v1/embeddings", b'{"model":"large"}', "bge")
    assert isinstance(other, BodyNotMade)
    assert line_or_refusal("a", "/v1/embeddings", BodyNotMade("no"), "bge").args == ("no",)  # type: ignore[union-attr]


def test_an_error_line_names_its_stage_beside_what_it_was() -> None:
    line = unanswered("a", NoAnswerCode.TEMPLATE, "why").line
    marked = of_stage(line, 2)
    assert json.loads(marked) == {**json.loads(line), "stage": 2}
    assert marked.endswith(b"}\n")


@pytest.mark.parametrize(
    ("stages", "param"),
    [
        ([Stage("/v1/embeddings", "{}")] * (MAX_STAGES + 1), "then"),
        ([Stage("/v1/embeddings", "{}"), Stage("/v1/none", "{}")], "then[1].endpoint"),
        ([Stage("/v1/embeddings", "{{ nobody }}")], "then[0].template"),
    ],
)
def test_a_chain_that_can_never_run_is_refused(stages: list[Stage], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_stages(stages)
    assert refused.value.param == param


@pytest.mark.parametrize("stage", [{"endpoint": "/v1/x"}, {"template": 1}, {"modle": "x"}])
def test_stages_that_are_written_down_wrong_are_refused(stage: dict[str, object]) -> None:
    with pytest.raises(RequestRefused, match="The stages cannot be read"):
        stages_of([stage])
