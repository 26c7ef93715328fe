"""Batches handed over: acknowledged is durable, and a runner of batches is woken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.dispatch import RUN_BATCHES
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.results.output_rules import OnInvalidOutput
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.services.user_locations import places_of
from batchyard.store import DeliveryKind, RunnerKind
from tests.cli.conftest import Background, Ended, with_services, with_store
from tests.contract.store.samples import begun_batch
from tests.hurry import hurried
from tests.pages import block, replaced, words_of
from tests.steps.conftest import Yard, chat_line
from tests.unit.test_dispatch import SmallPrefect, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

    Run = Callable[..., Ended]

SUBMIT = ("submit", "-i", "in.jsonl", "-o", "out.jsonl")
NOBODY = "http://127.0.0.1:9/api"


@pytest.fixture
def prefect(background: Background) -> SmallPrefect:
    served: SmallPrefect = background.enter(serving(SmallPrefect()))
    return served


@pytest.fixture
def here(alone: Run, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, and a Prefect that has the deployments."""
    monkeypatch.setenv("PREFECT_API_URL", prefect.url)
    return alone


def all_batches() -> list[BatchRecord]:
    return with_store(lambda store: store.batches.page())


def woken(prefect: SmallPrefect) -> int:
    """How many runners of batches were started; nothing else was."""
    ids = {run["deployment_id"] for run in prefect.runs}
    assert ids <= {RUN_BATCHES.replace("/", "--")}
    return len(prefect.runs)


# -- submit --------------------------------------------------------------------------------------


def test_a_chain_is_read_from_a_file_with_its_templates_beside_it(
    here: Run, tmp_path: Path
) -> None:
    judge = '{"prompt": {{ content | tojson }}}'
    (tmp_path / "judge.json.j2").write_text(judge)
    (tmp_path / "chain.toml").write_text(block("docs/how-to/chain-batches.md", "chain-file"))
    assert here(*SUBMIT, "--chain", "chain.toml").status == 0
    (batch,) = all_batches()
    first, second = with_store(lambda store: store.chains.get(batch.id)).stages
    assert (first.endpoint, first.model, first.template) == (
        "/v1/chat/completions",
        None,
        judge,
    )
    assert (second.endpoint, second.model) == ("/v1/embeddings", "tiny-embed")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[then]", "cannot be read"),
        ('[[then]]\ntemplate = "x"', "cannot be read"),
        ('[[then]]\nmodle = "x"', "cannot be read"),
        ('then = "x"', "cannot be read"),
        # It must not become a batch without further stages.
        ('[[stages]]\nmodel = "x"', "each stage begins with [[then]]"),
        ('[[Then]]\nmodel = "x"', "each stage begins with [[then]]"),
        ("", "each stage begins with [[then]]"),
        ("then = []", "each stage begins with [[then]]"),
    ],
)
def test_a_chain_that_cannot_be_read_is_refused(
    here: Run, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "chain.toml").write_text(text)
    ended = here(*SUBMIT, "--chain", "chain.toml")
    assert ended.status == 3
    assert why in ended.stderr
    assert all_batches() == []


