"""What Prefect's own UI makes of our reports, in a real Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow, get_client
from prefect.artifacts import acreate_markdown_artifact
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.shown.plot import speed_plot
from flows.shown.run_history import Rate
from tests.services.chromium import running_chromium
from tests.services.prefect import prefect_server

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "https://batches.example/batches/batch_1"
RATES = [Rate(float(n), 10.0, 100.0 * n, n / 10) for n in range(8)]


@flow(persist_result=False)
async def reports() -> str:
    """A report with the parts that Prefect's UI might drop; the artifact's id."""
    table = f"| Batch | [batch_1]({PAGE}) |\n|---|---|\n| Failed | 1 |"
    return str(await acreate_markdown_artifact(f"# Done\n\n{table}\n\n{speed_plot(RATES)}"))


async def test_the_ui_shows_the_plot_and_the_link_of_a_report(tmp_path: Path) -> None:
    settings = {"PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_SERVER_UI_API_URL": "/api"}
    with prefect_server(tmp_path, settings) as server:
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            artifact = await reports()
            async with get_client() as client:
                assert await client.read_artifacts()
            if waiting := EventsWorker.drain_all(timeout=10):
                await waiting  # or it would look for this server for ever
        url = f"{server.api_url.removesuffix('/api')}/artifacts/artifact/{artifact}"
        profile = tmp_path / "chromium"
        profile.mkdir()
        with running_chromium(profile) as browser, browser.tab() as tab:
            tab.open(url)
            # It loads what draws Markdown when it has an artifact to draw.
            tab.wait("document.querySelector('img[src^=\"data:image/svg+xml;base64,\"]')", 60.0)
            assert tab.run(f"Boolean(document.querySelector('a[href=\"{PAGE}\"]'))")
