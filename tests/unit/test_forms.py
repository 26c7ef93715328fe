"""Multipart forms from JSON bodies, and the files within data URLs."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartParser

from batchyard.lines.forms import AttachedFile, is_file_url, make_form, named_by_url, read_data_url

AUDIO = "/v1/audio/transcriptions"
FILE = AttachedFile("a.wav", "audio/wav", b"RIFF\r\n--\x00\xff\r\n")


async def sent(body: dict[str, Any], file: AttachedFile = FILE, url: str = AUDIO) -> FormData:
    """What the form's reader in vLLM, Starlette's, finds in it."""
    form = make_form(url, body, file)

    async def stream() -> Any:
        yield form.body

    headers = Headers({"content-type": form.content_type})
    return await MultiPartParser(headers, stream()).parse()


async def test_every_field_but_the_files_url_is_in_the_form() -> None:
    form = await sent({"model": "m", "file_url": "https://example.com/a.wav", "prompt": "é\r\n--"})

    file = form["file"]
    assert isinstance(file, UploadFile)
    assert (file.filename, file.content_type, await file.read()) == (
        "a.wav",
        "audio/wav",
        FILE.data,
    )
    assert [(name, value) for name, value in form.multi_items() if name != "file"] == [
        ("model", "m"),
        ("prompt", "é\r\n--"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0.5, [("temperature", "0.5")]),
        ("seed", 12345678901234567890, [("seed", "12345678901234567890")]),
        ("use_beam_search", True, [("use_beam_search", "true")]),
        ("language", None, []),
        ("wanted", ["word", "segment"], [("wanted[]", "word"), ("wanted[]", "segment")]),
        ("wanted[]", ["word"], [("wanted[]", "word")]),
        ("vllm_xargs", {"a": [1, "b"]}, [("vllm_xargs", '{"a":[1,"b"]}')]),
    ],
)
async def test_values_are_sent_as_openais_clients_send_them(
    name: str, value: Any, expected: list[tuple[str, str]]
) -> None:
    form = await sent({name: value})
    assert [item for item in form.multi_items() if item[0] != "file"] == expected


async def test_the_file_of_an_edit_is_its_image() -> None:
    form = await sent({"prompt": "a hat"}, url="/v1/images/edits")
    assert isinstance(form["image"], UploadFile)


def test_a_fields_name_cannot_add_another_field() -> None:
    name = 'x"\r\n\r\nstolen\r\n--'
    form = make_form(AUDIO, {name: "1"}, FILE)
    assert b'name="x%22%0D%0A%0D%0Astolen%0D%0A--"\r\n\r\n1\r\n' in form.body


def test_the_content_type_is_one_word_that_names_the_boundary() -> None:
    form = make_form(AUDIO, {}, FILE)
    kind, options = parse_options_header(form.content_type)
    assert (kind, " " in form.content_type) == (b"multipart/form-data", False)
    assert form.body.startswith(b"--" + options[b"boundary"] + b"\r\n")


@pytest.mark.parametrize(
    ("url", "file"),
    [
        (
            "data:audio/wav;base64," + base64.b64encode(FILE.data).decode(),
            AttachedFile("file.wav", "audio/wav", FILE.data),
        ),
        ("data:audio/mpeg,x", AttachedFile("file.mp3", "audio/mpeg", b"x")),
        ("data:audio/x-m4a,x", AttachedFile("file.m4a", "audio/x-m4a", b"x")),
        ("data:image/png,x", AttachedFile("file.png", "image/png", b"x")),
        ("data:;base64,aGk=", AttachedFile("file.bin", "application/octet-stream", b"hi")),
        ("data:,a%20b%2Cc", AttachedFile("file.bin", "application/octet-stream", b"a b,c")),
        ("DATA:text/plain;charset=utf-8,hi", AttachedFile("file.txt", "text/plain", b"hi")),
        ('data:a"\r\nb/c,hi', AttachedFile("file.bin", "application/octet-stream", b"hi")),
    ],
)
def test_a_data_url_holds_its_file(url: str, file: AttachedFile) -> None:
    assert read_data_url(url) == file


@pytest.mark.parametrize(
    "url", ["data:", "data:text/plain;base64", "data:;base64,a", "data:;base64,a*b="]
)
def test_a_broken_data_url_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match=r"base64 is broken|no comma") as failure:
        read_data_url(url)
    assert url not in str(failure.value)


@given(st.binary(max_size=200))
def test_any_bytes_come_through_a_data_url(data: bytes) -> None:
    assert read_data_url("data:;base64," + base64.b64encode(data).decode()).data == data


@pytest.mark.parametrize(
    ("url", "name", "media_type"),
    [
        ("https://example.com/a/b.mp3?X-Signature=s", "b.mp3", "audio/mpeg"),
        ("https://example.com/a%22%0D%0Ab.flac", "a___b.flac", "audio/"),
        ("https://example.com/", "file", "application/octet-stream"),
        ("https://example.com", "file", "application/octet-stream"),
        ("https://example.com/%2e%2e%2fetc", "etc", "application/octet-stream"),
        ("https://example.com/" + "x" * 300 + ".png", "x" * 96 + ".png", "image/png"),
    ],
)
def test_a_file_is_named_by_the_path_of_its_url(url: str, name: str, media_type: str) -> None:
    """Servers tell formats by the name; nothing else of the URL is sent on."""
    file = named_by_url(url, b"")
    assert file.name == name
    assert file.media_type.startswith(media_type)


@pytest.mark.parametrize("value", ["https://a", "HTTP://a", "data:,", "Data:;base64,"])
def test_what_can_be_a_file_url(value: str) -> None:
    assert is_file_url(value)


@pytest.mark.parametrize("value", [None, 3, "", "a.wav", "file:///etc/passwd", "s3://b/k", ["x"]])
def test_what_can_be_no_file_url(value: Any) -> None:
    assert not is_file_url(value)
