"""Which fields and media URLs a client's bodies may have, as the validator says it."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.errors import InputRefused
from batchyard.lines.body_policy import REFUSED_FIELDS, REFUSED_PARTS, BodyPolicy
from batchyard.lines.lines import Validator
from batchyard.lines.rules import Rules

if TYPE_CHECKING:
    from batchyard.batch_error import BatchError

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOL = {"type": "tool_result", "tool_use_id": "a"}
CANARY = "http://127.0.0.1:18111/secret"
TEXT = {"role": "user", "content": "hi"}


def line(body: dict[str, Any] | str, url: str = CHAT) -> bytes:
    text = body if isinstance(body, str) else json.dumps({"model": "m", "messages": []} | body)
    return f'{{"custom_id":"a","method":"POST","url":"{url}","body":{text}}}\n'.encode()


def refused(data: bytes, policy: BodyPolicy | None = None) -> list[tuple[str, str | None]]:
    """Codes and parameters of what is wrong with the line, which is the second of its file."""
    validator = Validator(Rules(endpoint=None, policy=policy or BodyPolicy()))
    file = io.BytesIO(b"\n" + data)
    entries: tuple[BatchError, ...] = ()
    is_good = bool(list(validator.lines(file)))
    try:
        validator.finish(file)
    except InputRefused as error:
        entries = error.entries
    assert is_good is (entries == ())
    assert all(entry.line == 2 for entry in entries)
    return [(entry.code, entry.param) for entry in entries]


def message(body: dict[str, Any]) -> str:
    validator = Validator(Rules(endpoint=None, policy=BodyPolicy()))
    file = io.BytesIO(line(body))
    list(validator.lines(file))
    with pytest.raises(InputRefused) as caught:
        validator.finish(file)
    return caught.value.entries[0].message


# -- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
@pytest.mark.parametrize("value", ["x", "", 1, True, {}, [], {"a": 1}])
def test_a_field_that_reaches_into_the_engine_is_refused_by_its_name(name: str, value: Any) -> None:
    expected = [("unsupported_parameter", f"body.{name}")]
    assert refused(line({name: value})) == expected
    assert refused(line({name: value}), BodyPolicy(allowed_fields=frozenset({name}))) == []


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
@pytest.mark.parametrize("value", [None, False, 0])
def test_a_field_that_says_nothing_is_not_refused(name: str, value: Any) -> None:
    """Clients that write out every default send them."""
    assert refused(line({name: value})) == []


def test_a_refusal_says_what_to_do() -> None:
    text = message({"chat_template": "{{ x }}"})
    assert text.startswith("body.chat_template is not accepted here")
    assert "leave it out" in text
    assert "BATCHYARD_BODIES__ALLOWED_FIELDS" in text


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "t", "text": "see http://127.0.0.1", "source_url": CANARY}]},
        {"cache_salt": "mine"},
        {"metadata": {"image_url": CANARY}},
        {"tools": [{"type": "function", "function": {"parameters": {"image_url": CANARY}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"image_url": CANARY}}},
        {"stop": ["a", "b", "c", "d"], "n": 8, "logprobs": True, "top_logprobs": 20},
        {"logit_bias": {"1": 5}, "max_tokens": 10**6, "temperature": 0.5, "user": "u"},
        {"messages": [TEXT | {"content": f"look at {CANARY}, image_url, {{[[["}]},
        {"messages": [TEXT | {"content": [{"type": "text", "text": CANARY}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": CANARY}}]}]},
        {"audio": {"voice": "v", "format": "wav"}},
        {"messages": [{"content": [{"source": {"type": "base64", "data": "AA"}}]}]},
        {"messages": [{"content": [{"source": CANARY}, {"source": {"url": CANARY}}]}]},
    ],
)
def test_what_clients_of_openai_send_passes(body: dict[str, Any]) -> None:
    assert refused(line(body)) == []


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"n": 9}, "integer_above_max_value", "body.n"),
        ({"n": 10**30}, "integer_above_max_value", "body.n"),
        ({"n": 8.5}, "integer_above_max_value", "body.n"),
        ({"n": 1e6}, "integer_above_max_value", "body.n"),
        ({"n": "1000000"}, "invalid_request", "body.n"),
        ({"n": [1]}, "invalid_request", "body.n"),
        ({"best_of": 9}, "integer_above_max_value", "body.best_of"),
        ({"top_logprobs": 21}, "integer_above_max_value", "body.top_logprobs"),
        # To vLLM it means all tokens that there are.
        ({"prompt_logprobs": -1}, "integer_above_max_value", "body.prompt_logprobs"),
        ({"logprobs": 21}, "integer_above_max_value", "body.logprobs"),
        ({"stop": list("abcde")}, "array_above_max_length", "body.stop"),
        ({"bad_words": ["x"] * 1025}, "array_above_max_length", "body.bad_words"),
        ({"stop_token_ids": [1] * 1025}, "array_above_max_length", "body.stop_token_ids"),
        (
            {"logit_bias": {str(n): 1 for n in range(1025)}},
            "array_above_max_length",
            "body.logit_bias",
        ),
        ({"response_format": {"x": "y" * 2**17}}, "schema_too_large", "body.response_format"),
        ({"tools": [{"x": "y" * 2**17}]}, "schema_too_large", "body.tools"),
        ({"guided_json": "y" * 2**17}, "schema_too_large", "body.guided_json"),
        ({"guided_regex": "y" * 2**14}, "schema_too_large", "body.guided_regex"),
        (
            {"structured_outputs": {"grammar": "y" * 2**14}},
            "schema_too_large",
            "body.structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json": {"x": "y" * 2**17}}},
            "schema_too_large",
            "body.structured_outputs",
        ),
    ],
)
def test_what_is_too_much_is_refused_and_the_operator_may_raise_it(
    body: dict[str, Any], code: str, param: str
) -> None:
    assert refused(line(body)) == [(code, param)]
    raised = BodyPolicy(
        max_choices=10**30,
        max_logprobs=100,
        max_stops=5,
        max_list_items=2000,
        max_schema_bytes=2**20,
        max_grammar_bytes=2**20,
    )
    expected = [] if code != "invalid_request" and -1 not in body.values() else [(code, param)]
    assert refused(line(body), raised) == expected


def test_every_refusal_of_a_body_is_reported() -> None:
    body = {"n": 9, "priority": 5, "messages": [{"content": [{"image_url": CANARY}]}]}
    assert refused(line(body)) == [
        ("media_url_refused", "body.messages[0].content[0].image_url"),
        ("integer_above_max_value", "body.n"),
        ("unsupported_parameter", "body.priority"),
    ]


def test_without_a_policy_everything_goes_through() -> None:
    body = {"chat_template": "x", "n": 10**6, "messages": [{"content": [{"image_url": CANARY}]}]}
    validator = Validator(Rules(endpoint=None))
    assert len(list(validator.lines(io.BytesIO(line(body))))) == 1


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m","messages":[],"priority":0,"priority":9}',
        '{"model":"m","messages":[],"\\u0070riority":9}',
    ],
)
def test_the_last_of_a_repeated_key_counts_however_it_is_written(body: str) -> None:
    assert refused(line(body)) == [("unsupported_parameter", "body.priority")]


def test_a_repeated_key_whose_last_value_says_nothing_passes() -> None:
    """Engines read the last one too."""
    assert refused(line('{"model":"m","messages":[],"priority":9,"priority":null}')) == []


# -- media ----------------------------------------------------------------------------------------

URLS = [
    *(CANARY, "https://example.com/a.png", "HTTP://127.0.0.1", "file:///etc/passwd", "ftp://h/a"),
    *(
        " http://127.0.0.1/",
        "\thttp://127.0.0.1/",
        "http:127.0.0.1",
        "//127.0.0.1/a",
        "/etc/passwd",
    ),
    *("http://[::ffff:127.0.0.1]/", "http://2130706433/", "gopher://x", "C:\\a.png", "a.png"),
    *(" data:image/png;base64,AA", "dat a:x", "http://data:,@127.0.0.1/", "s3://bucket/key"),
]


def parts(url: Any) -> list[dict[str, Any]]:
    """Every spelling of a part that vLLM 0.32 fetches."""
    return [
        *({"type": f"{kind}_url", f"{kind}_url": {"url": url}} for kind in KINDS),
        *({f"{kind}_url": url} for kind in KINDS),
        *({f"{kind}_url": {"url": url, "detail": "auto"}, "uuid": "u"} for kind in KINDS),
        *({"type": "text", "text": "t", f"{kind}_url": url, "uuid": "u"} for kind in KINDS),
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_file", "file_url": url},
        {"type": "computer_call_output", "output": {"image_url": url}},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]


KINDS = ("image", "audio", "video")


def bodies(part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every place of a body from which vLLM takes parts."""
    return [
        (CHAT, {"messages": [TEXT, {"role": "user", "content": [{"type": "text"}, part]}]}),
        (CHAT, {"messages": [{"role": "tool", "content": [part]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}),
        (MESSAGES, {"messages": [{"content": [TOOL | {"content": [part]}]}], "max_tokens": 1}),
        (MESSAGES, {"messages": [], "max_tokens": 1, "system": [part]}),
        (RESPONSES, {"input": [part]}),
        (RESPONSES, {"input": [{"role": "user", "content": [part]}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": [part]}]}),
        (RESPONSES, {"input": "x", "previous_input_messages": None, "prompt": {"v": {"a": part}}}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [part]}]}),
        ("/v1/embeddings", {"input": [{"role": "user", "content": [part]}]}),
        ("/v1/embeddings", {"input": [[{"role": "user", "content": [part]}]]}),
        ("/pooling", {"messages": [{"role": "user", "content": [part]}]}),
        ("/classify", {"messages": [{"role": "user", "content": [part]}]}),
        ("/score", {"data_1": {"content": [part]}, "data_2": "x"}),
        ("/v1/score", {"queries": "x", "documents": [{"content": [part]}]}),
        ("/v1/score", {"queries": {"content": [part]}, "items": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": {"content": [part]}}),
        ("/v1/rerank", {"query": {"content": [part]}, "documents": ["x"]}),
        ("/v2/rerank", {"query": "x", "documents": {"content": [part]}}),
        ("/v1/images/edits", {"prompt": "x", "images": [part]}),
    ]


@pytest.mark.parametrize("url", URLS)
def test_media_that_are_not_in_the_body_are_refused_wherever_they_may_stand(url: str) -> None:
    for part in parts(url):
        for endpoint, body in bodies(part):
            found = refused(line(body, endpoint))
            assert [code for code, _ in found] == ["media_url_refused"], (endpoint, body)


def test_media_within_the_body_pass_wherever_they_may_stand() -> None:
    for url in ("data:image/png;base64,AA==", "DATA:audio/wav;base64,AA==", "", None):
        for part in parts(url):
            for endpoint, body in bodies(part):
                assert refused(line(body, endpoint)) == [], (endpoint, body)


def called(arguments: Any, **block: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t", "name": "show", "input": arguments} | block


def said(*blocks: Any) -> dict[str, Any]:
    """A body of Anthropic's, with these blocks in its last message."""
    turns = [TEXT, {"role": "assistant", "content": list(blocks)}]
    return {"messages": turns, "max_tokens": 1}


@pytest.mark.parametrize("url", URLS)
def test_arguments_of_a_tool_in_a_message_are_the_clients_own(url: str) -> None:
    for part in [*parts(url), {"type": "image_embeds"}, {"image_embeds": "AA"}]:
        for arguments in (part, {"deep": [{"source": part}]}, called(part)):
            assert refused(line(said({"type": "text"}, called(arguments)), MESSAGES)) == []


def test_only_the_arguments_of_a_tool_in_a_message_are_left_out() -> None:
    """vLLM reads these of no other endpoint, place or type as text, or fetches what is beside."""
    for part in parts(CANARY):
        result = {"type": "tool_result", "tool_use_id": "t"}
        for body in (
            said(called({}), part),
            said(called({}, source=part)),
            said(called({}, content=[part])),
            said(called(part, type="tool_result")),
            said(called(part, type="image")),
            said(called(part, type=["tool_use"])),
            said([called(part)]),
            said(result | {"content": [part]}),
            said(result | {"content": [called(part)]}),
            said({"source": called(part)}),
            said("text") | {"system": [called(part)]},
            said("text") | {"chat_template_kwargs": called(part)},
            {"messages": {"role": "user", "content": [called(part)]}, "max_tokens": 1},
            {"messages": [[called(part)]], "max_tokens": 1},
            {"messages": [called(part)], "max_tokens": 1},
            {"messages": [{"content": called(part)}], "max_tokens": 1},
        ):
            assert [code for code, _ in refused(line(body, MESSAGES))] == ["media_url_refused"]
        assert refused(line(said(called(part)))) != []
        body = {"input": [{"role": "user", "content": [called(part)]}]}
        assert refused(line(body, RESPONSES)) != []


def test_of_a_repeated_type_the_last_one_says_whether_arguments_are_read() -> None:
    for types, passes in (
        ('"image","type":"tool_use"', True),
        ('"tool_use","type":"image"', False),
    ):
        block = f'{{"type":{types},"input":{{"image_url":"{CANARY}"}}}}'
        body = f'{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":[{block}]}}]}}'
        assert (refused(line(body, MESSAGES)) == []) is passes


def test_a_refusal_behind_arguments_says_where_it_is() -> None:
    image = {"type": "image", "source": {"type": "url", "url": CANARY}}
    body = said(called({"image_url": CANARY}), image)
    where = "body.messages[1].content[1].source"
    assert refused(line(body, MESSAGES)) == [("media_url_refused", where)]


@pytest.mark.parametrize(
    "body",
    [
        {"images": [CANARY]},
        {"images": CANARY},
        {"image": CANARY},
        {"video": "file:///etc/passwd"},
        {"audio": " HTTP://127.0.0.1"},
    ],
)
def test_fields_that_are_media_themselves_are_looked_at(body: dict[str, Any]) -> None:
    assert [code for code, _ in refused(line(body))] == ["media_url_refused"]


def test_a_file_url_that_we_fetch_ourselves_is_not_the_engines() -> None:
    body = {"model": "m", "file_url": "https://example.com/a.wav"}
    assert refused(line(json.dumps(body), "/v1/audio/transcriptions")) == []


def test_a_tool_server_of_the_clients_own_is_refused() -> None:
    body = {"input": "x", "tools": [{"type": "mcp", "server_label": "a", "server_url": CANARY}]}
    assert refused(line(body, RESPONSES)) == [("unsupported_parameter", "body.tools")]


@pytest.mark.parametrize("name", sorted(REFUSED_PARTS))
def test_parts_that_put_tensors_into_the_model_are_refused(name: str) -> None:
    for part in ({"type": name, "data": "AA"}, {"type": name, name: "AA"}, {name: {"a": "AA"}}):
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert {code for code, _ in refused(line(body))} == {"unsupported_parameter"}
        assert refused(line(body), BodyPolicy(allowed_fields=frozenset({name}))) == []
        assert {code for code, _ in refused(line({"input": [part]}, RESPONSES))} == {
            "unsupported_parameter"
        }


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_a_part_of_an_odd_type_is_the_engines_to_refuse(kind: Any) -> None:
    assert refused(line({"messages": [{"content": [{"type": kind, "text": "x"}]}]})) == []


@pytest.mark.parametrize(
    ("url", "passes"),
    [
        ("https://media.example.org/a.png", True),
        ("http://MEDIA.example.org:8080?x#y", True),
        ("https://media.example.org", True),
        ("data:image/png;base64,AA", True),
        ("https://other.example.org/a.png", False),
        ("https://media.example.org.evil.com/", False),
        ("https://media.example.org@evil.com/", False),
        ("https://evil.com\\@media.example.org/", False),
        ("https://media.example.org\\@evil.com/", False),
        ("https://media.example.org /", False),
        ("https://media.example.org/a b", False),
        ("https://u:p@media.example.org/", False),
        ("https://media.example.org:99999999/", False),
        ("https://media.example.org\n/", False),
        ("https://ｍedia.example.org/", False),
        ("ftp://media.example.org/", False),
        ("file://media.example.org/etc/passwd", False),
        (" https://media.example.org/", False),
        ("https:media.example.org", False),
    ],
)
def test_an_operator_may_name_hosts_that_media_come_from(url: str, passes: bool) -> None:
    policy = BodyPolicy(media_domains=frozenset({"media.example.org"}))
    body = {"messages": [{"content": [{"image_url": {"url": url}}]}]}
    assert (refused(line(body), policy) == []) is passes


def test_a_refused_url_is_not_repeated_in_the_message() -> None:
    """It may hold a signature; the names of the client's own keys are cut short."""
    body = {"messages": [{"hunter2\n" * 50: [{"image_url": "https://x.org/?sig=hunter3"}]}]}
    text = message(body)
    assert "hunter3" not in text
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize(
    "content",
    [
        '[{"image_url":"data:,","image_url":"http://x"}]',
        '[{"image_url":{"url":"data:,","url":"http://x"}}]',
        '[{"\\u0069mage\\u005furl":"\\u0068ttp:\\/\\/x"}]',
        '[{"type":"image_url","image_url":{"u\\u0072l":"http://x"}}]',
        '"x","content":[{"image_url":"http://x"}]',
    ],
)
def test_what_the_engine_reads_counts_however_it_is_written(content: str) -> None:
    body = '{"model":"m","messages":[{"role":"user","content":' + content + "}]}"
    assert [code for code, _ in refused(line(body))] == ["media_url_refused"]


def test_of_a_repeated_url_only_the_last_one_counts() -> None:
    content = '[{"image_url":"http://x","image_url":"data:,"}]'
    body = '{"model":"m","messages":[{"role":"user","content":' + content + "}]}"
    assert refused(line(body)) == []


JSON = st.recursive(
    st.sampled_from(["a", CANARY, "data:,", "", 1, None, True, "image_embeds"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["a", "url", "content", "type", "image_url", "video_url", "image_embeds"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


def holds_media(value: Any) -> bool:
    """The same question, asked without regard to time."""
    if isinstance(value, list):
        return any(map(holds_media, value))
    if not isinstance(value, dict):
        return False
    for key, child in value.items():
        if key in {"image_url", "video_url"}:
            wanted = child.get("url") if isinstance(child, dict) else child
            if CANARY in (wanted if isinstance(wanted, list) else [wanted]):
                return True
            if wanted in ("a", "image_embeds") or (
                isinstance(wanted, list) and {"a", "image_embeds"} & {str(one) for one in wanted}
            ):
                return True
        if key == "image_embeds" and child is not None:
            return True
        if key == "type" and child == "image_embeds":
            return True
        if holds_media(child):
            return True
    return False


@given(JSON, st.sampled_from([RESPONSES, "/pooling", "/v1/embeddings"]))
def test_no_way_of_nesting_hides_media(value: Any, endpoint: str) -> None:
    body = {"input": [value]}
    assert bool(refused(line(body, endpoint))) is holds_media(body)


@given(JSON)
def test_no_way_of_nesting_hides_media_in_the_parts_of_a_chat(value: Any) -> None:
    body = {"messages": [{"role": "user", "content": [value]}]}
    assert bool(refused(line(body))) is holds_media(body)
