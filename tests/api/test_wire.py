"""The bytes on the wire: exact shapes, odd forms, ranges, curl, and clients that misbehave."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from batchyard.api.http import body
from batchyard.files import upload
from batchyard.store import NewFile
from tests.api.conftest import LINE, read_all
from tests.api.test_multipart import END, PURPOSE, part

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.services.services import Services
    from tests.api.conftest import Api

FORM = "Content-Type: multipart/form-data; boundary=XyZ"
FILE = part('name="file"; filename="in.jsonl"', LINE)


def send_form(api: Api, form: bytes, path: str = "/files") -> tuple[int, dict[str, object]]:
    head = api.head("POST", path, FORM, f"Content-Length: {len(form)}")
    return parsed(api.raw(head + form))


def parsed(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def test_a_file_object_has_these_keys_in_this_order(api: Api) -> None:
    status, file = send_form(api, PURPOSE + FILE + END)
    assert status == 200
    assert list(file) == [
        *("object", "id", "purpose", "filename", "bytes", "created_at", "expires_at"),
        *("status", "status_details"),
    ]


def test_an_empty_list_is_this(api: Api) -> None:
    with api.http() as http:
        answer = http.get("/files")
    assert answer.content == (
        b'{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}'
    )
    assert answer.headers["content-type"] == "application/json"


def test_the_file_may_come_first_in_chunks_without_a_length(api: Api) -> None:
    form = FILE + PURPOSE + END
    chunks = [form[start : start + 37] for start in range(0, len(form), 37)]
    head = api.head("POST", "/files", FORM, "Transfer-Encoding: chunked")
    pieces = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    status, file = parsed(api.raw(head, *pieces, b"0\r\n\r\n"))
    assert (status, file["bytes"], file["purpose"]) == (200, len(LINE), "batch")


def test_a_form_as_dotnet_writes_it_is_read(api: Api) -> None:
    form = (
        part("name=purpose", b"batch", "Content-Type: text/plain; charset=utf-8")
        + part("name=file; filename=in.jsonl; filename*=utf-8''na%C3%AFve.jsonl", LINE)
        + END
    )
    status, file = send_form(api, form)
    assert (status, file["filename"]) == (200, "naïve.jsonl")


@pytest.mark.parametrize("kind", ["application/jsonl", "text/plain", "nonsense", None])
def test_the_type_of_a_part_does_not_matter(api: Api, kind: str | None) -> None:
    headers = [f"Content-Type: {kind}"] if kind else []
    status, _ = send_form(api, PURPOSE + part("name=file; filename=a", LINE, *headers) + END)
    assert status == 200


@pytest.mark.parametrize("spelling", ["expires_after[{}]", "expires_after.{}"])
def test_expires_after_is_read_with_brackets_and_with_dots(api: Api, spelling: str) -> None:
    anchor = part(f'name="{spelling.format("anchor")}"', b"created_at")
    seconds = part(f'name="{spelling.format("seconds")}"', b"3600")
    status, file = send_form(api, FILE + seconds + anchor + PURPOSE + END)
    assert (status, file["expires_at"]) == (200, int(str(file["created_at"])) + 3600)


@pytest.mark.parametrize(
    ("form", "param", "code"),
    [
        (FILE + END, "purpose", "missing_required_parameter"),
        (PURPOSE + END, "file", "missing_required_parameter"),
        (FILE + part("name=purpose", b"nothing") + END, "purpose", None),
        (FILE + part("name=purpose", b"batch_output") + END, "purpose", None),
        (PURPOSE + part("name=colour", b"red") + FILE + END, "colour", "unknown_parameter"),
        (PURPOSE + part('name=file; filename="a\0"', LINE) + END, None, None),
        (PURPOSE + FILE, None, None),
    ],
)
def test_a_form_that_lacks_something_is_a_400(
    api: Api, form: bytes, param: str | None, code: str | None
) -> None:
    status, answer = send_form(api, form)
    error = answer["error"]
    assert isinstance(error, dict)
    assert status == 400
    if param is not None:
        assert (error["param"], error["code"]) == (param, code)
    assert api.objects() == []


def test_a_bad_purpose_is_answered_as_openai_does(api: Api) -> None:
    _, answer = send_form(api, part("name=purpose", b"X") + FILE + END)
    assert answer["error"] == {
        "message": "'X' is not one of ['assistants', 'batch', 'fine-tune', 'vision', "
        "'user_data', 'evals'] - 'purpose'",
        "type": "invalid_request_error",
        "param": "purpose",
        "code": None,
    }


@pytest.mark.alone
@pytest.mark.parametrize("path", ["/files", "/files/"])
def test_a_body_that_announces_too_much_is_refused_unread(api: Api, path: str) -> None:
    head = api.head("POST", path, FORM, f"Content-Length: {2**40}", "Expect: 100-continue")
    began = time.monotonic()
    status, _ = parsed(api.raw(head))
    assert status == (413 if path == "/files" else 404)
    assert time.monotonic() - began < 2


def test_a_file_over_the_limit_is_a_413_that_the_client_gets_to_read(api: Api) -> None:
    big = part('name="file"; filename="in.jsonl"', LINE * 80_000)
    head = api.head("POST", "/files", FORM, "Transfer-Encoding: chunked")
    form = PURPOSE + big + END
    status, answer = parsed(api.raw(head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(form), form)))
    assert status == 413
    assert answer["error"]["param"] == "file"  # type: ignore[index]
    assert api.objects() == []


def test_an_input_over_its_limit_is_refused_too_when_its_purpose_comes_last(api: Api) -> None:
    big = part('name="file"; filename="in.jsonl"', LINE * 20_000)
    status, _ = send_form(api, big + PURPOSE + END)
    assert status == 413
    assert api.objects() == []


def test_a_file_for_another_purpose_is_held_to_its_own_limit_when_its_purpose_comes_last(
    monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    """Inputs of batches may be larger here."""
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", len(LINE))
    purpose = part("name=purpose", b"user_data")
    for content, status in ((LINE, 200), (LINE + b"\n", 413)):
        file = part('name="file"; filename="in.png"', content)
        for form in (purpose + file, file + purpose):
            assert send_form(api, form + END)[0] == status
    assert len(api.objects()) == 2


@pytest.mark.parametrize("path", ["/files", "/batches", "/uploads", "/webhook_endpoints"])
def test_a_wrong_key_is_refused_before_the_body_is_asked_for(api: Api, path: str) -> None:
    head = api.head("POST", path, FORM, "Content-Length: 1000", "Expect: 100-continue")
    answer = api.raw(head.replace(api.key.encode(), b"sk-by-wrong"))
    assert answer.startswith(b"HTTP/1.1 401")


def test_curl_uploads_with_expect_100_continue(api: Api, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not here")
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINE * 5000)
    command = [curl, "-sS", "-H", "Expect: 100-continue", "-H", f"Authorization: Bearer {api.key}"]
    command += ["-F", "purpose=batch", "-F", f"file=@{path}", f"{api.url}/files"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout)["bytes"] == path.stat().st_size


def test_a_gzipped_body_is_refused(api: Api) -> None:
    form = PURPOSE + FILE + END
    head = api.head(
        "POST", "/files", FORM, f"Content-Length: {len(form)}", "Content-Encoding: gzip"
    )
    assert parsed(api.raw(head + form))[0] == 415


def test_a_client_that_leaves_in_the_middle_leaves_nothing(api: Api) -> None:
    head = api.head("POST", "/files", FORM, "Content-Length: 500000")
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(head + PURPOSE + FILE[:-2] + LINE * 3000)
        api.wait_for_objects(1)
    api.wait_for_objects(0)


def test_a_client_that_leaves_a_part_in_the_middle_leaves_nothing(api: Api) -> None:
    upload = api.openai().uploads.create(
        filename="a", purpose="batch", bytes=5, mime_type="text/jsonl"
    )
    head = api.head("POST", f"/uploads/{upload.id}/parts", FORM, "Content-Length: 500000")
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(head + part("name=data; filename=x", LINE * 3000))
        api.wait_for_objects(1)
    api.wait_for_objects(0)


def test_a_client_that_trickles_is_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LEAST_SPEED", body.LeastSpeed(window_seconds=0.5, least_bytes=1000))
    monkeypatch.setattr(body, "_LINGER_SECONDS", 0.2)
    head = api.head("POST", "/files", FORM, "Content-Length: 500000")
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(head + PURPOSE)
        answer = read_all(connection)
    assert parsed(answer)[0] == 408
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert api.objects() == []


def test_a_refused_client_that_goes_on_sending_is_cut_off(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_LINGER_SECONDS", 0.3)
    head = api.head("POST", "/nothing", FORM, "Content-Length: 500000000")
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            keep_sending(connection)


def keep_sending(connection: socket.socket) -> None:
    for _ in range(1000):
        connection.sendall(b"x" * 65536)
        time.sleep(0.005)


def test_a_connection_goes_on_after_an_error_whose_body_was_read(api: Api) -> None:
    with api.http() as http:
        assert http.post("/uploads", json={"x": 1}).status_code == 400
        assert "connection" not in http.get("/files").headers


RANGES = [
    ("bytes=0-9", 0, 10),
    ("bytes=5-", 5, None),
    ("bytes=-7", -7, None),
    ("bytes=0-0", 0, 1),
    ("bytes=10-99999999", 10, None),
    ("bytes=-99999999", 0, None),
    ("bytes = 2 - 4", 2, 5),
]


@pytest.mark.parametrize(("asked", "start", "stop"), RANGES)
def test_a_range_is_a_206(api: Api, asked: str, start: int, stop: int | None) -> None:
    content = LINE * 30
    file = api.openai().files.create(file=content, purpose="batch")
    with api.http() as http:
        answer = http.get(f"/files/{file.id}/content", headers={"range": asked})
    wanted = content[start:stop]
    first = content.index(wanted) if start >= 0 else len(content) - len(wanted)
    assert (answer.status_code, answer.content) == (206, wanted)
    assert answer.headers["content-range"] == (
        f"bytes {first}-{first + len(wanted) - 1}/{len(content)}"
    )
    assert answer.headers["content-length"] == str(len(wanted))


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "lines=1-2", "bytes=x", "bytes=5-2", "bytes=-"])
def test_what_is_no_single_range_is_ignored(api: Api, asked: str) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    with api.http() as http:
        answer = http.get(f"/files/{file.id}/content", headers={"range": asked})
    assert (answer.status_code, answer.content) == (200, LINE)


@pytest.mark.parametrize("asked", ["bytes={}-", "bytes={}-{}", "bytes=-0"])
def test_a_range_behind_the_end_is_a_416(api: Api, asked: str) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    with api.http() as http:
        answer = http.get(
            f"/files/{file.id}/content", headers={"range": asked.format(len(LINE), 10**9)}
        )
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(LINE)}"
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "disposition"),
    [
        ("in.jsonl", 'attachment; filename="in.jsonl"'),
        ('a"b\\.jsonl', r'attachment; filename="a\"b\\.jsonl"'),
        ("naïve.jsonl", "attachment; filename=\"na?ve.jsonl\"; filename*=UTF-8''na%C3%AFve.jsonl"),
    ],
)
async def test_a_download_is_named_and_typed_as_bytes(
    api: Api, services: Services, name: str, disposition: str
) -> None:
    with api.http() as http:
        asked = {"filename": name, "purpose": "batch", "bytes": len(LINE), "mime_type": "x"}
        upload = http.post("/uploads", json=asked).json()
        sent = http.post(f"/uploads/{upload['id']}/parts", files={"data": LINE}).json()
        done = http.post(f"/uploads/{upload['id']}/complete", json={"part_ids": [sent["id"]]})
        answer = http.get(
            f"/files/{done.json()['file']['id']}/content", headers={"accept": "application/json"}
        )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == str(len(LINE))
    assert answer.headers["content-disposition"] == disposition


async def test_a_file_whose_name_has_a_line_end_is_downloaded(api: Api, services: Services) -> None:
    """Paths and keys of S3 may have one, and no header may."""
    file = api.openai().files.create(file=LINE, purpose="batch")
    first = await services.store.files.get(file.id)
    named = await services.store.files.create(
        NewFile(
            tenant="one",
            purpose="batch",
            filename="a\r\nb\x85.jsonl",
            size_bytes=first.size_bytes,
            sha256=first.sha256,
            storage_key=first.storage_key,
        )
    )
    with api.http() as http:
        answer = http.get(f"/files/{named.id}/content")
    assert answer.content == LINE
    assert answer.headers["content-disposition"] == 'attachment; filename="a__b_.jsonl"'


def test_bytes_that_are_gone_are_no_200(api: Api) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    (api.settings.home_folder / "objects/files" / file.id).unlink()
    with api.http() as http:
        answer = http.get(f"/files/{file.id}/content")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
