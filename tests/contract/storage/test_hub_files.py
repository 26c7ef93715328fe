"""``hf://`` as IN and OUT, with a server that speaks the routes of a Hugging Face hub."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageUnavailable,
)
from batchyard.locations.access import Access
from batchyard.locations.hub_file import HubFile
from batchyard.locations.location import parse_location, read_location, write_location
from batchyard.storage.backoff import Backoff
from batchyard.storage.hub_repository import HubCredentials, HubRepository
from tests.contract.storage.conftest import QUICK
from tests.services.hub import READER, WRITER, Dataset, Entry, Fault, Hub, running_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.locations.access import Location

NAME = "me/mine"
SMALL = b'{"n": 1}\n'
LARGE = random.Random(5).randbytes(3 * 1024 * 1024 + 7)  # several blocks, and several parts


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub) -> Hub:
    """The hub with one dataset, which has a branch."""
    server.datasets = {NAME: Dataset()}
    server.faults, server.requests = [], []
    server.uploaded, server.parts = {}, {}
    server.datasets[NAME].commit({"small.jsonl": SMALL, "data/large.jsonl": LARGE})
    return server


@pytest.fixture
def mine(hub: Hub) -> Dataset:
    return hub.datasets[NAME]


def access_to(hub: Hub, token: str = WRITER) -> Access:
    async def find(_: Any) -> Any:
        return hub.credentials(token)

    return Access(find)


def dataset(hub: Hub, token: str = WRITER, at: str = "", backoff: Backoff = QUICK) -> HubRepository:
    return HubRepository(f"datasets/{NAME}{at}", hub.credentials(token), backoff=backoff)


async def read(hub: Hub, place: Location, token: str = WRITER) -> bytes:
    stream = read_location(place, limit_bytes=2**30, access=access_to(hub, token))
    return b"".join([block async for block in stream])


async def content(of: HubRepository, path: str) -> bytes:
    return b"".join([block async for block in of.read(path)])


@pytest.mark.parametrize(
    ("path", "expected"), [("small.jsonl", SMALL), ("data/large.jsonl", LARGE)]
)
async def test_a_file_is_read(hub: Hub, path: str, expected: bytes) -> None:
    assert await read(hub, parse_location(f"hf://datasets/{NAME}/{path}"), READER) == expected


@pytest.mark.parametrize(
    ("path", "expected", "puts"),
    [
        ("out/small.jsonl", SMALL, 0),
        ("out/ü 100%.jsonl", LARGE[:5000], 1),
        ("out/large.parquet", LARGE, 4),
        ("empty.jsonl", b"", 0),
    ],
)
async def test_a_file_is_written_by_one_commit(
    hub: Hub, mine: Dataset, tmp_path: Path, path: str, expected: bytes, puts: int
) -> None:
    """Small texts are in git, others in LFS, of which large ones are sent in parts."""
    (tmp_path / "results").write_bytes(expected)
    place = parse_location(f"hf://datasets/{NAME}/{path}")
    await write_location(place, tmp_path / "results", access_to(hub))
    assert mine.files() == {"small.jsonl": SMALL, "data/large.jsonl": LARGE, path: expected}
    assert mine.summaries == ["", f"Write {path}"]
    assert (hub.asked("PUT"), hub.asked("/commit/")) == (puts, 1)
    assert await read(hub, place) == expected


async def test_the_same_content_is_committed_once(hub: Hub, mine: Dataset, tmp_path: Path) -> None:
    """As after a crash between the commit and the note of it."""
    (tmp_path / "results").write_bytes(LARGE)
    for _ in range(2):
        await dataset(hub).write_file("out.parquet", tmp_path / "results")
    (tmp_path / "small").write_bytes(b"text\n")
    for _ in range(2):
        await dataset(hub).write_file("out.jsonl", tmp_path / "small")
    assert mine.summaries[1:] == ["Write out.parquet", "Write out.jsonl"]


@pytest.mark.parametrize("size", [10, len(LARGE)])
async def test_a_commit_whose_answer_was_lost_is_not_made_again(
    hub: Hub, mine: Dataset, tmp_path: Path, size: int
) -> None:
    (tmp_path / "results").write_bytes(LARGE[:size])
    hub.faults = [Fault("/commit/", is_lost=True)]
    await dataset(hub).write_file("out.jsonl", tmp_path / "results")
    assert hub.faults == []
    assert mine.summaries[1:] == ["Write out.jsonl"]
    assert mine.files()["out.jsonl"] == LARGE[:size]


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault("preupload", status=503), Fault("objects/batch", status=500)),
        *(Fault("PUT", status=503), Fault("PUT", status=403), Fault("PUT", is_lost=True)),
        *(Fault("complete_multipart", status=502), Fault("verify", status=504)),
        # Another commit was made at the same time.
        *(Fault("/commit/", status=412), Fault("/commit/", status=500)),
        Fault("/commit/", status=429, headers={"Retry-After": "0"}),
    ],
    ids=str,
)
async def test_an_upload_that_fails_for_now_is_tried_again(
    hub: Hub, mine: Dataset, tmp_path: Path, fault: Fault
) -> None:
    (tmp_path / "results").write_bytes(LARGE)
    hub.faults = [fault]
    await dataset(hub).write_file("out.jsonl", tmp_path / "results")
    assert hub.faults == []
    assert mine.files()["out.jsonl"] == LARGE
    assert len(mine.summaries) == 2


@pytest.mark.parametrize("path", ["small.jsonl", "data/large.jsonl"])
async def test_a_download_that_is_cut_is_resumed_where_it_ended(hub: Hub, path: str) -> None:
    expected = hub.datasets[NAME].files()[path]
    half = len(expected) // 2
    words = "GET /datasets/" if len(expected) < 2000 else "Signature"
    hub.faults = [Fault(words, cut=half), Fault("/resolve/", status=500), Fault("/resolve/", 429)]
    assert await content(dataset(hub), path) == expected
    assert hub.faults == []
    # By whole blocks of 1 MiB.
    assert hub.asked("Signature=secret bytes=1048576-") == (path == "data/large.jsonl")


async def test_a_file_of_a_server_without_ranges_is_resumed(hub: Hub) -> None:
    hub.faults = [
        Fault("Signature", cut=len(LARGE) // 2),
        Fault("Signature", content=LARGE, status=200),
    ]
    assert await content(dataset(hub), "data/large.jsonl") == LARGE
    assert hub.faults == []


async def test_content_that_is_not_the_commits_is_noticed(hub: Hub) -> None:
    for path in ("small.jsonl", "data/large.jsonl"):
        expected = hub.datasets[NAME].files()[path]
        words = "GET /datasets/" if path == "small.jsonl" else "Signature"
        hub.faults = [Fault(words, content=bytes(len(expected)))]
        with pytest.raises(StorageUnavailable, match="by its hash"):
            await content(dataset(hub), path)


async def test_a_commit_that_has_other_content_is_noticed(
    hub: Hub, mine: Dataset, tmp_path: Path
) -> None:
    """Until the right one is there: another program may have written the file meanwhile."""
    (tmp_path / "results").write_bytes(SMALL)

    def other() -> None:
        newest = mine.commits[mine.branches["main"]]
        newest["a.jsonl"] = Entry(b"of another program\n", is_lfs=False)

    hub.faults = [Fault("/paths-info/", act=other)]
    await dataset(hub).write_file("a.jsonl", tmp_path / "results")
    assert mine.files()["a.jsonl"] == SMALL


async def test_a_branch_that_moves_does_not_mix_two_versions(hub: Hub, mine: Dataset) -> None:
    branch = dataset(hub)
    found = [path async for path in branch.list("")]
    mine.commit({"small.jsonl": b"other\n", "new.jsonl": b"new\n"})
    assert [path async for path in branch.list("")] == found
    assert await content(branch, "small.jsonl") == SMALL
    assert await content(dataset(hub), "small.jsonl") == b"other\n"
    place = parse_location(f"hf://datasets/{NAME}/small.jsonl")
    assert isinstance(place, HubFile)
    pinned = await place.pinned(access_to(hub))
    mine.commit({"small.jsonl": b"third\n"})
    assert await read(hub, pinned) == b"other\n"


async def test_paths_are_listed_by_their_beginning(hub: Hub, mine: Dataset) -> None:
    """Page by page, and folders are no files."""
    mine.commit({f"data/part-{n}.jsonl": SMALL for n in range(5)} | {"data2/x.jsonl": SMALL})
    of = dataset(hub)
    parts = [f"data/part-{n}.jsonl" for n in range(5)]
    assert [path async for path in of.list("data/part-")] == parts
    assert [path async for path in of.list("data/")] == ["data/large.jsonl", *parts]
    assert [path async for path in of.list("dat")] == ["data/large.jsonl", *parts, "data2/x.jsonl"]
    assert [path async for path in of.list("none/")] == []


@pytest.mark.parametrize("revision", ["v1", "feature/x", "refs/pr/3"])
async def test_a_branch_or_pull_request_is_read_and_written(
    hub: Hub, mine: Dataset, tmp_path: Path, revision: str
) -> None:
    mine.commit({"a.jsonl": b"of the branch\n"}, branch=revision)
    written = revision if revision.startswith("refs") else revision.replace("/", "%2F")
    url = f"hf://datasets/{NAME}@{written}"
    assert await read(hub, parse_location(f"{url}/a.jsonl")) == b"of the branch\n"
    (tmp_path / "results").write_bytes(SMALL)
    await write_location(parse_location(f"{url}/b.jsonl"), tmp_path / "results", access_to(hub))
    assert mine.files(revision)["b.jsonl"] == SMALL
    assert "b.jsonl" not in mine.files()


async def test_an_earlier_commit_is_read_by_its_hash(hub: Hub, mine: Dataset) -> None:
    sha = mine.branches["main"]
    mine.commit({"small.jsonl": b"other\n"})
    place = parse_location(f"hf://datasets/{NAME}@{sha}/small.jsonl")
    assert await read(hub, place) == SMALL
    with pytest.raises(LocationRefused, match="a commit, which never changes: name a branch"):
        await place.check_output()


@pytest.mark.parametrize(
    ("at", "path", "words"),
    [
        ("", "none.jsonl", "hf://datasets/me/mine/none.jsonl: the dataset has no such file"),
        ("@none", "small.jsonl", "no such branch, tag or commit"),
    ],
)
async def test_what_is_missing_is_named(hub: Hub, at: str, path: str, words: str) -> None:
    with pytest.raises(ObjectNotFound, match=words):
        await content(dataset(hub, at=at), path)
    assert len(hub.requests) <= 2  # asked once, not again and again


async def test_a_dataset_without_that_commit_is_not_an_empty_one(hub: Hub) -> None:
    """A listing says nothing of folders that are not there."""
    place = parse_location(f"hf://datasets/{NAME}@{'0' * 40}/data/")
    assert isinstance(place, HubFile)
    with pytest.raises(ObjectNotFound, match="no such branch, tag or commit"):
        await place.pinned(access_to(hub))


async def test_a_folder_is_no_file(hub: Hub) -> None:
    with pytest.raises(LocationRefused, match=r"is a folder: give a file, or .*/mine/data/ for"):
        await content(dataset(hub), "data")


async def test_a_dataset_that_does_not_exist_or_is_private(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "results").write_bytes(SMALL)
    place = parse_location("hf://datasets/me/none/a.jsonl")
    with pytest.raises(ObjectNotFound, match="no such dataset, or the token may not see it"):
        await read(hub, place)
    with pytest.raises(ObjectNotFound, match="no such dataset, or the token may not see it"):
        await write_location(place, tmp_path / "results", access_to(hub))


async def test_who_may_not_use_a_dataset_is_refused(hub: Hub, tmp_path: Path) -> None:
    """Without a word of the token."""
    (tmp_path / "results").write_bytes(SMALL)
    for token, act in (
        ("hf_wrong_token", lambda of: content(of, "small.jsonl")),
        (READER, lambda of: of.write_file("a.jsonl", tmp_path / "results")),
        (READER, lambda of: of.probe()),
    ):
        with pytest.raises(
            AccessDenied, match="not allowed to use hf://datasets/me/mine"
        ) as raised:
            await act(dataset(hub, token))
        assert "hf_" not in str(raised.value)
    await dataset(hub).probe()
    with pytest.raises(ObjectNotFound, match="no such branch"):
        await dataset(hub, at="@none").probe()


async def test_a_gated_dataset_says_what_to_do(
    hub: Hub, mine: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    mine.is_gated = True
    with pytest.raises(AccessDenied, match="ask for access on the dataset's page"):
        await content(dataset(hub, ""), "small.jsonl")
    mine.is_gated, mine.is_private = False, True
    with pytest.raises(AccessDenied, match="check that the dataset exists, and that the token"):
        await content(dataset(hub, ""), "small.jsonl")


async def test_the_token_is_that_of_the_environment(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.datasets[NAME].is_private = True
    monkeypatch.setenv("HF_TOKEN", READER)
    assert await content(dataset(hub, ""), "small.jsonl") == SMALL


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "7200"}, {"RateLimit": '"api";r=0;t=7200'}], ids=str
)
async def test_a_limit_that_ends_too_late_is_not_waited_for(
    hub: Hub, tmp_path: Path, headers: dict[str, str]
) -> None:
    (tmp_path / "results").write_bytes(SMALL)
    hub.faults = [Fault("/commit/", status=429, headers=headers)]
    with pytest.raises(StorageUnavailable, match="the hub answered 429, after 7200 s"):
        await dataset(hub).write_file("a.jsonl", tmp_path / "results")
    hub.faults = [Fault("/resolve/", status=429, headers=headers)]
    with pytest.raises(StorageUnavailable, match="the hub answered 429"):
        await content(dataset(hub), "small.jsonl")


async def test_a_limit_is_waited_for(hub: Hub) -> None:
    clock = asyncio.get_running_loop().time
    hub.faults = [Fault("/resolve/", status=429, headers={"Retry-After": "1"})]
    began = clock()
    assert await content(dataset(hub), "small.jsonl") == SMALL
    assert clock() - began >= 1


async def test_a_hub_that_is_away_is_unavailable(hub: Hub) -> None:
    away = HubCredentials(token=WRITER, endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match="the hub cannot be reached"):
        await content(HubRepository(f"datasets/{NAME}", away, backoff=QUICK), "a")
    hub.faults = [Fault("/revision/", status=413)]
    with pytest.raises(ObjectTooLarge):
        await content(dataset(hub), "a")
    hub.faults = [Fault("/revision/", content=b"<html>") for _ in range(QUICK.attempts)]
    with pytest.raises(StorageUnavailable, match="answer cannot be used"):
        await content(dataset(hub), "a")


async def test_a_path_that_the_repository_ignores_is_refused(
    hub: Hub, mine: Dataset, tmp_path: Path
) -> None:
    """The hub leaves it out, and says that all went well."""
    mine.ignored = r"\.jsonl$"
    (tmp_path / "results").write_bytes(SMALL)
    with pytest.raises(LocationRefused, match="gitignore excludes it"):
        await dataset(hub).write_file("out.jsonl", tmp_path / "results")


async def test_no_signature_and_no_token_is_logged(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("huggingface_hub").propagate = True
    (tmp_path / "results").write_bytes(LARGE)
    hub.faults = [Fault("PUT", status=503), Fault("Signature", cut=5)]
    of = dataset(hub)
    await of.write_file("a.jsonl", tmp_path / "results")
    await content(dataset(hub), "data/large.jsonl")
    assert hub.faults == []
    ours = [each.getMessage() for each in caplog.records if each.name != "aiohttp.access"]
    said = "".join([*ours, *capfd.readouterr()])
    assert "Signature" not in said
    assert WRITER not in said


async def test_an_upload_ends_with_its_caller(hub: Hub, mine: Dataset, tmp_path: Path) -> None:
    """Soon, and without a commit."""
    (tmp_path / "results").write_bytes(LARGE)
    hub.faults = [Fault("PUT", status=503) for _ in range(50)]
    patient = Backoff(attempts=50, first_seconds=0.01, longest_seconds=0.05)
    task = asyncio.ensure_future(
        dataset(hub, backoff=patient).write_file("a.jsonl", tmp_path / "results")
    )
    while not hub.asked("PUT"):  # noqa: ASYNC110 - the server is in another thread
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asked = len(hub.requests)
    await asyncio.sleep(0.3)
    assert len(hub.requests) == asked
    assert len(mine.summaries) == 1


async def test_a_reader_that_stops_early_leaves_nothing_behind(hub: Hub) -> None:
    of = dataset(hub)
    async with aclosing(of.read("data/large.jsonl")) as blocks:
        assert await anext(blocks) == LARGE[: 1024**2]
    await of.close()
    assert await content(dataset(hub), "small.jsonl") == SMALL


async def test_a_local_file_that_is_gone_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="none"):
        await dataset(hub).write_file("a.jsonl", tmp_path / "none")
