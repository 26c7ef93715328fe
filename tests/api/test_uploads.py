"""Uploads: parts in any order and side by side, one file in the end."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from batchyard.errors import StorageError, StoreUnavailable, TransitionConflict
from batchyard.files.complete import complete_upload
from batchyard.files.parts import cancel_upload, expire_uploads
from batchyard.store import NewUpload, Quota
from batchyard.store.tables.upload import UPLOADS
from tests.api.conftest import LINE
from tests.services.read_after import ReadAfter, ReadBefore

if TYPE_CHECKING:
    from pathlib import Path

    from openai.types import Upload
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from batchyard.store import PartRecord
    from tests.api.conftest import Api


def begin(api: Api, size_bytes: int, **more: Any) -> Upload:
    asked: dict[str, Any] = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "text/jsonl"}
    return api.openai().uploads.create(**(asked | {"bytes": size_bytes} | more))


class LosesTheFirstCompletion(httpx.HTTPTransport):
    """A proxy that times out while the server completes an upload, and only once."""

    lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        if request.url.path.endswith("/complete") and not self.lost:
            answer.read()
            self.lost += 1
            return httpx.Response(504)
        return answer


def test_an_upload_is_an_object_without_a_file_until_it_is_complete(api: Api) -> None:
    with api.http() as http:
        asked = {"filename": "a", "purpose": "batch", "bytes": 5, "mime_type": "text/jsonl"}
        upload = http.post("/uploads", json=asked).json()
    assert list(upload) == [
        *("id", "object", "bytes", "created_at", "filename", "purpose", "status", "expires_at")
    ]
    assert upload["object"] == "upload"
    assert upload["status"] == "pending"
    assert upload["id"].startswith("upload_")
    assert upload["expires_at"] == upload["created_at"] + 3600


def test_parts_make_a_file_in_the_order_that_is_asked_for(api: Api) -> None:
    client = api.openai()
    upload = begin(api, len(LINE))
    end = client.uploads.parts.create(upload.id, data=LINE[10:])
    start = client.uploads.parts.create(upload.id, data=LINE[:10])
    assert (start.object, start.upload_id) == ("upload.part", upload.id)
    done = client.uploads.complete(
        upload.id,
        part_ids=[start.id, end.id],
        md5=hashlib.md5(LINE, usedforsecurity=False).hexdigest(),
    )
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.filename) == (len(LINE), "in.jsonl")
    assert done.file.expires_at == done.file.created_at + 2_592_000
    assert client.files.content(done.file.id).read() == LINE
    assert api.objects() == [f"files/{done.file.id}"]


async def test_parts_arrive_side_by_side(api: Api) -> None:
    content = LINE * 2000
    cuts = [content[start : start + 20_000] for start in range(0, len(content), 20_000)]
    upload = begin(api, len(content))
    async with api.async_openai() as client:
        parts = await asyncio.gather(
            *(client.uploads.parts.create(upload.id, data=cut) for cut in cuts)
        )
        done = await client.uploads.complete(upload.id, part_ids=[part.id for part in parts])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).read() == content


def test_the_sdk_uploads_a_path_in_chunks(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINE * 1000)
    done = api.openai().uploads.upload_file_chunked(
        file=path, mime_type="text/jsonl", purpose="batch", part_size=10_000
    )
    assert done.file is not None
    assert api.openai().files.content(done.file.id).read() == path.read_bytes()


def test_a_file_is_kept_as_long_as_its_upload_said(api: Api) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    upload = begin(api, len(LINE), expires_after=expiry)
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    done = api.openai().uploads.complete(upload.id, part_ids=[part.id])
    assert done.file is not None
    assert done.file.expires_at == done.file.created_at + 7200


def test_parts_that_do_not_make_the_file_are_refused_and_stay(api: Api) -> None:
    client = api.openai()
    upload = begin(api, len(LINE))
    part = client.uploads.parts.create(upload.id, data=LINE)
    more = client.uploads.parts.create(upload.id, data=b"x")
    for part_ids, md5, param in (
        ([part.id, more.id], None, "part_ids"),
        ([part.id, part.id], None, "part_ids"),
        (["part_unknown"], None, "part_ids"),
        ([], None, "part_ids"),
        ([part.id], "0" * 32, "md5"),
        ([part.id], "short", "md5"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.uploads.complete(upload.id, part_ids=part_ids, md5=md5 or openai.NOT_GIVEN)
        assert raised.value.param == param
    assert api.objects() == sorted(f"uploads/{upload.id}/{each.id}" for each in (part, more))
    assert client.uploads.complete(upload.id, part_ids=[part.id]).status == "completed"


def test_a_joined_input_is_checked_like_any_other(api: Api) -> None:
    upload = begin(api, 7)
    part = api.openai().uploads.parts.create(upload.id, data=b"nothing")
    with pytest.raises(openai.BadRequestError) as raised:
        api.openai().uploads.complete(upload.id, part_ids=[part.id])
    assert raised.value.code == "invalid_json_line"
    assert api.objects() == [f"uploads/{upload.id}/{part.id}"]


def test_compressed_parts_make_a_file_that_is_decompressed(api: Api) -> None:
    """'md5' is that of what was sent."""
    client, packed = api.openai(), gzip.compress(LINE * 3)
    upload = begin(api, len(packed), filename="in.jsonl.gz")
    parts = [
        client.uploads.parts.create(upload.id, data=data).id for data in (packed[:9], packed[9:])
    ]
    md5 = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    file = client.uploads.complete(upload.id, part_ids=parts, md5=md5).file
    assert file is not None
    assert (file.filename, file.bytes) == ("in.jsonl", 3 * len(LINE))
    assert client.files.content(file.id).content == LINE * 3


async def test_an_upload_is_decompressed_within_the_quota(api: Api, services: Services) -> None:
    packed = gzip.compress(LINE + b" " * 100_000)
    upload = begin(api, len(packed))
    await services.store.tenants.set_quota("one", Quota(max_stored_bytes=100_000))
    client = api.openai(max_retries=0)
    part = client.uploads.parts.create(upload.id, data=packed)
    with pytest.raises(openai.APIStatusError) as raised:
        client.uploads.complete(upload.id, part_ids=[part.id])
    assert (raised.value.status_code, raised.value.code) == (413, "storage_limit_exceeded")
    assert not [each for each in api.objects() if each.startswith("files/")]


def test_a_cancelled_upload_is_over_and_its_parts_are_wiped(api: Api) -> None:
    client = api.openai()
    upload = begin(api, len(LINE))
    part = client.uploads.parts.create(upload.id, data=LINE)
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert client.uploads.cancel(upload.id).file is None
    assert api.objects() == []
    with pytest.raises(openai.BadRequestError):
        client.uploads.parts.create(upload.id, data=LINE)
    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(upload.id, part_ids=[part.id])


def test_a_completed_upload_is_over(api: Api) -> None:
    client = api.openai()
    upload = begin(api, len(LINE))
    start = client.uploads.parts.create(upload.id, data=LINE[:10])
    end = client.uploads.parts.create(upload.id, data=LINE[10:])
    client.uploads.complete(upload.id, part_ids=[start.id, end.id])
    md5 = hashlib.md5(LINE, usedforsecurity=False).hexdigest()
    for again in (
        lambda: client.uploads.complete(upload.id, part_ids=[end.id, start.id]),
        lambda: client.uploads.complete(upload.id, part_ids=[start.id]),
        lambda: client.uploads.complete(upload.id, part_ids=["part_x"]),
        lambda: client.uploads.complete(upload.id, part_ids=[]),
        lambda: client.uploads.complete(upload.id, part_ids=[start.id, end.id], md5=md5),
        lambda: client.uploads.parts.create(upload.id, data=LINE),
        lambda: client.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.BadRequestError, match="is completed and takes no"):
            again()
    assert len(api.objects()) == 1


def test_the_same_completion_again_has_the_same_answer(api: Api) -> None:
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    md5 = hashlib.md5(LINE, usedforsecurity=False).hexdigest()
    path, asked = f"/uploads/{upload.id}/complete", {"part_ids": [part.id], "md5": md5}
    with api.http() as http:
        first = http.post(path, json=asked)
        again = http.post(path, json=asked | {"md5": md5.upper()})
        other = http.post(path, json=asked | {"md5": "0" * 32})
    assert (first.status_code, again.status_code, other.status_code) == (200, 200, 400)
    assert again.content == first.content
    assert first.json()["file"]["object"] == "file"
    with api.http(api.other_key) as http:
        assert http.post(path, json=asked).status_code == 404
    assert len(api.objects()) == 1


async def test_an_upload_is_completed_again_after_its_hour(api: Api, services: Services) -> None:
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    done = api.openai().uploads.complete(upload.id, part_ids=[part.id])

    async def age(connection: AsyncConnection) -> None:
        await connection.execute(UPLOADS.update().values(expires_at=1))

    await services.store.database.write(age)
    await expire_uploads(services)
    again = api.openai().uploads.complete(upload.id, part_ids=[part.id])
    assert (again.status, again.file) == ("completed", done.file)


def test_an_upload_whose_file_was_deleted_is_over(api: Api) -> None:
    client = api.openai()
    upload = begin(api, len(LINE))
    part = client.uploads.parts.create(upload.id, data=LINE)
    done = client.uploads.complete(upload.id, part_ids=[part.id])
    assert done.file is not None
    client.files.delete(done.file.id)
    with pytest.raises(openai.BadRequestError, match="is completed and takes no"):
        client.uploads.complete(upload.id, part_ids=[part.id])


def test_the_sdk_gets_its_file_though_the_answer_is_lost_once(api: Api) -> None:
    transport = LosesTheFirstCompletion()
    with httpx.Client(transport=transport) as http:
        done = api.openai(http_client=http).uploads.upload_file_chunked(
            file=LINE, filename="in.jsonl", bytes=len(LINE), mime_type="x", purpose="batch"
        )
    assert transport.lost == 1
    assert done.file is not None
    assert api.objects() == [f"files/{done.file.id}"]


async def test_many_who_complete_at_once_get_one_file(api: Api) -> None:
    upload = begin(api, len(LINE))
    async with api.async_openai(max_retries=0) as client:
        part = await client.uploads.parts.create(upload.id, data=LINE)
        calls = [client.uploads.complete(upload.id, part_ids=[part.id]) for _ in range(8)]
        first, *others = await asyncio.gather(*calls)
    assert first.file is not None
    assert others == [first] * 7
    assert api.objects() == [f"files/{first.file.id}"]


async def test_of_many_who_complete_in_different_ways_one_does(api: Api) -> None:
    upload = begin(api, len(LINE))
    async with api.async_openai(max_retries=0) as client:
        parts = [await client.uploads.parts.create(upload.id, data=LINE) for _ in range(8)]
        calls = [client.uploads.complete(upload.id, part_ids=[part.id]) for part in parts]
        ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [each for each in ended if isinstance(each, BaseException)]
    assert len(refused) == 7
    assert all(type(each) is openai.BadRequestError for each in refused)
    assert len(api.objects()) == 1


@pytest.mark.parametrize("reader", [ReadAfter, ReadBefore])
async def test_an_upload_that_another_process_has_completed_meanwhile_has_its_file(
    api: Api, services: Services, reader: type[ReadAfter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same request, whose answer was late. What is joined here is of no use."""
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    files = []

    async def complete_there() -> None:
        monkeypatch.setattr("batchyard.files.complete._LOCKS", {})
        async with api.async_openai() as client:
            files.append((await client.uploads.complete(upload.id, part_ids=[part.id])).file)

    late = replace(services, storage=reader(services.storage, complete_there))
    _, file = await complete_upload(late, "one", upload.id, [part.id], None)
    assert [each and each.id for each in files] == [file.id]
    assert api.objects() == [f"files/{file.id}"]


