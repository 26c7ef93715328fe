"""The page's Retry button has the limits of the API's route, and works once for each page."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.page import samples
from tests.page.test_page import form_key_in, token_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services
    from batchyard.settings import Settings


@pytest.fixture
def settings(settings: Settings) -> Settings:
    quota = settings.quota.model_copy(update={"batches_per_hour": 2})
    return settings.model_copy(update={"quota": quota})


@asynccontextmanager
async def session(site: str, key: str) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    """A browser that is logged in, and the fields of its forms."""
    async with httpx.AsyncClient(base_url=site) as client:
        fields = {"csrf": token_in((await client.get("/login")).text), "key": key, "next": "/"}
        assert (await client.post("/login", data=fields)).status_code == 303
        yield client, {"csrf": token_in((await client.get("/")).text)}


async def test_a_tenants_retry_on_the_page_is_a_clients_and_counts(
    site: str, services: Services, keys: tuple[str, str]
) -> None:
    batch = await samples.ended(services, "x", tenant="one")
    assert not batch.options.public_urls
    async with session(site, keys[0]) as (client, fields):
        for _ in range(2):
            made = await client.post(f"/batches/{batch.id}/retry", data=fields)
            assert made.status_code == 303
        refused = await client.post(f"/batches/{batch.id}/retry", data=fields)
    new = await services.store.batches.get(made.headers["location"].removeprefix("/batches/"))
    assert new.options.public_urls
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert "may create 2 batches an hour" in refused.text


async def test_an_operators_retry_has_no_limit(
    site: str, services: Services, operator_key: str
) -> None:
    batch = await samples.ended(services, "x", tenant="one")
    async with session(site, operator_key) as (client, fields):
        for _ in range(3):
            answer = await client.post(f"/batches/{batch.id}/retry", data=fields)
            assert answer.status_code == 303


async def test_a_double_click_on_retry_makes_one_batch(
    site: str, services: Services, operator_key: str
) -> None:
    """Both clicks lead to it; who loads the page again may retry again."""
    batch = await samples.ended(services, "x", tenant="one")
    at = f"/batches/{batch.id}"
    async with session(site, operator_key) as (client, fields):
        form = {**fields, "form_key": form_key_in((await client.get(at)).text)}
        clicks = [client.post(f"{at}/retry", data=form) for _ in range(2)]
        answers = [*await asyncio.gather(*clicks), await client.post(f"{at}/retry", data=form)]
        form["form_key"] = form_key_in((await client.get(at)).text)
        again = await client.post(f"{at}/retry", data=form)
    (made,) = {answer.headers["location"] for answer in answers}
    assert (await services.store.batches.get(made.removeprefix("/batches/"))).retry_of == batch.id
    assert again.headers["location"] not in {made, at}
    assert len(await services.store.batches.page("one")) == 3


async def test_the_key_of_the_retry_form_stays_while_somebody_looks_at_it(
    site: str, services: Services, operator_key: str
) -> None:
    """What the page renews by itself has no key: it would differ at each look."""
    ended = await samples.ended(services, "x", tenant="one")
    running = await samples.running(services, "y", owner="r")
    async with session(site, operator_key) as (client, _):
        page = (await client.get(f"/batches/{ended.id}")).text
        renewed = (await client.get(f"/batches/{running.id}")).text
    assert "form_key" in page
    assert "hx-get" not in page
    assert "hx-get" in renewed
    assert "form_key" not in renewed
