"""What a person sees and does on the page, in a real Chromium."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from batchyard.batch.batch_options import OnInvalid
from batchyard.errors import RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.page import new_batch
from tests.api.conftest import Api, served
from tests.contract.store.samples import batch_in, begun_batch
from tests.page import samples
from tests.page.conftest import log_in
from tests.services.chromium import until
from tests.services.node import npm_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.services.chromium import Tab

LISTS = Path(__file__).parent / "node"
MOST_TABS = 200


def focused(tab: Tab) -> str:
    """The id of what has the focus, or its text."""
    found: str = tab.run("document.activeElement.id || document.activeElement.innerText.trim()")
    return found


def tab_to(tab: Tab, name: str) -> None:
    """Press Tab until it has the focus, which everything that has it must show."""
    for _ in range(MOST_TABS):
        tab.press("Tab")
        outline = tab.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", focused(tab)
        if focused(tab) == name:
            return
    raise AssertionError(f"{name} cannot be reached with the keyboard.")


async def test_everything_can_be_done_with_the_keyboard(
    tab: Tab, site: str, services: Services, keys: tuple[str, str]
) -> None:
    """Log in, filter, search, open a batch, pause it, set its priority, cancel it, log out."""
    batch = await begun_batch(services.store, tenant="one", metadata={"name": "Mine"})
    await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
    log_in(tab, site, keys[0])
    tab_to(tab, "tile-oldest")
    tab.press("Enter")
    tab.wait("location.search === '?show=waiting' && document.readyState === 'complete'")
    tab.wait("document.querySelectorAll('table.batches tbody tr').length === 1")
    tab_to(tab, "q")
    tab.type("nowhere")
    tab.wait("document.querySelector('#batches .empty') !== null")
    assert tab.run("location.search") == "?show=waiting&q=nowhere"
    tab.run("document.activeElement.select()")
    tab.type("min")
    tab.wait("document.querySelector('table.batches tbody tr') !== null")
    tab_to(tab, f"row-{batch.id}")
    tab.press("Enter")
    tab.wait(f"location.pathname === '/batches/{batch.id}' && document.readyState === 'complete'")
    tab_to(tab, "do-pause")
    tab.press("Enter")
    tab.wait("document.getElementById('do-unpause') !== null")
    tab_to(tab, "do-unpause")
    tab.press("Enter")
    tab.wait("document.getElementById('do-pause') !== null")
    tab_to(tab, "priority")
    tab.run("document.activeElement.select()")
    tab.type("7")
    tab.press("Enter")
    # What the server has sent, not what was typed.
    tab.wait("document.getElementById('priority').defaultValue === '7'")
    tab_to(tab, "do-cancel")
    tab.press("Enter")
    tab.wait("document.querySelector('.state').innerText === 'cancelling'")
    found = await services.store.batches.get(batch.id)
    assert (found.priority, found.status) == (7, BatchStatus.CANCELLING)
    tab_to(tab, "Log out")
    tab.press("Enter")
    tab.wait("location.pathname === '/login'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(
    tab: Tab, site: str, services: Services, operator_key: str, scheme: str
) -> None:
    axe = (npm_folder(LISTS) / "node_modules/axe-core/axe.min.js").read_text()
    batches = await samples.working_day(services)
    file = await services.store.files.create(
        await samples.stored(services, ["{}"], "bad.jsonl", "one")
    )
    tab.prefer(scheme)
    tab.open(f"{site}/login")
    found = {"/login": violations(tab, axe)}
    log_in(tab, site, operator_key)
    paths = ["/", "/?show=late&q=nothing", "/new", f"/new/{file.id}", "/batches/none"]
    paths += [f"/batches/{batches[name].id}" for name in ("running", "completed", "failed")]
    for width in (1280, 390):
        tab.resize(width, 900)
        for path in paths:
            tab.open(site + path)
            found[f"{path} {width}"] = violations(tab, axe)
    assert not {path: words for path, words in found.items() if words}


def violations(tab: Tab, axe: str) -> list[str]:
    # Not as a script of the page, which its policy would refuse.
    tab.run(f"{axe}; true")
    result = json.loads(tab.run("axe.run(document).then((found) => JSON.stringify(found))"))
    return [
        f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in result["violations"]
        for node in rule["nodes"]
    ]


async def test_no_request_leaves_the_origin_and_nothing_is_refused(
    tab: Tab, site: str, services: Services, operator_key: str
) -> None:
    """Neither by the page's own policy (inline styles, scripts) nor as missing."""
    batches = await samples.working_day(services)
    log_in(tab, site, operator_key)
    for path in ("/", f"/batches/{batches['running'].id}", "/new"):
        tab.open(site + path)
        tab.wait("document.fonts.ready.then(() => true)")
    tab.collect()
    assert len(tab.requests) > 10
    assert [url for url in tab.requests if not url.startswith(f"{site}/")] == []
    assert tab.complaints == []
    assert tab.run("document.querySelectorAll('.uplot canvas').length") == 0
    tab.open(f"{site}/batches/{batches['running'].id}")
    tab.wait("document.querySelectorAll('.uplot canvas').length === 2")


