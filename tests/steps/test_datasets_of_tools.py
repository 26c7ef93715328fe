"""Datasets as other tools write them today: what a template sees, and what the answers keep.

Each file is written by the tool itself, in the way that its documentation shows first.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import uuid
from typing import TYPE_CHECKING, Any

import datasets
import duckdb
import fastparquet
import pandas as pd
import PIL.Image
import polars as pl
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchyard.datasets import process
from batchyard.datasets.files import local_files
from batchyard.datasets.jobs import ROWS_FILE, TABLE_FILE, JoinJob, RenderJob
from batchyard.errors import DatasetRefused
from batchyard.results.results import answered
from tests.steps.conftest import CHAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

UUID = uuid.UUID("0192d3a4-5b6c-7d8e-9f00-112233445566")
AT = dt.datetime(2024, 2, 29, 12, 30, 0, 250_000)  # noqa: DTZ001 - a time without a zone is meant
MONDAY = dt.date(2024, 1, 1)
CHATS = [
    {"messages": [{"role": "user", "content": "1 hello"}], "meta": {"a": 1}, "tools": None},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "meta": "text",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
]
ALL = '{"row": {{ row | tojson }}}'


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def db() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        yield connection


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


async def lines_of(path: Path, template: str = ALL) -> list[Any]:
    """The requests of the file's rows, which are kept beside it."""
    folder = folder_of(path)
    job = RenderJob(
        files=tuple(map(str, local_files(path))),
        template=template,
        url=CHAT,
        model=None,
        most_line_bytes=100_000,
        most_rows=100,
    )
    data = b"".join([block async for block in process.run_job(job, folder, "default")])
    (folder / "lines").write_bytes(data)
    return [json.loads(line) for line in data.splitlines()]


async def rows_of(path: Path) -> list[Any]:
    """What a template sees of each row."""
    return [line["body"]["row"] for line in await lines_of(path)]


async def answers_to(path: Path) -> Path:
    """The table of the answers, one to each request of the file."""
    folder = folder_of(path)
    results = [
        answered(line["custom_id"], "req_1", 200, b'{"choices":[{"message":{"content":"yes"}}]}')
        for line in await lines_of(path, "{}")
    ]
    (folder / "output").write_bytes(b"".join(each.line for each in results))
    job = JoinJob(lines="lines", output="output", error=None, rows=ROWS_FILE, has_embeddings=False)
    assert [block async for block in process.run_job(job, folder, "default")] == []
    return folder / TABLE_FILE


def loaded_chats(folder: Path) -> datasets.Dataset:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return datasets.load_dataset("json", data_files=str(path), split="train")


def write_with_datasets(folder: Path) -> Path:
    loaded_chats(folder).to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def save_with_datasets(folder: Path) -> Path:
    loaded_chats(folder).save_to_disk(folder / "saved")
    return folder / "saved"


def write_with_duckdb(folder: Path) -> Path:
    loaded_chats(folder)
    with duckdb.connect() as connection:
        source = connection.read_json(str(folder / "chats.jsonl"))
        source.write_parquet(str(folder / "data.parquet"))
    return folder / "data.parquet"


def write_with_fastparquet(folder: Path) -> Path:
    path = folder / "data.parquet"
    fastparquet.write(str(path), pd.DataFrame(CHATS), object_encoding="json")
    return path


