"""``batchyard run`` as users run it, from input to results, in every form that they may write."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.settings import temporary_settings

from batchyard.engine.stub.stub import Fault, FaultKind
from blocks import S3CredentialsBlock
from tests.cli.conftest import Background, Terminal, chat_line, with_store
from tests.cli.screen import drawn
from tests.pages import block, replaced, words_of
from tests.patience import PATIENCE
from tests.services.hub import WRITER, Dataset, running_hub
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables
from tests.services.receiver import running_receiver
from tests.services.swift import BUCKET
from tests.unit.storage.web_server import gives, running_web_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefect.settings import Setting

    from batchyard.storage.bucket import S3Credentials
    from tests.cli.conftest import Ended

    Run = Callable[..., Ended]

ALL = ["id-0", "id-1", "id-2"]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_a_local_file_becomes_a_local_file(terminal: Terminal, engine_url: str) -> None:
    """Results are in input order; what is said goes to standard error; no error file is made.

    The command is that of docs/how-to/run-one-batch.md, and the key is in the environment.
    """
    ours = {"requests.jsonl": "in.jsonl", "results.jsonl": "out.jsonl", "\\\n": ""}
    ours["http://10.0.0.5:8000/v1"] = engine_url
    command = replaced(block("docs/how-to/run-one-batch.md", "engine-url"), ours)
    ended = terminal.batchyard(*words_of(command), "--model", "stub-model")
    assert ended.status == 0, ended.stderr
    assert ended.stdout == ""
    assert ids(terminal.read("out.jsonl")) == ALL
    assert terminal.names() == {"in.jsonl", "out.jsonl"}
    summary = ended.stderr[ended.stderr.index("batch_") :].splitlines()
    assert summary[0] == f"{ended.batch_id} is completed."
    assert summary[1] == "  requests  3 succeeded, 0 failed, 3 in all"
    assert summary[3] == f"  output    {terminal.folder / 'out.jsonl'}"


@pytest.mark.parametrize(
    "proxy",
    [
        {"http_proxy": "http://127.0.0.1:9"},
        {"ALL_PROXY": "socks5://127.0.0.1:9", "HTTPS_PROXY": "http://u:p@127.0.0.1:9"},
        {
            "all_proxy": "socks5h://127.0.0.1:9",
            "HTTP_PROXY": "127.0.0.1:9",
            "NO_PROXY": "a.example",
        },
    ],
    ids=" ".join,
)
def test_a_proxy_for_the_internet_is_not_asked_for_prefect(
    terminal: Terminal, engine_url: str, proxy: dict[str, str]
) -> None:
    """Companies set one on their machines. It cannot reach 127.0.0.1."""
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url),
        **{"no_proxy": None, "NO_PROXY": None} | proxy,
    )
    assert ended.status == 0, ended.stderr


def test_a_proxy_that_prefects_client_cannot_use_is_named_at_once(
    terminal: Terminal, engine_url: str
) -> None:
    """It would fail at its first call, also of a server that needs no proxy."""
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url),
        all_proxy="socks://127.0.0.1:1080/",
    )
    assert (ended.status, terminal.names()) == (1, {"in.jsonl"})
    assert ended.stderr.startswith("batchyard: all_proxy names a proxy with socks://, which")


def test_a_url_with_the_checksum_of_an_empty_body_is_warned_of_before_the_first_request(
    terminal: Terminal, engine_url: str
) -> None:
    """As AWS's SDK for JavaScript makes them."""
    query = "X-Amz-Signature=hunter2&X-Amz-SignedHeaders=host&x-amz-checksum-crc32=AAAAAA%3D%3D"
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", f"http://127.0.0.1:9/out?{query}"),
        *("--engine-url", engine_url),
    )
    assert ended.status == 1
    before, _, _ = ended.stderr.partition("3 succeeded")
    assert 'requestChecksumCalculation: "WHEN_REQUIRED"' in before
    assert "hunter2" not in ended.stderr


