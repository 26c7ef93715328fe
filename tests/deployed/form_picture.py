"""``python -m tests.deployed.form_picture``: the picture of submit-batch's form in docs/how-to.

It is of Prefect's own UI, served by a real server, in a real Chromium. A test compares the form's
fields with those that the picture was made from, so that it cannot go stale.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import quote

from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.submit_batch import submit_batch
from tests.services.chromium import Tab, running_chromium
from tests.services.prefect import prefect_server

_FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
PICTURE: Final = _FOLDER / "submit-form.png"
MADE_FROM: Final = _FOLDER / "submit-form.txt"
_FILLED_IN: Final = {
    "input": "/data/requests.jsonl",
    "output": "/data/results.jsonl",
    "errors": "/data/results.errors.jsonl",
    "model": "tiny-chat",
    "endpoint": "/v1/chat/completions",
    "webhook_url": "https://hooks.example/batches",
    "notify_email": "ada@example.org",
    "metadata": {"team": "search"},
}
_UI: Final = {"PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_SERVER_UI_API_URL": "/api"}
_FIELDS: Final = "[...document.querySelectorAll('.p-label')].map(each => each.innerText)"


def fields_hash() -> str:
    """Of what Prefect makes the form from."""
    schema = submit_batch.parameters.model_dump(mode="json")
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Make the picture."""
    with tempfile.TemporaryDirectory() as folder:
        home, profile = Path(folder) / "prefect", Path(folder) / "chromium"
        home.mkdir()
        profile.mkdir()
        with prefect_server(home, _UI) as server, running_chromium(profile) as browser:
            with temporary_settings({PREFECT_API_URL: server.api_url}):
                deployment = asyncio.run(_deploy())
            site = server.api_url.removesuffix("/api")
            values = quote(json.dumps(_FILLED_IN))
            with browser.tab(width=1080, height=2400) as tab:
                tab.prefer("dark")
                tab.open(f"{site}/deployments/deployment/{deployment}/run?parameters={values}")
                _take(tab)
    MADE_FROM.write_text(f"{fields_hash()}\n")


async def _deploy() -> str:
    """As far as the form needs it; the id of the deployment."""
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name="control", type="process"))
        flow_id = await client.create_flow(submit_batch)
        deployment = await client.create_deployment(
            flow_id,
            "default",
            work_pool_name="control",
            parameter_openapi_schema=submit_batch.parameters.model_dump(),
        )
        return str(deployment)


def _take(tab: Tab) -> None:
    tab.wait("document.body.innerText.includes('metadata')", seconds=60)
    shot = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    PICTURE.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