def test_a_submitted_batch_is_in_the_database_and_a_runner_is_woken(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    ended = here(*SUBMIT, "--model", "m", "--priority", "-5", "--tenant", "search")
    assert (ended.status, ended.stderr) == (0, "")
    (batch,) = all_batches()
    assert ended.stdout == f"{batch.id}\n"
    assert (batch.priority, batch.tenant, batch.options.models) == (-5, "search", ("m",))
    locations = with_store(lambda store: store.batch_places.locations(batch.id))
    assert locations.input == str(tmp_path / "in.jsonl")
    assert woken(prefect) == 1
    assert prefect.runs[0]["parameters"] == {}


def test_a_window_that_ends_before_the_engines_hours_begin_is_warned_of(
    here: Run, prefect: SmallPrefect
) -> None:
    """The batch is made all the same: the operator may change the hours."""
    leap_days = Hours((HoursWindow("0 0 29 2 *", "1h", timezone="Europe/Berlin"),))
    with_store(lambda store: store.engine_hours.record({"m": leap_days}))
    ended = here(*SUBMIT, "--model", "m")
    assert ended.status == 0
    assert ended.stdout.startswith("batch_")
    assert ended.stderr.startswith("batchyard: the hours of engine m begin on 20")
    assert ended.stderr.endswith("when the completion window of the batch has ended.\n")
    assert here(*SUBMIT, "--model", "other").stderr == ""
    assert here(*SUBMIT).stderr == ""


def test_a_background_batch_is_submitted_and_shown(here: Run, prefect: SmallPrefect) -> None:
    command = block("docs/how-to/operate-batches.md", "background")
    batch_id = here(*words_of(command.strip())).stdout.strip()
    (batch,) = all_batches()
    assert (batch.completion_window, batch.expires_at - batch.created_at) == (
        "background",
        30 * 86_400,
    )
    shown = here("show", batch_id).stdout
    assert "  window    background, ends in " in shown
    refused = here(*SUBMIT, "--completion-window", "sometime")
    assert refused.status == 3
    assert "for example 24h, or background." in refused.stderr


def test_of_many_batches_one_runner_takes_care(here: Run, prefect: SmallPrefect) -> None:
    for _ in range(3):
        assert here(*SUBMIT).status == 0
    assert len(all_batches()) == 3
    assert woken(prefect) == 1


def test_a_runner_that_lives_is_left_alone(here: Run, prefect: SmallPrefect) -> None:
    with_store(lambda store: store.runners.register(kind=RunnerKind.BATCHES, pool="control"))
    assert here(*SUBMIT).status == 0
    assert woken(prefect) == 0


def test_without_a_prefect_to_ask_no_batch_is_made(alone: Run) -> None:
    ended = alone(*SUBMIT)
    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr.startswith("batchyard: PREFECT_API_URL is not set")
    assert all_batches() == []


def test_a_batch_is_kept_when_prefect_does_not_answer(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", NOBODY)
    ended = alone(*SUBMIT)
    assert_kept(ended, f"The Prefect server at {NOBODY} did not answer")


@pytest.mark.parametrize(
    ("status", "message"), [(500, "Prefect answered 500"), (401, "refuses the login (HTTP 401)")]
)
def test_a_batch_is_kept_when_prefect_refuses(
    here: Run, prefect: SmallPrefect, status: int, message: str
) -> None:
    prefect.status = status
    assert_kept(here(*SUBMIT), message)


def test_a_batch_is_kept_when_the_deployments_are_missing(here: Run, prefect: SmallPrefect) -> None:
    prefect.deployments.clear()
    assert_kept(here(*SUBMIT), "run `batchyard deploy`")


def assert_kept(ended: Ended, message: str) -> None:
    (batch,) = all_batches()
    assert batch.status.value == "validating"
    assert (ended.status, ended.stdout) == (0, f"{batch.id}\n")
    (line,) = ended.stderr.splitlines()
    assert message in line
    assert line.endswith(
        f" {batch.id} is saved and waits until Prefect is back and the reconciler runs."
    )


def test_a_quota_that_is_used_up_is_a_clear_refusal(here: Run, prefect: SmallPrefect) -> None:
    here("quota", "search", "--active-batches", "1")
    assert here(*SUBMIT, "--tenant", "search").status == 0
    ended = here(*SUBMIT, "--tenant", "search")
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr == (
        "batchyard: Tenant 'search' may have 1 active batches; it has 1, and this would "
        "add 1. Wait until earlier batches are done, or cancel one, or have the quota raised.\n"
    )
    assert here(*SUBMIT).status == 0


def test_a_window_that_cannot_be_kept_is_a_clear_refusal(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where admission is on, and the model is known to take longer than that to load."""
    measured = {"tokens_per_second": 1.0, "load_seconds": 600.0}
    with_store(lambda store: store.rates.record("m", "gpu", **measured))
    monkeypatch.setenv("BATCHYARD_ADMISSION", "refuse")
    ended = here(*SUBMIT, "--model", "m", "--completion-window", "1m")
    assert (ended.status, ended.stdout) == (3, "")
    assert "its completion window of 1m ends in 0 h 1 min" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_who_is_told_of_a_batch_is_kept_with_it(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__HOST", "mail.example.com")
    told = ("--webhook-url", "https://example.com/in?x=1", "--notify-email", "me@example.com")
    assert here(*SUBMIT, *told).status == 0
    (batch,) = all_batches()
    assert batch.notify_email == "me@example.com"
    locations = with_store(lambda store: store.batch_places.locations(batch.id))
    assert locations.receivers[DeliveryKind.WEBHOOK] == "https://example.com/in?x=1"


def test_that_identical_requests_run_once_is_kept_with_the_batch(here: Run) -> None:
    for words in ((), ("--deduplicate",)):
        assert here(*SUBMIT, *words).status == 0
    assert sorted(batch.options.deduplicate for batch in all_batches()) == [False, True]


def test_the_template_of_a_dataset_is_kept_with_the_batch(here: Run, tmp_path: Path) -> None:
    (tmp_path / "body.j2").write_text('{"messages": {{ messages | tojson }}}')
    words = ("submit", "-i", "data/*.parquet", "--template")
    assert here(*words, "body.j2").status == 0
    (batch,) = all_batches()
    assert (batch.endpoint, batch.options.is_rendered) == ("/v1/chat/completions", True)
    locations = with_store(lambda store: store.batch_places.locations(batch.id))
    assert locations.input == str(tmp_path / "data" / "*.parquet")
    assert locations.template == '{"messages": {{ messages | tojson }}}'
    missing = here(*words, "missing.j2")
    assert missing.status == 2
    assert "missing.j2 cannot be read: No such file" in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--webhook-url", "http://example.com/"), "'webhook_url' must be an https:// URL."),
        (("--notify-email", "a@example.com,b"), "'notify_email' must be one e-mail address."),
        (("--notify-email", "me@example.com"), "This server sends no e-mail: "),
    ],
)
def test_whom_nobody_can_tell_is_refused(here: Run, words: tuple[str, str], message: str) -> None:
    ended = here(*SUBMIT, *words)
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr.startswith(f"batchyard: {message}")
    assert all_batches() == []


def test_a_batch_that_no_other_machine_would_see_is_refused(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is a file here, and Prefect's workers are elsewhere."""
    monkeypatch.setenv("PREFECT_API_URL", "http://192.0.2.7:4200/api")
    ended = alone(*SUBMIT)
    assert (ended.status, ended.stdout) == (1, "")
    assert "192.0.2.7" in ended.stderr
    assert "BATCHYARD_DATABASE_URL" in ended.stderr


# -- cancel and reconcile ------------------------------------------------------------------------


def test_a_cancellation_wakes_a_runner(here: Run, prefect: SmallPrefect) -> None:
    batch = with_store(begun_batch)
    assert here("cancel", batch.id).stdout == "cancelling\n"
    assert woken(prefect) == 1


def test_a_cancellation_holds_when_prefect_is_away(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", NOBODY)
    batch = with_store(begun_batch)
    ended = alone("cancel", batch.id)
    assert (ended.status, ended.stdout) == (0, "cancelling\n")
    assert "and waits until Prefect is back" in ended.stderr


@pytest.mark.parametrize("batches", [0, 2])
def test_reconcile_wakes_a_runner_where_batches_are_free(
    here: Run, prefect: SmallPrefect, batches: int
) -> None:
    for _ in range(batches):
        with_store(begun_batch)
    assert here("reconcile").status == 0
    assert woken(prefect) == min(batches, 1)


# -- retry ---------------------------------------------------------------------------------------


def ended_with_failures(folder: Path) -> str:
    """A batch of five requests, two of which failed; its id."""

    async def run(services: Services) -> str:
        fault = Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400, body=b"{}")
        engine = StubEngine(max_num_seqs=8, faults=[fault])
        yard = Yard(services, folder, engine)
        yard.use(engine)
        yard.set(flush_seconds=0.05)
        lines = [chat_line(f"id-{n}", "bad" if n in {1, 3} else "good") for n in range(5)]
        with hurried():
            return (await yard.run(lines)).id

    return with_services(run)


def test_a_retry_is_a_new_batch_of_the_lines_that_failed(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    prefect.offered = {"stub-model"}
    old = ended_with_failures(tmp_path)
    command = block("docs/how-to/operate-batches.md", "retry")
    words = words_of(replaced(command, {"BATCH": old}).strip())
    ended = here(*words, "--completion-window", "2h")
    assert (ended.status, ended.stderr) == (0, "")
    new = with_store(lambda store: store.batches.get(ended.stdout.strip()))
    assert (new.retry_of, new.completion_window) == (old, "2h")
    locations = with_store(lambda store: store.batch_places.locations(new.id))
    assert locations.output == str(tmp_path / "again.jsonl")
    assert locations.error == str(tmp_path / "still-failed.jsonl")
    assert custom_ids(new.input_file_id) == ["id-1", "id-3"]
    assert woken(prefect) == 1


def test_a_retry_may_have_other_lines_with_other_parameters(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    """The stub's short answers are cut off; the two failed ones are chosen by their status."""
    prefect.offered = {"stub-model"}
    old = ended_with_failures(tmp_path)
    command = block("docs/how-to/operate-batches.md", "retry-changed")
    words = words_of(replaced(command, {"BATCH": old}).strip())
    new_id = here(*words).stdout.strip()
    cut = with_store(lambda store: store.batches.get(new_id))
    assert custom_ids(cut.input_file_id) == ["id-0", "id-2", "id-4"]
    bodies = [line["body"] for line in lines_in(cut.input_file_id)]
    assert [body["max_tokens"] for body in bodies] == [4096] * 3
    chosen = here("retry", old, "--code", "409,400", "--set", 'stop=["END"]', "--json")
    failed = json.loads(chosen.stdout)
    assert [line["body"]["stop"] for line in lines_in(failed["input_file_id"])] == [["END"]] * 2
    none = here("retry", old, "--invalid-json", "--finish-reason", "stop", "--set", "a")
    assert (none.status, none.stdout) == (3, "")
    assert "'a' sets nothing" in none.stderr


def test_a_retry_may_keep_the_results_of_the_other_lines(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    prefect.offered = {"stub-model"}
    old = ended_with_failures(tmp_path)
    command = block("docs/how-to/operate-batches.md", "retry-merged")
    words = words_of(replaced(command, {"BATCH": old}).strip())
    new_id = here(*words).stdout.strip()
    new = with_store(lambda store: store.batches.get(new_id))
    assert custom_ids(new.input_file_id) == [f"id-{n}" for n in range(5)]
    assert (new.options.kept.completed, new.options.kept.failed) == (3, 0)


def test_a_batch_is_submitted_with_a_threshold_of_errors(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    (tmp_path / "requests.jsonl").touch()
    command = block("docs/how-to/operate-batches.md", "threshold")
    assert here(*words_of(command.strip())).status == 0
    (batch,) = all_batches()
    assert batch.options.error_threshold == "5%"


def test_several_files_are_one_batch(here: Run, prefect: SmallPrefect, tmp_path: Path) -> None:
    for name in ("part-1.jsonl", "part-2.jsonl"):
        (tmp_path / name).touch()
    command = block("docs/how-to/operate-batches.md", "several")
    words = words_of(command.strip().replace("part-*.jsonl", "part-1.jsonl part-2.jsonl"))
    batch_id = here(*words, "-i", "s3://bucket/part-0").stdout.strip()
    places = with_services(lambda services: places_of(services, batch_id))
    assert str(places.input) == ", ".join(
        ("s3://bucket/part-0", str(tmp_path / "part-1.jsonl"), str(tmp_path / "part-2.jsonl"))
    )
    none = here("submit", "-o", "out.jsonl")
    assert none.status != 0
    assert "Give an input file." in none.stderr


def test_a_batch_is_submitted_with_what_bad_answers_do(
    here: Run, prefect: SmallPrefect, tmp_path: Path
) -> None:
    (tmp_path / "requests.jsonl").touch()
    (tmp_path / "rule.json").write_text('{"invalid_json": true, "then": "error_file"}')
    command = block("docs/how-to/operate-batches.md", "invalid-output").replace("\\\n", "")
    found = []
    for words in (words_of(command.strip()), (*SUBMIT, "--on-invalid-output", "@rule.json")):
        batch_id = here(*words).stdout.strip()
        batch = with_store(lambda store, it=batch_id: store.batches.get(it))
        found.append(batch.options.on_invalid_output)
    assert found == [
        OnInvalidOutput(finish_reasons=("length",), set={"max_tokens": 4096}),
        OnInvalidOutput(invalid_json=True, then="error_file"),
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("@none.json", "none.json cannot be read: No such file or directory."),
        ("{", "It is not JSON"),
        ("[]", "It is not an object"),
        ("{}", "on_invalid_output needs a test"),
    ],
)
def test_what_bad_answers_do_is_an_object_in_json(here: Run, rule: str, message: str) -> None:
    ended = here(*SUBMIT, "--on-invalid-output", rule)
    assert ended.status != 0
    assert message in " ".join(ended.stderr.replace("│", "").split())


def custom_ids(file_id: str) -> list[Any]:
    return [line["custom_id"] for line in lines_in(file_id)]


def lines_in(file_id: str) -> list[Any]:
    async def read(services: Services) -> bytes:
        file = await services.store.files.get(file_id)
        return b"".join([part async for part in services.storage.get(file.storage_key)])

    return [json.loads(line) for line in with_services(read).splitlines()]


def test_what_still_runs_cannot_be_retried(here: Run, prefect: SmallPrefect) -> None:
    batch = with_store(begun_batch)
    ended = here("retry", batch.id)
    assert (ended.status, ended.stdout) == (3, "")
    assert "wait until it has ended, or cancel it, and retry then" in ended.stderr
    assert woken(prefect) == 0


def test_without_a_prefect_to_ask_nothing_is_retried(alone: Run) -> None:
    batch = with_store(begun_batch)
    ended = alone("retry", batch.id)
    assert ended.status == 1
    assert ended.stderr.startswith("batchyard: PREFECT_API_URL is not set")


# -- paths of one machine where there are several --------------------------------------------------


@pytest.mark.parametrize("words", [("-o", "out.jsonl"), ("-o", "s3://b/o", "-e", "e.jsonl")])
def test_a_path_is_no_place_for_results_where_there_may_be_several_machines(
    here: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It would be written on whichever machine runs the batch, and nothing would say which."""
    monkeypatch.setenv("BATCHYARD_STORAGE", "s3://bucket/yard")
    monkeypatch.setenv("BATCHYARD_MACHINE", "gpu-7")
    ended = here("submit", "-i", "s3://inbox/in.jsonl", *words)
    assert (ended.status, ended.stdout) == (3, "")
    assert "may be run on another machine than gpu-7" in ended.stderr
    assert "batchyard results" in ended.stderr
    assert all_batches() == []


def test_places_that_every_machine_sees_are_accepted(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_STORAGE", "s3://bucket/yard")
    assert here("submit", "-i", "in.jsonl", "-o", "s3://outbox/out.jsonl").status == 0
    assert here("submit", "-i", "in.jsonl").status == 0
    monkeypatch.setenv("BATCHYARD_SHARED_PATHS", "true")
    assert here(*SUBMIT).status == 0
    assert len(all_batches()) == 3