def test_identical_requests_run_once_and_the_summary_says_so(
    terminal: Terminal, engine_url: str
) -> None:
    lines = [chat_line(f"id-{n}") for n in range(3)]
    for line in lines:
        line["body"]["temperature"] = 0
    terminal.write("in.jsonl", lines)
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--deduplicate"),
        *("--model", "stub-model", "--engine-url", engine_url),
    )
    assert ended.status == 0, ended.stderr
    results = terminal.read("out.jsonl")
    assert ids(results) == ALL
    assert len({line["response"]["request_id"] for line in results}) == 1
    assert "2 with the answer of an identical request" in ended.stderr


def test_fields_and_media_urls_of_ones_own_file_reach_the_engine(
    terminal: Terminal, engine_url: str
) -> None:
    """As with ``vllm run-batch``; ``--client-rules`` refuses the file as the API would."""
    lines = [chat_line(f"id-{n}") for n in range(3)]
    for line in lines:
        line["body"] |= {"priority": 7, "chat_template": "x", "n": 9}
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    lines[1]["body"]["messages"][0]["content"] = [image]
    terminal.write("in.jsonl", lines)
    words = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url)
    ended = terminal.batchyard(*words)
    assert ended.status == 0, ended.stderr
    assert ids(terminal.read("out.jsonl")) == ALL
    ended = terminal.batchyard(*words, "--client-rules")
    assert ended.status == 1
    assert "body.priority is not accepted here" in ended.stderr


def test_who_is_to_be_told_of_the_end_is_told(terminal: Terminal, engine_url: str) -> None:
    """Here and now: nobody else may be there to do it."""
    with running_receiver(tls=False) as receiver:
        ended = terminal.batchyard(
            *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url),
            *("--webhook-url", receiver.url("/hook?x=1")),
            BATCHYARD_ALLOW_PRIVATE_URLS="true",
        )
        assert ended.status == 0, ended.stderr
        (request,) = receiver.requests
    assert json.loads(request.body)["data"] == {"id": ended.batch_id}


def test_in_a_pipe_each_phase_is_a_line(terminal: Terminal, engine_url: str) -> None:
    """No control characters, none of Prefect's log, and the number of requests at the end."""
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url, "--exclusive")
    )
    assert "\x1b" not in ended.stderr
    said = ended.stderr.splitlines()
    titles = [line for line in said[: said.index("Publishing files")] if not line.startswith("✓")]
    assert titles == [
        "Connecting to Prefect",
        "Fetching the input",
        "Validating and planning",
        "Loading the model",
        "Loading the model: ready",
        "Running requests: 0/3",
        "Collecting results",
    ]
    assert any(line.startswith("✓ Running requests") and "3/3" in line for line in said)


def test_in_a_terminal_no_bar_outlives_its_phase(terminal: Terminal, engine_url: str) -> None:
    """What stays on the screen is a line for each phase, then the summary."""
    screen = _screen(
        terminal, "run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url
    )
    phases = [line for line in screen if line.startswith("✓")]
    assert [line[2:26].strip() for line in phases] == [
        "Connecting to Prefect",
        "Fetching the input",
        "Validating and planning",
        "Loading the model",
        "Running requests",
        "Collecting results",
        "Publishing files",
    ]
    assert phases[4].endswith("3/3")
    assert "━" not in "".join(screen)
    assert screen.index(phases[-1]) + 1 == next(
        number for number, line in enumerate(screen) if line.startswith("batch_")
    )


def test_a_refused_request_is_a_line_of_the_error_file(
    terminal: Terminal, here: Run, serve_stub: Callable[..., str]
) -> None:
    """The others are answered, and the command has done its job: status 0."""
    refused = Fault(FaultKind.ANSWER, lambda body: b"question 1" in body, status=400)
    ended = here(
        "run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", serve_stub(faults=[refused])
    )
    assert ended.status == 0, ended.stderr
    assert ids(terminal.read("out.jsonl")) == ["id-0", "id-2"]
    (line,) = terminal.read("out.errors.jsonl")
    assert (line["custom_id"], line["response"]["status_code"]) == ("id-1", 400)
    assert f"errors    {terminal.folder / 'out.errors.jsonl'}" in ended.stderr


