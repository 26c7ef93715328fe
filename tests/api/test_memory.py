"""What the server's process needs while large files pass through it: next to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.api.conftest import LINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.api.conftest import Api, ServerProcess

MIB = 1024**2
ROOM_BYTES = 32 * MIB
BOUNDARY = b"XyZ"


def form(size_bytes: int) -> Iterator[bytes]:
    """As openai-node sends it: the file first, in chunks, without a length."""
    yield b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    block = LINE * (MIB // len(LINE))
    sent = 0
    while sent < size_bytes:
        yield block
        sent += len(block)
    yield b'\r\n--XyZ\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--XyZ--'


def upload(api: Api, size_bytes: int) -> str:
    with api.http() as http:
        kind = {"content-type": "multipart/form-data; boundary=XyZ"}
        answer = http.post("/files", content=form(size_bytes), headers=kind)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def download(api: Api, file_id: str) -> int:
    with api.http() as http, http.stream("GET", f"/files/{file_id}/content") as answer:
        return sum(len(block) for block in answer.iter_bytes())


@pytest.mark.alone
@pytest.mark.parametrize("size_bytes", [64 * MIB, pytest.param(200 * MIB, marks=pytest.mark.slow)])
def test_a_large_file_passes_through_with_flat_memory(
    server_process: ServerProcess, size_bytes: int
) -> None:
    api = server_process.api
    download(api, upload(api, MIB))
    server_process.forget_peak()
    before = server_process.peak_bytes()
    file_id = upload(api, size_bytes)
    assert server_process.peak_bytes() - before <= ROOM_BYTES
    assert download(api, file_id) >= size_bytes
    assert server_process.peak_bytes() - before <= ROOM_BYTES


@pytest.mark.alone
def test_parts_are_joined_with_flat_memory(server_process: ServerProcess) -> None:
    api = server_process.api
    download(api, upload(api, MIB))
    server_process.forget_peak()
    before = server_process.peak_bytes()
    block = LINE * (16 * MIB // len(LINE))
    client = api.openai()
    started = client.uploads.create(
        filename="in.jsonl", purpose="batch", bytes=4 * len(block), mime_type="text/jsonl"
    )
    parts = [client.uploads.parts.create(started.id, data=block).id for _ in range(4)]
    done = client.uploads.complete(started.id, part_ids=parts)
    assert done.file is not None
    assert done.file.bytes == 4 * len(block)
    assert server_process.peak_bytes() - before <= ROOM_BYTES
