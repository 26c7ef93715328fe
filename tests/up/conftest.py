"""One ``batchyard up`` with real vLLM for all that is here, so that one engine is started.

Its clients' URLs may lead to 127.0.0.1 by https, as docs/how-to/receive-webhooks.md says, and its
mail server is a test's. ``test_stop`` ends it.
"""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

import openai
import pytest
import trustme

from tests.contract.engine.conftest import require_vllm
from tests.pages import block, replaced
from tests.services.receiver import Receiver, running_receiver
from tests.services.smtp import MailServer, running_mail_server
from tests.services.up import Yard, running_yard
from tests.up.programs import exported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMTP_PASSWORD = "canary-smtp-5cf0b6a1e9"
INPUT = block("docs/how-to/use-the-api.md", "input")
MAIL_SETTINGS = block("docs/how-to/receive-webhooks.md", "smtp")
INTERNAL_SETTINGS = block("docs/how-to/receive-webhooks.md", "internal")


@pytest.fixture(scope="package")
def authority() -> trustme.CA:
    """Whose certificates the yard trusts."""
    return trustme.CA()


@pytest.fixture(scope="package")
def mail_server(authority: trustme.CA) -> Iterator[MailServer]:
    login = ("batchyard", SMTP_PASSWORD)
    with running_mail_server(login=login, authority=authority) as running:
        yield running


@pytest.fixture(scope="package")
def yard(
    tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA, mail_server: MailServer
) -> Iterator[Yard]:
    require_vllm()
    folder = tmp_path_factory.mktemp("yard")
    authority.cert_pem.write_to_path(str(folder / "authorities.pem"))
    settings = exported(
        replaced(
            MAIL_SETTINGS,
            {
                "mail.example.com": mail_server.host,
                "587": str(mail_server.port),
                "hunter2": SMTP_PASSWORD,
            },
        )
    )
    settings |= exported(
        replaced(
            INTERNAL_SETTINGS,
            {
                "10.20.0.0/16": "127.0.0.0/8",
                "/etc/batchyard/authorities.pem": str(folder / "authorities.pem"),
            },
        )
    )
    with running_yard(folder, VLLM_CPU_KVCACHE_SPACE="1", **settings) as running:
        yield running


@pytest.fixture
def client(yard: Yard) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as opened:
        yield opened


@pytest.fixture
def receiver(authority: trustme.CA) -> Iterator[Receiver]:
    """Takes webhooks, and is trusted."""
    with running_receiver(authority=authority) as running:
        yield running


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    """For a server on 127.0.0.1 that is trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the input file of docs/how-to/use-the-api.md."""
    subprocess.run(["bash", "-e"], input=INPUT, cwd=tmp_path, text=True, check=True)
    return tmp_path
