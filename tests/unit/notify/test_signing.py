"""Signatures that Standard Webhooks' library and OpenAI's SDKs accept."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from standardwebhooks import Webhook, WebhookVerificationError

from batchyard.notify.event import batch_data, event_body
from batchyard.notify.webhook import signed_headers
from batchyard.wire import new_signing_secret
from tests.services.node import run_node
from tests.unit.notify.batches import BATCH_ID, ended_batch

if TYPE_CHECKING:
    from pathlib import Path

CLIENT = OpenAI(api_key="unused")


def body_of(*, full: bool = False) -> bytes:
    data = batch_data(ended_batch(), full=full)
    return event_body(
        event_id="evt_1", event_type="batch.completed", created_at=1_795_215_723, data=data
    )


def headers_of(body: bytes, *secrets: str) -> dict[str, str]:
    return signed_headers(body, delivery_id="wh_1", at=datetime.now(UTC), secrets=secrets)


def test_openais_public_vector_has_the_signature_that_it_is_published_with() -> None:
    body = (
        b'{"id": "evt_685c059ae3a481909bdc86819b066fb6", "object": "event", '
        b'"created_at": 1750861210, "type": "response.completed", "data": {"id": "resp_123"}}'
    )
    headers = signed_headers(
        body,
        delivery_id="wh_685c059ae39c8190af8c71ed1022a24d",
        at=datetime.fromtimestamp(1_750_861_210, UTC),
        secrets=["whsec_RdvaYFYUXuIFuEbvZHwMfYFhUf7aMYjYcmM24+Aj40c="],
    )

    assert headers == {
        "webhook-id": "wh_685c059ae39c8190af8c71ed1022a24d",
        "webhook-timestamp": "1750861210",
        "webhook-signature": "v1,gUAg4R2hWouRZqRQG4uJypNS8YK885G838+EHb4nKBY=",
    }


@pytest.mark.parametrize("full", [False, True])
def test_openais_sdk_unwraps_what_was_signed(*, full: bool) -> None:
    secret = new_signing_secret()
    body = body_of(full=full)

    event = CLIENT.webhooks.unwrap(body, headers_of(body, secret), secret=secret)

    assert isinstance(event, BatchCompletedWebhookEvent)
    assert event.data.id == BATCH_ID


def test_openais_sdk_for_node_unwraps_what_was_signed(tmp_path: Path) -> None:
    secret = new_signing_secret()
    body = body_of()
    program = f"""
        import OpenAI from "openai";
        const client = new OpenAI({{ apiKey: "unused" }});
        const headers = {json.dumps(headers_of(body, new_signing_secret(), secret))};
        const event = await client.webhooks.unwrap(
            {json.dumps(body.decode())}, headers, {json.dumps(secret)});
        console.log(event.type, event.data.id);
    """

    said = run_node(program, cwd=tmp_path, environment=os.environ)

    assert said.split() == ["batch.completed", BATCH_ID]


def test_the_standards_own_library_accepts_what_was_signed() -> None:
    secret = new_signing_secret()
    body = body_of()

    assert Webhook(secret).verify(body, headers_of(body, secret)) == json.loads(body)


def test_each_of_several_secrets_has_a_signature_of_its_own() -> None:
    new, old, other = (new_signing_secret() for _ in range(3))
    body = body_of()
    headers = headers_of(body, new, old)

    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in (new, old):
        assert Webhook(secret).verify(body, headers)
        CLIENT.webhooks.verify_signature(body, headers, secret=secret)
    with pytest.raises(WebhookVerificationError):
        Webhook(other).verify(body, headers)


def test_a_body_that_was_changed_is_not_accepted() -> None:
    secret = new_signing_secret()
    headers = headers_of(body_of(), secret)

    with pytest.raises(InvalidWebhookSignatureError):
        CLIENT.webhooks.unwrap(body_of(full=True), headers, secret=secret)


def test_without_a_secret_nothing_is_signed() -> None:
    with pytest.raises(ValueError, match="at least one secret"):
        headers_of(body_of())


@pytest.mark.parametrize(
    "at",
    [
        datetime(2026, 11, 20, 12, 0, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 11, 20, 12, 0),  # noqa: DTZ001 - that it is naive is the point
    ],
)
def test_a_time_that_is_not_utc_is_refused(at: datetime) -> None:
    with pytest.raises(ValueError, match="UTC"):
        signed_headers(b"{}", delivery_id="wh_1", at=at, secrets=[new_signing_secret()])
