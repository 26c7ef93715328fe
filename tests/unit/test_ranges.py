"""Which chunk a runner takes: its own range first, and never nothing while one is free."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchyard.ranges import Piece, choose


def pieces(states: str, *, small: str = "") -> list[Piece]:
    """A letter for each chunk: ``.`` is free, a lower-case runner is done, an upper-case at it.

    ``small``: the same for chunks of a quarter of the size at the end.
    """
    return [
        Piece(
            index=index,
            first_record=10 * index,
            request_count=10,
            tokens=100 if index < len(states) else 25,
            is_free=state == ".",
            is_held=state.isupper(),
            owner=None if state == "." else state.lower(),
        )
        for index, state in enumerate(states + small)
    ]


def chosen(states: str, owner: str, *, small: str = "", place: int | None = None) -> int | None:
    piece = choose(pieces(states, small=small), owner, place=place)
    return None if piece is None else piece.index


def test_a_runner_by_itself_goes_from_the_first_to_the_last() -> None:
    assert chosen("....", "a") == 0
    assert chosen("aA..", "a") == 2


def test_a_runner_goes_on_after_its_own_chunk() -> None:
    assert chosen("aA...bB...", "a") == 2
    assert chosen("aA...bB...", "b") == 7


def test_one_that_comes_begins_in_the_middle_of_the_largest_range() -> None:
    assert chosen("A.........", "b") == 6
    assert chosen("A..B......", "c") == 7


def test_one_whose_range_is_done_takes_the_second_half_of_anothers() -> None:
    assert chosen("A......bbB", "b") == 4
    assert chosen("A.bbbbbbbB", "b") == 1


def test_what_a_runner_that_has_gone_left_over_is_taken_from_its_beginning() -> None:
    assert chosen("xxx....A..", "b") == 3


def test_small_chunks_are_left_for_the_end() -> None:
    """Engines that share a batch end together because the last chunks are small."""
    assert chosen("A..", "b", small="....") == 2
    assert chosen("aAB", "b", small="....") == 3
    assert chosen("aAB", "a", small="B...") == 6


def test_beside_a_chunk_of_another_batch_a_runner_begins_where_that_one_is() -> None:
    assert chosen("..........", "a", place=45) == 4
    assert chosen("....A.....", "a", place=45) == 5
    assert chosen("...aaaaaaa", "a", place=45) == 0


def test_chunks_with_the_longest_answers_go_before_ranges_and_before_what_is_warm() -> None:
    """So that none of them is begun when all else has ended."""
    bits = [7, 7, 7, 9, 9, 9, 9, 7, 7, 7]
    left = [
        replace(each, answer_bits=n) for each, n in zip(pieces("A" + 9 * "."), bits, strict=True)
    ]

    def index(owner: str, place: int | None = None) -> int:
        piece = choose(left, owner, place=place)
        assert piece is not None
        return piece.index

    assert index("a") == index("b") == 3
    assert [index("b", place) for place in (5, 45, 85)] == [3, 4, 3]
    left[3] = replace(left[3], is_free=False, is_held=True, owner="b")
    assert (index("a"), index("b")) == (6, 4)


def test_nothing_is_chosen_where_nothing_is_free() -> None:
    assert chosen("aAbB", "c") is None


@given(st.lists(st.sampled_from(".abAB"), min_size=1, max_size=30), st.data())
def test_every_chunk_is_taken_once_whoever_asks(states: list[str], data: st.DataObject) -> None:
    """So none starves, and no runner is idle while one is free."""
    left = pieces("".join(states))
    free = {piece.index for piece in left if piece.is_free}
    while free:
        owner = data.draw(st.sampled_from("abc"))
        place = data.draw(st.none() | st.integers(0, 10 * len(states)))
        piece = choose(left, owner, place=place)
        assert piece is not None
        assert piece.index in free
        free.remove(piece.index)
        left[piece.index] = replace(piece, is_free=False, is_held=True, owner=owner)
    assert choose(left, "a") is None


@given(st.integers(2, 6), st.integers(20, 200))
def test_engines_that_run_side_by_side_have_few_ranges(engines: int, chunks: int) -> None:
    """Each begins anew only where it takes half of what another one has left."""
    left = pieces("." * chunks)
    orders: dict[str, list[int]] = {name: [] for name in "abcdef"[:engines]}
    for turn in range(chunks):
        owner = "abcdef"[turn % engines]
        for index in orders[owner][-1:]:
            left[index] = replace(left[index], is_held=False)
        piece = choose(left, owner)
        assert piece is not None
        orders[owner].append(piece.index)
        left[piece.index] = replace(piece, is_free=False, is_held=True, owner=owner)
    jumps = sum(
        later != earlier + 1 for order in orders.values() for earlier, later in pairwise(order)
    )
    assert jumps <= engines * chunks.bit_length()
