"""The plan: exact prefix order, flat memory, balanced chunks."""

from __future__ import annotations

import io
import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.lines.lines import RequestLine
from batchyard.plan.cutter import ChunkCutter, requests_of_a_chunk
from batchyard.plan.lengths import LengthHistory, Lengths
from batchyard.plan.planner import Planner, PlanSummary
from batchyard.plan.records import BYTES_PER_TOKEN, RECORD, left_to_run, read_records

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"


def line(number: int, body: dict[str, Any], url: str = CHAT) -> RequestLine:
    return RequestLine(number + 1, number, number * 1000, 900, f"id-{number}", url, "m", body)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant"]
    messages = [{"role": roles[i % 3], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages} | fields


def plan(
    lines: list[RequestLine], spool: Path, **options: Any
) -> tuple[list[int], PlanSummary, Any]:
    options = {"order": "prefix", "chunk_requests": 100} | options
    planner = Planner(spool=spool, **options)
    for item in lines:
        planner.add(item)
    file = io.BytesIO()
    summary = planner.write(file)
    records = read_records(file.getvalue())
    return [int(o) for o in records["ordinal"]], summary, records


def test_requests_that_share_a_prefix_run_side_by_side(tmp_path: Path) -> None:
    documents = [f"document {d} " * 50 for d in range(5)]
    lines = [
        line(n, chat("You answer.", documents[n % 5] + f"question {n // 5}")) for n in range(50)
    ]
    random.Random(1).shuffle(lines)
    lines = [line(n, item.body) for n, item in enumerate(lines)]
    order, summary, records = plan(lines, tmp_path)
    by_document = [lines[o].body["messages"][1]["content"][:11] for o in order]
    changes = sum(a != b for a, b in itertools.pairwise(by_document))
    assert changes == 4
    shared_tokens = records["shared_bytes"].sum() / BYTES_PER_TOKEN
    assert shared_tokens > 0.85 * summary.prompt_tokens


def test_the_shared_prefix_of_neighbours_is_measured_exactly(tmp_path: Path) -> None:
    lines = [line(0, {"prompt": "abcdef"}, "/v1/completions")]
    lines += [line(1, {"prompt": "abcxyz"}, "/v1/completions")]
    _, _, records = plan(lines, tmp_path)
    assert list(records["shared_bytes"]) == [0, 3]


def test_prompts_with_other_cache_salts_share_nothing(tmp_path: Path) -> None:
    """As the engine has it; those with the same one run side by side."""
    salts = ["a", "ab", "", "a", None, "ab"]
    bodies = [{"prompt": f"abc{n}", "cache_salt": salt} for n, salt in enumerate(salts)]
    lines = [line(n, body, "/v1/completions") for n, body in enumerate(bodies)]
    order, _, records = plan(lines, tmp_path)
    assert order == [2, 4, 0, 3, 1, 5]
    assert list(records["shared_bytes"]) == [0, 3, 0, 3, 0, 3]


def with_adapter(number: int, body: dict[str, Any], adapter: str) -> RequestLine:
    return msgspec.structs.replace(line(number, body), adapter=adapter)


def test_prompts_with_other_adapters_share_nothing(tmp_path: Path) -> None:
    """As the engine has it; those with the same one run side by side, in prefix order."""
    adapters = ["b", "", "a", "b", "", "a"]
    prompts = "yyyxxx"
    lines = [
        with_adapter(n, {"messages": [{"role": "", "content": prompts[n]}]}, adapter)
        for n, adapter in enumerate(adapters)
    ]
    order, _, records = plan(lines, tmp_path)
    assert order == [5, 2, 3, 0, 4, 1]
    assert list(records["shared_bytes"]) == [0, 2, 0, 2, 0, 2]


def test_long_answers_first_part_no_adapters_requests(tmp_path: Path) -> None:
    """An engine has few adapters at hand: with each change others wait."""
    lines = [
        with_adapter(n, chat(f"{n:03d}", max_tokens=(10, 5000)[n % 2]), "abc"[n % 3])
        for n in range(60)
    ]
    order, _, _ = plan(lines, tmp_path)
    assert order != sorted(order, key=lambda n: (n % 3, n))
    changes = sum(a % 3 != b % 3 for a, b in itertools.pairwise(order))
    assert changes == 2


def test_requests_of_two_adapters_never_share_an_answer(tmp_path: Path) -> None:
    bodies = [{**chat("same", temperature=0), "model": model} for model in ("m", "a", "a")]
    lines = [with_adapter(n, each, ("", "a", "a")[n]) for n, each in enumerate(bodies)]
    _, summary, _ = plan(lines, tmp_path, deduplicates=True)
    assert summary.copies == 1


def test_tools_come_before_messages_as_templates_render_them(tmp_path: Path) -> None:
    tools = [[{"type": "function", "function": {"name": name}}] for name in "ab"]
    lines = [line(n, chat("s", f"u{n % 3}", tools=tools[n % 2])) for n in range(12)]
    order, _, _ = plan(lines, tmp_path)
    used = [lines[o].body["tools"][0]["function"]["name"] for o in order]
    assert used == sorted(used)


def test_text_parts_of_a_message_are_seen_as_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "same text "}, {"type": "text", "text": "end"}]
    as_parts = {"messages": [{"role": "user", "content": parts}]}
    as_text = {"messages": [{"role": "user", "content": "same text end"}]}
    _, _, records = plan([line(0, as_parts), line(1, as_text)], tmp_path)
    assert records["shared_bytes"][1] == len("\x1euser\x1fsame text end")


