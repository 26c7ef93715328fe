"""``batchyard run`` with servers that are not where, or not what, its ``--engine-url`` says."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import chat_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cli.conftest import Ended, Terminal

    Run = Callable[..., Ended]

CHAT = {"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1}}


@contextlib.contextmanager
def server(pages: dict[str, Any], *, redirects: int = 1000) -> Iterator[str]:
    """Answers ``"GET /path"`` and ``"POST /path"`` with JSON, HTML (text) or a redirect (bytes).

    After so many ``redirects`` no further one is answered.
    """
    redirected = itertools.count(1)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            page = pages.get(f"{self.command} {self.path}")
            if isinstance(page, bytes):
                if next(redirected) > redirects:
                    is_over.wait()
                self.send_response(308)
                self.send_header("Location", page.decode())
            else:
                self.send_response(404 if page is None else 200)
            is_json = isinstance(page, dict)
            body = json.dumps(page) if is_json else page if isinstance(page, str) else ""
            self.send_header("Content-Type", "application/json" if is_json else "text/html")
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.end_headers()
                self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        is_over.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def run(here: Run, url: str, *more: str) -> Ended:
    words = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", url, "--exclusive")
    return here(*words, *more)


@pytest.mark.parametrize("path", ["/api/v3", "/api/v3/"])
def test_a_server_whose_base_path_is_not_v1_answers(
    terminal: Terminal, here: Run, path: str
) -> None:
    pages = {"GET /api/v3/models": {"data": []}, "POST /api/v3/chat/completions": CHAT}
    with server(pages) as url:
        ended = run(here, url + path)
    assert ended.status == 0, ended.stderr
    assert len(terminal.read("out.jsonl")) == 3


def test_the_url_of_an_endpoint_is_refused_before_anything_starts(here: Run) -> None:
    ended = run(here, "http://127.0.0.1:1/v1/chat/completions")
    assert ended.status == 1
    assert "ends in an endpoint: use http://127.0.0.1:1/v1," in " ".join(ended.stderr.split())
    assert "batch_" not in ended.stderr


def test_a_server_that_only_redirects_is_an_error_that_names_the_right_url(here: Run) -> None:
    with server({"GET /v1/models": b"https://llm.example/v1/models"}) as url:
        ended = run(here, f"{url}/v1")
    assert ended.status == 1
    assert "use https://llm.example/v1" in " ".join(ended.stderr.split())


def test_a_batch_that_is_redirected_stops_and_says_so(terminal: Terminal, here: Run) -> None:
    """The list of models is there, so that the start cannot know."""
    lines = [json.dumps(chat_line(f"id-{number}")) for number in range(3000)]
    (terminal.folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    there = b"https://llm.example/v1/chat/completions?key=secret"
    pages = {"GET /v1/models": {"data": []}, "POST /v1/chat/completions": there}
    # Otherwise a busy machine may have answered all of them before the batch is stopped.
    with server(pages, redirects=200) as url:
        ended = run(here, f"{url}/v1")
    said = " ".join(ended.stderr.split())
    assert ended.status == 1
    assert "All of the first 100 answers of the engine were not found or redirects" in said
    failures = terminal.read("out.errors.jsonl")
    assert len(failures) == 3000
    [first] = [line for line in failures if line["response"]][:1]
    assert first["response"]["status_code"] == 308
    message = first["response"]["body"]["error"]["message"]
    assert "redirects to https://llm.example/v1/chat/completions." in message
    assert [line["error"]["code"] for line in failures if line["error"]][-1] == "batch_failed"


def test_a_page_in_place_of_an_answer_is_shown(terminal: Terminal, here: Run) -> None:
    page = "<html><title>Sign in</title></html>"
    with server({"GET /v1/models": {"data": []}, "POST /v1/chat/completions": page}) as url:
        run(here, f"{url}/v1")
    failures = terminal.read("out.errors.jsonl")
    message = failures[0]["response"]["body"]["error"]["message"]
    assert message.endswith(f"HTTP 200, text/html. Its body begins: {page}")


def test_lines_may_name_the_adapters_of_a_server(terminal: Terminal, here: Run) -> None:
    pages = {"GET /v1/models": {"data": []}, "POST /v1/chat/completions": CHAT}
    models = ["m", "tone", "other"]
    lines = [chat_line(f"id-{name}", model=name) for name in models]
    (terminal.folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with server(pages) as url:
        refused = run(here, f"{url}/v1", "--model", "m", "--engine-adapter", "tone")
        adapters = ("--engine-adapter", "tone", "--engine-adapter", "other")
        ended = run(here, f"{url}/v1", "--model", "m", *adapters)
    assert refused.status == 1
    assert ended.status == 0, ended.stderr
    assert len(terminal.read("out.jsonl")) == 3