def test_a_batch_of_which_nothing_succeeded_ends_with_1_and_says_why(
    terminal: Terminal, here: Run, serve_stub: Callable[..., str]
) -> None:
    """Its files are written all the same; to repeat the command with --resume changes nothing."""
    refused = Fault(FaultKind.ANSWER, status=422)
    words = ("--engine-url", serve_stub(faults=[refused]))
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", *words)
    assert ended.status == 1
    assert "  requests  0 succeeded, 3 failed, 3 in all\n            3 × 422 " in ended.stderr
    assert ids(terminal.read("out.errors.jsonl")) == ALL
    again = here("run", "--resume", ended.batch_id, *words)
    assert again.status == 1
    assert "            3 × 422 " in again.stderr
    shown = here("show", ended.batch_id)
    assert (shown.status, "            3 × 422 " in shown.stdout) == (0, True)


def test_e_says_where_the_error_file_goes(
    terminal: Terminal, here: Run, serve_stub: Callable[..., str]
) -> None:
    """With -e, nothing is written beside the output."""
    refused = Fault(FaultKind.ANSWER, status=422)
    here(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "-e", "bad.jsonl"),
        *("--engine-url", serve_stub(faults=[refused])),
    )
    assert ids(terminal.read("bad.jsonl")) == ALL
    assert terminal.names() == {"in.jsonl", "bad.jsonl"}


def test_the_input_may_be_a_url(
    terminal: Terminal, here: Run, engine_url: str, background: Background
) -> None:
    """A plain http URL is read; its query stays out of what is said."""
    web = background.enter(running_web_server())
    web.answers = [gives((terminal.folder / "in.jsonl").read_bytes())]
    url = web.url("/in.jsonl?sig=canary")
    ended = here("run", "-i", url, "-o", "out.jsonl", "--engine-url", engine_url)
    assert ended.status == 0, ended.stderr
    assert ids(terminal.read("out.jsonl")) == ALL
    assert "canary" not in ended.stderr


def test_presigned_urls_on_both_sides(
    terminal: Terminal, here: Run, engine_url: str, s3: S3Credentials
) -> None:
    """A presigned GET is read, and the results are PUT to a presigned URL, on real S3."""
    client = s3.client()
    client.upload_file(str(terminal.folder / "in.jsonl"), BUCKET, "presigned/in.jsonl")
    source, target = (
        client.generate_presigned_url(method, {"Bucket": BUCKET, "Key": f"presigned/{name}"})
        for method, name in (("get_object", "in.jsonl"), ("put_object", "out.jsonl"))
    )
    ended = here("run", "-i", source, "-o", target, "--engine-url", engine_url)
    assert ended.status == 0, ended.stderr
    body = client.get_object(Bucket=BUCKET, Key="presigned/out.jsonl")["Body"].read()
    assert ids([json.loads(line) for line in body.splitlines()]) == ALL
    assert "ignature" not in ended.stderr


def test_s3_locations_use_the_credentials_of_the_block(
    terminal: Terminal,
    here: Run,
    engine_url: str,
    s3: S3Credentials,
    prefect_settings: dict[Setting, str],
) -> None:
    """``s3://`` on both sides, with the S3 block that Prefect keeps under the name default."""
    with temporary_settings(prefect_settings):
        S3CredentialsBlock(
            endpoint_url=s3.endpoint_url,
            region=s3.region,
            access_key_id=s3.access_key_id,
            secret_access_key=s3.secret_access_key,
        ).save("default", overwrite=True)
    client = s3.client()
    client.upload_file(str(terminal.folder / "in.jsonl"), BUCKET, "block/in.jsonl")
    ended = here(
        *("run", "-i", f"s3://{BUCKET}/block/in.jsonl", "-o", f"s3://{BUCKET}/block/out.jsonl"),
        *("--engine-url", engine_url),
    )
    assert ended.status == 0, ended.stderr
    body = client.get_object(Bucket=BUCKET, Key="block/out.jsonl")["Body"].read()
    assert ids([json.loads(line) for line in body.splitlines()]) == ALL


