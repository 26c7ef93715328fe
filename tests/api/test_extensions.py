"""What a batch may ask for that OpenAI's do not know: it is checked, and kept for who needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.locations.location import parse_location
from batchyard.locations.parted_url import PartedUrl
from batchyard.results.output_rules import OnInvalidOutput
from batchyard.settings_parts import SmtpSettings
from batchyard.store import DeliveryKind
from tests.api.test_batches import WANTED, post
from tests.pages import block, replaced

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


@pytest.mark.parametrize("key", ["input_url", "output_url", "error_url", "webhook_url"])
def test_a_url_that_leads_to_a_private_address_is_refused_at_once(api: Api, key: str) -> None:
    asked = {key: "https://10.0.0.7/x?sign=hunter2"}
    more = {"input_file_id": ...} if key == "input_url" else {}
    status, body = post(api, **asked, **more)
    assert (status, body["error"]["param"]) == (400, key)
    assert "its address is not public" in body["error"]["message"]
    assert "hunter2" not in body["error"]["message"]


def test_a_name_that_is_not_known_yet_is_no_refusal(api: Api) -> None:
    assert post(api, webhook_url="https://not-yet.invalid/hook")[0] == 200


async def test_a_batch_may_go_to_a_multipart_upload(api: Api, services: Services) -> None:
    url = "https://example.com/out?X-Amz-Signature=hunter2"
    upload = {"part_urls": [f"{url}&partNumber={n}" for n in (1, 2)], "complete_url": url}
    _, body = post(api, output_upload=upload)
    places = await services.store.batch_places.locations(body["id"])
    assert parse_location(str(places.output)) == PartedUrl(tuple(upload["part_urls"]), url)


def test_an_address_is_refused_where_no_mail_server_is_configured(api: Api) -> None:
    status, body = post(api, notify_email="me@example.com")
    assert status == 400
    assert body["error"]["message"].startswith("This server sends no e-mail: ")
    assert body["error"]["param"] == "notify_email"
    assert body["error"]["code"] == "email_not_configured"


async def test_a_dataset_comes_with_its_template(
    api: Api, services: Services, tmp_path: Path
) -> None:
    """The call is that of docs/how-to/datasets.md."""
    template = '{"messages": {{ messages | tojson }}}'
    (tmp_path / "question.json.j2").write_text(template)
    path = f'"{tmp_path}/question.json.j2"'
    program = replaced(
        block("docs/how-to/datasets.md", "dataset-api"),
        {"bucket.example": "example.com", '"question.json.j2"': path},
    )
    names: dict[str, Any] = {"client": api.openai(), "Path": Path}
    exec(program, names)  # noqa: S102 - of our own page
    batch_id = names["batch"].id
    places = await services.store.batch_places.locations(batch_id)
    assert places.template == template
    assert str(places.input).startswith("https://example.com/data.parquet?")
    assert (await services.store.batches.get(batch_id)).options.is_rendered


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"template": "{% if %}"}, "template", "invalid_template"),
        ({"template": None}, "template", "missing_required_parameter"),
        ({"template": "x" * 65_537}, "template", "invalid_template"),
        ({"error_url": "https://example.com/e.parquet"}, "error_url", "invalid_value"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    api: Api, asked: dict[str, Any], param: str, code: str
) -> None:
    wanted = {"template": "{}", "input_url": "https://example.com/data.parquet", **asked}
    status, body = post(api, input_file_id=..., **wanted)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


def test_a_template_is_not_for_an_uploaded_file(api: Api) -> None:
    status, body = post(api, template="{}")
    assert (status, body["error"]["param"]) == (400, "template")


async def test_extensions_are_kept_for_those_who_need_them(
    mail_server: None, api: Api, services: Services
) -> None:
    urls = {
        key: f"https://example.com/{key}?sign=1"
        for key in ("input_url", "output_url", "error_url", "webhook_url")
    }
    _, body = post(api, input_file_id=..., **urls, notify_email="me@example.com", priority=5)
    locations = await services.store.batch_places.locations(body["id"])
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


async def test_what_is_to_become_of_bad_answers_is_kept(api: Api, services: Services) -> None:
    """A value of null is one, where it is set in a body."""
    rule = {"finish_reasons": ["length"], "set": {"stop": None}, "unset": None, "attempts": 2}
    _, body = post(api, on_invalid_output=rule)
    batch = await services.store.batches.get(body["id"])
    kept = OnInvalidOutput(finish_reasons=("length",), set={"stop": None}, attempts=2)
    assert batch.options.on_invalid_output == kept


def test_deduplicate_is_a_boolean(api: Api) -> None:
    status, body = post(api, deduplicate=1)
    assert (status, body["error"]["param"]) == (400, "deduplicate")
