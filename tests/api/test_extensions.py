"""What a batch may ask for that OpenAI's do not know: it is checked, and kept for who needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from batchyard.settings import SmtpSettings
from batchyard.store import DeliveryKind
from tests.api.test_batches import WANTED, post

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api


@pytest.fixture
def mail_server(settings: Settings) -> None:
    """One is configured; nobody asks it. To be asked for ahead of ``api``."""
    settings.smtp = SmtpSettings(host="mail.example.com")


def test_extensions_are_taken_with_extra_body(mail_server: None, api: Api) -> None:
    batch = api.openai().batches.create(
        **{key: value for key, value in WANTED.items() if key != "input_file_id"},
        input_file_id=openai.omit,  # type: ignore[arg-type]
        extra_body={
            "input_url": "https://example.com/in?X=1",
            "output_url": "https://example.com/out?X=2",
            "error_url": "https://example.com/error?X=3",
            "webhook_url": "https://example.com/hook",
            "notify_email": "me+batches@example.com",
            "priority": -3,
            "deduplicate": True,
        },
    )
    assert batch.input_file_id.startswith("file-")


def test_an_address_is_refused_where_no_mail_server_is_configured(api: Api) -> None:
    status, body = post(api, notify_email="me@example.com")
    assert status == 400
    assert body["error"]["message"].startswith("This server sends no e-mail: ")
    assert body["error"]["param"] == "notify_email"
    assert body["error"]["code"] == "email_not_configured"


async def test_extensions_are_kept_for_those_who_need_them(
    mail_server: None, api: Api, services: Services
) -> None:
    urls = {
        key: f"https://example.com/{key}?sign=1"
        for key in ("input_url", "output_url", "error_url", "webhook_url")
    }
    _, body = post(api, input_file_id=..., **urls, notify_email="me@example.com", priority=5)
    locations = await services.store.batches.locations(body["id"])
    batch = await services.store.batches.get(body["id"])
    assert [
        locations.input,
        locations.output,
        locations.error,
        locations.receivers[DeliveryKind.WEBHOOK],
    ] == list(urls.values())
    assert (batch.notify_email, batch.priority, batch.tenant) == ("me@example.com", 5, "one")
    assert batch.options.public_urls


async def test_identical_requests_run_once_if_that_is_asked_for(
    api: Api, services: Services
) -> None:
    for asked, kept in (({}, False), ({"deduplicate": None}, False), ({"deduplicate": True}, True)):
        _, body = post(api, **asked)
        assert (await services.store.batches.get(body["id"])).options.deduplicate is kept
        assert ("deduplicated_requests" in body["usage"]) is kept


def test_deduplicate_is_a_boolean(api: Api) -> None:
    status, body = post(api, deduplicate=1)
    assert (status, body["error"]["param"]) == (400, "deduplicate")
