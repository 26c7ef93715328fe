"""Plays a script on a whole installation, and checks what must come out of any."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
from sqlalchemy import text

from batchyard.errors import TransitionConflict
from batchyard.files.retention import expire_files, sweep_orphans
from batchyard.lifecycle import TERMINAL
from batchyard.store import DeliveryStatus, Quota, RunnerKind, RunnerStatus, WhenFull
from tests.mixtures import lines
from tests.mixtures.lines import CHAT, MODEL, RESPONSES, Line, expected_reply, reply
from tests.mixtures.script import lines_of
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.store import BatchRecord
    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Site
    from tests.mixtures.outside import Outside
    from tests.mixtures.script import Script, Step

END_SECONDS: Final = 60.0
"""From the last step until everything has ended."""
SECOND_TEMPLATE: Final = (
    '{"messages": [{"role": "user", "content": {{ ("next " ~ content) | tojson }}}],'
    ' "max_tokens": 16, "temperature": 0}'
)
DATASET_TEMPLATE: Final = (
    '{"model": {{ model | tojson }}, "messages": [{"role": "user", "content": {{ q | tojson }}}],'
    ' "max_tokens": 16, "temperature": 0}'
)
_UNFINISHED: Final = {
    "cancelled": "batch_cancelled",
    "expired": "batch_expired",
    "failed": "batch_failed",
}
_KINDS: Final = {"control": RunnerKind.BATCHES, "runner": RunnerKind.CHUNKS}
_LOOK_SECONDS: Final = 0.5
_START_SECONDS: Final = 10.0
"""A busy machine starts a process within that time."""
_ENOUGH: Final = {"max_tokens": lines.ENOUGH_TOKENS}


@dataclass(slots=True)
class Asked:
    """A batch that was accepted, and what happened to it."""

    id: str
    key: str
    """The API key of its tenant."""
    lines: list[Line]
    options: frozenset[str]
    kind: str = "batch"
    threshold: int | None = None
    input_file_ids: Sequence[str] = ()
    done: set[str] = field(default_factory=set)
    """The actions that it has met."""
    followed: asyncio.Task[list[bytes]] | None = None
    order: str = "completion"
    """In which it is followed."""
    are_deleted: bool = False
    """Its results."""
    output_path: str | None = None
    hook_path: str | None = None
    kept: frozenset[str] = frozenset()
    """The lines of a merging retry that keep their results."""


@dataclass(slots=True)
class Player:
    site: Site
    nursery: Nursery
    outside: Outside
    http: httpx.AsyncClient
    keys: dict[str, str]
    port: int
    actors: dict[str, Actor] = field(default_factory=dict)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who starts and ends processes."""
    later: list[asyncio.Task[None]] = field(default_factory=list)
    """Deaths of the API while it answers something, and ends of sleeps."""
    asked: dict[str, Asked] = field(default_factory=dict)
    had_quota: bool = False
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    """The steps that were refused, each with its status and message."""

    # -- the processes ----------------------------------------------------------------------

    async def start(self, role: str) -> None:
        parts = self.site.parts(model=MODEL) | {"port": self.port}
        self.actors[role] = await self.nursery.start(role, parts)

    async def _kill(self, role: str, after_seconds: float = 0.0) -> None:
        await asyncio.sleep(after_seconds)
        async with self.changing:
            await self.nursery.kill(self.actors[role])
            await self.start(role)

    async def keep_alive(self) -> None:
        """Start what has ended, and one more beside what takes no more work, as Prefect does.

        A process whose heartbeat was late on a busy machine does what it has begun, and ends.
        """
        lease_seconds = self.site.services.settings.lease_seconds
        missed: Counter[str] = Counter()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            async with self.changing:
                for role in ("api", "control", "runner"):
                    if not self.nursery.is_alive(self.actors[role]):
                        await self.start(role)
                for role, kind in _KINDS.items():
                    live = await self.site.services.store.runners.live(
                        kind=kind, within_seconds=lease_seconds
                    )
                    is_there = any(each.status is RunnerStatus.LIVE for each in live)
                    missed[role] = 0 if is_there else missed[role] + 1
                    if missed[role] * _LOOK_SECONDS > _START_SECONDS:
                        missed[role] = 0
                        await self._start_beside(role)

    async def _start_beside(self, role: str) -> None:
        old = self.actors[role]
        self.actors[f"{role} {old.pid}"] = old
        await self.start(role)

    async def _sleep(self, role: str) -> None:
        """Past its lease, while another one works in its place. Then it wakes up as a zombie.

        Not for longer: what stands still within a transaction keeps SQLite's lock.
        """
        async with self.changing:
            sleeper = self.actors[role]
            await self.nursery.stand_still(sleeper)
            self.later.append(asyncio.create_task(self._wake(sleeper)))
            await self._start_beside(role)

    async def _wake(self, sleeper: Actor) -> None:
        await asyncio.sleep(1.5 * self.site.services.settings.lease_seconds)
        await self.nursery.signal(sleeper, signal.SIGCONT)

    # -- the steps --------------------------------------------------------------------------

    async def play(self, script: Script) -> None:
        for step in script:
            name = step.get("batch")
            if step["do"] == "create":
                if step["kind"] != "batch":
                    # To ask for these twice makes two of them.
                    await asyncio.gather(*self.later)
                await getattr(self, f"_create_{step['kind']}")(step)
            elif step["do"] == "wait":
                await asyncio.sleep(step["seconds"])
            elif not name:
                await self._accident(step["do"], step.get("after", 0.0))
            elif name in self.asked:
                if step["do"] == "follow":
                    await self._follow(self.asked[name], step["order"])
                else:
                    await getattr(self, f"_{step['do']}")(self.asked[name], name)
                self.asked[name].done.add(step["do"])

    async def _accident(self, what: str, after_seconds: float) -> None:
        match what.split("_"):
            case ["kill", "api"]:
                self.later.append(asyncio.create_task(self._kill("api", after_seconds)))
            case ["kill", role]:
                await self._kill(role)
            case ["sleep", role]:
                await self._sleep(role)
            case ["receivers", "down"]:
                self.outside.is_down = not self.outside.is_down
            case ["quota"] | ["waiting", "quota"]:
                when_full = WhenFull.WAIT if what == "waiting_quota" else None
                quota = Quota(max_active_batches=2, max_enqueued_requests=30, when_full=when_full)
                await self.site.services.store.tenants.set_quota("one", quota)
                self.had_quota = True

    async def call(
        self, method: str, path: str, key: str, *, good: bool = True, **options: Any
    ) -> httpx.Response:
        """Ask until the API answers: it may have been killed a moment ago."""
        headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
        deadline = time.monotonic() + PATIENCE * 30
        while True:
            try:
                answer = await self.http.request(method, path, headers=headers, **options)
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the API does not come back"
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 503:
                await asyncio.sleep(0.1)
                continue
            assert answer.status_code < 500, answer.text
            if good:
                assert answer.status_code < 400, f"{method} {path}: {answer.text}"
            return answer

    async def upload_first(self) -> None:
        await self._upload(b"{}", self.keys["one"])

    async def _upload(self, content: bytes, key: str) -> str:
        files = {"file": ("in.jsonl", content)}
        data = {"purpose": "batch"}
        answer = await self.call("POST", "/v1/files", key, files=files, data=data, good=False)
        return str(answer.json()["id"])

    async def _upload_in_parts(self, content: bytes, key: str) -> str:
        about = {"purpose": "batch", "filename": "in.jsonl", "mime_type": "application/jsonl"}
        begun = await self.call("POST", "/v1/uploads", key, json={**about, "bytes": len(content)})
        path, middle = f"/v1/uploads/{begun.json()['id']}", len(content) // 2
        parts = []
        for part in (content[:middle], content[middle:]):
            sent = await self.call("POST", f"{path}/parts", key, files={"data": ("part", part)})
            parts.append(sent.json()["id"])
        whole = await self.call("POST", f"{path}/complete", key, json={"part_ids": parts})
        return str(whole.json()["file"]["id"])

    async def _input(self, step: Step, asked: list[Line], key: str) -> dict[str, Any]:
        packed = gzip.compress if "compressed" in step["options"] else bytes
        content = packed(lines.as_input(asked))
        match step["source"]:
            case "file":
                return {"input_file_id": await self._upload(content, key)}
            case "upload":
                return {"input_file_id": await self._upload_in_parts(content, key)}
            case "files":
                middle = len(asked) // 2 or 1
                parts = [part for part in (asked[:middle], asked[middle:]) if part]
                ids = [await self._upload(packed(lines.as_input(part)), key) for part in parts]
                return {"input_file_ids": ids}
            case "inline":
                return {"requests": [line.as_object() for line in asked]}
            case "url":
                name = f"{step['batch']}.jsonl"
                (self.outside.folder / name).write_bytes(content)
                return {"input_url": self.outside.url(f"/{name}")}
            case _:
                name = f"{step['batch']}-rows.jsonl"
                rows = [
                    {"custom_id": line.custom_id, "q": line.words, "model": line.model}
                    for line in asked
                ]
                text_of_rows = "".join(json.dumps(row) + "\n" for row in rows)
                (self.outside.folder / name).write_text(text_of_rows)
                return {"input_url": self.outside.url(f"/{name}"), "template": DATASET_TEMPLATE}

    def _key(self, options: set[str]) -> str:
        return self.keys["other" if "other_tenant" in options else "one"]

    async def _create_batch(self, step: Step) -> None:
        name, options, asked = step["batch"], set(step["options"]), lines_of(step)
        key = self._key(options)
        body: dict[str, Any] = await self._input(step, asked, key)
        sources = [*body.get("input_file_ids", []), *filter(None, [body.get("input_file_id")])]
        body |= {
            "endpoint": asked[0].url,
            "completion_window": "background" if "background" in options else "24h",
        }
        threshold = 2 if "threshold" in options else None
        further: dict[str, Any] = {
            "lenient": {"on_invalid": "error_file"},
            "deduplicate": {"deduplicate": True},
            "ledger": {"ledger": True},
            "chain": {"then": [{"endpoint": CHAT, "template": SECOND_TEMPLATE}]},
            "priority": {"priority": 7},
            "threshold": {"error_threshold": str(threshold)},
            "short_lived": {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "invalid_output": {
                "on_invalid_output": {
                    "finish_reasons": ["length"],
                    "set": _ENOUGH,
                    "then": "error_file",
                }
            },
            "webhook": {"webhook_url": self.outside.url(f"/hooks/{name}")},
            "result_urls": {
                "output_url": self.outside.url(f"/results/{name}"),
                "error_url": self.outside.url(f"/errors/{name}"),
            },
        }
        for option in options & further.keys():
            body |= further[option]
        # Always, because the API may be killed while it answers.
        headers = {"idempotency-key": f"key of {name}"}
        for _ in range(2 if "idempotent" in options else 1):
            answer = await self.call(
                "POST", "/v1/batches", key, json=body, headers=headers, good=False
            )
        if answer.status_code >= 400:
            self._note_refusal(f"create {sorted(options)} {step['source']}", answer)
            return
        self.asked[name] = Asked(
            answer.json()["id"],
            key,
            asked,
            frozenset(options),
            threshold=threshold,
            input_file_ids=sources,
            output_path=f"/results/{name}" if "result_urls" in options else None,
            hook_path=f"/hooks/{name}" if "webhook" in options else None,
        )

    async def _create_message_batch(self, step: Step) -> None:
        asked, key = lines_of(step), self._key(set(step["options"]))
        requests = [{"custom_id": line.custom_id, "params": line.body()} for line in asked]
        answer = await self.call(
            "POST", "/v1/messages/batches", key, json={"requests": requests}, good=False
        )
        if answer.status_code >= 400:
            self._note_refusal("create message_batch", answer)
            return
        batch_id = answer.json()["id"].replace("msgbatch_", "batch_")
        self.asked[step["batch"]] = Asked(
            batch_id, key, asked, frozenset(step["options"]), "message_batch"
        )

    async def _create_responses(self, step: Step) -> None:
        asked, key = [], self._key(set(step["options"]))
        for line in lines_of(step):
            body = line.body() | {"background": True}
            answer = await self.call("POST", "/v1/responses", key, json=body, good=False)
            if answer.status_code >= 400:
                self._note_refusal("create response", answer)
                continue
            asked.append(Line(answer.json()["id"], RESPONSES, line.words))
        self.asked[step["batch"]] = Asked("", key, asked, frozenset(step["options"]), "responses")

    def _note_refusal(self, step: str, answer: httpx.Response) -> None:
        self.refused.append((step, answer.status_code, answer.json()["error"]["message"]))

    async def _cancel(self, asked: Asked, _: str) -> None:
        if asked.kind == "responses":
            for line in asked.lines[::2]:
                await self.call("POST", f"/v1/responses/{line.custom_id}/cancel", asked.key)
            return
        path = f"/v1/batches/{asked.id}/cancel"
        if asked.kind == "message_batch":
            path = f"/v1/messages/batches/{asked.id.replace('batch_', 'msgbatch_')}/cancel"
        answer = await self.call("POST", path, asked.key, good=False)
        assert answer.status_code in (200, 400, 409), answer.text

    async def _pause(self, asked: Asked, _: str) -> None:
        if asked.id:
            with contextlib.suppress(TransitionConflict):
                await self.site.services.store.batch_schedule.pause(asked.id)

    async def _overdue(self, asked: Asked, _: str) -> None:
        """As if its completion window had ended."""
        if asked.id:
            await self._sql(
                "UPDATE batches SET expires_at = created_at WHERE id = :id", id=asked.id
            )

    async def _delete_input(self, asked: Asked, _: str) -> None:
        for file_id in asked.input_file_ids:
            answer = await self.call("DELETE", f"/v1/files/{file_id}", asked.key, good=False)
            assert answer.status_code in (200, 404), answer.text

    async def _redeliver(self, asked: Asked, name: str) -> None:
        if asked.kind != "batch":
            return
        path = f"/results/{name}-again"
        body = {"output_url": self.outside.url(path)}
        answer = await self.call(
            "POST", f"/v1/batches/{asked.id}/results", asked.key, json=body, good=False
        )
        if answer.status_code < 400:
            asked.output_path = path
        else:
            self._note_refusal("redeliver", answer)

    async def _retry_merged(self, asked: Asked, name: str) -> None:
        await self._retry(asked, name, merges=True)

    async def _retry(self, asked: Asked, name: str, *, merges: bool = False) -> None:
        """Once it has ended; if it does not soon, this is refused."""
        if asked.kind != "batch":
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                while not await self._has_ended(asked):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)
        answer = await self.call(
            "POST",
            f"/v1/batches/{asked.id}/retry",
            asked.key,
            good=False,
            headers={"idempotency-key": f"retry of {name}, {merges}"},
            json={"merge": merges},
        )
        if answer.status_code >= 400:
            self._note_refusal("retry", answer)
            return
        failed = {line["custom_id"] for line in await self._lines(asked, "error_file_id")}
        again = [line for line in asked.lines if line.custom_id in failed and not line.is_bad]
        ran = {line.custom_id for line in again}
        kept = {line.custom_id for line in asked.lines} - ran if merges else set()
        self.asked[f"{name} {'merged' if merges else 'again'}"] = Asked(
            answer.json()["id"],
            asked.key,
            asked.lines if merges else again,
            asked.options,
            threshold=asked.threshold,
            hook_path=asked.hook_path,
            kept=frozenset(kept),
        )

    async def _delete_results(self, asked: Asked, _: str) -> None:
        """Once it has ended."""
        if asked.kind != "batch" or asked.followed is not None:
            return
        batch = (await self.call("GET", f"/v1/batches/{asked.id}", asked.key)).json()
        if batch["output_file_id"] is not None:
            path = f"/v1/files/{batch['output_file_id']}"
            await self.call("DELETE", path, asked.key, good=False)
            asked.are_deleted = True

    async def _follow(self, asked: Asked, order: str) -> None:
        if asked.kind == "batch" and asked.followed is None and not asked.are_deleted:
            asked.order = order
            asked.followed = asyncio.create_task(self._read_along(asked, order))

    async def _read_along(self, asked: Asked, order: str) -> list[bytes]:
        found: list[bytes] = []
        after = ""
        while True:
            query = {"order": order, **({"after": after} if after else {})}
            path = f"/v1/batches/{asked.id}/results"
            page = await self.call("GET", path, asked.key, params=query)
            found += page.content.splitlines()
            after = page.headers["x-next-after"]
            if page.headers["x-has-more"] == "false":
                return found
            await asyncio.sleep(0.05)

    # -- until nothing happens any more -----------------------------------------------------

    async def settle(self) -> None:
        """Everybody is back, nothing is held up: all of it ends."""
        self.outside.is_down = False
        await asyncio.gather(*self.later)
        await self.site.services.store.tenants.set_quota("one", Quota())
        deadline = time.monotonic() + PATIENCE * END_SECONDS
        for name, asked in self.asked.items():
            while not await self._has_ended(asked):
                assert time.monotonic() < deadline, await self._state(name, asked)
                await asyncio.sleep(0.05)
        while open_ones := await self._open_deliveries():
            assert time.monotonic() < deadline, f"not delivered: {open_ones}"
            await self._sql("UPDATE deliveries SET due_at = created_at WHERE status = 'pending'")
            await asyncio.sleep(0.1)

    async def _has_ended(self, asked: Asked) -> bool:
        if asked.kind == "responses":
            found = [await self._response(asked, line) for line in asked.lines]
            return all(each["status"] not in ("queued", "in_progress") for each in found)
        if "pause" in asked.done:
            with contextlib.suppress(TransitionConflict):
                await self.site.services.store.batch_schedule.unpause(asked.id)
        batch = await self.site.services.store.batches.get(asked.id)
        return batch.status in TERMINAL

    async def _open_deliveries(self) -> list[str]:
        found = await self.site.services.store.deliveries.page(
            limit=100, status=DeliveryStatus.PENDING
        )
        return [each.id for each in found]

    async def _state(self, name: str, asked: Asked) -> str:
        if not asked.id:
            return f"{name}: responses do not end\n{self.site.log_tail()}"
        batch = await self.site.services.store.batches.get(asked.id)
        return f"{name} does not end: {batch}\n{self.site.log_tail()}"

    async def _response(self, asked: Asked, line: Line) -> dict[str, Any]:
        answer = await self.call("GET", f"/v1/responses/{line.custom_id}", asked.key)
        found: dict[str, Any] = answer.json()
        return found

    async def _sql(self, statement: str, **values: Any) -> None:
        async def work(connection: Any) -> None:
            await connection.execute(text(statement), values)

        await self.site.services.store.database.write(work)

    # -- what must have come out of it ------------------------------------------------------

    async def check(self) -> None:
        for name, asked in self.asked.items():
            if asked.kind == "responses":
                await self._check_responses(asked)
            elif asked.kind == "message_batch":
                await self._check_message_batch(name, asked)
            else:
                await self._check_batch(name, asked)
        await self._check_lists()
        assert "Traceback (most" not in self.site.log(), self.site.log_tail()

    async def _lines(self, asked: Asked, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in await self._raw_lines(asked, file)]

    async def _raw_lines(self, asked: Asked, file: str) -> list[bytes]:
        batch = (await self.call("GET", f"/v1/batches/{asked.id}", asked.key)).json()
        if batch[file] is None:
            return []
        path = f"/v1/files/{batch[file]}/content"
        answer = await self.call("GET", path, asked.key, good=not asked.are_deleted)
        return answer.content.splitlines() if answer.status_code < 400 else []

    async def _check_batch(self, name: str, asked: Asked) -> None:
        batch = await self.site.services.store.batches.get(asked.id)
        output = await self._raw_lines(asked, "output_file_id")
        error = await self._raw_lines(asked, "error_file_id")
        self._check_status(name, asked, batch)
        if asked.are_deleted:
            assert not output, name
        elif not output and not error:
            assert batch.status.value != "completed" or not asked.lines, name
            assert batch.counts.completed == batch.counts.failed == 0, name
        else:
            self._check_lines(name, asked, batch, output, error)
            await self._check_usage(name, asked, batch, output)
            if "ledger" in asked.options:
                await self._check_ledger(name, asked, batch, [*output, *error])
        if asked.followed is not None:
            followed = await asyncio.wait_for(asked.followed, PATIENCE * 30)
            assert Counter(followed) == Counter([*output, *error]), f"{name}: followed otherwise"
            if asked.order == "input":
                place = {line.custom_id: index for index, line in enumerate(asked.lines)}
                places = [place[json.loads(line)["custom_id"]] for line in followed]
                assert places == sorted(places), f"{name}: not in the order of the input"
        if asked.hook_path:
            # A retry has the receiver of the first batch.
            every = self.outside.hooks[asked.hook_path]
            events = [(each, json.loads(body)) for each, body in every]
            hooks = [(each, event) for each, event in events if event["data"]["id"] == asked.id]
            assert len({each for each, _ in hooks}) == 1, f"{name}: webhooks {hooks}"
            kinds = {event["type"] for _, event in hooks}
            assert kinds == {f"batch.{batch.status.value}"}, f"{name}: {kinds}"
        if asked.output_path and output:
            put = self.outside.put[asked.output_path]
            assert put, f"{name}: nothing was put to {asked.output_path}"
            assert set(put) == {b"\n".join(output) + b"\n"}, f"{name}: other bytes were put"

    def _check_status(self, name: str, asked: Asked, batch: BatchRecord) -> None:
        allowed = {"completed"}
        if self._bad(asked) and "lenient" not in asked.options:
            allowed = {"failed"}
        failing = sum(line.is_bad or _fails(line, asked) for line in asked.lines)
        if asked.threshold is not None and failing >= asked.threshold:
            allowed.add("failed")
        if "cancel" in asked.done:
            allowed.add("cancelled")
        if "delete_input" in asked.done and asked.input_file_ids and not batch.counts.total:
            # It was there when the batch was created, and not when it was validated.
            allowed.add("failed")
        if self._is_over_quota(asked, batch):
            allowed.add("failed")
        if "overdue" in asked.done:
            allowed.add("expired")
        status = batch.status.value
        assert status in allowed, f"{name} is {status}, not {allowed}: {batch.errors}"

    def _is_over_quota(self, asked: Asked, batch: BatchRecord) -> bool:
        """Whether its lines were more than the tenant may have waiting, when it was validated."""
        codes = {each.code for each in batch.errors or ()}
        return (
            self.had_quota
            and asked.key == self.keys["one"]
            and codes == {"token_limit_exceeded"}
            and not batch.counts.total
        )

    @staticmethod
    def _bad(asked: Asked) -> bool:
        return any(line.is_bad for line in asked.lines)

    def _check_lines(
        self,
        name: str,
        asked: Asked,
        batch: BatchRecord,
        output: list[bytes],
        error: list[bytes],
    ) -> None:
        """Every line once, each with the answer of its own request."""
        good = [json.loads(line) for line in output]
        bad = [json.loads(line) for line in error]
        ids = Counter(line["custom_id"] for line in (*good, *bad))
        assert ids == Counter(line.custom_id for line in asked.lines), f"{name}: {ids}"
        by_id = {line.custom_id: line for line in asked.lines}
        unfinished = 0
        for found in good:
            line = by_id[found["custom_id"]]
            assert not line.is_bad, found
            assert not _fails(line, asked), f"{name}: {found}"
            wanted = _wanted(line, asked)
            assert lines.reply_in(found["response"]["body"]) == wanted, f"{name}: {found} {line}"
        for found in bad:
            code = (found["error"] or {}).get("code")
            if code is not None and code == _UNFINISHED.get(batch.status.value):
                unfinished += 1
                continue
            line = by_id[found["custom_id"]]
            assert line.is_bad or _fails(line, asked), f"{name}: {found} {line}"
            if not line.is_bad and lines.REFUSED in line.words:
                assert found["response"]["status_code"] == 400, found
            elif not line.is_bad:
                assert code == "invalid_output", found
        counts = batch.counts
        assert counts.total == len(asked.lines), f"{name}: {counts}"
        assert counts.completed == len(good), f"{name}: {counts}, {len(good)} good"
        assert counts.failed == len(bad) - unfinished, f"{name}: {counts}, {len(bad)} {unfinished}"

    async def _check_usage(
        self, name: str, asked: Asked, batch: BatchRecord, output: list[bytes]
    ) -> None:
        """Counted once. Copies, attempts and stages use other amounts than the output says."""
        if {"chain", "deduplicate", "invalid_output"} & asked.options:
            return
        rows = await self.site.services.store.usage.of_batch(asked.id)
        requests = sum(row.requests for row in rows)
        ended = batch.counts.completed + batch.counts.failed
        assert requests == ended - len(asked.kept), f"{name}: {rows}"
        results = [json.loads(line) for line in output]
        said = [
            each["response"]["body"]["usage"]
            for each in results
            if each["custom_id"] not in asked.kept
        ]
        tokens = sum(each.get("prompt_tokens", each.get("input_tokens", 0)) for each in said)
        assert sum(row.input_tokens for row in rows) == tokens, f"{name}: {rows}"
        assert batch.usage.input_tokens == tokens, f"{name}: {batch.usage}"

    async def _check_ledger(
        self, name: str, asked: Asked, batch: BatchRecord, results: list[bytes]
    ) -> None:
        """Its sums are the batch's usage. A line has one row, and in a chain one for each stage."""
        answer = await self.call("GET", f"/v1/batches/{asked.id}/ledger", asked.key)
        rows = [json.loads(line) for line in answer.content.splitlines()]
        for tokens in ("input_tokens", "output_tokens", "total_tokens"):
            total = sum(row[tokens] for row in rows)
            assert total == getattr(batch, tokens), f"{name}: {tokens} {total} {batch.usage}"
        of_lines = Counter((row["custom_id"], row["stage"]) for row in rows if row["line"])
        assert set(of_lines.values()) <= {1}, f"{name}: {of_lines}"
        ids = {json.loads(line)["custom_id"] for line in results}
        assert {custom_id for custom_id, _ in of_lines} <= ids, f"{name}: {of_lines}"

    async def _check_message_batch(self, name: str, asked: Asked) -> None:
        path = f"/v1/messages/batches/{asked.id.replace('batch_', 'msgbatch_')}"
        batch = await self.site.services.store.batches.get(asked.id)
        self._check_status(name, asked, batch)
        shown = (await self.call("GET", path, asked.key)).json()
        found = (await self.call("GET", f"{path}/results", asked.key)).content.splitlines()
        results = [json.loads(line) for line in found]
        assert Counter(each["custom_id"] for each in results) == Counter(
            line.custom_id for line in asked.lines
        ), name
        by_id = {line.custom_id: line for line in asked.lines}
        counts = Counter(each["result"]["type"] for each in results)
        for each in results:
            line, result = by_id[each["custom_id"]], each["result"]
            if result["type"] == "succeeded":
                assert lines.reply_in(result["message"]) == reply(MODEL, line.words), name
            elif result["type"] == "errored":
                is_refused = self._is_over_quota(asked, batch)
                assert is_refused or _fails(line, asked), f"{name}: {each}"
            else:
                wanted = {"cancel": "canceled", "overdue": "expired"}
                assert result["type"] in {wanted.get(each) for each in asked.done}, each
        assert shown["request_counts"] == {
            "processing": 0,
            **{kind: counts[kind] for kind in ("succeeded", "errored", "canceled", "expired")},
        }, name

    async def _check_responses(self, asked: Asked) -> None:
        for index, line in enumerate(asked.lines):
            found = await self._response(asked, line)
            if found["status"] == "completed":
                assert lines.reply_in(found) == reply(MODEL, line.words), found
            elif found["status"] == "cancelled":
                assert "cancel" in asked.done, found
                assert index % 2 == 0, found
            else:
                assert found["status"] == "failed", found
                assert _fails(line, asked), found

    async def _check_lists(self) -> None:
        """Each batch is listed once, for its tenant alone."""
        for key in self.keys.values():
            listed = []
            after = None
            while True:
                query = {"limit": 100, **({"after": after} if after else {})}
                page = (await self.call("GET", "/v1/batches", key, params=query)).json()
                listed += [each["id"] for each in page["data"]]
                if not page["has_more"]:
                    break
                after = page["last_id"]
            mine = [each.id for each in self.asked.values() if each.key == key and each.id]
            assert Counter(listed) >= Counter(mine), "a batch is not listed"
            assert set(Counter(listed).values()) <= {1}, "a batch is listed twice"

    # -- at rest ----------------------------------------------------------------------------

    async def check_rest(self) -> None:
        """Nothing is held any more; and of what is deleted nothing is left."""
        store = self.site.services.store
        for tenant in self.keys:
            used = await store.tenants.usage(tenant)
            assert (used.active_batches, used.enqueued_requests, used.enqueued_tokens) == (0, 0, 0)
        await self._until_none(
            "leases of chunks", "SELECT count(*) FROM chunks WHERE status = 'leased'"
        )
        await self._until_none(
            "leases of batches",
            "SELECT count(*) FROM batches WHERE owner IS NOT NULL AND status NOT IN"
            " ('completed', 'failed', 'expired', 'cancelled')",
        )
        await self._delete_everything()
        # One whose id was lost with the API's answer lives for an hour.
        await self._sql("UPDATE uploads SET expires_at = created_at")
        await expire_files(self.site.services)
        for tenant in self.keys:
            assert (await store.tenants.usage(tenant)).stored_bytes == 0, tenant
        await self._until_none("files", "SELECT count(*) FROM files WHERE deleted_at IS NULL")
        await sweep_orphans(self.site.services, 0)
        left = [each.key async for each in self.site.services.storage.listing("")]
        assert not [key for key in left if key.startswith(("files/", "batches/", "uploads/"))], left

    async def _until_none(self, what: str, statement: str) -> None:
        async def work(connection: Any) -> int:
            return int((await connection.execute(text(statement))).scalar_one())

        deadline = time.monotonic() + PATIENCE * 10
        while count := await self.site.services.store.database.read(work):
            assert time.monotonic() < deadline, f"{count} {what}"
            await asyncio.sleep(0.1)

    async def _delete_everything(self) -> None:
        for asked in self.asked.values():
            await self._delete(asked)
        for key in self.keys.values():
            while found := (await self.call("GET", "/v1/files", key)).json()["data"]:
                for each in found:
                    await self.call("DELETE", f"/v1/files/{each['id']}", key, good=False)

    async def _delete(self, asked: Asked) -> None:
        """What of it is not in the list of files."""
        if asked.kind == "responses":
            for line in asked.lines:
                await self.call("DELETE", f"/v1/responses/{line.custom_id}", asked.key)
        if asked.kind == "message_batch":
            name = asked.id.replace("batch_", "msgbatch_")
            await self.call("DELETE", f"/v1/messages/batches/{name}", asked.key)
        if "ledger" in asked.options:
            await self.call("DELETE", f"/v1/batches/{asked.id}/ledger", asked.key, good=False)
        if "chain" in asked.options:
            stages = await self.call("GET", f"/v1/batches/{asked.id}/stages", asked.key)
            ids = [stage["output_file_id"] for stage in stages.json()["data"]]
            for file_id in filter(None, ids):
                await self.call("DELETE", f"/v1/files/{file_id}", asked.key, good=False)


def _fails(line: Line, asked: Asked) -> bool:
    """Whether its answer belongs in the error file."""
    if lines.REFUSED in line.words:
        return True
    can_be_cut = line.url in (CHAT, lines.COMPLETIONS) and lines.ALWAYS_CUT in line.words
    return can_be_cut and "invalid_output" in asked.options


def _wanted(line: Line, asked: Asked) -> str | float:
    first = expected_reply(line.url, line.model, line.words)
    if "chain" not in asked.options:
        return first
    # A stage without a model has that of the batch, whose adapters are for its lines alone.
    return reply(MODEL, f"next {first}")
