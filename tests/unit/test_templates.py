"""Request bodies from clients' templates: what they make, and what they cannot do."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.control.chains import renderer as renderer_module
from batchyard.control.chains.renderer import Renderer
from batchyard.lines.json_depth import MAX_DEPTH
from batchyard.lines.templates import (
    MAX_BODY_DEPTH,
    BodyNotMade,
    BodyTemplate,
    TemplateRefused,
    check_template,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TENANT = "acme"
SPENT = "it took too long or too much memory for earlier lines"
NAMES = ("content", "request")
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

BUSY = "{% for a in range(99999) %}{% for b in range(5) %}{% endfor %}{% endfor %}"


def test_values_keep_their_order_and_every_character() -> None:
    content = {"z": 'é"\n</script>', "a": [1, None, True]}
    made = BodyTemplate('{"input": {{ content | tojson }}}').render({"content": content})
    assert made == {"input": content}
    assert list(made["input"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("[1]", "not a JSON object"),
        ('{"a": ', "not JSON"),
        ("{{ content.no_such }}", "UndefinedError"),
        ("{{ content.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'x' * 20000000 }}", "too large"),
    ],
)
def test_what_makes_no_object_says_why(source: str, why: str) -> None:
    with pytest.raises(BodyNotMade, match=why):
        BodyTemplate(source).render({"content": "text"})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ contnt }}", "'contnt' is not one of its variables, which are: content, request"),
        ("{% if %}", "Expected an expression"),
        ("{% include 'other' %}", "may not include"),
        ("x" * 70_000, "more than 65536 characters"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "nested too deeply"),
    ],
)
def test_what_can_never_be_rendered_is_refused_before_it_is_run(source: str, why: str) -> None:
    with pytest.raises(TemplateRefused, match=why):
        check_template(source, NAMES)


def test_names_of_its_own_are_no_unknown_variables() -> None:
    check_template(
        "{% set n = 1 %}{% macro m(x) %}{{ x ~ n }}{% endmacro %}"
        "{% for each in request.messages %}{{ m(each.content) ~ loop.index }}{% endfor %}",
        NAMES,
    )


def test_to_check_a_template_runs_nothing_of_it() -> None:
    check_template("{{ 'a' | center(10 ** 12) }}" + FOREVER, NAMES)


async def rendered(
    renderer: Renderer, variables: list[dict[str, Any]]
) -> list[bytes | BodyNotMade]:
    """A body of each, or why there is none."""
    bodies: list[bytes | BodyNotMade] = []
    while len(bodies) < len(variables):
        bodies += await renderer.render(variables[len(bodies) :])
    return bodies


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    source = (
        '{% if content == "slow" %}' + FOREVER + "{% endif %}"
        '{% if content == "large" %}{{ "a" | center(10 ** 11) }}{% endif %}'
        '{% if content == "busy" %}' + BUSY + "{% endif %}"
        '{% if content == "bad" %}{{ content.nothing }}{% endif %}'
        '{"input": {{ content | tojson }}}'
    )
    async with Renderer(source, TENANT) as opened:
        yield opened


async def test_a_hostile_line_ends_by_itself_and_the_others_are_rendered(
    renderer: Renderer,
) -> None:
    texts = ["one", "slow", "bad", "large", "two"]
    made = await rendered(renderer, [{"content": each} for each in texts])
    assert [made[0], made[4]] == [b'{"input":"one"}', b'{"input":"two"}']
    assert [str(each) for each in made[1:4]] == [
        "it takes too long",
        "UndefinedError: 'str object' has no attribute 'nothing'",
        "it takes too much memory",
    ]


async def test_errors_that_only_speak_of_slowness_keep_no_later_line_from_being_rendered() -> None:
    """Jinja's texts may repeat what a model has answered."""
    source = '{"input": {{ {"yes": 1}[content] }}}'
    answers = [{"content": f"This is too long for me ({n})."} for n in range(10)]
    async with Renderer(source, TENANT) as renderer:
        refused = await rendered(renderer, answers)
        made = await renderer.render([{"content": "yes"}])
    assert all("too long for me" in str(each) for each in refused)
    assert made == [b'{"input":1}']


async def test_lines_that_take_too_much_memory_are_tried_ten_times(renderer: Renderer) -> None:
    made = [each for _ in range(12) for each in await renderer.render([{"content": "large"}])]
    assert [str(each) for each in made] == 10 * ["it takes too much memory"] + 2 * [SPENT]