def questions(texts: list[str]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table({"question": texts}), written)
    return written.getvalue()


def dataset_command(
    name: str, here: Callable[[str], str], engine_url: str, page: str = "docs/how-to/datasets.md"
) -> list[str]:
    """That of the page, with the stub engine instead of vLLM."""
    text = here(block(page, name))
    command = text[text.index("batchyard run") :]
    model = "--model .models/tiny-chat --served-model-name tiny-chat"
    ours = {model: f"--engine-url {engine_url} --model stub-model", "\\\n": ""}
    return words_of(replaced(command, ours))


def write_template(folder: Path) -> None:
    text = block("docs/how-to/datasets.md", "dataset")
    template = text[text.index("{") : text.index("EOF\nbatchyard")]
    template = replaced(template, {"tiny-chat": "stub-model"})
    (folder / "question.json.j2").write_text(template)


def test_the_rows_of_a_dataset_come_back_with_their_answers(
    terminal: Terminal, here: Run, serve_stub: Callable[..., str]
) -> None:
    """As docs/how-to/datasets.md says; a row that fails is in the error file as well."""
    url = serve_stub(faults=[Fault(FaultKind.ANSWER, lambda body: b"two" in body, status=400)])
    write_template(terminal.folder)
    (terminal.folder / "data.parquet").write_bytes(questions(["one", "two", "three"]))
    ended = here(*dataset_command("dataset", str, url))
    assert ended.status == 0, ended.stderr
    table = pq.read_table(terminal.folder / "answers.parquet")
    assert table["question"].to_pylist() == ["one", "two", "three"]
    assert table["status"].to_pylist() == ["succeeded", "failed", "succeeded"]
    assert ids(terminal.read("answers.errors.jsonl")) == ["row-2"]


def test_a_dataset_may_be_a_folder_of_a_bucket(
    terminal: Terminal,
    here: Run,
    engine_url: str,
    s3: S3Credentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = s3.client()
    for name, texts in (("0.parquet", ["one", "two"]), ("1.parquet", ["three"])):
        client.put_object(Bucket=BUCKET, Key=f"questions/{name}", Body=questions(texts))
    client.put_object(Bucket=BUCKET, Key="questions/_SUCCESS", Body=b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3.region)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_access_key)
    write_template(terminal.folder)
    places = {"s3://inbox": f"s3://{BUCKET}", "s3://outbox": f"s3://{BUCKET}/table"}
    words = dataset_command("dataset-s3", lambda text: replaced(text, places), engine_url)
    ended = here(*words)
    assert ended.status == 0, ended.stderr
    body = client.get_object(Bucket=BUCKET, Key="table/answers.parquet")["Body"].read()
    found = pq.read_table(io.BytesIO(body))
    assert found["question"].to_pylist() == ["one", "two", "three"]
    assert found["status"].to_pylist() == ["succeeded"] * 3


def test_a_dataset_of_a_hub_is_read_and_its_answers_are_committed(
    terminal: Terminal, engine_url: str
) -> None:
    """The command of docs/how-to/run-one-batch.md, with hub and token in the environment."""
    write_template(terminal.folder)
    page = "docs/how-to/run-one-batch.md"
    with running_hub() as hub:
        for name in ("me/questions", "me/answers"):
            hub.datasets[name] = Dataset(is_private=True)
            hub.datasets[name].commit({"README.md": b""})
        hub.datasets["me/questions"].commit({"data/a.parquet": questions(["one", "two"])})
        ended = terminal.batchyard(
            *dataset_command("hub", str, engine_url, page), HF_ENDPOINT=hub.url, HF_TOKEN=WRITER
        )
        assert ended.status == 0, ended.stderr
        assert "hf_" not in ended.stderr
        body = hub.datasets["me/answers"].files()["answers.parquet"]
    assert pq.read_table(io.BytesIO(body))["question"].to_pylist() == ["one", "two"]


