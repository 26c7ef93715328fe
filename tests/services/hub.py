"""A Hugging Face hub of datasets, with the routes that huggingface_hub 2.4 asks for.

Made from the source of that version: what it sends and what it reads of an answer. The hub is
stricter than it has to be: a token, revision, hash, size or order that is not right is refused. Its
file storage has another address, as the real one, which takes signed URLs and no token.

Of what the real hub has, Xet is missing: large files go through git LFS, by one PUT or by parts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from aiohttp import web

from batchyard.storage.hub_repository import HubCredentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

WRITER, READER = "hf_writer_token", "hf_reader_token"
LFS_FROM_BYTES = 2000
PART_BYTES = 1024 * 1024
"""Larger files are uploaded in parts of this size."""
_PAGE = 3
_SIGNED = "X-Amz-Signature"


@dataclass
class Entry:
    """A file of a commit."""

    content: bytes
    is_lfs: bool

    @property
    def blob_id(self) -> str:
        content = self.content
        if self.is_lfs:
            oid = f"oid sha256:{self.sha256}\nsize {len(content)}\n"
            content = f"version https://git-lfs.github.com/spec/v1\n{oid}".encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - git's

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def described(self, path: str) -> dict[str, Any]:
        """As the routes `tree` and `paths-info` do."""
        found = {"type": "file", "oid": self.blob_id, "size": len(self.content), "path": path}
        if self.is_lfs:
            lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
            found |= {"lfs": lfs, "xetHash": self.sha256}
        return found


@dataclass
class Dataset:
    """A repository: commits, and branches that name one of them each."""

    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)
    is_private: bool = False
    is_gated: bool = False
    ignored: str = "$^"
    """What its .gitignore excludes, as a regular expression."""

    def commit(self, files: Mapping[str, bytes], branch: str = "main", summary: str = "") -> str:
        """Add files; returns the commit's SHA."""
        entries = {
            path: Entry(content, is_lfs(path, len(content))) for path, content in files.items()
        }
        return self.commit_entries(entries, branch, summary)

    def commit_entries(self, entries: Mapping[str, Entry], branch: str, summary: str) -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        sha = secrets.token_hex(20)
        self.commits[sha] = {**before, **entries}
        self.branches[branch] = sha
        self.summaries.append(summary)
        return sha

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """The content of every file."""
        found = self.commits[self.branches[branch]]
        return {path: entry.content for path, entry in found.items()}


def is_lfs(path: str, size: int) -> bool:
    """What the .gitattributes of a dataset and the hub decide: binary and large files are."""
    return size >= LFS_FROM_BYTES or path.endswith((".parquet", ".gz", ".zst"))


@dataclass
class Fault:
    """What happens to the next request whose method and path have these words in them.

    ``status``: the answer, in place of the right one. ``cut``: the answer ends after so many bytes.
    ``is_lost``: everything is done, and no answer comes. ``content``: what is sent instead, with
    ``status`` if there is one. ``act`` is called before the right answer is made.
    """

    words: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    is_lost: bool = False
    content: bytes | None = None
    act: Callable[[], object] | None = None


class Hub:
    """The server's state. Both URLs are set when it runs."""

    def __init__(self) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.uploaded: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.url = ""
        self.storage_url = ""

    def credentials(self, token: str = WRITER) -> HubCredentials:
        """What the product needs to use it."""
        return HubCredentials(token=token, endpoint_url=self.url)

    def asked(self, words: str) -> int:
        """How many requests had these words in them."""
        return sum(words in request for request in self.requests)


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without datasets, on loopback."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    hub = Hub()

    async def start(routes: list[web.RouteDef]) -> web.AppRunner:
        app = web.Application(client_max_size=2**30, middlewares=[_with_faults(hub)])
        app.add_routes(routes)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    routes, files = _Routes(hub), _Storage(hub)
    runners = [
        asyncio.run_coroutine_threadsafe(start(each), loop).result()
        for each in (routes.table(), files.table())
    ]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
    try:
        yield hub
    finally:
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _with_faults(hub: Hub) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        line = f"{request.method} {request.raw_path} {request.headers.get('Range', '')}"
        hub.requests.append(line)
        fault = next((each for each in hub.faults if each.words in line), None)
        if fault is None:
            answer: web.StreamResponse = await handler(request)
            return answer
        hub.faults.remove(fault)
        if fault.status and fault.content is None:
            return web.Response(status=fault.status, headers=fault.headers, text="refused")
        if fault.act is not None:
            fault.act()
        answer = await handler(request)
        if fault.act is not None:
            return answer
        if fault.content is not None:
            return web.Response(body=fault.content, status=fault.status or answer.status)
        if fault.is_lost:
            assert request.transport is not None
            request.transport.abort()
            return answer
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        cut = web.StreamResponse(status=answer.status, headers=answer.headers)
        cut.content_length = len(answer.body)
        await cut.prepare(request)
        await cut.write(answer.body[: fault.cut])
        assert request.transport is not None
        request.transport.close()
        return cut

    return middleware