@pytest.mark.parametrize(
    "write", [write_with_datasets, save_with_datasets, write_with_duckdb, write_with_fastparquet]
)
async def test_json_is_what_it_says_at_any_depth(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    """A text that is JSON within a list of objects, in a column, and where there is none."""
    path = write(tmp_path)
    assert await rows_of(path) == CHATS


async def test_json_that_is_none_fails_its_own_row(
    tmp_path: Path, db: duckdb.DuckDBPyConnection
) -> None:
    """And so does a value in a map whose keys cannot be those of an object."""
    path = tmp_path / "data.parquet"
    table = pa.table({"j": pa.array(['{"a": NaN}', "[1", None]).cast(pa.json_())})
    pq.write_table(table, path)
    first, second, third = await lines_of(path)
    assert first["body"]["row"] == {"j": {"a": None}}
    assert third["body"]["row"] == {"j": None}
    assert "its value of 'j' cannot be given" in second["template_error"]["message"]
    db.sql("SELECT MAP {{'a': 1}: 2} AS m").write_parquet(str(path))
    (line,) = await lines_of(path)
    assert "its value of 'm' cannot be given" in line["template_error"]["message"]


async def test_uuids_are_text_also_as_ids_of_requests(
    tmp_path: Path, db: duckdb.DuckDBPyConnection
) -> None:
    path = tmp_path / "data.parquet"
    for write in (
        lambda: pd.DataFrame({"custom_id": [UUID]}).to_parquet(path),
        lambda: db.sql(f"SELECT '{UUID}'::UUID AS custom_id").write_parquet(str(path)),
    ):
        write()
        assert pq.read_schema(path).field("custom_id").type == pa.uuid()
        (line,) = await lines_of(path, '{"a": {{ custom_id | tojson }}, "b": "{{ custom_id }}"}')
        assert line["custom_id"] == str(UUID)
        assert line["body"] == {"a": str(UUID), "b": str(UUID)}


async def test_what_polars_writes(tmp_path: Path) -> None:
    """Of text with few values, Arrow can read neither the values nor write them: it has views."""
    kind = pl.Enum(["a", "b"])
    frame = pl.DataFrame(
        {
            "category": pl.Series(["a", None], dtype=pl.Categorical),
            "enum": pl.Series(["b", "a"], dtype=kind),
            "enums": pl.Series([["b"], []], dtype=pl.List(kind)),
            "object": pl.Series([{"e": "a"}, {"e": None}], dtype=pl.Struct({"e": kind})),
            "text": ["x", None],
            "binary": [b"x", b""],
            "decimal": [decimal.Decimal("1.50"), None],
            "duration": [dt.timedelta(hours=25), None],
            "time": [dt.time(1, 2), None],
            "date": [MONDAY, None],
            "at": pl.Series([AT, None], dtype=pl.Datetime("ns")),
            "pair": pl.Series([[1, 2], None], dtype=pl.Array(pl.Int64, 2)),
            "nulls": [None, None],
            "float": pl.Series([0.1, float("nan")], dtype=pl.Float32),
            "floats": pl.Series([[0.1], []], dtype=pl.List(pl.Float32)),
            "half": pl.Series([0.5, None], dtype=pl.Float16),
            "large": pl.Series([2**64 - 1, None], dtype=pl.UInt64),
        }
    )
    first = {
        "category": "a",
        "enum": "b",
        "enums": ["b"],
        "object": {"e": "a"},
        "text": "x",
        "binary": "eA==",
        "decimal": "1.50",
        "duration": "P1DT3600S",
        "time": "01:02:00",
        "date": "2024-01-01",
        "at": "2024-02-29T12:30:00.250000",
        "pair": [1, 2],
        "nulls": None,
        "float": 0.1,
        "floats": [0.1],
        "half": 0.5,
        "large": 2**64 - 1,
    }
    ways = {
        "data.parquet": frame.write_parquet,
        "data.arrow": frame.write_ipc,
        "stream.arrow": frame.write_ipc_stream,
    }
    for name, write in ways.items():
        write(tmp_path / name)
        rows = await rows_of(tmp_path / name)
        assert rows[0] == first
        assert rows[1]["float"] is None
        answers = pl.read_parquet(await answers_to(tmp_path / name))
        assert answers.select(frame.columns).equals(frame)
        assert answers.schema["enum"] == kind
    frame.select(pl.col("large").cast(pl.Int128)).write_parquet(tmp_path / "data.parquet")
    with pytest.raises(DatasetRefused, match="does not support, such as integers of 128 bits"):
        await rows_of(tmp_path / "data.parquet")


async def test_what_pandas_writes(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    frame = pd.DataFrame(
        {
            "id": [UUID],
            "category": pd.Categorical(["a"]),
            "interval": pd.interval_range(0, 1),
            "delta": pd.to_timedelta([90], unit="s"),
            "at": pd.to_datetime(["2024-01-01"]).tz_localize("Europe/Berlin"),
            "integer": pd.array([2**60 + 1], dtype="Int64"),
            "decimal": [decimal.Decimal("1.5")],
            "time": [dt.time(1, 2)],
            "object": [{"a": 1}],
            "float": pd.array([0.1], dtype="float32"),
        }
    )
    frame.to_parquet(path)
    assert await rows_of(path) == [
        {
            "id": str(UUID),
            "category": "a",
            "interval": {"left": 0, "right": 1},
            "delta": "PT90S",
            "at": "2024-01-01T00:00:00+01:00",
            "integer": 2**60 + 1,
            "decimal": "1.5",
            "time": "01:02:00",
            "object": {"a": 1},
            "float": 0.1,
        }
    ]
    answers = pd.read_parquet(await answers_to(path))
    pd.testing.assert_frame_equal(
        answers[frame.columns],
        frame.astype({"integer": "int64", "interval": object}),
        check_dtype=False,
    )


async def test_what_duckdb_writes(tmp_path: Path, db: duckdb.DuckDBPyConnection) -> None:
    path = tmp_path / "data.parquet"
    columns = {
        "'a'::ENUM('a', 'b')": "a",
        "'10101'::BIT": "10101",
        "123456789012345678901234567890::BIGNUM": "123456789012345678901234567890",
        "18446744073709551615::UBIGINT": 2**64 - 1,
        "2::HUGEINT": 2.0,
        "1.50::DECIMAL(10, 2)": "1.50",
        "0.1::FLOAT": 0.1,
        "TIMESTAMP_NS '2024-01-01 00:00:00.123456789'": "2024-01-01T00:00:00.123456",
        "TIMESTAMP '2024-01-01'": "2024-01-01T00:00:00",
        "TIMESTAMPTZ '2024-01-01 00:00:00+01'": "2023-12-31T23:00:00Z",
        "TIME '01:02:03'": "01:02:03",
        "TIMETZ '01:02:03+02'": "23:02:03",
        "MAP {'a': 1}": {"a": 1},
        "MAP {1: 'x'}": {"1": "x"},
        f"MAP {{'{UUID}'::UUID: '[1]'::JSON}}": {str(UUID): [1]},
        "{'j': ['{\"a\": 1}'::JSON, NULL], 'n': 1}": {"j": [{"a": 1}, None], "n": 1},
        "[1, 2]::INTEGER[2]": [1, 2],
        "union_value(n := 2)": {"element1": 0, "n": 2},
        "'\\xAA'::BLOB": "qg==",
        "INTERVAL 1 MONTH": "AQAAAAAAAAAAAAAA",
        "NULL": None,
    }
    selected = ", ".join(f"{each} AS c{n}" for n, each in enumerate(columns))
    db.sql(f"SELECT {selected}").write_parquet(str(path))
    (row,) = await rows_of(path)
    assert dict(zip(columns, row.values(), strict=True)) == columns
    again = db.read_parquet(str(await answers_to(path))).fetchall()[0]
    assert again is not None
    before = db.read_parquet(str(path)).fetchall()[0]
    assert before is not None
    kept = dict(zip(columns, before, strict=True))
    # pyarrow writes the bytes of an interval, and leaves out that a time is UTC.
    kept["INTERVAL 1 MONTH"] = bytes([1, *[0] * 11])
    kept["TIMETZ '01:02:03+02'"] = kept["TIMETZ '01:02:03+02'"].replace(tzinfo=None)
    assert dict(zip(columns, again, strict=False)) == kept


async def test_numbers_without_meaning_are_refused_where_they_are_used(
    tmp_path: Path, db: duckdb.DuckDBPyConnection
) -> None:
    """pandas writes a month as the number of months since 1970; a VARIANT is bytes."""
    path = tmp_path / "data.parquet"
    months = pd.period_range("2024-01", periods=1, freq="M")
    for write, name in (
        (lambda: pd.DataFrame({"x": months, "y": [1]}).to_parquet(path), r"pandas\.period"),
        (lambda: db.sql("SELECT 1::VARIANT x, 1 AS y").write_parquet(str(path)), "VARIANT"),
    ):
        write()
        assert [line["body"] for line in await lines_of(path, '{"y": {{ y }}}')] == [{"y": 1}]
        with pytest.raises(DatasetRefused, match=f"'x' is of the type {name}"):
            await lines_of(path, '{"x": {{ x | tojson }}}')


async def test_fastparquet_has_no_durations(tmp_path: Path) -> None:
    """It writes one as a time of a day."""
    path = tmp_path / "data.parquet"
    frame = pd.DataFrame({"d": pd.to_timedelta([1], unit="h"), "c": pd.Categorical(["a"])})
    fastparquet.write(str(path), frame)
    assert await rows_of(path) == [{"d": "01:00:00", "c": "a"}]


@pytest.mark.parametrize("is_saved", [False, True], ids=["parquet", "save_to_disk"])
async def test_features_of_hugging_face_are_those_of_the_answers(
    tmp_path: Path, is_saved: bool
) -> None:
    """And ours come behind them. The template sees a label's number, and an image's bytes."""
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "image": datasets.Image(),
            "matrix": datasets.Array2D((1, 2), "float32"),
            "meta": datasets.Json(),
            "pair": datasets.Sequence(datasets.Value("int32"), length=2),
        }
    )
    rows = {
        "label": [0, 1],
        "image": [PIL.Image.new("RGB", (2, 2))] * 2,
        "matrix": [[[0.1, 2]]] * 2,
        "meta": [{"a": 1}, "x"],
        "pair": [[1, 2]] * 2,
    }
    made = datasets.Dataset.from_dict(rows, features=features)
    path = tmp_path / ("saved" if is_saved else "data.parquet")
    made.save_to_disk(path) if is_saved else made.to_parquet(path)
    second = (await rows_of(path))[1]
    assert (second["label"], second["meta"], second["matrix"]) == (1, "x", [[0.1, 2.0]])
    assert second["image"]["bytes"].startswith("iVBOR")
    answers = await answers_to(path)
    for found in (
        datasets.load_dataset("parquet", data_files=str(answers), split="train"),
        datasets.Dataset.from_parquet(str(answers)),
    ):
        ours = {name: each for name, each in found.features.items() if name not in features}
        assert {name: found.features[name] for name in features} == features
        assert list(ours)[:3] == ["custom_id", "status", "content"]
        assert ours["input_tokens"] == datasets.Value("int64")
        assert found[1]["content"] == "yes"
        assert found[1]["image"].size == (2, 2)
        assert found.features["label"].int2str(found["label"]) == ["no", "yes"]


