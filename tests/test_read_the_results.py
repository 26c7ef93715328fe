"""The code of docs/how-to/read-the-results.md on long result files, and the traps that it avoids.

A trap that is gone, with a newer version of a library, fails here: then the page is to be changed.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from typing import TYPE_CHECKING, Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.json as pj
import pytest

from batchyard.results.results import NoAnswerCode, answered, unanswered
from tests.pages import ROOT, block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = "docs/how-to/read-the-results.md"
LINES = 30_000
LATE = 20
"""So many lines at the end have keys, errors or an endpoint that no line before them has."""
EXACT = 0.1 + 0.2
TEXTS = (
    'a tab\t, a backslash \\n, a "quote", a separator\u2028 and an é',
    "2026-01-02",
    "007",
    "null",
)
UPPER = "{}AF00000-0000-0000-0000-00000000000A"
REFUSAL = {"message": "too long, " * 30, "type": "BadRequestError", "param": None, "code": 400}


def chat(text: str | None = "text", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    first = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"object": "chat.completion", "model": "m", "choices": [first | choice], "usage": usage}


def answer(custom_id: str, body: dict[str, Any], status: int = 200) -> bytes:
    return answered(custom_id, f"req_{custom_id}", status, json.dumps(body).encode()).line


def late(number: int) -> dict[str, Any]:
    """The body of a line near the end."""
    if number % 2:
        embedding = {"object": "embedding", "index": 0, "embedding": [EXACT, -1e-12 / 3]}
        return {"object": "list", "model": "m", "data": [embedding]}
    body = chat(
        "x" * 3_000_000 if number == LINES - 2 else None,
        logprobs={"content": [{"token": "a", "logprob": -EXACT}]},
    )
    function = {"name": "f", "arguments": '{"x": 1}'}
    body["choices"][0]["message"]["tool_calls"] = [{"id": "call_1", "function": function}]
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 16}
    return body | {"seed": 2**63 - 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the two result files of a batch, of 30,000 lines each, as Batchyard writes them."""
    made = tmp_path_factory.mktemp("results")
    early = LINES - LATE
    bodies = (chat(TEXTS[n % 4]) if n < early else late(n) for n in range(LINES))
    good = [answer(f"{n:03d}", body) for n, body in enumerate(bodies)]
    (made / "results.jsonl").write_bytes(b"".join(good))
    bad = [answer(f"{n:07d}", {"error": REFUSAL}, 400) for n in range(early)]
    bad += [unanswered(f"{n:07d}", NoAnswerCode.EXPIRED).line for n in range(early, LINES)]
    (made / "results.errors.jsonl").write_bytes(b"".join(bad))
    return made