async def test_a_template_has_an_amount_of_processor_time_for_all_its_lines(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no line takes too long, and whichever process renders them."""
    monkeypatch.setattr(renderer_module, "_CPU_SECONDS", 0.3)
    monkeypatch.setattr(renderer_module, "_LINE_CPU_SECONDS", 0.001)
    made: list[bytes | BodyNotMade] = []
    for _ in range(40):
        made += await renderer.render([{"content": "busy"}])
        await renderer._end()
    assert made[0] == b'{"input":"busy"}'
    assert str(made[-1]) == SPENT


async def test_a_large_chain_does_not_end_for_its_size(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its lines adds to what all of them may take."""
    monkeypatch.setattr(renderer_module, "_CPU_SECONDS", 0.01)
    monkeypatch.setattr(renderer_module, "_LINE_CPU_SECONDS", 5.0)
    made = [each for _ in range(3) for each in await renderer.render([{"content": "busy"}])]
    assert renderer._cpu_seconds > 0.01
    assert made == 3 * [b'{"input":"busy"}']


async def test_templates_of_a_tenant_wait_for_each_other_and_for_no_other_tenants(
    renderer: Renderer,
) -> None:
    ended = []

    async def render(name: str, opened: Renderer, content: str) -> None:
        await rendered(opened, [{"content": content}])
        ended.append(name)

    source = '{"input": {{ content | tojson }}}'
    async with Renderer(source, TENANT) as second, Renderer(source, "other") as other:
        await asyncio.gather(
            render("slow", renderer, "slow"),
            render("second", second, "one"),
            render("other's", other, "one"),
        )
    assert ended == ["other's", "slow", "second"]


async def test_a_turn_ends_once_its_lines_took_long(renderer: Renderer) -> None:
    made = await renderer.render([{"content": "slow"}, {"content": "one"}])
    assert [str(each) for each in made] == ["it takes too long"]


async def test_its_process_is_less_urgent_than_ours_and_leaves_no_core_file(
    renderer: Renderer,
) -> None:
    await renderer.render([{"content": "one"}])
    assert renderer._process is not None
    pid = renderer._process._process.pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 5)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


async def test_a_process_that_is_not_used_ends(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await renderer.render([{"content": "one"}])
    await renderer.end_if_idle()
    assert renderer._process is not None
    monkeypatch.setattr(renderer_module, "_IDLE_SECONDS", 0.0)
    await renderer.end_if_idle()
    assert renderer._process is None
    assert await renderer.render([{"content": "two"}]) == [b'{"input":"two"}']


async def test_the_process_may_end_in_the_middle(renderer: Renderer) -> None:
    await renderer.render([{"content": "one"}])
    assert renderer._process is not None
    await renderer._process.end()
    lost, made = await rendered(renderer, [{"content": "two"}, {"content": "three"}])
    assert isinstance(lost, BodyNotMade)
    assert made == b'{"input":"three"}'


async def test_what_is_nested_too_deeply_ends_its_own_line() -> None:
    """Also where its process, with fewer calls under way, could read what we cannot."""
    most = MAX_BODY_DEPTH - 1
    depths = [1, most, most + 1, *range(900, 1001)]
    async with Renderer('{"input": {{ "[" * depth }}{{ "]" * depth }}}', TENANT) as renderer:
        made = await rendered(renderer, [{"depth": depth} for depth in depths])
    assert [isinstance(each, BodyNotMade) for each in made] == [False, False] + 102 * [True]
    assert str(made[2]) == "what it makes is nested deeper than 63 levels"


async def test_an_error_that_cannot_be_encoded_ends_its_own_line() -> None:
    """With half of a surrogate pair, which Jinja2 takes from an escape."""
    async with Renderer('{{ content.split(**{"\\ud800": 1}) }}', TENANT) as renderer:
        found = await renderer.render([{"content": "a"}, {"content": "b"}])
    assert [str(each)[:18] for each in found] == ["TypeError: '\\ud800"] * 2


async def test_of_large_bodies_only_as_many_are_made_as_may_be_held() -> None:
    """They are in the memory of the process that holds the batches of all tenants."""
    source = '{"input": "{{ letter * (size - 12) }}"}'
    asked = [{"letter": each, "size": 16_000_000} for each in "abcdef"]
    async with Renderer(source, TENANT) as renderer:
        made = await renderer.render(asked)
        assert 1 <= len(made) <= 3
        assert all(isinstance(each, bytes) for each in made)
        made += await rendered(renderer, asked[len(made) :])
    assert [each[10:11] for each in made if isinstance(each, bytes)] == [*map(str.encode, "abcdef")]


@pytest.mark.parametrize("text", ['"€€€€€€€€"', "1e15"])
async def test_a_body_is_no_larger_than_its_limit_however_short_its_text_is(text: str) -> None:
    source = '{"input": [{{ ([text] * 1_000_000) | join(",") }}]}'
    async with Renderer(source, TENANT) as renderer:
        (made,) = await renderer.render([{"text": text}])
        assert isinstance(made, BodyNotMade)
        assert str(made) == "what it makes is too large"


def test_a_body_is_as_deep_as_a_line_may_hold() -> None:
    assert MAX_BODY_DEPTH == MAX_DEPTH - 1