async def test_answers_do_not_have_the_fingerprint_of_their_dataset(tmp_path: Path) -> None:
    """``datasets`` keeps what it has computed by that: for the answers it would be another's."""
    made = datasets.Dataset.from_dict({"label": [0]})
    path = tmp_path / "data.parquet"
    kept = {"info": {"features": made.features.to_dict()}, "fingerprint": "abc"}
    table = made.data.table.replace_schema_metadata({"huggingface": json.dumps(kept)})
    pq.write_table(table, path)
    metadata = pq.read_schema(await answers_to(path)).metadata
    assert json.loads(metadata[b"huggingface"]) == {"info": kept["info"]}


async def test_what_pandas_says_of_one_file_is_not_said_of_the_answers(tmp_path: Path) -> None:
    """Its index has only the first file's rows, and names that are numbers have no place for ours.

    pandas raises for such a column label, and restores an index that only one of the files has.
    """
    folder = tmp_path / "parts"
    folder.mkdir()
    pd.DataFrame({"7": ["a", "b"]}, index=[5, 6]).to_parquet(folder / "0.parquet")
    pd.DataFrame({"7": ["c"]}, index=[7]).to_parquet(folder / "1.parquet")
    found = pd.read_parquet(await answers_to(folder))
    assert list(found["7"]) == ["a", "b", "c"]
    assert list(found["__index_level_0__"]) == [5, 6, 7]
    assert list(found["status"]) == ["succeeded"] * 3


