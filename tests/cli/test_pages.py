"""Blocks of the how-to pages whose commands need no server: run as they are printed there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.locations.local_file import LocalFile
from batchyard.steps.create.create import BatchRequest, create_batch
from tests.cli.conftest import Ended, chat_line, with_services
from tests.contract.engine.conftest import TINY_CHAT, require_vllm
from tests.pages import block, replaced, words_of
from tests.steps.conftest import Yard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from batchyard.services.services import Services

    Run = Callable[..., Ended]

USE_THE_API = "docs/how-to/use-the-api.md"
RUN_ONE_BATCH = "docs/how-to/run-one-batch.md"
OPERATE = "docs/how-to/operate-batches.md"
LIVE = "docs/how-to/serve-live.md"
ESTIMATE = "docs/how-to/estimate-a-batch.md"


def run_block(run: Run, page: str, name: str, examples: Mapping[str, str] | None = None) -> str:
    """What the block's commands print to standard output, each of which succeeds."""
    said = []
    for line in replaced(block(page, name), examples or {}).splitlines():
        if words := words_of(line.removeprefix("$ ")):
            ended = run(*words)
            assert ended.status == 0, (line, ended.stderr)
            said.append(ended.stdout)
    assert said
    return "".join(said)


def output_of(page: str, name: str) -> str:
    """What the page says that the block's command prints."""
    lines = block(page, name).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("$ "))


def chats(path: Path, count: int, model: str = "stub-model", **changed: object) -> None:
    lines = [chat_line(f"id-{n}", f"question {n}", model) | changed for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def half_done(alone: Run, tmp_path: Path) -> str:
    """The id of a batch that has ended, and in which one of two requests failed."""

    async def work(services: Services) -> str:
        yard = Yard(services, tmp_path, StubEngine())
        refused = Fault(FaultKind.ANSWER, lambda body: b"refused" in body, status=400)
        yard.use(StubEngine(faults=[refused]))
        path = yard.write_input([chat_line("good", "one"), chat_line("bad", "refused")])
        batch_id = await create_batch(yard.services, BatchRequest(input=LocalFile(path)))
        return (await yard.finish(batch_id)).id

    return with_services(work)


def test_keys_are_created_listed_and_revoked(alone: Run) -> None:
    first, *others = block(USE_THE_API, "keys").splitlines()
    made = alone(*words_of(first))
    key_id = next(word for word in made.stderr.split() if word.startswith("key_"))
    listing, revoking = others
    assert "laptop" in alone(*words_of(listing)).stdout
    revoked = alone(*words_of(replaced(revoking, {"key_4c0ffee4c0ffee42": key_id})))
    assert revoked.status == 0


def test_keys_with_options_are_created(alone: Run) -> None:
    for line in block(USE_THE_API, "key-options").splitlines():
        assert alone(*words_of(line)).status == 0
    said = alone("keys", "list").stdout
    for words in ("tenant, read-only", "expires in", "operator"):
        assert words in said


def test_results_go_to_a_place_and_to_standard_output(
    alone: Run, half_done: str, tmp_path: Path
) -> None:
    place = {"batch_…": half_done, "$NEW_PRESIGNED_PUT": "there.jsonl"}
    said = run_block(alone, RUN_ONE_BATCH, "results", place)
    assert (tmp_path / "there.jsonl").read_text() == said
    assert json.loads(said)["custom_id"] == "good"


def test_answers_are_followed_into_files(alone: Run, half_done: str, tmp_path: Path) -> None:
    assert run_block(alone, OPERATE, "follow", {"BATCH": half_done}) == ""
    for name, custom_id in (("answers.jsonl", "good"), ("failed.jsonl", "bad")):
        assert json.loads((tmp_path / name).read_text())["custom_id"] == custom_id


def test_the_columns_of_the_list_are_those_of_the_page(alone: Run) -> None:
    head = output_of(OPERATE, "list").splitlines()[0]
    assert alone("list", "--all").stdout.splitlines()[0].split() == head.split()


def test_quotas_are_set_and_shown(alone: Run) -> None:
    """The page's tenant has used some; ours has not."""
    said = run_block(alone, OPERATE, "quota")
    shown = re.sub(r"  [\d,]+ (?=  )", "    0 ", output_of(OPERATE, "quota"))
    assert [line.split() for line in said.splitlines()] == [
        line.split() for line in shown.splitlines()
    ]


def test_the_limit_of_live_requests_is_set_as_the_page_says(alone: Run) -> None:
    said = run_block(alone, LIVE, "live-quota")
    assert said.splitlines()[-1].split() == ["live", "requests", "-", "16"]


def test_the_first_step_of_a_rotation_says_what_is_next(alone: Run) -> None:
    alone("list")
    assert run_block(alone, OPERATE, "rotate") == output_of(OPERATE, "rotate")


def test_the_reconciler_counts(alone: Run) -> None:
    assert run_block(alone, OPERATE, "reconcile") == output_of(OPERATE, "reconcile")


def test_an_estimate_has_the_lines_of_the_page(alone: Run, tmp_path: Path) -> None:
    chats(tmp_path / "questions.jsonl", 20, "Qwen/Qwen3-8B")
    said = run_block(alone, ESTIMATE, "estimate")
    labels = [line[:16].strip() for line in output_of(ESTIMATE, "estimate").splitlines()]
    assert [line[:16].strip() for line in said.splitlines()] == labels


def test_an_estimate_lists_bad_lines(alone: Run, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    chats(path, 210, "Qwen/Qwen3-8B")
    lines = path.read_text().splitlines()
    lines[16] = lines[16].replace("POST", "GET")
    lines[202] = lines[202].replace("id-202", "id-0")
    path.write_text("\n".join(lines))
    (command, *_) = block(ESTIMATE, "bad-lines").splitlines()
    ended = alone(*words_of(command.removeprefix("$ ")))
    assert ended.status == 1
    _, _, expected = output_of(ESTIMATE, "bad-lines").partition("…\n")
    assert ended.stdout.endswith(expected)


def test_a_deep_estimate_counts_as_the_page_says(alone: Run, tmp_path: Path) -> None:
    require_vllm()
    (tmp_path / ".models").symlink_to(TINY_CHAT.parent)
    long = {**chat_line("long"), "body": {**chat_line("long")["body"], "max_tokens": 9000}}
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (chat_line("a", "Hello!"), long)))
    (command, *_) = block(ESTIMATE, "deep").splitlines()
    ended = alone(*words_of(command.removeprefix("$ ")))
    assert ended.status == 1
    expected = output_of(ESTIMATE, "deep").splitlines()[1]
    (counted,) = (line for line in ended.stdout.splitlines() if line[:13] == expected[:13])
    assert counted == expected.replace("209,164", "12").replace("400 lines", "1 line")
    assert "line 2: context_length_exceeded: body.max_tokens is 9000" in ended.stdout
