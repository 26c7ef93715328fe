"""What a file would be to run: figures for a person and for a program, and its bad lines."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.plan.lengths import LengthClass, Lengths, bucket_of
from batchyard.schedule.hours import Hours, HoursWindow
from tests.cli.conftest import Background, Ended, chat_line, with_store
from tests.contract.engine.conftest import require_vllm
from tests.unit.storage.web_server import gives, running_web_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.store import Store

    Run = Callable[..., Ended]

QUESTIONS, DOCUMENTS = 5, 40
SMALL_ENGINE = ("--cache-tokens", "4000", "--sequences", "8")


def questions_on_documents() -> list[dict[str, Any]]:
    """About 500 tokens each, in the order that a loop over the questions writes."""
    return [
        chat_line(f"{question}-{document}", f"document {document} " * 150 + f"question {question}")
        for question in range(QUESTIONS)
        for document in range(DOCUMENTS)
    ]


def write(path: Path, lines: list[dict[str, Any]]) -> bytes:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(content)
    return content


@pytest.fixture(autouse=True)
def no_home(alone: Run, tmp_path: Path) -> None:
    """Nothing that is asked here needs one."""
    shutil.rmtree(tmp_path / "home")


def test_a_file_cannot_write_to_the_terminal(alone: Run, tmp_path: Path) -> None:
    line = chat_line("a", "x")
    line["body"]["model"] = "m\x1b[2J"
    write(tmp_path / "in.jsonl", [line])
    ended = alone("estimate", "in.jsonl")
    assert (ended.status, "no batch of model m�[2J has run yet" in ended.stdout) == (0, True)


@pytest.fixture
def documents(tmp_path: Path) -> bytes:
    """``in.jsonl`` and its content."""
    return write(tmp_path / "in.jsonl", questions_on_documents())


def figures(run: Run, *words: str) -> dict[str, Any]:
    ended = run("estimate", *words, "--json")
    assert (ended.status, ended.stderr) == (0, "")
    return dict(json.loads(ended.stdout))


def test_it_says_what_our_order_is_worth_and_leaves_nothing_behind(
    alone: Run, documents: bytes, tmp_path: Path
) -> None:
    ended = alone("estimate", "in.jsonl", "--model", "stub-model", *SMALL_ENGINE)
    assert (ended.status, ended.stderr) == (0, "")
    lines = {line[:16].strip(): line[16:] for line in ended.stdout.splitlines()}
    assert lines["requests"] == "200"
    assert lines["from the cache"] == "79 % in our order, 0 % in the file's, 79 % at most"
    assert lines["gain of order"].endswith("with 4,000 tokens of KV cache and 8 sequences")
    assert float(lines["gain of order"].split("×")[0]) > 1.2
    assert lines["time"] == "unknown: no batch of model stub-model has run yet"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_program_gets_the_same_as_json(alone: Run, documents: bytes) -> None:
    found = figures(alone, "in.jsonl", *SMALL_ENGINE)
    assert (found["model"], found["requests"], found["errors"]) == ("stub-model", 200, [])
    assert found["hit_rate"] == found["hit_rate_ceiling"] > 0.7
    assert found["hit_rate_file_order"] < 0.1
    assert found["seconds"] is None


def test_what_fits_into_the_cache_gains_nothing(alone: Run, documents: bytes) -> None:
    found = figures(alone, "in.jsonl", "--cache-tokens", "1000000")
    assert found["hit_rate_file_order"] == found["hit_rate"]
    assert found["gain"] == pytest.approx(1, abs=0.01)


def test_identical_deterministic_requests_count_once_where_they_run_once(
    alone: Run, tmp_path: Path
) -> None:
    lines = [chat_line(f"id-{n}", f"question {n % 3} " * 40) for n in range(12)]
    for line in lines:
        line["body"]["temperature"] = 0
    write(tmp_path / "in.jsonl", lines)
    apart, once = (figures(alone, "in.jsonl", *words) for words in ((), ("--deduplicate",)))
    assert (apart["requests"], apart["deduplicated_requests"]) == (12, 0)
    assert (once["requests"], once["deduplicated_requests"]) == (12, 9)
    assert once["simulated_requests"] == 3
    for tokens in ("prompt_tokens", "output_tokens"):
        assert once[tokens] * 4 == apart[tokens]
    words = alone("estimate", "in.jsonl", "--deduplicate").stdout
    assert "12, 9 of them answered by an identical request" in words


def test_tokens_are_counted_as_the_user_knows_them(alone: Run, documents: bytes) -> None:
    four, two = (
        figures(alone, "in.jsonl", "--bytes-per-token", ratio)["prompt_tokens"]
        for ratio in ("4", "2")
    )
    assert two == 2 * four


def test_the_time_is_that_of_the_measured_rate(alone: Run, documents: bytes) -> None:
    with_store(
        lambda store: store.rates.record(
            "stub-model", "gpu", tokens_per_second=1000.0, load_seconds=30.0
        )
    )
    found = figures(alone, "in.jsonl")
    tokens = found["prompt_tokens"] + found["output_tokens"]
    assert found["seconds"] == pytest.approx(tokens / 1000 + 30)
    words = alone("estimate", "in.jsonl").stdout
    assert "on one engine, at 1,000 tokens a second as measured on pool gpu" in words


def test_the_time_counts_prompts_by_what_they_were_seen_to_cost(
    alone: Run, documents: bytes
) -> None:
    """Here they cost nothing, so it is the time of the answers."""
    with_store(
        lambda store: store.rates.record(
            "stub-model",
            "gpu",
            tokens_per_second=1000.0,
            work_per_second=200.0,
            prompt_tokens_per_second=800.0,
            prompt_weight=0.0,
        )
    )
    found = figures(alone, "in.jsonl")
    assert found["seconds"] == pytest.approx(found["output_tokens"] / 100)


def test_the_hours_of_the_engine_are_named_and_counted(alone: Run, documents: bytes) -> None:
    """Each is open for half of the time, so that it takes twice as long, and a wait."""

    async def record(store: Store) -> None:
        await store.rates.record("stub-model", "gpu", tokens_per_second=10.0)
        half = HoursWindow("*/2 * * * *", "1m")
        await store.engine_hours.record({"stub-model": Hours((half,))})

    with_store(record)
    found = figures(alone, "in.jsonl")
    assert found["done_in_seconds"] == pytest.approx(2 * found["seconds"], abs=61)
    words = alone("estimate", "in.jsonl").stdout
    assert "\nhours           " in words
    assert ", by these hours\n" in words
    assert "warning" not in words
    late = alone("estimate", "in.jsonl", "--completion-window", "1h").stdout
    assert late.splitlines()[-1] == ("warning         that is after the completion window, 1h")


def test_a_window_without_hours_in_it_is_warned_of(alone: Run, documents: bytes) -> None:
    leap_days = Hours((HoursWindow("0 0 29 2 *", "1h", timezone="Europe/Berlin"),))
    with_store(lambda store: store.engine_hours.record({"stub-model": leap_days}))
    lines = alone("estimate", "in.jsonl").stdout.splitlines()
    assert lines[-2].startswith("hours           begin on 20")
    assert lines[-2].endswith("-02-29 at 00:00 Europe/Berlin")
    assert lines[-1] == "warning         no hours begin within the completion window, 24h"
    assert figures(alone, "in.jsonl")["opens_at"] > 0
    assert alone("estimate", "in.jsonl", "--completion-window", "soon").status == 3


def test_a_database_that_does_not_answer_costs_only_the_time(
    alone: Run, documents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    ended = alone("estimate", "in.jsonl")
    assert ended.status == 0
    assert "unknown: the database does not answer" in ended.stdout


def test_bad_lines_are_listed_without_their_content(alone: Run, tmp_path: Path) -> None:
    lines = [chat_line(f"id-{n}", "canary") for n in range(6)]
    lines[1]["method"] = "canary"
    lines[3]["body"]["model"] = "another"
    lines[4]["custom_id"] = "id-0"
    write(tmp_path / "in.jsonl", lines)
    ended = alone("estimate", "in.jsonl", "--model", "stub-model")
    assert (ended.status, ended.stderr) == (1, "")
    listed = [line.split()[1:3] for line in ended.stdout.splitlines() if line.startswith("  line")]
    assert listed == [
        ["2:", "invalid_method:"],
        ["4:", "model_not_found:"],
        ["5:", "duplicate_custom_id:"],
    ]
    assert "requests        4" in ended.stdout
    assert "canary" not in ended.stdout


def test_what_clients_may_not_send_is_a_bad_line_unless_the_file_is_for_run(
    alone: Run, tmp_path: Path
) -> None:
    lines = [chat_line("id-0"), chat_line("id-1")]
    lines[1]["body"]["priority"] = 7
    write(tmp_path / "in.jsonl", lines)
    ended = alone("estimate", "in.jsonl")
    assert ended.status == 1
    assert "line 2: unsupported_parameter: body.priority" in ended.stdout
    ended = alone("estimate", "in.jsonl", "--no-client-rules")
    assert (ended.status, ended.stderr) == (0, "")


def test_a_program_gets_the_bad_lines_too(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    ended = alone("estimate", "in.jsonl", "--json")
    assert ended.status == 1
    found = json.loads(ended.stdout)
    assert (found["requests"], found["hit_rate"]) == (0, None)
    assert {error["line"] for error in found["errors"]} == {1}


def test_more_bad_lines_are_listed_than_a_batch_lists(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("nonsense\n" * 1200)
    ended = alone("estimate", "in.jsonl")
    assert ended.stdout.count("invalid_json_line") == 1000
    assert "more_errors: 200 more errors are not listed." in ended.stdout


@pytest.mark.parametrize("has_good_line", [False, True])
def test_only_a_file_with_good_lines_may_run_without_the_bad_ones(
    alone: Run, tmp_path: Path, has_good_line: bool
) -> None:
    """A file that is no UTF-8 has none."""
    lines = "".join(json.dumps(chat_line(f"id-{n}")) + "\n" for n in range(3))
    good = lines.encode() if has_good_line else b""
    (tmp_path / "in.jsonl").write_bytes(lines.encode("utf-16") + b"\n" + good)
    ended = alone("estimate", "in.jsonl")
    assert ended.status == 1
    assert "the file is UTF-16, so save it as UTF-8" in ended.stdout
    assert ("--on-invalid error_file" in ended.stdout) is has_good_line


def test_a_file_without_lines_is_refused(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    ended = alone("estimate", "in.jsonl")
    assert ended.status == 1
    assert "empty_file" in ended.stdout


def test_lines_for_another_endpoint_are_bad_lines(alone: Run, documents: bytes) -> None:
    ended = alone("estimate", "in.jsonl", "--endpoint", "/v1/completions")
    assert ended.status == 1
    assert "line 1: invalid_url" in ended.stdout


def test_the_file_may_be_at_a_url(alone: Run, documents: bytes, background: Background) -> None:
    web = background.enter(running_web_server())
    web.answers = [gives(documents)]
    assert figures(alone, web.url("/in.jsonl?sig=canary"))["requests"] == 200


def test_a_file_that_is_not_there_is_one_sentence(alone: Run) -> None:
    ended = alone("estimate", "nowhere.jsonl")
    assert (ended.status, ended.stdout) == (4, "")
    assert ended.stderr == "batchyard: nowhere.jsonl does not exist\n"


def test_answers_are_expected_to_be_as_long_as_earlier_ones_of_the_tenant(
    alone: Run, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", [chat_line(f"id-{n}") for n in range(20)])
    unknown = figures(alone, "in.jsonl")
    assert (unknown["output_tokens"], unknown["learned_requests"]) == (5120, 0)
    lengths = Lengths()
    for _ in range(50):
        lengths.add(30)
    each = LengthClass("/v1/chat/completions", "", bucket_of(None))
    with_store(lambda store: store.lengths.record({("default", "stub-model"): {each: lengths}}))
    known = figures(alone, "in.jsonl")
    assert (known["output_tokens"], known["learned_requests"]) == (600, 20)
    assert "about 600, as earlier answers were" in alone("estimate", "in.jsonl").stdout
    assert figures(alone, "in.jsonl", "--tenant", "another")["output_tokens"] == 5120


def test_a_deep_estimate_says_why_nothing_was_counted(alone: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [chat_line("a")])
    ended = alone("estimate", "in.jsonl", "--validation", "deep")
    assert ended.status == 0
    assert "1 line not counted: PREFECT_API_URL is not set" in ended.stdout


@pytest.mark.vllm
def test_fields_that_vllm_ignores_are_a_warning(alone: Run, tmp_path: Path) -> None:
    require_vllm()
    lines = [chat_line("a", "x"), chat_line("b", "x")]
    for line in lines:
        line["body"] |= {"guided_choice": ["a"], "top_p": 0.5, "service_tier": None}
    write(tmp_path / "in.jsonl", lines)
    ended = alone("estimate", str(tmp_path / "in.jsonl"))
    assert ended.status == 0
    assert "warning         vLLM ignores body.guided_choice: 2 lines" in ended.stdout
    assert ended.stdout.count("vLLM ignores") == 1
