"""Webhook endpoints, what was delivered, and whom e-mails go to, from the command line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import standardwebhooks

from batchyard.lifecycle import BatchStatus
from batchyard.notify.event import EVENT_TYPES
from batchyard.store import Attempt, BatchLocations, DeliveryKind, DeliveryStatus
from tests.cli.conftest import Ended, with_store
from tests.contract.store.outbox_samples import NO_LIMITS
from tests.contract.store.samples import batch_in
from tests.services.receiver import Receiver, Reply, running_receiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchyard.store import Store, WebhookEndpointRecord

    Run = Callable[..., Ended]

URL = "https://hooks.example.com/in?token=abc"
SECRET = r"whsec_[A-Za-z0-9+/]{43}=\n"


def endpoint_id(ended: Ended) -> str:
    """Of the endpoint that the command made."""
    assert ended.status == 0, ended.stderr
    return next(word for word in ended.stderr.split() if word.startswith("whe_"))


def endpoints() -> list[WebhookEndpointRecord]:
    return list(with_store(lambda store: store.webhook_endpoints.page()))


def secrets_of(endpoint: str) -> tuple[str, ...]:
    return with_store(lambda store: store.webhook_endpoints.secrets(endpoint))


def delivery(status: DeliveryStatus | None = None, **changes: Any) -> str:
    """Of a completed batch's own webhook, after an attempt that came to ``status``; its id."""

    async def work(store: Store) -> str:
        locations = BatchLocations(receivers={DeliveryKind.WEBHOOK: URL})
        await batch_in(store, BatchStatus.COMPLETED, **{"locations": locations, **changes})
        (claim,) = await store.deliveries.claim("me", lease_seconds=60, limit=1, limits=NO_LIMITS)
        if status is None:
            await store.deliveries.release("me")
        else:
            attempt = Attempt(duration_ms=5, status_code=500, error="the receiver answered 500")
            again = 300.0 if status is DeliveryStatus.PENDING else None
            await store.deliveries.record(
                claim, attempt, owner="me", status=status, again_after_seconds=again
            )
        return claim.delivery.id

    return with_store(work)


# -- endpoints -----------------------------------------------------------------------------------


def test_a_new_endpoints_secret_is_all_that_goes_to_standard_output(alone: Run) -> None:
    ended = alone("webhooks", "create", URL, "--name", "ci", "--tenant", "search")
    assert re.fullmatch(SECRET, ended.stdout)
    assert f"The signing secret of {endpoint_id(ended)} is shown only this once" in ended.stderr
    (made,) = endpoints()
    assert (made.id, made.name, made.tenant, made.url) == (
        endpoint_id(ended),
        "ci",
        "search",
        URL,
    )
    assert made.event_types == EVENT_TYPES
    assert secrets_of(made.id) == (ended.stdout.strip(),)


def test_an_endpoint_may_hear_of_some_ends_alone(alone: Run) -> None:
    alone("webhooks", "create", URL, "--event", "batch.failed", "--event", "batch.expired")
    (made,) = endpoints()
    assert made.event_types == ("batch.failed", "batch.expired")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("http://hooks.example.com/",), "'url' must be an https:// URL."),
        ((URL, "--name", ""), "'name' must not be empty."),
        ((URL, "--event", "batch.lost"), "There is no event type 'batch.lost' here, only: "),
    ],
)
def test_what_is_no_endpoint_is_refused(alone: Run, words: tuple[str, ...], message: str) -> None:
    ended = alone("webhooks", "create", *words)
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr.startswith(f"batchyard: {message}")
    assert endpoints() == []


def test_the_list_has_every_endpoint_and_neither_secret_nor_query(alone: Run) -> None:
    secret = alone("webhooks", "create", URL, "--name", "[red]ci\x1b[2J").stdout.strip()
    gone = endpoint_id(alone("webhooks", "create", URL, "--tenant", "search"))
    with_store(lambda store: store.webhook_endpoints.disable(gone, "it answered 410"))
    shown = alone("webhooks", "list").stdout
    assert secret not in shown
    assert "token" not in shown
    assert "[red]ci�[2J" in shown
    lines = {line.split()[0]: line for line in shown.splitlines()[1:]}
    assert lines[gone].rstrip().endswith("disabled: it answered 410")
    assert f"whsec_…{secret[-4:]}" in shown
    (line,) = alone("webhooks", "list", "--tenant", "search").stdout.splitlines()[1:]
    assert line.startswith(gone)


