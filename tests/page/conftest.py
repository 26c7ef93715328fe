"""The page in a real Chromium, served by a real uvicorn, over a store as on a working day."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.api import conftest as of_api
from tests.services.chromium import running_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from tests.services.chromium import Browser, Tab

api, keys, migrated_home = of_api.api, of_api.keys, of_api.migrated_home
services, settings = of_api.services, of_api.settings


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as opened:
        yield opened


@pytest.fixture
async def operator_key(services: Services) -> str:
    """A key that sees all tenants."""
    return (await services.store.api_keys.create("one", "operator", is_operator=True)).secret


@pytest.fixture
def site(api: of_api.Api) -> str:
    """Where the page is."""
    return f"http://127.0.0.1:{api.port}"


def log_in(tab: Tab, url: str, key: str) -> None:
    """Through the form, as a person does."""
    tab.open(f"{url}/login")
    tab.run("document.getElementById('key').focus()")
    tab.type(key)
    tab.press("Enter")
    tab.wait("location.pathname === '/' && document.readyState === 'complete'")