def test_without_a_prefect_server_the_command_brings_its_own(
    terminal: Terminal, engine_url: str
) -> None:
    """An API is started for the time of the command, and is gone afterwards."""
    ended = terminal.batchyard(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url),
        PREFECT_API_URL=None,
        PREFECT_HOME=str(terminal.folder / "home" / "prefect"),
    )
    assert ended.status == 0, ended.stderr
    assert ids(terminal.read("out.jsonl")) == ALL
    assert _processes_that_know(str(terminal.home / "prefect")) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_a_signal_stops_can_be_resumed(
    terminal: Terminal, here: Run, serve_stub: Callable[..., str], number: int, status: int
) -> None:
    """The whole process group gets the signal, as from a terminal; --resume does the rest."""
    terminal.write("in.jsonl", [chat_line(f"id-{n}", f"question {n}") for n in range(12)])
    slow = serve_stub(latency=lambda body: 600.0 if b"question 1" in body else 0.0)
    process = terminal.start(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", slow),
        BATCHYARD_FLUSH_SECONDS="0.1",
    )
    _wait_for_segments(terminal.home)
    os.killpg(process.pid, number)
    stopped = terminal.finish(process)
    assert stopped.status == status
    assert stopped.stderr.splitlines()[-1] == (
        "Stopped. Finished lines are kept. To continue, repeat the command with "
        f"--resume {stopped.batch_id}."
    )
    assert terminal.names() == {"in.jsonl"}
    assert _processes_that_know(str(terminal.home)) == []

    ended = here("run", "--resume", stopped.batch_id, "--engine-url", serve_stub())
    assert ended.status == 0, ended.stderr
    assert "Running requests: 9/12" in ended.stderr
    assert ids(terminal.read("out.jsonl")) == [f"id-{n}" for n in range(12)]


def test_pressing_ctrl_c_again_and_again_ends_the_command_in_silence(
    terminal: Terminal, serve_stub: Callable[..., str]
) -> None:
    """Wherever it is in its exit. Of its own Prefect server nothing is left either."""
    put_tables(terminal.home / "prefect")
    slow = serve_stub(latency=lambda body: 600.0 if b"question 1" in body else 0.0)
    process = terminal.start(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", slow),
        BATCHYARD_FLUSH_SECONDS="0.1",
        PREFECT_API_URL=None,
        PREFECT_HOME=str(terminal.home / "prefect"),
        **HAS_BLOCK_TYPES,
    )
    _wait_for_segments(terminal.home)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    said = [process.stderr.readline()]
    while not said[-1].startswith("Stopped."):
        said.append(process.stderr.readline())
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    ended = terminal.finish(process)
    assert (ended.status, ended.stderr) == (130, "")
    _wait_until(lambda: not _processes_that_know(str(terminal.home)))


def test_workers_leave_its_batch_to_it(here: Run, engine_url: str) -> None:
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url)
    assert with_store(lambda store: store.batches.get(ended.batch_id)).is_inline


def test_a_resumed_batch_keeps_its_model(terminal: Terminal, here: Run, engine_url: str) -> None:
    """Another model would refuse every line that is left."""
    ended = here(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl"),
        *("--model", "stub-model", "--engine-url", engine_url),
    )
    words = ("run", "--resume", ended.batch_id, "--model", "other", "--engine-url", engine_url)
    again = here(*words)
    assert again.status == 3
    assert f"{ended.batch_id} is for stub-model: give the same --model" in again.stderr