def test_a_list_that_goes_on_says_so(alone: Run) -> None:
    for _ in range(2):
        alone("webhooks", "create", URL)
    assert "more than 1" in alone("webhooks", "list", "--limit", "1").stderr


def test_an_endpoint_is_shown_without_its_secret(alone: Run) -> None:
    made = alone("webhooks", "create", URL)
    shown = alone("webhooks", "show", endpoint_id(made)).stdout
    assert made.stdout.strip() not in shown
    assert json.loads(shown)["url"] == "https://hooks.example.com/in"


def test_an_update_changes_what_is_given_and_enables(alone: Run) -> None:
    made = endpoint_id(alone("webhooks", "create", URL, "--name", "ci"))
    with_store(lambda store: store.webhook_endpoints.disable(made, "gone"))
    ended = alone("webhooks", "update", made, "--event", "batch.failed")
    shown = json.loads(ended.stdout)
    assert (shown["name"], shown["event_types"]) == ("ci", ["batch.failed"])
    assert shown["disabled_at"] is None
    (found,) = endpoints()
    assert found.url == URL


def test_a_deleted_endpoint_is_gone(alone: Run) -> None:
    made = endpoint_id(alone("webhooks", "create", URL))
    ended = alone("webhooks", "delete", made)
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert alone("webhooks", "show", made).stderr == (
        f"batchyard: No webhook endpoint found with id '{made}'.\n"
    )


@pytest.mark.parametrize("keep_old", [False, True])
def test_a_rotated_secret_is_printed_and_the_old_one_may_stay(alone: Run, keep_old: bool) -> None:
    made = alone("webhooks", "create", URL)
    words = ("--keep-old",) if keep_old else ()
    ended = alone("webhooks", "rotate", endpoint_id(made), *words)
    assert re.fullmatch(SECRET, ended.stdout)
    old = (made.stdout.strip(),) if keep_old else ()
    assert secrets_of(endpoint_id(made)) == (ended.stdout.strip(), *old)


def test_the_secret_of_batches_own_webhooks_is_what_signs_them(alone: Run) -> None:
    ended = alone("webhooks", "secret", "--tenant", "search")
    assert re.fullmatch(SECRET, ended.stdout)

    async def claimed(store: Store) -> tuple[str, ...]:
        locations = BatchLocations(receivers={DeliveryKind.WEBHOOK: URL})
        await batch_in(store, BatchStatus.COMPLETED, locations=locations, tenant="search")
        (claim,) = await store.deliveries.claim("me", lease_seconds=60, limit=1, limits=NO_LIMITS)
        return claim.secrets

    assert with_store(claimed) == (ended.stdout.strip(),)


# -- a sample event ------------------------------------------------------------------------------