async def test_the_key_is_in_no_url(
    tab: Tab, site: str, services: Services, operator_key: str
) -> None:
    batch = await begun_batch(services.store)
    log_in(tab, site, operator_key)
    for path in ("/", f"/batches/{batch.id}", "/new", "/nowhere"):
        tab.open(site + path)
    tab.collect()
    assert not [url for url in tab.requests if operator_key in url or operator_key[8:] in url]
    assert operator_key not in tab.run("document.documentElement.outerHTML + document.cookie")


async def test_html_of_others_is_text(
    tab: Tab, site: str, services: Services, operator_key: str
) -> None:
    """In names, metadata, file names, custom ids, errors and answers; and in the search."""
    batch = await samples.ended(services, samples.HOSTILE, tenant="one", hostile=True)
    log_in(tab, site, operator_key)
    for path in ("/", f"/batches/{batch.id}", "/?q=%3Cscript%3Edocument.title%3D1%3C/script%3E"):
        tab.open(site + path)
        shown = tab.run("document.documentElement.outerHTML")
        assert "&lt;script&gt;document.title=" in shown
        assert tab.run("[...document.querySelectorAll('img[src=x]')].length") == 0
        assert tab.run("document.querySelectorAll('script:not([src])').length") == 0
        assert tab.run("document.title").endswith(" · Batchyard")
    download = f"{site}/batches/{batch.id}/files/output"
    kind = tab.run(f"fetch({json.dumps(download)}).then((r) => r.headers.get('content-type'))")
    assert kind == "application/octet-stream"


async def test_what_happens_is_seen_without_loading_again(
    tab: Tab, site: str, services: Services, keys: tuple[str, str]
) -> None:
    """Tiles, table and batch; what has the focus keeps it."""
    log_in(tab, site, keys[0])
    tab_to(tab, "tile-running")
    batch = await begun_batch(services.store, tenant="one", metadata={"name": "Fresh"})
    tab.wait("document.querySelector('table.batches')?.innerText.includes('Fresh')")
    tab.wait("document.getElementById('tile-running').innerText.includes('1 waiting')")
    assert focused(tab) == "tile-running"
    tab.open(f"{site}/batches/{batch.id}")
    await services.store.batches.cancel(batch.id)
    tab.wait("document.querySelector('#batch .state').innerText === 'cancelling'")