def write_shards(folder: Path, *shards: list[Any]) -> Path:
    """With pandas, one file for each list of the values of ``id``."""
    path = folder / "shards"
    path.mkdir()
    for number, values in enumerate(shards):
        pd.DataFrame({"id": values}).to_parquet(path / f"{number}.parquet")
    return path


async def test_a_number_is_no_text_of_another_shard(tmp_path: Path) -> None:
    """A cast would make "007" of one file the 7 of another."""
    path = write_shards(tmp_path, [7], ["007"])
    words = r"The column 'id' is int64 in 0\.parquet and large_string in 1\.parquet"
    with pytest.raises(DatasetRefused, match=words):
        await rows_of(path)


@pytest.mark.parametrize(
    "values",
    [["007"], [UUID], [{"a": "x"}], [["x"]], [MONDAY], [AT]],
    ids=["text", "uuid", "object", "list", "date", "time"],
)
async def test_a_column_without_values_in_one_shard_has_those_of_the_others(
    tmp_path: Path, values: list[Any]
) -> None:
    path = write_shards(tmp_path, [None], values, [None])
    written = pq.read_schema(path / "1.parquet").field("id").type
    first, second, third = await rows_of(path)
    assert (first, third) == ({"id": None}, {"id": None})
    assert second["id"] not in (None, 7)
    assert pq.read_schema(path / ROWS_FILE).field("id").type == written
    assert pq.read_table(path / ROWS_FILE)["id"].to_pylist()[1] == values[0]