def _refused(status: int, code: str, message: str) -> web.HTTPException:
    """As the hub says it: in headers as well."""
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    kind = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        412: web.HTTPPreconditionFailed,
    }[status]
    error = kind(text=json.dumps({"error": message}), headers=headers)
    error.content_type = "application/json"
    return error


class _Routes:
    """The hub itself."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def table(self) -> list[web.RouteDef]:
        api = "/api/datasets/{owner}/{name}"
        files = "/datasets/{owner}/{name}"
        return [
            web.get(api + "/revision/{revision:.*}", self._revision),
            web.get(api + "/tree/{revision:[^/]*}", self._tree),
            web.get(api + "/tree/{revision:[^/]*}/{path}", self._tree),
            web.post(api + "/paths-info/{revision}", self._paths),
            web.get(api + "/auth-check", self._read_check),
            web.get(api + "/auth-check/write", self._write_check),
            web.post(api + "/preupload/{revision}", self._preupload),
            web.post(api + "/commit/{revision}", self._commit),
            web.get(files + "/resolve/{revision}/{path:.*}", self._resolve),
            web.post(files + ".git/info/lfs/objects/batch", self._batch),
            web.post("/api/complete_multipart", self._complete),
            web.post("/api/verify", self._verify),
        ]

    def _dataset(self, request: web.Request, *, writes: bool = False) -> Dataset:
        said = request.headers.get("Authorization")
        token = None if said is None else said.removeprefix("Bearer ")
        if token not in {None, WRITER, READER}:
            raise _refused(401, "", "Invalid credentials in Authorization header")
        assert request.headers["User-Agent"].startswith("batchyard/")
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        found = self._hub.datasets.get(name)
        if found is None or (found.is_private and token is None):
            raise _refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if found.is_gated and token is None:
            raise _refused(401, "GatedRepo", "Access to this dataset is restricted")
        if writes and token != WRITER:
            raise _refused(403 if token else 401, "", "You don't have the rights to do that")
        return found

    def _commit_of(self, request: web.Request, dataset: Dataset) -> str:
        revision = unquote(request.match_info["revision"])
        sha = dataset.branches.get(revision, revision)
        if sha not in dataset.commits:
            raise _refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    async def _revision(self, request: web.Request) -> web.Response:
        dataset = self._dataset(request)
        sha = self._commit_of(request, dataset)
        found: dict[str, Any] = {"id": "x/y", "sha": sha}
        if request.query.getall("expand", []) != ["sha"]:
            found["siblings"] = [{"rfilename": path} for path in dataset.commits[sha]]
        return web.json_response(found)

    async def _tree(self, request: web.Request) -> web.Response:
        """Three entries a page, with the next page in the header `Link`."""
        dataset = self._dataset(request)
        files = dataset.commits[self._commit_of(request, dataset)]
        assert request.query["recursive"] == "true"
        folder = unquote(request.match_info.get("path", ""))
        below = {
            path: e for path, e in files.items() if not folder or path.startswith(folder + "/")
        }
        if folder and not below:
            raise _refused(404, "EntryNotFound", f"{folder} does not exist")
        folders = {path.rpartition("/")[0] for path in below} - {"", folder}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": each} for each in folders
        ]
        entries += [entry.described(path) for path, entry in below.items()]
        at = int(request.query.get("cursor", "0"))
        more = {}
        if at + _PAGE < len(entries):
            query = f"recursive=true&expand=false&cursor={at + _PAGE}"
            more["Link"] = (
                f'<{self._hub.url}{request.raw_path.partition("?")[0]}?{query}>; rel="next"'
            )
        return web.json_response(entries[at : at + _PAGE], headers=more)

    async def _paths(self, request: web.Request) -> web.Response:
        dataset = self._dataset(request)
        files = dataset.commits[self._commit_of(request, dataset)]
        found: list[dict[str, Any]] = []
        for path in map(str, (await request.post()).getall("paths")):
            if path in files:
                found.append(files[path].described(path))
            elif any(each.startswith(f"{path}/") for each in files):
                found.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
        return web.json_response(found)

    async def _read_check(self, request: web.Request) -> web.Response:
        self._dataset(request)
        return web.Response()

    async def _write_check(self, request: web.Request) -> web.Response:
        self._dataset(request, writes=True)
        return web.Response()

    async def _resolve(self, request: web.Request) -> web.Response:
        dataset = self._dataset(request)
        sha = self._commit_of(request, dataset)
        assert sha == request.match_info["revision"], "read by a branch, which may move meanwhile"
        entry = dataset.commits[sha].get(request.match_info["path"])
        if entry is None:
            raise _refused(404, "EntryNotFound", "Entry not found")
        assert request.headers["Accept-Encoding"] == "identity"
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.blob_id}"'}
        if not entry.is_lfs:
            return _ranged(request, entry.content, headers)
        self._hub.uploaded[entry.sha256] = entry.content
        there = f"{self._hub.storage_url}/{entry.sha256}?{_SIGNED}=secret"
        return web.Response(status=302, headers=headers | {"Location": there})

    async def _preupload(self, request: web.Request) -> web.Response:
        dataset = self._dataset(request, writes=True)
        files = dataset.commits[self._commit_of(request, dataset)]
        answers = []
        for asked in (await request.json())["files"]:
            path, size = asked["path"], asked["size"]
            assert len(base64.b64decode(asked["sample"])) == min(512, size)
            answer: dict[str, Any] = {
                "path": path,
                "uploadMode": "lfs" if is_lfs(path, size) else "regular",
                "shouldIgnore": re.search(dataset.ignored, path) is not None,
            }
            if path in files:
                entry = files[path]
                answer["oid"] = entry.sha256 if entry.is_lfs else entry.blob_id
            answers.append(answer)
        return web.json_response({"files": answers})

    async def _batch(self, request: web.Request) -> web.Response:
        self._dataset(request, writes=True)
        assert request.headers["Accept"] == "application/vnd.git-lfs+json"
        body = await request.json()
        assert (body["operation"], body["hash_algo"]) == ("upload", "sha256")
        assert "xet" not in body["transfers"]
        objects = []
        for each in body["objects"]:
            oid, size = each["oid"], each["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self._hub.uploaded:
                there = f"{self._hub.storage_url}/{oid}"
                upload: dict[str, Any] = {"href": f"{there}?{_SIGNED}=secret"}
                if size > PART_BYTES:
                    parts = -(-size // PART_BYTES)
                    header = {str(n): f"{there}/{n}?{_SIGNED}=secret" for n in range(1, parts + 1)}
                    upload = {"href": f"{self._hub.url}/api/complete_multipart"}
                    upload["header"] = {"chunk_size": str(PART_BYTES), **header}
                verify = {"href": f"{self._hub.url}/api/verify"}
                answer["actions"] = {"upload": upload, "verify": verify}
            objects.append(answer)
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        parts = self._hub.parts.pop(body["oid"])
        assert [each["partNumber"] for each in body["parts"]] == sorted(parts)
        for each in body["parts"]:
            assert each["etag"] == _etag(parts[each["partNumber"]])
        self._hub.uploaded[body["oid"]] = b"".join(parts[number] for number in sorted(parts))
        return web.json_response({})

    async def _verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        content = self._hub.uploaded[body["oid"]]
        is_right = hashlib.sha256(content).hexdigest() == body["oid"]
        if not is_right or len(content) != body["size"]:
            raise _refused(400, "", "The uploaded file has another hash")
        return web.json_response({})

    async def _commit(self, request: web.Request) -> web.Response:
        dataset = self._dataset(request, writes=True)
        assert request.content_type == "application/x-ndjson"
        branch = unquote(request.match_info["revision"])
        if branch not in dataset.branches:
            raise _refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        header, *operations = [json.loads(line) for line in (await request.read()).splitlines()]
        assert header["key"] == "header"
        entries = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                content = self._hub.uploaded.get(value["oid"])
                if content is None or len(content) != value["size"]:
                    raise _refused(400, "", "LFS pointer pointed to a file that does not exist")
                entries[value["path"]] = Entry(content, is_lfs=True)
            else:
                assert (operation["key"], value["encoding"]) == ("file", "base64")
                entries[value["path"]] = Entry(base64.b64decode(value["content"]), is_lfs=False)
        sha = dataset.commit_entries(entries, branch, header["value"]["summary"])
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        url = f"{self._hub.url}/datasets/{name}/commit/{sha}"
        return web.json_response({"commitUrl": url, "commitOid": sha, "hookOutput": ""})


class _Storage:
    """Where large files are: it takes signed URLs, and no token beside them, as S3."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/{oid}", self._get),
            web.put("/{oid}", self._put),
            web.put("/{oid}/{number}", self._put_part),
        ]

    def _check(self, request: web.Request) -> str:
        if "Authorization" in request.headers or request.query.get(_SIGNED) != "secret":
            raise _refused(400, "", "Only one auth mechanism allowed")
        return request.match_info["oid"]

    async def _get(self, request: web.Request) -> web.Response:
        return _ranged(request, self._hub.uploaded[self._check(request)], {})

    async def _put(self, request: web.Request) -> web.Response:
        oid, content = self._check(request), await _whole(request)
        if hashlib.sha256(content).hexdigest() != oid:
            raise _refused(400, "", "another hash")
        self._hub.uploaded[oid] = content
        return web.Response(headers={"ETag": _etag(content)})

    async def _put_part(self, request: web.Request) -> web.Response:
        content = await _whole(request)
        parts = self._hub.parts.setdefault(self._check(request), {})
        parts[int(request.match_info["number"])] = content
        return web.Response(headers={"ETag": _etag(content)})


async def _whole(request: web.Request) -> bytes:
    assert "Content-Length" in request.headers, "S3 takes no body of unknown length"
    return await request.read()


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _ranged(request: web.Request, content: bytes, headers: dict[str, str]) -> web.Response:
    start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
    said = f"bytes {start}-{len(content) - 1}/{len(content)}"
    return web.Response(body=content[start:], status=206, headers=headers | {"Content-Range": said})