def test_input_order_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [line(n, chat(str(random.Random(n).random()) * 40)) for n in range(500)]
    order, _, _ = plan(lines, tmp_path, order="input", memory_bytes=5_000)
    assert order == list(range(500))


@given(st.lists(st.text(alphabet="ab\u00e9", max_size=12), max_size=60))
def test_spilling_to_disk_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str]
) -> None:
    spool = tmp_path_factory.getbasetemp()
    lines = [line(n, {"prompt": p}, "/v1/completions") for n, p in enumerate(prompts)]
    in_memory = plan(lines, spool)
    spilled = plan(lines, spool, memory_bytes=600)
    assert spilled[:2] == in_memory[:2]
    assert [prompts[o].encode() for o in in_memory[0]] == sorted(p.encode() for p in prompts)


def test_many_runs_are_merged_in_several_rounds(tmp_path: Path) -> None:
    prompts = [str(random.Random(n).random()) for n in range(300)]
    lines = [line(n, {"prompt": p}, "/v1/completions") for n, p in enumerate(prompts)]
    order, _, _ = plan(lines, tmp_path, memory_bytes=1)
    assert [prompts[o] for o in order] == sorted(prompts)
    assert list(tmp_path.iterdir()) == []


def test_a_record_takes_32_bytes_and_says_where_the_line_is(tmp_path: Path) -> None:
    _, _, records = plan([line(7, chat("hello", max_tokens=9))], tmp_path)
    assert RECORD.itemsize == 32
    assert (records["offset"][0], records["length"][0]) == (7000, 900)
    assert records["output_tokens"][0] == 9


@pytest.mark.parametrize("requests", [1, 99, 100, 101, 1000, 1037])
def test_chunks_cover_every_record_once(tmp_path: Path, requests: int) -> None:
    lines = [line(n, chat(f"{n}", max_tokens=1 + n % 300)) for n in range(requests)]
    _, summary, _ = plan(lines, tmp_path)
    covered = sorted(
        r for c in summary.chunks for r in range(c.first_record, c.first_record + c.request_count)
    )
    assert covered == list(range(requests))
    assert [c.index for c in summary.chunks] == list(range(len(summary.chunks)))


def test_chunks_are_balanced_by_tokens_not_by_lines(tmp_path: Path) -> None:
    lines = [line(n, chat(f"{n:04}", max_tokens=1000 if n < 100 else 100)) for n in range(1000)]
    _, summary, _ = plan(lines, tmp_path)
    estimates = [chunk.token_estimate for chunk in summary.chunks]
    assert max(estimates[:8]) < 1.3 * min(estimates[:8])


@pytest.mark.parametrize(("requests", "sizes"), [(700, [100] * 7), (800, [100] * 6 + [25] * 8)])
def test_the_last_chunks_of_many_are_smaller(
    tmp_path: Path, requests: int, sizes: list[int]
) -> None:
    """Engines that share a batch are done with it at about the same time."""
    lines = [line(n, chat(f"{n:04}", max_tokens=100)) for n in range(requests)]
    _, summary, _ = plan(lines, tmp_path)
    assert [chunk.request_count for chunk in summary.chunks] == sizes


def test_requests_with_long_outputs_run_first(tmp_path: Path) -> None:
    lines = [line(n, chat(f"{n:04}", max_tokens=2048 if n % 2 else 16)) for n in range(1000)]
    order, summary, _ = plan(lines, tmp_path)
    assert order == [*range(1, 1000, 2), *range(0, 1000, 2)]
    assert summary.chunks[0].first_record == 0