async def test_json_may_be_null_in_the_first_shard(tmp_path: Path) -> None:
    """At any depth; and a shard without objects has a list that says nothing of its items."""
    folder = tmp_path / "shards"
    folder.mkdir()
    frames = [{"meta": None, "chats": []}, {"meta": {"a": 1}, "chats": [{"x": CHATS[1]}]}]
    fastparquet.write(str(folder / "1.parquet"), pd.DataFrame(frames[1:]), object_encoding="json")
    pd.DataFrame({"meta": [None], "chats": [None]}).to_parquet(folder / "0.parquet")
    assert await rows_of(folder) == [{"meta": None, "chats": None}, frames[1]]


async def test_each_shard_has_its_own_values_and_the_table_those_of_all(tmp_path: Path) -> None:
    """pandas writes integers as floats where one is missing, categories in one shard only."""
    path = write_shards(tmp_path, [7, 8], [9.0, None], [10])
    assert [row["id"] for row in await rows_of(path)] == [7, 8, 9.0, None, 10]
    assert pq.read_schema(path / ROWS_FILE).field("id").type == pa.float64()
    folder = tmp_path / "texts"
    folder.mkdir()
    pd.DataFrame({"t": pd.Categorical(["a"])}).to_parquet(folder / "0.parquet")
    pl.DataFrame({"t": ["b"]}).write_ipc(folder / "1.arrow")
    pd.DataFrame({"t": ["b"]}).to_parquet(folder / "1.parquet")
    assert [row["t"] for row in await rows_of(folder)] == ["a", "b"]


async def test_a_value_that_the_type_of_all_shards_lacks_is_refused(tmp_path: Path) -> None:
    """A float does not have every integer."""
    path = write_shards(tmp_path, [1.5], [2**53 + 1])
    with pytest.raises(DatasetRefused, match=r"The column 'id' is int64 in one file .* double"):
        await rows_of(path)
