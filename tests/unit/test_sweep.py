"""One walk through the prompts of several chunks, and nobody is left out of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchyard.runner.window.sweep import Sweep

MOST = 12


def walk(chunks: dict[str, list[int]], sweep: Sweep[str] | None = None) -> list[tuple[str, int]]:
    """In which order the chunks' requests go, each with the number that its prompt begins with."""
    sweep = sweep or Sweep(MOST)
    left = {name: list(prompts) for name, prompts in chunks.items() if prompts}
    order = []
    while left:
        waiting = {name: prompts[0].to_bytes(4) for name, prompts in left.items()}
        host = min(left)
        name = sweep.next(host, waiting, left.keys() - {host})
        order.append((name, left[name].pop(0)))
        if not left[name]:
            del left[name]
            sweep.forget(name)
    return order


@given(st.lists(st.lists(st.integers(0, 9)), min_size=1, max_size=5))
def test_plans_about_the_same_documents_become_one_walk(plans: list[list[int]]) -> None:
    """As long as none has so much more about one of them that the others have their turns."""
    chunks = {"abcde"[number]: sorted(plan)[:4] for number, plan in enumerate(plans)}
    prompts = [prompt for _, prompt in walk(chunks, Sweep(100))]
    assert prompts == sorted(prompts)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=40), min_size=1, max_size=5))
def test_nobody_is_passed_over_for_long(plans: list[list[int]]) -> None:
    """In any order: plans that begin with long answers, and chunks from elsewhere."""
    chunks = {"abcde"[number]: plan for number, plan in enumerate(plans)}
    order = [name for name, _ in walk(chunks)]
    left = {name: len(plan) for name, plan in chunks.items() if plan}
    waited = dict.fromkeys(left, 0)
    for name in order:
        for other in left:
            waited[other] = 0 if other == name else waited[other] + 1
            assert waited[other] <= MOST + len(plans)
        left[name] -= 1
        if not left[name]:
            del left[name]


def test_one_that_comes_later_catches_up_and_they_go_on_together() -> None:
    sweep: Sweep[str] = Sweep(MOST)
    first = [sweep.next("a", {"a": bytes([n])}, ()) for n in range(4)]
    assert first == ["a"] * 4
    order = walk({"a": [4, 5, 6], "b": [1, 2, 3, 4, 5, 6]}, sweep)
    assert [prompt for _, prompt in order] == [1, 2, 3, 4, 4, 5, 5, 6, 6]


def test_the_walk_begins_again_where_it_has_come_to_the_end() -> None:
    sweep: Sweep[str] = Sweep(MOST)
    waiting = {"a": b"m", "b": b"z"}
    assert sweep.next("a", waiting, "b") == "a"
    assert sweep.next("a", {"a": b"c", "b": b"z"}, "b") == "b"
    assert sweep.next("a", {"a": b"c", "b": b"d"}, "b") == "a"


def test_one_with_much_about_a_document_does_not_keep_the_others_there() -> None:
    order = [name for name, _ in walk({"a": [1] * 100, "b": [2] * 100})]
    assert order.index("b") == MOST