def test_of_a_large_file_whole_chunks_with_long_outputs_run_first(tmp_path: Path) -> None:
    """It is sorted on disk, and its end is a small part of it."""
    count = 70_000
    body = {limit: chat("x", max_tokens=limit) for limit in (16, 2048)}
    lines = [line(n, body[16 if n < count // 2 else 2048]) for n in range(count)]
    order, summary, _ = plan(lines, tmp_path, chunk_requests=5000)
    assert order == list(range(count))
    assert summary.chunks[0].first_record >= count // 2 - 5000


def test_each_record_has_its_place_in_prefix_order(tmp_path: Path) -> None:
    lines = [line(n, chat(f"{n:04}", max_tokens=16 if n < 5 else 2048)) for n in range(10)]
    _, _, records = plan(lines, tmp_path)
    assert list(records["rank"]) == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_input_order_does_not_look_at_lengths(tmp_path: Path) -> None:
    lines = [line(n, chat(f"{n}", max_tokens=1 + 50 * n)) for n in range(20)]
    order, _, _ = plan(lines, tmp_path, order="input")
    assert order == list(range(20))


def test_the_number_of_samples_multiplies_the_expected_output(tmp_path: Path) -> None:
    _, summary, _ = plan([line(0, chat("x", max_tokens=10, n=3))], tmp_path)
    assert summary.output_tokens == 30


def test_embeddings_have_no_output_tokens(tmp_path: Path) -> None:
    body = {"model": "m", "input": ["a", "b"]}
    _, summary, _ = plan([line(0, body, "/v1/embeddings")], tmp_path)
    assert summary.output_tokens == 0


def embed(number: int, text: str) -> RequestLine:
    return line(number, {"model": "m", "input": text}, "/v1/embeddings")


def groups(records: Any) -> list[list[int]]:
    """The ordinals of each request that runs, with those of its copies behind it."""
    found: list[list[int]] = []
    for record in records:
        if record["prompt_tokens"]:
            found.append([])
        found[-1].append(int(record["ordinal"]))
    return found


@pytest.mark.parametrize("order", ["prefix", "input"])
@pytest.mark.parametrize("memory_bytes", [24 * 1024**2, 5_000])
def test_copies_follow_the_first_of_their_kind(
    tmp_path: Path, order: str, memory_bytes: int
) -> None:
    lines = [embed(n, f"text {n % 7}") for n in range(210)]
    random.Random(1).shuffle(lines)
    lines = [line(n, item.body, item.url) for n, item in enumerate(lines)]
    _, summary, records = plan(
        lines, tmp_path, deduplicates=True, order=order, memory_bytes=memory_bytes
    )
    found = groups(records)
    assert [len(group) for group in found] == [30] * 7
    assert all(group == sorted(group) for group in found)
    for group in found:
        assert len({lines[o].body["input"] for o in group}) == 1
    assert (summary.copies, summary.requests) == (203, 210)
    if order == "input":
        assert [group[0] for group in found] == sorted(group[0] for group in found)


def test_copies_have_no_tokens_and_count_for_none(tmp_path: Path) -> None:
    lines = [line(n, chat("hello", temperature=0, max_tokens=9)) for n in range(50)]
    _, all_of_them, _ = plan(lines, tmp_path)
    _, once, records = plan(lines, tmp_path, deduplicates=True)
    assert 50 * once.prompt_tokens == all_of_them.prompt_tokens
    assert once.output_tokens == 9
    assert sum(chunk.token_estimate for chunk in once.chunks) == once.prompt_tokens + 9
    assert not records["prompt_tokens"][1:].any()
    assert not records["output_tokens"][1:].any()


def test_without_the_option_nothing_is_a_copy(tmp_path: Path) -> None:
    _, summary, records = plan([embed(n, "the same") for n in range(10)], tmp_path)
    assert summary.copies == 0
    assert records["prompt_tokens"].all()


def test_requests_that_draw_lots_have_no_copies(tmp_path: Path) -> None:
    lines = [line(n, chat("hello")) for n in range(10)]
    _, summary, _ = plan(lines, tmp_path, deduplicates=True)
    assert summary.copies == 0


def test_no_chunk_parts_a_request_from_its_copies(tmp_path: Path) -> None:
    lines = [embed(n, f"text {n % 40}") for n in range(4000)]
    _, summary, records = plan(lines, tmp_path, deduplicates=True, chunk_requests=10)
    assert len(summary.chunks) > 10
    assert sum(chunk.request_count for chunk in summary.chunks) == 4000
    assert all(records["prompt_tokens"][chunk.first_record] for chunk in summary.chunks)


def test_copies_stay_with_their_request_when_long_outputs_go_first(tmp_path: Path) -> None:
    lines = [
        line(n, chat(f"question {n % 30} " * 3, temperature=0, max_tokens=2 ** (n % 30 % 9)))
        for n in range(300)
    ]
    order, _, records = plan(lines, tmp_path, deduplicates=True)
    assert [len(group) for group in groups(records)] == [10] * 30
    assert sorted(order) == list(range(300))
    outputs = [int(n) for n in records["output_tokens"] if n]
    assert outputs == sorted(outputs, reverse=True)


def test_more_than_a_runner_holds_of_one_kind_run_more_than_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.plan.duplicates._MOST_COPIES", 24)
    _, summary, records = plan([embed(n, "a") for n in range(60)], tmp_path, deduplicates=True)
    assert [len(group) for group in groups(records)] == [25, 25, 10]
    assert summary.copies == 57


def test_prefixes_are_measured_as_if_there_were_no_copies(tmp_path: Path) -> None:
    texts = ["abcdef", "abcdef", "abcxyz"]
    lines = [line(n, {"prompt": t, "seed": 1}, "/v1/completions") for n, t in enumerate(texts)]
    _, _, records = plan(lines, tmp_path, deduplicates=True)
    run = records[records["prompt_tokens"] > 0]
    assert list(run["shared_bytes"]) == [0, 3]


def test_of_what_is_left_to_run_the_first_copy_takes_the_place_of_a_finished_request(
    tmp_path: Path,
) -> None:
    lines = [embed(n, f"text {n // 4}") for n in range(12)]
    _, _, records = plan(lines, tmp_path, deduplicates=True)
    left = left_to_run(records, {0, 2, 4, 5, 6, 7, 9})
    assert [(int(one["ordinal"]), list(copies["ordinal"])) for one, copies in left] == [
        (1, [3]),
        (8, [10, 11]),
    ]
    assert left_to_run(records, set(range(12))) == []


def test_copies_do_not_make_a_chunk_one_of_short_answers() -> None:
    """A chunk of long answers goes first, however many requests share them."""
    cutter = ChunkCutter(requests=24, tokens=262, chunk_requests=12)
    for _ in range(4):
        cutter.add(1, 32)
    for _ in range(2):
        cutter.add(1, 64)
        for _ in range(9):
            cutter.add_copy()
    chunks = [(chunk.first_record, chunk.request_count) for chunk in cutter.finish()]
    assert chunks == [(4, 20), (0, 4)]


@pytest.mark.parametrize(
    ("requests", "size"),
    [(10, 1024), (50_000, 1024), (131_072, 1024), (1_000_000, 7812), (100_000_000, 8192)],
)
def test_the_chunks_of_a_large_batch_are_larger(requests: int, size: int) -> None:
    assert requests_of_a_chunk(requests, 1024) == size


def test_an_operator_may_want_chunks_that_are_larger_still() -> None:
    assert requests_of_a_chunk(1_000_000, 20_000) == 20_000


SECRET = b"key"


def kinds(count: int, **body: Any) -> list[RequestLine]:
    """Two templates in turn."""
    return [
        line(n, chat(f"template {n % 2}", f"question {n:04d}", **body)) for n in range(2 * count)
    ]


def written(planner: Planner, history: LengthHistory | None = None) -> tuple[PlanSummary, Any]:
    file = io.BytesIO()
    summary = planner.write(file, history, SECRET)
    return summary, read_records(file.getvalue())


def planner_of(lines: list[RequestLine], spool: Path, **options: Any) -> Planner:
    planner = Planner(**{"order": "prefix", "chunk_requests": 100, "spool": spool} | options)
    for item in lines:
        planner.add(item)
    return planner


def test_each_record_has_the_number_of_its_class(tmp_path: Path) -> None:
    summary, records = written(planner_of(kinds(30), tmp_path))
    assert len(summary.classes.table) == 2
    for record in records:
        number = int(record["length_class"])
        kind = int(record["ordinal"]) % 2
        assert number == int(records[records["ordinal"] == kind]["length_class"][0])
    assert all(each.endpoint == CHAT and each.bucket == 0 for each in summary.classes.table)


def test_each_chunk_has_its_requests_and_tokens_by_class(tmp_path: Path) -> None:
    summary, records = written(planner_of(kinds(200), tmp_path))
    assert len(summary.chunks) > 2
    for chunk in summary.chunks:
        own = records[chunk.first_record : chunk.first_record + chunk.request_count]
        assert chunk.prompt_tokens == own["prompt_tokens"].sum()
        assert {n: share.runs for n, share in chunk.outputs.items()} == {
            int(n): int((own["length_class"] == n).sum()) for n in set(own["length_class"])
        }
        outputs = sum(share.output_tokens for share in chunk.outputs.values())
        assert outputs == own["output_tokens"].sum()
        assert chunk.token_estimate == chunk.prompt_tokens + outputs


def test_copies_and_answers_without_tokens_have_no_class(tmp_path: Path) -> None:
    copies = [line(n, chat("s", "same", temperature=0)) for n in range(3)]
    lines = [*copies, *(embed(n, "a") for n in range(3, 6))]
    _, records = written(planner_of(lines, tmp_path, deduplicates=True))
    assert sorted(records["length_class"]) == [0, 0, 0, 0, 0, 1]


def history_of(summary: PlanSummary, records: Any, tokens: tuple[int, int]) -> LengthHistory:
    """As if the requests with even ordinals had answers of the first length."""
    history = LengthHistory()
    for kind, count in enumerate(tokens):
        number = int(records[records["ordinal"] == kind]["length_class"][0])
        lengths = Lengths()
        for _ in range(100):
            lengths.add(count)
        history.add({summary.classes.table[number - 1]: lengths})
    return history


def test_a_plan_with_history_puts_what_was_long_before_first(tmp_path: Path) -> None:
    before, records = written(planner_of(kinds(30), tmp_path))
    assert list(records["ordinal"] % 2) == [0] * 30 + [1] * 30
    history = history_of(before, records, (5, 900))
    after, records = written(planner_of(kinds(30), tmp_path), history)
    assert list(records["ordinal"] % 2) == [1] * 30 + [0] * 30
    assert after.output_tokens < before.output_tokens + 30 * 900
    assert after.learned_requests == 60
    assert before.learned_requests == 0


def test_some_of_each_unknown_template_run_first_in_a_large_plan(tmp_path: Path) -> None:
    summary, records = written(planner_of(kinds(300), tmp_path))
    assert sorted(records["ordinal"][:36] % 2) == [0] * 18 + [1] * 18
    assert list(records["ordinal"][36:300] % 2) == [0] * 264
    history = history_of(summary, records, (100, 100))
    _, records = written(planner_of(kinds(300), tmp_path), history)
    assert list(records["ordinal"][:300] % 2) == [0] * 300


def test_chunks_of_unknown_kinds_hold_one_kind_each(tmp_path: Path) -> None:
    """Which goes first can still be decided when their lengths are known."""
    summary, records = written(planner_of(kinds(300), tmp_path, chunk_requests=400))
    ends = [chunk.first_record + chunk.request_count for chunk in summary.chunks]
    assert ends[-1] == 600
    assert 36 + 282 in ends  # the samples, the rest of one kind, and then the other
    history = history_of(summary, records, (100, 100))
    known, _ = written(planner_of(kinds(300), tmp_path, chunk_requests=400), history)
    assert 318 not in [chunk.first_record + chunk.request_count for chunk in known.chunks]


def test_until_their_lengths_are_known_kinds_take_turns(tmp_path: Path) -> None:
    summary, records = written(planner_of(kinds(300), tmp_path, chunk_requests=400))
    firsts = [records[chunk.first_record : chunk.first_record + 20] for chunk in summary.chunks]
    kinds_of = [set((first["ordinal"] % 2).tolist()) for first in firsts]
    assert kinds_of[1:] == [{0}, {1}] * 4


def test_a_plan_without_a_key_knows_no_template(tmp_path: Path) -> None:
    summary = planner_of(kinds(30), tmp_path).write(io.BytesIO())
    assert [each.template for each in summary.classes.table] == [""]


def test_where_answers_are_a_small_part_nothing_goes_first_to_learn_them(tmp_path: Path) -> None:
    lines = [line(n, chat(f"{n % 2}", f"{n:04d} " * 400, max_tokens=8)) for n in range(600)]
    _, records = written(planner_of(lines, tmp_path))
    assert list(records["ordinal"][:300] % 2) == [0] * 300