async def test_the_bytes_of_an_upload_that_ended_while_they_were_joined_are_deleted(
    api: Api, services: Services
) -> None:
    """As by a request that another process answers."""
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    before = api.objects()

    async def cancel() -> None:
        await services.store.uploads.cancel(upload.id, tenant="one")

    slow = replace(services, storage=ReadAfter(services.storage, cancel))
    with pytest.raises(TransitionConflict):
        await complete_upload(slow, "one", upload.id, [part.id], None)
    assert api.objects() == before


async def test_an_upload_is_complete_though_its_parts_cannot_be_looked_up_afterwards(
    api: Api, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a file, and no reason to let the client ask again."""
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)

    async def lose(_: str) -> list[PartRecord]:
        raise StoreUnavailable("The database is away.")

    with monkeypatch.context() as patch:
        patch.setattr(services.store.uploads, "parts_of", lose)
        _, file = await complete_upload(services, "one", upload.id, [part.id], None)
    assert file.size_bytes == len(LINE)
    assert await expire_uploads(services) == 1


async def test_the_parts_are_joined_once_however_many_complete_at_once(
    api: Api, services: Services
) -> None:
    """Each copy may have gigabytes, which no quota counts."""
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)
    reads = 0

    async def count() -> None:
        nonlocal reads
        reads += 1

    counted = replace(services, storage=ReadAfter(services.storage, count))
    calls = [complete_upload(counted, "one", upload.id, [part.id], None) for _ in range(8)]
    first, *others = await asyncio.gather(*calls)
    assert others == [first] * 7
    assert reads == 1


async def test_an_upload_that_is_cancelled_while_its_parts_are_read_says_so(
    api: Api, services: Services
) -> None:
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)

    async def cancel() -> None:
        await cancel_upload(services, "one", upload.id)

    interrupted = replace(services, storage=ReadAfter(services.storage, cancel))
    with pytest.raises(TransitionConflict, match="cancelled"):
        await complete_upload(interrupted, "one", upload.id, [part.id], None)
    assert api.objects() == []


async def test_an_upload_whose_parts_cannot_be_read_stays_pending(
    api: Api, services: Services
) -> None:
    upload = begin(api, len(LINE))
    part = api.openai().uploads.parts.create(upload.id, data=LINE)

    async def lose() -> None:
        raise StorageError("The disk is away.")

    interrupted = replace(services, storage=ReadAfter(services.storage, lose))
    with pytest.raises(StorageError, match="The disk is away"):
        await complete_upload(interrupted, "one", upload.id, [part.id], None)
    assert api.openai().uploads.complete(upload.id, part_ids=[part.id]).status == "completed"


async def test_an_upload_whose_hour_is_over_takes_no_more_and_is_wiped(
    api: Api, services: Services
) -> None:
    new = NewUpload(
        tenant="one", filename="a", purpose="batch", bytes=1, mime_type="x", lifetime_seconds=0
    )
    upload = await services.store.uploads.create(new)
    with pytest.raises(openai.BadRequestError, match="expired"):
        api.openai().uploads.parts.create(upload.id, data=b"x")
    kept = begin(api, 1)
    part = api.openai().uploads.parts.create(kept.id, data=b"x")
    assert await expire_uploads(services) == 0
    assert (await services.store.uploads.get(upload.id)).status == "expired"
    assert api.objects() == [f"uploads/{kept.id}/{part.id}"]


def test_the_uploads_of_another_tenant_are_unknown(api: Api) -> None:
    upload = begin(api, len(LINE))
    other = api.openai(api.other_key)
    for call in (
        lambda: other.uploads.parts.create(upload.id, data=LINE),
        lambda: other.uploads.complete(upload.id, part_ids=["part_x"]),
        lambda: other.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert api.objects() == []


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"bytes": 0}, "bytes", "integer_below_min_value"),
        ({"bytes": 1024**2 + 1}, "bytes", "integer_above_max_value"),
        ({"bytes": 8 * 1024**3 + 1, "purpose": "user_data"}, "bytes", "integer_above_max_value"),
        ({"bytes": "5"}, "bytes", "invalid_type"),
        ({"purpose": "nothing"}, "purpose", None),
        ({"filename": None}, "filename", "missing_required_parameter"),
        ({"filename": "a\n"}, "filename", "invalid_value"),
        ({"filename": "a.txt"}, None, None),
        ({"mime_type": "x" * 300}, "mime_type", "invalid_value"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
        ({"expires_after": {"seconds": 1}}, "expires_after.anchor", "missing_required_parameter"),
    ],
)
def test_an_upload_that_cannot_be_is_refused(
    api: Api, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    asked = {"filename": "a.jsonl", "purpose": "batch", "bytes": 5, "mime_type": "text/jsonl"}
    with api.http() as http:
        answer = http.post("/uploads", json=asked | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


def test_a_part_over_64_mib_is_refused(api: Api) -> None:
    upload = begin(api, 1, purpose="user_data")
    with api.http() as http:
        answer = http.post(f"/uploads/{upload.id}/parts", files={"data": b"x" * (64 * 1024**2 + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "data")
    assert api.objects() == []


def test_a_part_needs_bytes(api: Api) -> None:
    upload = begin(api, 1)
    with api.http() as http:
        path = f"/uploads/{upload.id}/parts"
        absent = http.post(path, files={"other": (None, "x")})
        empty = http.post(path, files={"data": b""})
    assert absent.json()["error"]["code"] == "missing_required_parameter"
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "data")
    assert api.objects() == []