async def test_what_was_held_back_is_shown_afterwards(
    tab: Tab, site: str, services: Services, keys: tuple[str, str]
) -> None:
    """Somebody has a field in their hands while the batch changes, and lets go of it."""
    batch = await begun_batch(services.store, tenant="one")
    await samples.earlier(services.store, batch, 2 * samples.HOUR)  # its age is in minutes
    log_in(tab, site, keys[0])
    tab.open(f"{site}/batches/{batch.id}")
    tab.run(
        "document.addEventListener('htmx:afterRequest', (event) =>"
        "{ window.isSent = event.detail.xhr.responseText.includes('cancelling'); })"
    )
    tab.run("document.getElementById('priority').focus()")
    tab.run(
        "fetch(location.pathname + '/cancel', { method: 'POST', body: new URLSearchParams("
        "{ csrf: document.querySelector('[name=csrf]').value }) }).then(() => true)"
    )
    look = "htmx.trigger(document.body, 'look')"
    tab.wait(f"({look}, window.isSent)")
    assert tab.text("#batch .state") == "waiting"
    tab.run("document.activeElement.blur(); window.isSent = false")
    # The next look, and none after it: in a minute, the batch's age would differ too.
    tab.wait(f"({look}, window.isSent)")
    assert tab.text("#batch .state") == "cancelling"


async def test_what_is_replaced_gives_the_focus_back(
    tab: Tab, site: str, services: Services, operator_key: str
) -> None:
    """By its id: without one, the next Tab would begin at the top of the page again."""
    batches = await samples.working_day(services)
    log_in(tab, site, operator_key)
    within = (
        ":is(#batches, [hx-trigger*=look]) :is(a, button, [tabindex], input:not([type=hidden]))"
    )
    for path in ("/", "/?q=nothing", f"/batches/{batches['running'].id}"):
        tab.open(site + path)
        found = f"[...document.querySelectorAll('{within}')]"
        assert tab.run(f"{found}.length") > 3
        assert tab.run(f"{found}.filter((each) => !each.id).map((each) => each.outerHTML)") == []
        assert tab.run(f"new Set({found}.map((each) => each.id)).size === {found}.length")


async def test_the_page_goes_on_after_the_server_was_away(
    tab: Tab, settings: Settings, keys: tuple[str, str], services: Services
) -> None:
    with served(settings, keys) as first:
        log_in(tab, f"http://127.0.0.1:{first.port}", keys[0])
        port = first.port
    tab.wait("document.getElementById('live').dataset.state === 'away'")
    await begun_batch(services.store, tenant="one", metadata={"name": "Meanwhile"})
    with served(settings, keys, port=port):
        tab.wait("document.querySelector('table.batches')?.innerText.includes('Meanwhile')")
        tab.wait("document.getElementById('live').dataset.state === 'live'")


async def test_a_new_batch_is_made_by_dropping_a_file(
    tab: Tab, site: str, services: Services, keys: tuple[str, str]
) -> None:
    log_in(tab, site, keys[0])
    tab.open(f"{site}/new")
    drop(tab, "bad.jsonl", line("a") + "no JSON\n" + line("a"))
    tab.wait("location.pathname.startsWith('/new/file-') && document.readyState === 'complete'")
    shown = tab.text("main")
    assert "invalid_json_line" in shown
    assert "line 2" in shown
    assert "line 3" in shown
    assert tab.run("document.getElementById('on-invalid').value") == "error_file"
    tab.open(f"{site}/new")
    drop(tab, "good.jsonl", line("a") + line("b"))
    tab.wait("document.getElementById('create') !== null")
    assert "2" in tab.text(".facts")
    assert tab.run("document.getElementById('endpoint').value") == "/v1/completions"
    assert tab.run("document.getElementById('on-invalid').value") == "fail"
    tab.run("document.getElementById('name').focus()")
    tab.type("From a file")
    tab.press("Enter")
    tab.wait("location.pathname.startsWith('/batches/batch_')")
    (batch,) = await services.store.batches.page("one")
    assert batch.metadata == {"name": "From a file"}
    assert (batch.endpoint, batch.status) == ("/v1/completions", BatchStatus.VALIDATING)


