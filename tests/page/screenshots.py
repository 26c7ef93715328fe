"""``python -m tests.page.screenshots``: the pictures of the page in README.md and docs/.

They are of the page as it is, in a real Chromium, over the store of :mod:`tests.page.samples`. A
test compares what they were made from with what is there now, so that they cannot go stale.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.api.conftest import served
from tests.page import samples
from tests.page.conftest import log_in
from tests.services.chromium import running_chromium

if TYPE_CHECKING:
    from batchyard.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "screenshots"
_PRICES = {"*": {"input": 0.15, "cached": 0.03, "output": 0.6}}
MADE_FROM = FOLDER / "made-from.txt"


def source_hash() -> str:
    """Of everything that decides how the page looks, and of what the pictures show."""
    page = ROOT / "batchyard" / "page"
    files = [
        *(page / "templates").rglob("*.html"),
        *(each for each in (page / "static").rglob("*") if each.is_file()),
        Path(samples.__file__),
    ]
    digest = hashlib.sha256()
    for each in sorted(files):
        digest.update(each.relative_to(ROOT).as_posix().encode() + b"\0" + each.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Make all of them."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home, profile = Path(folder) / "home", Path(folder) / "chromium"
        profile.mkdir()
        settings = read_settings(home=home, prices=_PRICES)
        key, batch_id = asyncio.run(_fill(settings))
        with served(settings, (key, key)) as api, running_chromium(profile) as browser:
            site = f"http://127.0.0.1:{api.port}"
            for scheme in ("light", "dark"):
                with browser.tab() as tab:
                    tab.prefer(scheme)
                    log_in(tab, site, key)
                    tab.screenshot(FOLDER / f"overview-{scheme}.png")
                    tab.open(f"{site}/batches/{batch_id}")
                    tab.wait("document.querySelectorAll('.uplot canvas').length === 2")
                    tab.screenshot(FOLDER / f"batch-{scheme}.png")
    MADE_FROM.write_text(f"{source_hash()}\n")


async def _fill(settings: Settings) -> tuple[str, str]:
    async with open_services(settings) as services:
        key = await services.store.api_keys.create("shop", "operator", is_operator=True)
        batches = await samples.working_day(services)
        return key.secret, batches["running"].id


if __name__ == "__main__":
    main()
