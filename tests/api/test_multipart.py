"""The form reader alone: every order and cut of parts, and what is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, Form

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TYPE = "multipart/form-data; boundary=XyZ"


def part(disposition: str | bytes, content: bytes, *headers: str) -> bytes:
    value = disposition.encode() if isinstance(disposition, str) else disposition
    more = "".join(f"{header}\r\n" for header in headers).encode()
    return (
        b"--XyZ\r\nContent-Disposition: form-data; "
        + value
        + b"\r\n"
        + more
        + (b"\r\n" + content + b"\r\n")
    )


END = b"--XyZ--\r\n"
PURPOSE = part('name="purpose"', b"batch")
FILE = part('name="file"; filename="in.jsonl"', b"{}\r\n--Xy\r\n{}\n", "Content-Type: a/b")


def read(
    body: bytes, *, step: int = 1 << 20, limit: int = 1000, kind: str = TYPE
) -> tuple[Form, bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), step):
            yield body[start : start + step]

    async def run() -> tuple[Form, bytes]:
        form = Form(kind, file_field="file", limit_bytes=lambda _: limit)
        return form, b"".join([piece async for piece in form.content(chunks())])

    return asyncio.run(run())


def refusal(body: bytes, **options: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(body, **options)  # type: ignore[arg-type]
    return raised.value


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("body", [PURPOSE + FILE + END, FILE + PURPOSE + END])
def test_any_order_of_parts_and_any_cut_of_chunks_is_read_alike(body: bytes, step: int) -> None:
    form, content = read(body, step=step)
    assert content == b"{}\r\n--Xy\r\n{}\n"
    assert form.fields == {"purpose": "batch"}
    assert form.file is not None
    assert form.file.filename == "in.jsonl"


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        ('name="file"; filename="a b.jsonl"', "a b.jsonl"),
        ("name=file; filename=plain.jsonl; filename*=utf-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("name=file; filename*=UTF-8'en'%e2%82%ac.jsonl", "€.jsonl"),
        ("name=file; filename=a; filename*=utf-8''%ff", "a"),
        ("name=file; filename=a; filename*=klingon''b", "a"),
        ('filename="x.jsonl"; name="file"', "x.jsonl"),
        ('name="file"; filename="naïve 文.jsonl"', "naïve 文.jsonl"),
        (b'name="file"; filename="na\xefve.jsonl"', "naïve.jsonl"),
        (r'name="file"; filename="say \"hi\".jsonl"', 'say "hi".jsonl'),
        ('name="file"; filename="a;name=b.jsonl"', "a;name=b.jsonl"),
        ('name="file"; filename=""', ""),
        ('name="file"', None),
    ],
)
def test_a_filename_is_read_however_it_is_written(
    disposition: str | bytes, filename: str | None
) -> None:
    form, content = read(part(disposition, b"x") + END)
    assert (form.file and form.file.filename, content) == (filename, b"x")


def test_a_quoted_boundary_is_understood() -> None:
    _, content = read(FILE + END, kind='multipart/form-data; charset=utf-8; boundary="XyZ"')
    assert content.startswith(b"{}")


def test_a_form_without_a_file_yields_nothing() -> None:
    form, content = read(PURPOSE + END)
    assert (form.file, content) == (None, b"")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (PURPOSE + FILE, 400, None),
        (PURPOSE + FILE[:-4], 400, None),
        (b"", 400, None),
        (b"{}", 400, None),
        (FILE + FILE + END, 400, "file"),
        (PURPOSE + PURPOSE + END, 400, "purpose"),
        (part('filename="x"', b"x") + END, 400, None),
        (b"--XyZ\r\nContent-Type: a/b\r\n\r\nx\r\n" + END, 400, None),
        (part('name="purpose"', b"x" * (MAX_FIELD_BYTES + 1)) + END, 400, "purpose"),
        (part('name="purpose"', b"\xff") + END, 400, "purpose"),
        (b"".join(part(f"name=f{n}", b"") for n in range(MAX_FIELDS + 1)) + END, 400, None),
        (part(f'name="file"; filename="{"x" * 9000}"', b"x") + END, 400, None),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, status: int, param: str | None) -> None:
    refused = refusal(body)
    assert (refused.status, refused.param) == (status, param)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=" + "x" * 300, 400),
    ],
)
def test_a_content_type_that_is_no_form_is_refused(kind: str, status: int) -> None:
    assert refusal(FILE + END, kind=kind).status == status


def test_a_file_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    refused = refusal(FILE, limit=5)
    assert (refused.status, refused.param, refused.code) == (413, "file", "file_too_large")
