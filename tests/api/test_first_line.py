"""The look at a batch input's first line, however its bytes are cut."""

from __future__ import annotations

import gzip
import time

import pytest

from batchyard.files.upload import FirstLine


def sniffed(data: bytes, step: int) -> FirstLine:
    line = FirstLine()
    for start in range(0, len(data), step):
        line.add(data[start : start + step])
    return line


@pytest.mark.parametrize("step", [1, 2, 5, 4096])
@pytest.mark.parametrize(
    ("data", "is_json"),
    [
        (b'{"a": 1}\nbroken', True),
        (b'{"a": 1}', True),
        (b'\xef\xbb\xbf{"a": 1}\r\n', True),
        (b'\n \r\n\t\n{"a": 1}\n', True),
        (b'\xef\xbb\xbf\r\n{"a": 1}', True),
        (b"broken\n{}", False),
        (b"\n\nbroken\n{}", False),
        (b'{"a":\n1}', False),
        (b'{"a": NaN}', False),
        (b'{"a": "\xff"}', False),
        (b"\xff\xfe{\x00}\x00", False),
        (b"[" * 5000, False),
    ],
)
def test_the_first_line_that_is_not_blank_decides(data: bytes, is_json: bool, step: int) -> None:
    line = sniffed(data, step)
    assert (line.is_json(), line.is_blank) == (is_json, False)


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_blank_lines_alone_are_no_line(data: bytes) -> None:
    assert sniffed(data, 1).is_blank


def test_a_first_line_of_many_megabytes_is_judged_by_its_beginning() -> None:
    assert sniffed(b'{"a": "' + b"x" * 3_000_000 + b'"}\n', 65536).is_json()
    assert not sniffed(b"x" * 3_000_000, 65536).is_json()


def test_millions_of_blank_lines_cost_next_to_nothing() -> None:
    began = time.process_time()
    assert sniffed(b"\n" * 50_000_000, 65536).is_blank
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}\n'.encode("utf-16-le"), "UTF-16"),
        (gzip.compress(b'{"a": 1}\n'), "gzip"),
        (b"broken\n", None),
    ],
    ids=["UTF-16", "UTF-16 without a mark", "gzip", "none"],
)
@pytest.mark.parametrize("step", [1, 4096])
def test_a_file_of_another_format_is_named(data: bytes, said: str | None, step: int) -> None:
    found = sniffed(data, step).other_format
    assert found is None if said is None else said in str(found)