@asynccontextmanager
async def logged_in(
    site: str, key: str, path: str
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.Response]]:
    """A browser without scripts, and the page at the path."""
    async with httpx.AsyncClient(base_url=site, follow_redirects=True) as client:
        form = await client.get("/login")
        fields = {"csrf": token_in(form.text), "key": key, "next": path}
        yield client, await client.post("/login", data=fields)


async def test_a_file_with_bad_lines_runs_without_them_if_there_are_others(
    site: str, services: Services, keys: tuple[str, str]
) -> None:
    async with logged_in(site, keys[0], "/new") as (client, first):
        fields = {"csrf": token_in(first.text)}
        some = {"file": ("some.jsonl", line("a") + "no JSON\n")}
        page = await client.post("/new", data=fields, files=some)
        assert "or create a batch without them" in page.text
        asked = {**fields, "endpoint": "/v1/completions", "on_invalid": "error_file"}
        await client.post(page.url.path, data=asked)
        none = {"file": ("none.jsonl", "no JSON\n")}
        page = await client.post("/new", data=fields, files=none)
        assert "Create batch" not in page.text
    (batch,) = await services.store.batches.page("one")
    assert batch.options.on_invalid is OnInvalid.ERROR_FILE


async def test_a_form_that_is_sent_twice_makes_one_batch(
    site: str, services: Services, keys: tuple[str, str]
) -> None:
    """As by a double click. With other fields, it makes another one."""
    async with logged_in(site, keys[0], "/new") as (client, first):
        fields = {"csrf": token_in(first.text)}
        page = await client.post("/new", data=fields, files={"file": ("a.jsonl", line("a"))})
        asked = {**fields, "endpoint": "/v1/completions", "form_key": form_key_in(page.text)}
        clicks = [client.post(page.url.path, data=asked) for _ in range(2)]
        made = {answer.url.path for answer in await asyncio.gather(*clicks)}
        assert [f"/batches/{each.id}" for each in await services.store.batches.page("one")] == [
            *made
        ]
        await client.post(page.url.path, data={**asked, "completion_window": "1h"})
    assert len(await services.store.batches.page("one")) == 2