@pytest.fixture
def receiver(alone: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("BATCHYARD_ALLOW_PRIVATE_URLS", "true")
    with running_receiver(tls=False) as running:
        yield running


def test_a_sample_event_is_signed_and_its_status_printed(alone: Run, receiver: Receiver) -> None:
    made = alone("webhooks", "create", receiver.url())
    ended = alone("webhooks", "test", endpoint_id(made), "--event", "batch.failed")
    assert (ended.status, ended.stdout) == (0, "200\n")
    (request,) = receiver.requests
    event = standardwebhooks.Webhook(made.stdout.strip()).verify(
        request.body, dict(request.headers)
    )
    assert event["type"] == "batch.failed"


def test_a_receiver_that_refuses_a_sample_event_fails_the_command(
    alone: Run, receiver: Receiver
) -> None:
    receiver.answers.append(Reply(500))
    made = endpoint_id(alone("webhooks", "create", receiver.url()))
    ended = alone("webhooks", "test", made)
    assert (ended.status, ended.stdout) == (1, "500\n")


def test_a_receiver_that_is_not_there_is_a_clear_error(alone: Run, receiver: Receiver) -> None:
    made = endpoint_id(alone("webhooks", "create", "http://127.0.0.1:9/in?token=abc"))
    ended = alone("webhooks", "test", made)
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr.startswith("batchyard: The event did not arrive: ")
    assert "token" not in ended.stderr


# -- deliveries ----------------------------------------------------------------------------------


def test_the_list_of_deliveries_says_how_each_stands(alone: Run) -> None:
    pending = delivery(DeliveryStatus.PENDING)
    failed = delivery(DeliveryStatus.FAILED, tenant="search")
    shown = alone("deliveries", "list").stdout
    lines = {line.split()[0]: line.split() for line in shown.splitlines()[1:]}
    assert {"batch.completed", "hooks.example.com", "pending", "1", "in"} <= set(lines[pending])
    assert {"failed", "-"} <= set(lines[failed])
    assert "token" not in shown
    for words in (("--tenant", "search"), ("--status", "failed")):
        (line,) = alone("deliveries", "list", *words).stdout.splitlines()[1:]
        assert line.startswith(failed)


def test_a_list_of_deliveries_may_be_of_one_batch_and_as_json(alone: Run) -> None:
    first, _ = delivery(DeliveryStatus.FAILED), delivery(DeliveryStatus.FAILED)
    batch = json.loads(alone("deliveries", "show", first).stdout)["batch_id"]
    (line,) = alone("deliveries", "list", "--batch", batch, "--json").stdout.splitlines()
    assert json.loads(line)["id"] == first
    assert "more than 1" in alone("deliveries", "list", "--limit", "1").stderr


def test_a_delivery_is_shown_with_its_attempts(alone: Run) -> None:
    shown = json.loads(alone("deliveries", "show", delivery(DeliveryStatus.FAILED)).stdout)
    (attempt,) = shown["attempts"]
    assert (attempt["number"], attempt["status_code"]) == (1, 500)
    assert attempt["error"] == "the receiver answered 500"


def test_a_delivery_is_replayed_once(alone: Run) -> None:
    failed = delivery(DeliveryStatus.FAILED)
    ended = alone("deliveries", "replay", failed)
    assert (ended.status, ended.stdout, ended.stderr) == (0, "pending\n", "")
    again = alone("deliveries", "replay", failed)
    assert (again.status, again.stdout) == (3, "")
    assert again.stderr.count("\n") == 1


def test_a_delivery_that_nobody_made_is_a_clear_error(alone: Run) -> None:
    for command in ("show", "replay"):
        ended = alone("deliveries", command, "wh_0")
        assert (ended.status, ended.stdout) == (4, "")
        assert "wh_0" in ended.stderr


# -- e-mail --------------------------------------------------------------------------------------


def test_a_tenants_address_is_set_shown_and_removed(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__HOST", "mail.example.com")
    for words, said in (
        ((), "none\n"),
        (("me@example.com",), "me@example.com\n"),
        ((), "me@example.com\n"),
        (("--tenant", "search"), "none\n"),
        (("--remove",), "none\n"),
        ((), "none\n"),
    ):
        ended = alone("email", *words)
        assert (ended.status, ended.stdout, ended.stderr) == (0, said, "")


def test_an_address_without_a_mail_server_is_kept_with_a_warning(alone: Run) -> None:
    ended = alone("email", "me@example.com")
    assert ended.status == 0
    assert "BATCHYARD_SMTP__HOST" in ended.stderr
    assert alone("email").stdout == "me@example.com\n"


@pytest.mark.parametrize(
    "words", [("nobody",), ("a@example.com,b@example.com",), ("a@example.com", "--remove")]
)
def test_what_is_no_address_is_refused(alone: Run, words: tuple[str, ...]) -> None:
    ended = alone("email", *words)
    assert (ended.status, ended.stdout) == (2, "")
    assert alone("email").stdout == "none\n"
