"""Files through the official client, sync and async."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

import openai
import pytest
from backports import zstd

from batchyard.api.files.files import download_file, file_response
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Caller
from batchyard.errors import StorageError
from batchyard.files.delete import delete_file
from batchyard.store import NewBatch, NewFile
from tests.api.conftest import LINE
from tests.services.read_after import ReadAfter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import httpx

    from batchyard.services.services import Services
    from tests.api.conftest import Api

THIRTY_DAYS = 2_592_000


def reader(services: Services, first: Callable[[], Awaitable[None]]) -> Caller:
    """Who reads files, each of them after ``first``."""
    slow = replace(services, storage=ReadAfter(services.storage, first))
    return Caller("one", slow, "key", is_operator=False, may_write=False)


def test_bytes_become_a_file_that_is_kept_for_30_days(api: Api) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    assert file.id.startswith("file-")
    assert len(file.id) == len("file-") + 22
    assert (file.filename, file.bytes, file.purpose) == ("upload", len(LINE), "batch")
    assert (file.status, file.status_details) == ("processed", None)
    assert file.expires_at == file.created_at + THIRTY_DAYS


def test_a_path_gives_its_name(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "naïve 文.jsonl"
    path.write_bytes(LINE)
    assert api.openai().files.create(file=path, purpose="batch").filename == path.name


def test_names_in_any_language_are_kept(api: Api) -> None:
    client = api.openai()
    for name in (
        "\u8981\u6c42\u3000\u4e00\u89a7.jsonl",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.jsonl",
        "\u0915\u094d\u200d\u0937.jsonl",
        "\U0001f469\u200d\U0001f4bb.jsonl",
        "Screenshot at 3.04\u202fPM.jsonl",
        "a\u00a0b.jsonl",
        "\u05d0\u200f.jsonl",
        "\U0001fffe.jsonl",
    ):
        file = client.files.create(file=(name, LINE), purpose="batch")
        assert (file.filename, client.files.retrieve(file.id).filename) == (name, name)
        disposition = client.files.content(file.id).response.headers["content-disposition"]
        assert unquote(disposition.partition("filename*=UTF-8''")[2]) == name
        with api.http() as http:
            upload = {"filename": name, "purpose": "batch", "mime_type": "text/jsonl", "bytes": 1}
            assert http.post("/uploads", json=upload).json()["filename"] == name


def test_a_name_that_could_mislead_its_reader_is_refused(api: Api) -> None:
    upload = {"purpose": "batch", "mime_type": "text/jsonl", "bytes": 1}
    with api.http() as http:
        for char in "\n\x1b\x85\u2028\u2029\u202a\u202e\u2066\u2069":
            answer = http.post("/uploads", json={**upload, "filename": f"a{char}b.jsonl"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filename")


def test_a_tuple_gives_name_and_type(api: Api) -> None:
    file = ("in.jsonl", LINE, "application/jsonl")
    assert api.openai().files.create(file=file, purpose="batch").filename == "in.jsonl"


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "vision", "user_data", "evals"])
def test_files_for_other_purposes_hold_anything_and_are_kept(api: Api, purpose: str) -> None:
    file = api.openai().files.create(file=("a.png", b"\x89PNG"), purpose=purpose)  # type: ignore[arg-type]
    assert (file.purpose, file.expires_at) == (purpose, None)


@pytest.mark.parametrize("purpose", ["batch", "user_data"])
def test_a_client_says_how_long_its_file_is_kept(api: Api, purpose: str) -> None:
    file = api.openai().files.create(
        file=LINE,
        purpose=purpose,  # type: ignore[arg-type]
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600


def test_a_file_is_looked_at_and_waited_for(api: Api) -> None:
    client = api.openai()
    created = client.files.create(file=LINE, purpose="batch")
    assert client.files.retrieve(created.id) == created
    assert client.files.wait_for_processing(created.id) == created


def test_content_comes_back_as_it_was(api: Api, tmp_path: Path) -> None:
    client = api.openai()
    content = LINE * 10_000
    file = client.files.create(file=content, purpose="batch")
    assert client.files.content(file.id).read() == content
    with pytest.warns(DeprecationWarning, match="content"):
        assert client.files.retrieve_content(file.id) == content.decode()
    with client.files.with_streaming_response.content(file.id) as response:
        response.stream_to_file(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


async def test_the_async_client_does_it_all(api: Api) -> None:
    async with api.async_openai() as client:
        file = await client.files.create(file=("in.jsonl", LINE), purpose="batch")
        assert (await client.files.content(file.id)).read() == LINE
        assert [each.id async for each in client.files.list()] == [file.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


def test_pages_hold_every_file_once_though_all_came_in_one_second(api: Api) -> None:
    client = api.openai()
    ids = [client.files.create(file=LINE, purpose="batch").id for _ in range(25)]
    for order in ("asc", "desc"):
        listed = [each.id for each in client.files.list(limit=4, order=order)]  # type: ignore[arg-type]
        assert sorted(listed) == sorted(ids)
    backward = [each.id for each in client.files.list(limit=7, order="desc")]
    assert backward == [each.id for each in client.files.list(limit=4, order="asc")][::-1]


def test_a_list_is_filtered_by_purpose_on_every_page(api: Api) -> None:
    client = api.openai()
    for purpose in ("batch", "user_data") * 3:
        client.files.create(file=LINE, purpose=purpose)  # type: ignore[arg-type]
    assert [each.purpose for each in client.files.list(purpose="batch", limit=2)] == ["batch"] * 3


def test_a_deleted_file_still_marks_its_place_in_a_list(api: Api) -> None:
    client = api.openai()
    for _ in range(4):
        client.files.create(file=LINE, purpose="batch")
    first, second, *rest = client.files.list().data
    client.files.delete(second.id)
    assert [each.id for each in client.files.list(after=second.id)] == [each.id for each in rest]
    assert first.id not in [each.id for each in client.files.list(after=second.id)]


def test_an_unknown_cursor_is_refused(api: Api) -> None:
    client = api.openai()
    client.files.create(file=LINE, purpose="batch")
    with pytest.raises(openai.BadRequestError) as raised:
        client.files.list(after="file-unknown")
    assert raised.value.param == "after"


def test_a_deleted_file_is_gone_and_its_bytes_are_wiped(api: Api) -> None:
    client = api.openai()
    file = client.files.create(file=LINE, purpose="batch")
    assert api.objects() == [f"files/{file.id}"]
    deleted = client.files.delete(file.id)
    assert deleted.to_dict() == {"id": file.id, "object": "file", "deleted": True}
    assert api.objects() == []
    assert client.files.list().data == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


async def test_a_file_that_is_deleted_between_the_question_and_its_bytes_is_unknown(
    api: Api, services: Services
) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")

    async def delete() -> None:
        await delete_file(services, "one", file.id)

    with pytest.raises(ApiError, match="No such File object") as raised:
        await download_file(file.id, reader(services, delete))
    assert raised.value.status == 404


async def test_a_file_whose_bytes_cannot_be_read_is_not_called_unknown(
    api: Api, services: Services
) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")

    async def lose() -> None:
        raise StorageError("The disk is away.")

    with pytest.raises(StorageError, match="The disk is away"):
        await download_file(file.id, reader(services, lose))


async def test_an_operator_is_told_why_another_tenants_file_cannot_be_read(
    api: Api, services: Services
) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    record = await services.store.files.get(file.id)

    async def lose() -> None:
        raise StorageError("The disk is away.")

    operator = replace(reader(services, lose), tenant="another", is_operator=True)
    with pytest.raises(StorageError, match="The disk is away"):
        await file_response(operator, record)


async def test_a_file_past_its_expiry_is_gone(api: Api, services: Services) -> None:
    new = NewFile(
        tenant="one",
        purpose="batch",
        filename="old",
        size_bytes=1,
        sha256="",
        storage_key="files/old",
        lifetime_seconds=0,
    )
    file = await services.store.files.create(new)
    client = api.openai()
    assert client.files.list().data == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


async def test_a_deleted_input_stays_readable_for_the_batch_that_runs(
    api: Api, services: Services
) -> None:
    client = api.openai()
    file = client.files.create(file=LINE, purpose="batch")
    await services.store.batches.create(
        NewBatch(
            endpoint="/v1/completions",
            completion_window="24h",
            window_seconds=86_400,
            tenant="one",
            input_file_id=file.id,
        )
    )
    client.files.delete(file.id)
    assert api.objects() == [f"files/{file.id}"]
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_the_files_of_another_tenant_are_unknown(api: Api) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    other = api.openai(api.other_key)
    assert other.files.list().data == []
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError) as foreign:
            call(file.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            call("file-unknown")
        assert foreign.value.message.replace(file.id, "file-unknown") == unknown.value.message
    with pytest.raises(openai.BadRequestError):
        other.files.list(after=file.id)
    assert api.openai().files.retrieve(file.id).id == file.id


@pytest.mark.parametrize("purpose", ["user_data", "assistants", "vision", "fine-tune", "evals"])
def test_only_inputs_and_results_of_batches_are_downloaded(api: Api, purpose: str) -> None:
    client = api.openai()
    file = client.files.create(file=b"x", purpose=purpose)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as raised:
        client.files.content(file.id)
    assert raised.value.body == {
        "message": f"Not allowed to download files of purpose: {purpose}",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("name", "content", "param", "code"),
    [
        ("in.txt", LINE, None, None),
        ("in.JSON", LINE, None, None),
        ("in.jsonl", b"", "file", "empty_file"),
        ("in.jsonl", b"\n\r\n", "file", "empty_file"),
        ("in.jsonl", b"nothing\n" + LINE, "file", "invalid_json_line"),
    ],
)
def test_an_input_that_cannot_be_one_is_refused_and_leaves_nothing(
    api: Api, name: str, content: bytes, param: str | None, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        api.openai().files.create(file=(name, content), purpose="batch")
    assert (raised.value.type, raised.value.param, raised.value.code) == (
        "invalid_request_error",
        param,
        code,
    )
    assert api.objects() == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl.gz", gzip.compress(LINE)),
        ("in.jsonl.zst", zstd.compress(LINE)),
        ("in.jsonl", gzip.compress(LINE)),
        ("in.jsonl.gz", LINE),
    ],
    ids=["gzip", "zstd", "named otherwise", "only named so"],
)
def test_a_compressed_input_is_kept_decompressed(api: Api, name: str, content: bytes) -> None:
    client = api.openai()
    file = client.files.create(file=(name, content), purpose="batch")
    assert (file.filename, file.bytes) == ("in.jsonl", len(LINE))
    assert client.files.content(file.id).content == LINE


def test_a_compressed_file_for_another_purpose_stays_as_it_is(api: Api) -> None:
    content = gzip.compress(LINE)
    file = api.openai().files.create(file=("in.jsonl.gz", content), purpose="user_data")
    assert (file.filename, file.bytes) == ("in.jsonl.gz", len(content))


def file_before_purpose(api: Api, purpose: str) -> httpx.Response:
    """As openai-node sends it."""
    parts = [("file", ("in.jsonl.gz", gzip.compress(LINE))), ("purpose", (None, purpose.encode()))]
    with api.http() as http:
        return http.post("/files", files=parts)


def test_a_purpose_behind_a_compressed_input_counts_as_well(api: Api) -> None:
    sent = file_before_purpose(api, "batch")
    assert (sent.status_code, sent.json()["bytes"]) == (200, len(LINE))


def test_another_purpose_behind_a_compressed_file_is_refused(api: Api) -> None:
    sent = file_before_purpose(api, "user_data")
    assert sent.status_code == 400
    assert sent.json()["error"]["message"] == (
        "The file is compressed, and its purpose came behind it: send 'purpose' first."
    )
    assert api.objects() == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(LINE)[:-3], "The file is cut off: its compressed data have no end."),
        (zstd.compress(LINE) + b"more", "The file is damaged: it is not valid zstd."),
    ],
    ids=["cut off", "damaged"],
)
def test_a_damaged_input_is_refused_and_leaves_nothing(api: Api, content: bytes, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        api.openai().files.create(file=("in.jsonl.gz", content), purpose="batch")
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"] == said
    assert (raised.value.param, raised.value.code) == ("file", "invalid_file")
    assert api.objects() == []


def test_a_small_file_with_more_content_than_an_input_may_have_is_refused(api: Api) -> None:
    content = zstd.compress(bytes(300 * 1024**2))
    with pytest.raises(openai.APIStatusError) as raised:
        api.openai().files.create(file=("in.jsonl.zst", content), purpose="batch")
    assert (raised.value.status_code, raised.value.code) == (413, "file_too_large")
    assert api.objects() == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LINE.decode().encode("utf-16"), "The file is UTF-16, so save it as UTF-8."),
        (
            gzip.compress(gzip.compress(LINE)),
            "The file is compressed with gzip, so decompress it first.",
        ),
    ],
    ids=["UTF-16", "gzip twice"],
)
def test_an_input_of_another_format_is_named(api: Api, content: bytes, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        api.openai().files.create(file=("in.jsonl", content), purpose="batch")
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"] == f"Invalid file format for Batch API. {said}"
    assert raised.value.body["code"] == "invalid_json_line"


def test_an_empty_file_is_refused_for_any_purpose(api: Api) -> None:
    with pytest.raises(openai.BadRequestError):
        api.openai().files.create(file=b"", purpose="user_data")


@pytest.mark.parametrize("name", ["in.jsonl", "in.JSONL", "upload", ".jsonl"])
def test_a_later_broken_line_is_for_the_batch_to_find(api: Api, name: str) -> None:
    assert api.openai().files.create(file=(name, LINE + b"broken\n"), purpose="batch").bytes


@pytest.mark.parametrize(
    ("expiry", "param", "code"),
    [
        ({"anchor": "now", "seconds": 3600}, "anchor", "invalid_value"),
        ({"anchor": "created_at", "seconds": 3599}, "seconds", "integer_below_min_value"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "seconds", "integer_above_max_value"),
        ({"anchor": "created_at", "seconds": "soon"}, "seconds", "invalid_type"),
        ({"anchor": "created_at"}, "seconds", "missing_required_parameter"),
        ({"seconds": 3600}, "anchor", "missing_required_parameter"),
    ],
)
def test_an_expiry_that_cannot_be_is_refused(
    api: Api, expiry: dict[str, object], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        api.openai().files.create(file=LINE, purpose="batch", expires_after=expiry)  # type: ignore[arg-type]
    assert (raised.value.param, raised.value.code) == (f"expires_after.{param}", code)
    assert api.objects() == []