async def test_a_form_that_is_sent_again_leads_to_its_batch_though_a_new_one_is_refused(
    site: str, services: Services, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because of the work that waits, its own among it."""

    async def refuse(*_: Any, **__: Any) -> Any:
        raise RequestRefused("There is too much work.", param=None, code="window_unattainable")

    async with logged_in(site, keys[0], "/new") as (client, first):
        fields = {"csrf": token_in(first.text)}
        page = await client.post("/new", data=fields, files={"file": ("a.jsonl", line("a"))})
        asked = {**fields, "endpoint": "/v1/completions", "form_key": form_key_in(page.text)}
        made = await client.post(page.url.path, data=asked)
        monkeypatch.setattr(new_batch, "accept_batch", refuse)
        again = await client.post(page.url.path, data=asked)
    (batch,) = await services.store.batches.page("one")
    assert made.url.path == again.url.path == f"/batches/{batch.id}"


def line(custom_id: str) -> str:
    body = {"model": "m", "prompt": "Once", "max_tokens": 4}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(request) + "\n"


def drop(tab: Tab, name: str, text: str) -> None:
    """Let go of a file over the form."""
    tab.run(
        f"""(() => {{
          const data = new DataTransfer();
          data.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
          const form = document.querySelector("form.drop");
          form.dispatchEvent(new DragEvent("drop", {{ dataTransfer: data, bubbles: true }}));
        }})()"""
    )


async def test_links_and_forms_do_all_of_it_without_scripts(
    site: str, services: Services, keys: tuple[str, str]
) -> None:
    """The charts say in words what they would show."""
    batch = await samples.running(services, "Plain", owner="r")
    async with logged_in(site, keys[0], "/") as (client, first):
        assert f"/batches/{batch.id}" in first.text
        assert f"/batches/{batch.id}" not in (await client.get("/?show=ended")).text
        page = await client.get(f"/batches/{batch.id}")
        assert "<noscript><p" in page.text
        fields = {"csrf": token_in(page.text)}
        assert "Unpause" in (await client.post(f"/batches/{batch.id}/pause", data=fields)).text
        assert (await client.post(f"/batches/{batch.id}/cancel", data={})).status_code == 403
        others = {"file": ("a.jsonl", line("a"))}
        assert (await client.post("/new", files=others)).status_code == 403
        page = await client.post("/new", data=fields, files=others)
        assert "Create batch" in page.text
    found = await services.store.batches.get(batch.id)
    assert found.paused_at is not None
    assert found.status is BatchStatus.IN_PROGRESS


async def test_a_tenant_sees_and_changes_its_own_batches_only(
    site: str, services: Services, keys: tuple[str, str]
) -> None:
    mine = await begun_batch(services.store, tenant="one")
    other = await begun_batch(services.store, tenant="other")
    async with logged_in(site, keys[0], "/") as (client, first):
        assert mine.id in first.text
        assert other.id not in first.text
        token = {"csrf": token_in(first.text), "priority": "1"}
        for what in ("pause", "unpause", "cancel", "retry", "priority"):
            answer = await client.post(f"/batches/{other.id}/{what}", data=token)
            assert answer.status_code == 404
        for path in ("", "/now", "/files/input"):
            assert (await client.get(f"/batches/{other.id}{path}")).status_code == 404
    assert (await services.store.batches.get(other.id)).status is BatchStatus.IN_PROGRESS


def token_in(page: str) -> str:
    """The token of its forms."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
    assert found
    return found[1]


def form_key_in(page: str) -> str:
    """What makes a form that is sent twice work once."""
    found = re.search(r'name="form_key" value="([^"]{20,})"', page)
    assert found
    return found[1]


def test_the_state_of_the_table_is_in_the_url(tab: Tab, site: str, keys: tuple[str, str]) -> None:
    log_in(tab, site, keys[0])
    tab.open(f"{site}/?show=all&q=some+words&sort=priority&order=up")
    assert tab.run("document.getElementById('q').value") == "some words"
    assert tab.text(".filters [aria-current]") == "All"


async def test_of_two_filters_the_later_one_is_shown(
    tab: Tab, site: str, keys: tuple[str, str]
) -> None:
    """However late the answer to the first one comes, and nobody hears of a lost connection."""
    log_in(tab, site, keys[0])
    tab.run(
        "window.states = [];"
        "new MutationObserver((changes) => window.states.push(changes[0].target.dataset.state))"
        ".observe(document.getElementById('live'), { attributes: true })"
    )
    tab.run(
        "document.getElementById('filter-2').click(); document.getElementById('filter-3').click()"
    )
    tab.wait("document.getElementById('filter-3').ariaCurrent === 'true'")
    tab.wait("document.querySelector('.htmx-request') === null")
    assert tab.text(".filters [aria-current]") == "Waiting"
    assert "away" not in tab.run("window.states")


async def test_a_list_of_all_filters_leads_somewhere(
    tab: Tab, site: str, services: Services, keys: tuple[str, str], api: Api
) -> None:
    """Of nothing there is a sentence for each filter, and a way on."""
    log_in(tab, site, keys[0])
    count = tab.run("document.querySelectorAll('.filters a').length")
    for number in range(1, count + 1):
        tab.run(f"document.getElementById('filter-{number}').click()")
        tab.wait(f"document.getElementById('filter-{number}').ariaCurrent === 'true'")
        until(lambda: tab.run("document.querySelector('#batches .empty a') !== null"), 5, "a link")


def test_screens_fit(tab: Tab, site: str, keys: tuple[str, str], tmp_path: Path) -> None:
    """Nothing but tables scrolls sideways."""
    log_in(tab, site, keys[0])
    for width in (320, 390, 768, 1280):
        tab.resize(width, 800)
        for path in ("/", "/new"):
            tab.open(site + path)
            wide = tab.run("document.documentElement.scrollWidth")
            assert wide <= width, (path, width, wide)