@pytest.fixture
def here(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of the files is the working directory, and datasets asks no server."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return folder


def lines_of(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def run(name: str) -> dict[str, Any]:
    """The variables of the page's block after it has run."""
    variables: dict[str, Any] = {}
    exec(compile(block(PAGE, name), PAGE, "exec"), variables)  # noqa: S102 - the page's own code
    return variables


def assert_same(found: Iterator[tuple[Any, ...]], path: Path) -> None:
    """All lines are there, with their custom_ids, responses and errors, and no others."""
    expected = [(each["custom_id"], each["response"], each["error"]) for each in lines_of(path)]
    assert len(expected) == LINES
    assert list(found) == expected


def parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def filled(value: Any) -> Any:
    """None for the NaN that pandas writes in place of null."""
    return None if isinstance(value, float) and math.isnan(value) else value


def both(here: Path, variables: dict[str, Any]) -> Iterator[tuple[Any, Path]]:
    yield variables["answers"], here / "results.jsonl"
    yield variables["errors"], here / "results.errors.jsonl"


def test_the_page_names_the_versions_that_are_tested() -> None:
    page = (ROOT / PAGE).read_text()
    for name in ("pandas", "polars", "DuckDB", "pyarrow", "datasets"):
        assert f"{name} {importlib.metadata.version(name.lower())}" in page


def test_line_by_line_everything_is_read(here: Path) -> None:
    for found, path in both(here, run("json")):
        assert_same(((each["custom_id"], each["response"], each["error"]) for each in found), path)


def test_pandas_reads_everything(here: Path) -> None:
    for found, path in both(here, run("pandas")):
        columns = (found[key].map(filled) for key in ("custom_id", "response", "error"))
        assert_same(zip(*columns, strict=True), path)


def test_polars_reads_everything(here: Path) -> None:
    variables = run("polars")
    for found, path in both(here, variables):
        rows = found.select("custom_id", "line", "error").iter_rows()
        read = ((name, parsed(line)["response"], parsed(error)) for name, line, error in rows)
        assert_same(read, path)
    assert variables["answers"]["content"].to_list()[:4] == list(TEXTS)


def test_duckdb_reads_everything(here: Path) -> None:
    variables = run("duckdb")
    for found, path in both(here, variables):
        rows = ((name, parsed(got), parsed(error)) for name, got, error in found.fetchall())
        assert_same(rows, path)
    assert variables["texts"].limit(2).fetchall() == [("000", TEXTS[0]), ("001", TEXTS[1])]


def test_pyarrow_reads_what_the_schema_names(here: Path) -> None:
    for found, path in both(here, run("pyarrow")):
        expected = lines_of(path)
        assert found["custom_id"].to_pylist() == [each["custom_id"] for each in expected]
        assert found["error"].to_pylist() == [each["error"] for each in expected]
        for got, line in zip(found["response"].to_pylist(), expected, strict=True):
            assert text_of(got) == text_of(line["response"])


def text_of(response: dict[str, Any] | None) -> tuple[Any, ...]:
    """The values that the schema of the page names."""
    if response is None:
        return ()
    body = response["body"]
    texts = [each["message"]["content"] for each in body.get("choices") or ()]
    vectors = [each["embedding"] for each in body.get("data") or ()]
    return response["status_code"], texts, vectors, (body.get("error") or {}).get("message")


def test_datasets_reads_everything(here: Path) -> None:
    for found, path in both(here, run("datasets")):
        columns = (found[key][:] for key in ("custom_id", "response", "error"))
        rows = zip(*columns, strict=True)
        assert_same(((name, parsed(got), parsed(error)) for name, got, error in rows), path)


def few(path: Path, *bodies: dict[str, Any], custom_id: str = "row-{}") -> str:
    """A file with these answers."""
    lines = [answer(custom_id.format(number), body) for number, body in enumerate(bodies, 1)]
    path.write_bytes(b"".join(lines))
    return str(path)


def test_pandas_makes_numbers_of_ids_unless_one_has_a_letter(tmp_path: Path) -> None:
    ids = pd.read_json(few(tmp_path / "a", chat(), custom_id="00{}"), lines=True)["custom_id"]
    assert ids.tolist() == [1]
    with (tmp_path / "a").open("ab") as file:
        file.write(answer("x", chat()))
    assert pd.read_json(tmp_path / "a", lines=True)["custom_id"].tolist() == ["001", "x"]


def test_pandas_rounds_floats_and_refuses_long_integers(tmp_path: Path) -> None:
    path = few(tmp_path / "a", chat() | {"score": -0.0012345678901234567})
    read = pd.read_json(path, lines=True, dtype=False)
    assert read["response"][0]["body"]["score"] != -0.0012345678901234567
    path = few(tmp_path / "a", chat() | {"seed": 2**64})
    with pytest.raises(ValueError, match="Value is too big!"):
        pd.read_json(path, lines=True, dtype=False, precise_float=True)


def test_polars_loses_late_keys_and_refuses_late_errors(here: Path, tmp_path: Path) -> None:
    path = few(tmp_path / "a", *[chat()] * 100, chat() | {"service_tier": "default"})
    body = pl.read_ndjson(path)["response"].struct.field("body")
    assert "service_tier" not in body.struct.fields
    with pytest.raises(pl.exceptions.ComputeError, match="got non-null value for NULL-typed"):
        pl.read_ndjson(here / "results.errors.jsonl")
    errors = pl.read_ndjson(here / "results.errors.jsonl", infer_schema_length=None)["error"]
    assert errors.drop_nulls().len() == LATE


def test_polars_writes_objects_as_text_that_is_no_json(tmp_path: Path) -> None:
    schema = {"custom_id": pl.String, "response": pl.String}
    path = few(tmp_path / "a", chat("a\tb"), chat("a\\nb"))
    tab, backslash = pl.read_ndjson(path, schema=schema)["response"]
    with pytest.raises(json.JSONDecodeError, match="control character"):
        json.loads(tab)
    assert json.loads(backslash)["body"]["choices"][0]["message"]["content"] == "a\nb"


def test_duckdb_loses_late_errors_and_keys(here: Path) -> None:
    path = str(here / "results.errors.jsonl")
    counts = "count(*), count(error)"
    assert duckdb.read_json(path).aggregate(counts).fetchall() == [(LINES, 0)]
    assert duckdb.read_json(path, sample_size=-1).aggregate(counts).fetchall() == [(LINES, LATE)]
    answers = duckdb.read_json(str(here / "results.jsonl")).select("response").fetchall()
    assert "data" not in answers[-1][0]["body"]


def test_duckdb_makes_dates_and_uuids_of_ids_and_texts(tmp_path: Path) -> None:
    path = few(tmp_path / "a.jsonl", chat("2026-01-02"), custom_id="2026-01-0{}")
    types = "typeof(custom_id), typeof(response.body.choices[1].message.content)"
    read = duckdb.read_json(path, sample_size=-1).select(types)
    assert read.fetchall() == [("DATE", "DATE")]
    path = few(tmp_path / "a.jsonl", chat(), custom_id=UPPER)
    assert duckdb.read_json(path).select("typeof(custom_id)").fetchall() == [("UUID",)]


def test_pyarrow_refuses_late_errors_and_long_lines(here: Path, tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException):
        pj.read_json(here / "results.errors.jsonl")
    with pytest.raises(pa.ArrowInvalid, match="straddl"):
        pj.read_json(few(tmp_path / "a", chat(), chat("x" * 3_000_000)))


def test_pyarrow_and_datasets_make_times_of_ids(here: Path, tmp_path: Path) -> None:
    path = few(tmp_path / "a", chat(), custom_id="2026-01-0{}")
    assert pj.read_json(path)["custom_id"].type == pa.timestamp("s")
    read = datasets.load_dataset("json", data_files=path, split="train")
    assert read.features["custom_id"] == datasets.Value("timestamp[s]")


def test_datasets_refuses_late_errors_only_of_long_files(here: Path, tmp_path: Path) -> None:
    path = here / "results.errors.jsonl"
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        datasets.load_dataset("json", data_files=str(path), split="train")
    short = tmp_path / "a"
    short.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[-LATE - 1 :]))
    errors = datasets.load_dataset("json", data_files=str(short), split="train")["error"]
    assert [bool(each) for each in errors] == [False] + [True] * LATE


def test_datasets_rounds_floats_of_json(here: Path, tmp_path: Path) -> None:
    text = datasets.Value("string")
    kinds = {"id": text, "custom_id": text, "response": datasets.Json(), "error": datasets.Json()}
    path = few(tmp_path / "a", chat() | {"score": -0.0012345678901234567})
    features = datasets.Features(kinds)
    read = datasets.load_dataset("json", data_files=path, split="train", features=features)
    assert read[0]["response"]["body"]["score"] == -0.0012345679
