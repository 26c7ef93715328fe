"""Sessions of browsers: how one begins, what it may do, how it ends, and what attackers try."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import Request  # noqa: TC002 — FastAPI reads it at run time

from batchyard.api.http.session import PageCaller, csrf_of, csrf_token, local_path, read_form
from batchyard.errors import AccessDenied, StorageFull, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.page.failed_logins import MOST_FAILURES, WINDOW_SECONDS, FailedLogins
from batchyard.server import create_app
from batchyard.services.services import open_services
from batchyard.store.tenant.sessions import _SESSIONS
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.errors import BatchyardError
    from batchyard.services.services import Services
    from batchyard.settings import Settings

COOKIE = "batchyard_session"


def with_page(settings: Settings) -> FastAPI:
    """The application, with a page of the test's own."""
    app = create_app(settings)

    @app.get("/test/page")
    async def page(request: Request, caller: PageCaller) -> dict[str, Any]:
        return {
            "tenant": caller.tenant,
            "operator": caller.is_operator,
            "sees": caller.sees_tenant,
            "csrf": csrf_token(request),
        }

    @app.post("/test/form")
    async def form(request: Request, caller: PageCaller) -> dict[str, str]:
        return await read_form(request)

    return app


@pytest.fixture
async def browser(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    app = with_page(settings)
    async with open_services(settings) as services, browser_of(app) as client:
        app.state.services = services
        yield client


def browser_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(options.pop("address", "127.0.0.1"), 1))
    return httpx.AsyncClient(
        transport=transport, base_url=options.pop("base_url", "http://test"), **options
    )


async def form_of(client: httpx.AsyncClient, **query: str) -> dict[str, str]:
    shown = await client.get("/login", params=query)
    assert shown.status_code == 200
    fields = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', shown.text)
    return {name: unescape(value) for name, value in fields}


async def log_in(client: httpx.AsyncClient, key: str, **query: str) -> httpx.Response:
    return await client.post("/login", data={**await form_of(client, **query), "key": key})


# -- a session begins ----------------------------------------------------------------------------


