"""What happens in an installation on one day: a little of everything, through the API."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from batchyard.files.retention import clean_up
from batchyard.lifecycle import TERMINAL
from batchyard.logs.rotation import rotate
from batchyard.store import BatchLocations, BatchOptions, NewBatch, Quota
from batchyard.store.tables.audit import acting_as
from tests.faults.site import MODEL, lines
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    import httpx
    from sqlalchemy.ext.asyncio import AsyncConnection

    from tests.faults.site import Site

CHAT: Final = "/v1/chat/completions"
EMBED: Final = {"endpoint": "/v1/embeddings", "template": '{"input": {{ content | tojson }}}'}
UNSERVED: Final = "unserved-model"
"""No runner serves it: its batches end by a cancellation, or by the end of their window."""
NO_RECEIVER: Final = "http://127.0.0.1:9/hook"
"""Nothing listens there: every attempt of a webhook fails at once."""
LOG_BYTES: Final = 64 * 1024
"""So much of a log is kept before it is rotated; the product keeps more, for longer."""
_SYSTEM: Final = "Answer in one word. " * 80
"""Long enough for the order by prefixes to see that the lines have it in common."""
_KEY_SECONDS: Final = 7 * 86_400
_TEMPLATE: Final = (
    '{"model": "stub-model", "max_tokens": 4, '
    '"messages": [{"role": "user", "content": {{ question | tojson }}}]}'
)


@dataclass(slots=True)
class Days:
    """The days of an installation. ``clients``: the API, with the key of each tenant."""

    site: Site
    clients: Sequence[httpx.AsyncClient]
    tenants: Sequence[str]
    key_ids: Sequence[str]
    receiver: str = NO_RECEIVER
    """Where all webhooks go."""
    all_within_days: int = 1
    """What happens this often or more often happens every day."""
    day: int = 0
    _asked: list[str] = field(default_factory=list)

    async def live(self) -> None:
        """Do everything that is done on one day, and wait until it has come to its end."""
        self.day += 1
        one, other = self.clients
        kinds: dict[int, list[Callable[[], Awaitable[None]]]] = {
            1: [partial(self._uploaded, one), self._keys_and_sessions],
            2: [
                partial(self._inline, other),
                partial(self._messages, one),
                partial(self._left_to_expire, one),
            ],
            3: [
                partial(self._responses, one),
                partial(self._failed, other),
                partial(self._uploads, other),
            ],
            4: [partial(self._chain, other), partial(self._cancelled, one)],
            10: [self._dataset],
            30: [self._hooks],
        }
        today = [
            each
            for days, of_kind in kinds.items()
            for each in of_kind
            if days <= self.all_within_days or self.day % days == 1
        ]
        await asyncio.gather(*(happens() for happens in today))
        await self._until_all_ended()
        await self._read_and_delete(one)
        await self.site.services.store.batch_history.record()

    async def clean_up(self, *logs: Path) -> None:
        """What a schedule and the operating system do every day."""
        await clean_up(self.site.services)
        for path in logs:
            rotate(path, max_bytes=LOG_BYTES)

    # -- batches ------------------------------------------------------------------------------

    async def _uploaded(self, client: httpx.AsyncClient) -> None:
        """From a file, asked for twice with one key, and read while it runs."""
        batch = {
            "input_file_id": await self._file(client, "uploaded"),
            "endpoint": CHAT,
            "completion_window": "24h",
            "metadata": {"day": str(self.day)},
            "webhook_url": self.receiver,
        }
        again = {"idempotency-key": f"day-{self.day}"}
        made = [await posted(client, "/batches", batch, headers=again) for _ in range(2)]
        assert made[0]["id"] == made[1]["id"]
        await got(client, f"/batches/{made[0]['id']}/results")

    async def _inline(self, client: httpx.AsyncClient) -> None:
        batch = {"endpoint": CHAT, "completion_window": "24h", "deduplicate": True}
        await posted(client, "/batches", {**batch, "requests": self._lines("inline", count=4)})

    async def _messages(self, client: httpx.AsyncClient) -> None:
        requests = [
            {"custom_id": line["custom_id"], "params": {**line["body"], "max_tokens": 4}}
            for line in self._lines("messages")
        ]
        await posted(client, "/messages/batches", {"requests": requests})

    async def _responses(self, client: httpx.AsyncClient) -> None:
        for number in range(2):
            asked = {"model": MODEL, "input": f"{self.day} {number}", "background": True}
            self._asked.append((await posted(client, "/responses", asked))["id"])

    async def _chain(self, client: httpx.AsyncClient) -> None:
        batch = {"endpoint": CHAT, "completion_window": "24h", "then": [EMBED]}
        await posted(client, "/batches", {**batch, "requests": self._lines("chain")})

    async def _cancelled(self, client: httpx.AsyncClient) -> None:
        made = await self._unserved(client, "cancelled")
        await posted(client, f"/batches/{made}/cancel", {})

    async def _failed(self, client: httpx.AsyncClient) -> None:
        file_id = await self._file(client, "failed", content=self._content("failed") + b"no JSON\n")
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        await posted(client, "/batches", batch)

    async def _left_to_expire(self, client: httpx.AsyncClient) -> None:
        await self._unserved(client, "expired")

    async def _unserved(self, client: httpx.AsyncClient, name: str) -> str:
        requests = self._lines(name, model=UNSERVED)
        batch = {"endpoint": CHAT, "completion_window": "24h", "requests": requests}
        return str((await posted(client, "/batches", batch))["id"])

    async def _dataset(self) -> None:
        """Of a file of the machine, with results in another one."""
        rows, answers = self.site.folder / "rows.jsonl", self.site.folder / "answers.jsonl"
        rows.write_text("".join(f'{{"question": "{self.day} {n}"}}\n' for n in range(3)))
        await self.site.services.store.batches.create(
            NewBatch(
                tenant=self.tenants[0],
                endpoint=CHAT,
                options=BatchOptions(is_rendered=True),
                locations=BatchLocations(str(rows), str(answers), template=_TEMPLATE),
            )
        )

    # -- everything else ----------------------------------------------------------------------

    async def _uploads(self, client: httpx.AsyncClient) -> None:
        """One that is completed, and one that is not."""
        content = self._content("upload")
        for is_completed in (True, False):
            asked = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "text/jsonl"}
            upload = await posted(client, "/uploads", {**asked, "bytes": len(content)})
            part = await client.post(f"/uploads/{upload['id']}/parts", files={"data": content})
            assert part.status_code == 200, part.text
            if is_completed:
                parts = {"part_ids": [part.json()["id"]]}
                await posted(client, f"/uploads/{upload['id']}/complete", parts)

    async def _keys_and_sessions(self) -> None:
        """A key for a week, a login, and an operator who does something."""
        store = self.site.services.store
        expires_at = int(await store.database.now()) + _KEY_SECONDS
        with acting_as("operator@machine"):
            await store.api_keys.create(self.tenants[0], f"day {self.day}", expires_at=expires_at)
            await store.tenants.set_quota(self.tenants[1], Quota(max_active_batches=100 + self.day))
        await store.sessions.redeem(await store.sessions.make_code(self.key_ids[0]))
        await store.sessions.open(self.key_ids[0])

    async def _hooks(self) -> None:
        """A receiver of each tenant that never answers; another one each month."""
        for client in self.clients:
            for endpoint in (await got(client, "/webhook_endpoints"))["data"]:
                assert (await client.delete(f"/webhook_endpoints/{endpoint['id']}")).is_success
            asked = {"name": "mine", "url": self.receiver}
            kinds = ["batch.completed", "batch.failed", "response.completed"]
            await posted(client, "/webhook_endpoints", {**asked, "event_types": kinds})

    async def _read_and_delete(self, client: httpx.AsyncClient) -> None:
        """A client that looks at what it has, and deletes a little of it."""
        batches = (await got(client, "/batches"))["data"]
        files = (await got(client, "/files"))["data"]
        done = next(each for each in batches if each["status"] == "completed")
        await client.get(f"/files/{done['output_file_id']}/content")
        assert (await client.delete(f"/files/{files[-1]['id']}")).status_code in {200, 404, 409}
        while len(self._asked) > 1:
            assert (await client.delete(f"/responses/{self._asked.pop()}")).is_success
            self._asked.clear()

    # -- how ----------------------------------------------------------------------------------

    def _lines(self, name: str, *, count: int = 2, model: str = MODEL) -> list[dict[str, Any]]:
        made = lines(count, f"{name}-{self.day}", model=model)
        for line in made:
            line["body"]["messages"].insert(0, {"role": "system", "content": _SYSTEM})
        return made

    def _content(self, name: str) -> bytes:
        return "".join(json.dumps(line) + "\n" for line in self._lines(name)).encode()

    async def _file(
        self, client: httpx.AsyncClient, name: str, content: bytes | None = None
    ) -> str:
        sent = {"file": (f"{name}.jsonl", content or self._content(name))}
        answer = await client.post("/files", files=sent, data={"purpose": "batch"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def _until_all_ended(self, seconds: float = 60.0) -> None:
        """All batches and responses but those of the model that nobody serves."""
        ended = ", ".join(f"'{status.value}'" for status in TERMINAL)
        unserved = self.site.services.store.database
        statement = text(
            f"SELECT count(*) FROM batches WHERE status NOT IN ({ended}) "  # noqa: S608 - constants
            f"AND NOT (status = 'in_progress' AND model = '{UNSERVED}')"
        )
        open_responses = text("SELECT count(*) FROM responses WHERE ended_at IS NULL")

        async def count(connection: AsyncConnection) -> int:
            found = [await connection.execute(each) for each in (statement, open_responses)]
            return sum(int(each.scalar_one()) for each in found)

        give_up_at = time.monotonic() + PATIENCE * seconds
        while await unserved.read(count):
            assert time.monotonic() < give_up_at, f"day {self.day}\n{self.site.log_tail()}"
            await asyncio.sleep(0.02)


async def posted(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], **options: Any
) -> dict[str, Any]:
    answer = await client.post(path, json=body, **options)
    assert answer.is_success, (path, answer.text)
    found: dict[str, Any] = answer.json()
    return found


async def got(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.is_success, (path, answer.text)
    kind = answer.headers["content-type"]
    return answer.json() if kind.startswith("application/json") else answer.text