def test_engine_options_reach_the_engine_unchanged(
    terminal: Terminal, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, short ones, ones with ``=`` and values that look like options of ours."""
    _fake_engine(terminal, 'printf "%s\\n" "$@" > words.txt; exit 1')
    options = ["-ep", "-tp", "2", '--hf-overrides={"a": "-i"}', "--seed", "-1", "--enforce-eager"]
    terminal.write("in.jsonl", [chat_line("id-0", model="served")])
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", str(terminal.folder / "python"))
    ended = here(
        *("run", "-i", "in.jsonl", "-ep", "-tp", "2", *options[3:], "-o", "out.jsonl"),
        *("--served-model-name", "served", "also", "--model", "org/weights"),
    )
    assert ended.status == 1
    words = (terminal.folder / "words.txt").read_text().splitlines()
    start = words.index("-ep")
    assert words[start : start + 10] == [*options, "--served-model-name", "served", "also"]
    assert words[words.index("--model") + 1] == "org/weights"


def test_options_of_run_batch_that_mean_nothing_here_are_left_out(
    terminal: Terminal, here: Run, engine_url: str
) -> None:
    """A command line for ``vllm run-batch`` works as it is, with a word about each."""
    ended = here(
        *("run", "--input_file=in.jsonl", "--output_file", "out.jsonl", "--enable-metrics"),
        *("--output-tmp-dir", "/nowhere", "--engine-url", engine_url),
    )
    assert ended.status == 0, ended.stderr
    assert "--enable-metrics has no meaning here and is ignored." in ended.stderr
    assert ids(terminal.read("out.jsonl")) == ALL


def test_a_server_that_others_use_is_asked_for_few_places_and_that_is_said(
    here: Run, engine_url: str
) -> None:
    """With the number of its places, or without other users, there is nothing to say."""
    words = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url)
    assert "keeps 8 in flight" in here(*words).stderr
    for more in (("--engine-seats", "32"), ("--exclusive",)):
        assert "in flight" not in here(*words, *more).stderr


def test_a_batch_runs_with_an_objective_for_the_servers_users(
    terminal: Terminal, here: Run, engine_url: str
) -> None:
    """The stub's server has no such metrics: that is said, and the batch runs."""
    ended = here(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url),
        *("--engine-seats", "32", "--engine-ttft-ms", "250", "--engine-itl-ms", "50"),
        *("--engine-latency-quantile", "0.95", "--engine-reserve-seats", "4"),
        *("--engine-priority", "0"),
    )
    assert ended.status == 0, ended.stderr
    assert "takes a quarter of it" in ended.stderr
    assert ids(terminal.read("out.jsonl")) == ALL


@pytest.mark.parametrize(
    "more", [("--engine-seats", "32"), ("--exclusive",), ("--engine-ttft-ms", "250")]
)
def test_an_engine_of_our_own_has_no_places_to_share(
    here: Run, more: tuple[str, ...], tmp_path: Path
) -> None:
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", "--model", str(tmp_path), *more)
    assert ended.status != 0
    assert "--engine-url" in ended.stderr


# -- what the tests above look with ---------------------------------------------------------------


def _fake_engine(terminal: Terminal, script: str) -> None:
    program = terminal.folder / "python"
    program.write_text(f"#!/bin/bash\ncd {terminal.folder}\n{script}\n")
    program.chmod(0o755)


def _wait_for_segments(home: Path) -> None:
    """Until finished lines are durable."""
    _wait_until(lambda: bool(list(home.glob("objects/batches/*/segments/*"))))


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE * 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _processes_that_know(text: str) -> list[str]:
    """Command lines of processes whose environment holds ``text``."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and text.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


def _screen(terminal: Terminal, *words: str) -> list[str]:
    """The lines that a terminal of 100 columns shows in the end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchyard.cli", *words],
        cwd=terminal.folder,
        env=terminal.environment | {"TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    with suppress(OSError):  # the other end was closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert process.wait() == 0
    return drawn(written.decode())