async def test_a_page_without_a_session_leads_to_the_form_and_back(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    refused = await browser.get("/test/page?a=b&c=%22")
    assert refused.status_code == 303
    assert refused.headers["location"] == "/login?next=/test/page%3Fa%3Db%26c%3D%2522"
    shown = await browser.get(refused.headers["location"])
    assert 'name="next" value="/test/page?a=b&amp;c=%22"' in shown.text
    answer = await log_in(browser, keys[0], next="/test/page?a=b&c=%22")
    assert (answer.status_code, answer.headers["location"]) == (303, "/test/page?a=b&c=%22")
    page = await browser.get(answer.headers["location"])
    assert page.json() | {"csrf": ""} == {
        "tenant": "one",
        "operator": False,
        "sees": "one",
        "csrf": "",
    }
    assert (await browser.get("/login")).headers["location"] == "/"


async def test_htmx_is_told_to_load_the_form_as_a_page(browser: httpx.AsyncClient) -> None:
    refused = await browser.get("/test/page", headers={"hx-request": "true"})
    assert (refused.status_code, refused.headers["hx-redirect"]) == (401, "/login")


@pytest.mark.parametrize(
    "error", [StoreUnavailable("host db"), AccessDenied("/srv"), StorageFull("/srv")]
)
async def test_a_page_that_cannot_be_made_now_says_so_and_the_log_says_why(
    browser: httpx.AsyncClient,
    keys: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BatchyardError,
) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise error

    await log_in(browser, keys[0])
    monkeypatch.setattr("batchyard.store.overview.Overview.work", refused)
    answer = await browser.get("/")
    assert answer.status_code == 503
    assert "Not available now" in answer.text
    assert str(error) not in answer.text
    (logged,) = [each for each in caplog.records if str(error) in each.getMessage()]
    assert logged.exc_info is None


async def test_an_operators_session_sees_all_tenants(
    browser: httpx.AsyncClient, services: Services
) -> None:
    key = await services.store.api_keys.create("one", "boss", is_operator=True)
    await log_in(browser, key.secret)
    page = (await browser.get("/test/page")).json()
    assert (page["tenant"], page["operator"], page["sees"]) == ("one", True, None)


async def test_the_cookie_is_for_this_site_and_no_script(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    set_cookies = (await log_in(browser, keys[0])).headers.get_list("set-cookie")
    (cookie,) = [each for each in set_cookies if each.startswith(f"{COOKIE}=")]
    words = {word.strip().lower() for word in cookie.split(";")[1:]}
    assert words == {"httponly", "max-age=28800", "path=/", "samesite=strict"}
    assert keys[0] not in cookie


@pytest.mark.parametrize(
    ("base_url", "headers"),
    [("https://test", {}), ("http://test", {"x-forwarded-proto": "https"})],
)
async def test_behind_https_the_cookie_is_secure_and_this_hosts(
    settings: Settings, keys: tuple[str, str], base_url: str, headers: dict[str, str]
) -> None:
    app = with_page(settings)
    async with (
        open_services(settings) as services,
        browser_of(app, base_url=base_url, headers=headers) as browser,
    ):
        app.state.services = services
        shown = await browser.get("/login")
        (form_cookie,) = shown.headers.get_list("set-cookie")
        assert form_cookie.startswith("__Host-batchyard_login=")
        secret = form_cookie.split("=", 1)[1].split(";")[0]
        answer = await browser.post(
            "/login",
            data={"csrf": csrf_of(secret), "key": keys[0]},
            headers={"cookie": f"__Host-batchyard_login={secret}"},
        )
        cookies = answer.headers.get_list("set-cookie")
        (cookie,) = [each for each in cookies if each.startswith(f"__Host-{COOKIE}=")]
        assert "secure" in cookie.lower()
        token = cookie.split("=", 1)[1].split(";")[0]
        # Of a host that was given a cookie of the plain name, by whatever means, nothing is taken.
        for name, status in ((f"__Host-{COOKIE}", 200), (COOKIE, 303)):
            page = await browser.get("/test/page", headers={"cookie": f"{name}={token}"})
            assert page.status_code == status
        # Users copy its commands, which send their key there.
        batch = await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
        cookie = {"cookie": f"__Host-{COOKIE}={token}"}
        page = await browser.get(f"/batches/{batch.id}", headers=cookie)
        assert "https://test/v1" in page.text
        assert "http://test" not in page.text


async def test_a_link_logs_in_once(browser: httpx.AsyncClient, services: Services) -> None:
    key_id = (await services.store.api_keys.list("one"))[0].id
    code = await services.store.sessions.make_code(key_id)
    opened = await browser.get("/login", params={"code": code})
    assert opened.status_code == 200
    assert 'content="0; url=/"' in opened.text
    page = (await browser.get("/test/page")).json()
    assert (page["tenant"], page["operator"]) == ("one", True)
    again = await browser.get("/login", params={"code": code})
    assert (again.status_code, again.headers["location"]) == (303, "/")
    browser.cookies.clear()
    refused = await browser.get("/login", params={"code": code})
    assert refused.status_code == 401
    assert "used before, or it is older than 10 minutes" in refused.text
    assert "`batchyard keys login` prints a new one" in refused.text
    assert (await browser.get("/test/page")).status_code == 303


async def test_a_look_at_the_link_without_a_get_does_not_use_it(
    browser: httpx.AsyncClient, services: Services
) -> None:
    key_id = (await services.store.api_keys.list("one"))[0].id
    code = await services.store.sessions.make_code(key_id)
    assert (await browser.head("/login", params={"code": code})).status_code == 405
    assert (await browser.get("/login", params={"code": code})).status_code == 200


async def test_logins_are_in_the_audit_log_and_failed_ones_are_not(
    browser: httpx.AsyncClient, services: Services, keys: tuple[str, str]
) -> None:
    key_id = (await services.store.api_keys.list("one"))[0].id
    await log_in(browser, "sk-by-wrong")
    await log_in(browser, keys[0])
    browser.cookies.clear()
    await browser.get("/login", params={"code": await services.store.sessions.make_code(key_id)})
    found = await services.store.audit.newest(limit=10)
    assert {(each.actor, each.action, each.details["by"]) for each in found} == {
        (key_id, "login", "key"),
        (key_id, "login", "link"),
    }
    assert len(found) == 2


# -- a session ends ------------------------------------------------------------------------------


async def test_a_logout_ends_the_session_wherever_its_cookie_is(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    await log_in(browser, keys[0])
    token = browser.cookies[COOKIE]
    csrf = (await browser.get("/test/page")).json()["csrf"]
    answer = await browser.post("/logout", data={"csrf": csrf})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert COOKIE not in browser.cookies
    page = await browser.get("/test/page", headers={"cookie": f"{COOKIE}={token}"})
    assert page.status_code == 303


async def test_a_read_only_session_can_be_ended(
    browser: httpx.AsyncClient, services: Services
) -> None:
    key = await services.store.api_keys.create("one", "ro", may_write=False)
    await log_in(browser, key.secret)
    csrf = (await browser.get("/test/page")).json()["csrf"]
    assert (await browser.post("/test/form", data={"csrf": csrf})).status_code == 403
    assert (await browser.post("/logout", data={"csrf": csrf})).status_code == 303
    assert COOKIE not in browser.cookies


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_a_session_ends_with_its_time_and_with_its_key(
    browser: httpx.AsyncClient, services: Services, how: str
) -> None:
    key = await services.store.api_keys.create("one", "x")
    await log_in(browser, key.secret)
    assert (await browser.get("/test/page")).status_code == 200
    if how == "revoked":
        await services.store.api_keys.revoke(key.record.id)
    else:
        await _rewrite(services, expires_at=1)
    assert (await browser.get("/test/page")).status_code == 303


# -- what attackers try --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["unknown", "revoked", "expired", "a hash", "nothing"])
async def test_a_wrong_key_opens_nothing_and_is_not_shown(
    browser: httpx.AsyncClient, services: Services, what: str
) -> None:
    store = services.store
    expires_at = 1 if what == "expired" else None
    key = await store.api_keys.create("one", "x", expires_at=expires_at)
    if what == "revoked":
        await store.api_keys.revoke(key.record.id)
    given = {"unknown": "sk-by-<script>", "a hash": "0" * 64, "nothing": ""}.get(what, key.secret)
    refused = await log_in(browser, given)
    assert refused.status_code == 401
    assert ("expired on 1970" in refused.text) == (what == "expired")
    assert COOKIE not in browser.cookies
    if given:
        assert given not in refused.text


async def test_a_key_in_the_url_does_nothing(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    shown = await browser.get("/login", params={"key": keys[0]})
    assert shown.status_code == 200
    assert COOKIE not in browser.cookies
    assert keys[0] not in shown.text


async def test_a_session_that_was_put_upon_a_browser_does_not_become_its_own(
    browser: httpx.AsyncClient, services: Services, keys: tuple[str, str]
) -> None:
    """Session fixation: neither a token of the attacker's choice nor one of theirs goes on."""
    theirs = await services.store.sessions.open((await services.store.api_keys.list("other"))[0].id)
    form = await form_of(browser)
    for planted in ("chosen", theirs):
        browser.cookies.set(COOKIE, planted, domain="test.local")
        answer = await browser.post("/login", data={**form, "key": keys[0]})
        assert answer.status_code == 303
        assert browser.cookies[COOKIE] != planted
        assert await services.store.sessions.holder_of(planted) is None
        browser.cookies.delete(COOKIE)
        form = await form_of(browser)


async def test_another_sites_form_logs_nobody_in(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    """Login CSRF: it has no cookie of ours, and a token of its own browser's form is worthless."""
    form = await form_of(browser)
    browser.cookies.clear()
    for fields in ({"key": keys[0]}, {**form, "key": keys[0]}, {"csrf": csrf_of(""), "key": ""}):
        refused = await browser.post("/login", data=fields)
        assert refused.status_code == 403
        assert COOKIE not in browser.cookies
        browser.cookies.clear()


async def test_another_sites_form_logs_nobody_out(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    await log_in(browser, keys[0])
    for fields in ({}, {"csrf": csrf_of("")}):
        assert (await browser.post("/logout", data=fields)).status_code == 403
    assert (await browser.get("/test/page")).status_code == 200


async def test_a_request_that_writes_needs_the_sessions_token(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    await log_in(browser, keys[1])
    others = (await browser.get("/test/page")).json()["csrf"]
    browser.cookies.clear()
    await log_in(browser, keys[0])
    token = (await browser.get("/test/page")).json()["csrf"]
    for given in ("", "x", others, csrf_of(""), browser.cookies[COOKIE]):
        for sent in (
            {"data": {"csrf": given}},
            {"headers": {"x-csrf-token": given}},
            {"json": {"csrf": given}},
            {"files": {"csrf": (None, given)}},
        ):
            assert (await browser.post("/test/form", **sent)).status_code == 403, (given, sent)
    assert (await browser.post("/test/form", params={"csrf": token})).status_code == 403
    done = await browser.post("/test/form", data={"csrf": token, "a": "ü&="})
    assert done.json() == {"csrf": token, "a": "ü&="}
    assert (await browser.post("/test/form", headers={"x-csrf-token": token})).status_code == 200


async def test_the_csrf_token_does_not_tell_the_session(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    await log_in(browser, keys[0])
    page = (await browser.get("/test/page")).json()
    assert browser.cookies[COOKIE] not in page["csrf"]
    assert page["csrf"] == csrf_of(browser.cookies[COOKIE])


@pytest.mark.parametrize(
    "body", [b"a=" + b"x" * 65536, b"csrf=%ff", b"a=%00", b"&".join([b"a=b"] * 101)]
)
async def test_a_form_that_is_too_much_is_refused(browser: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    refused = await browser.post("/login", content=body, headers=headers)
    assert refused.status_code in {400, 413}


async def test_after_ten_failures_an_address_waits_and_the_others_do_not(
    settings: Settings, keys: tuple[str, str]
) -> None:
    app = with_page(settings)
    async with (
        open_services(settings) as services,
        browser_of(app, address="192.0.2.1") as attacker,
        browser_of(app, address="192.0.2.2") as other,
    ):
        app.state.services = services
        for n in range(MOST_FAILURES):
            assert (await log_in(attacker, f"sk-by-{n}")).status_code == 401
        refused = await log_in(attacker, keys[0])
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= WINDOW_SECONDS
        assert (await attacker.get("/login", params={"code": "x"})).status_code == 429
        assert (await log_in(other, keys[0])).status_code == 303


async def test_images_on_another_site_lock_nobody_out(
    browser: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    for _ in range(MOST_FAILURES):
        assert (await browser.get("/login", params={"code": "x"})).status_code == 401
    assert (await log_in(browser, keys[0])).status_code == 303


def test_failures_are_forgotten_after_a_while_and_never_fill_the_memory() -> None:
    now = 0.0
    failures = FailedLogins(lambda: now)
    for n in range(5000):
        failures.note(f"10.0.{n // 256}.{n % 256}")
    assert len(failures._failures) < 5000
    for n in range(MOST_FAILURES):
        failures.note(f"2001:db8::{n:x}")
    assert failures.wait_seconds("2001:db8::ffff") == WINDOW_SECONDS
    assert failures.wait_seconds("2001:db8:0:1::1") == 0
    now = WINDOW_SECONDS
    assert failures.wait_seconds("2001:db8::1") == 0


def test_an_address_of_ipv4_counts_by_itself_however_a_proxy_writes_it() -> None:
    failures = FailedLogins()
    for _ in range(MOST_FAILURES):
        failures.note("::ffff:203.0.113.7")
    assert failures.wait_seconds("203.0.113.7") == WINDOW_SECONDS
    assert failures.wait_seconds("::ffff:198.51.100.1") == 0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "batches",
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/\tx",
        "/x\r\nset-cookie: a=b",
        "/a\\b",
        "/ü",
    ],
)
def test_a_login_leads_to_no_other_site(text: str | None) -> None:
    assert local_path(text) == "/"


async def test_all_html_has_the_headers_that_keep_other_sites_out(
    browser: httpx.AsyncClient,
) -> None:
    shown = await browser.get("/login")
    for name, value in {
        "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'; object-src 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
        "x-frame-options": "DENY",
    }.items():
        assert shown.headers[name] == value
    assert "<script" not in shown.text
    assert "style=" not in shown.text


async def _rewrite(services: Services, **columns: int) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(_SESSIONS.update().values(**columns))

    await services.store.database.write(work)
