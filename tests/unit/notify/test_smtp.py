"""One message handed to a real mail server, willing or not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.notify.email import batch_email
from batchyard.notify.smtp import Mailer
from tests.services.smtp import MailServer, Security, running_mail_server
from tests.unit.notify.batches import ended_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MESSAGE = batch_email(
    ended_batch(), to="me@example.com", sender="by@example.com", delivery_id="mail_1"
)
LOGIN = ("batchyard", "pässword canary")


@pytest.fixture
def server() -> Iterator[MailServer]:
    with running_mail_server() as running:
        yield running


def mailer(server: MailServer, **values: Any) -> Mailer:
    its_own = {"host": server.host, "port": server.port, "ssl_context": server.client_context}
    return Mailer(**(its_own | values))


@pytest.mark.parametrize("security", ["starttls", "tls", "none"])
async def test_a_message_arrives_in_each_way_of_connecting(security: Security) -> None:
    with running_mail_server(security) as server:
        answer = await mailer(server, security=security).send(MESSAGE)

    assert (answer.status_code, answer.error) == (250, None)
    (mail,) = server.mails
    assert (mail.sender, mail.recipients) == ("by@example.com", ["me@example.com"])
    assert mail.is_encrypted == (security != "none")
    assert mail.message["Message-ID"] == "<mail_1@batchyard>"
    kinds = [each.get_content_type() for each in mail.message.iter_parts()]
    assert kinds == ["text/plain", "text/html"]


@pytest.mark.parametrize("security", ["starttls", "tls", "none"])
async def test_a_login_is_made_where_one_is_set(security: Security) -> None:
    with running_mail_server(security, login=LOGIN) as server:
        sending = mailer(server, security=security, username=LOGIN[0], password=LOGIN[1])
        answer = await sending.send(MESSAGE)

    assert answer.is_accepted
    assert server.mails[0].username == "batchyard"


async def test_a_wrong_password_is_an_error_that_may_pass() -> None:
    with running_mail_server(login=LOGIN) as server:
        answer = await mailer(server, username="batchyard", password="other").send(MESSAGE)

    assert answer.status_code == 535
    assert answer.error == "the mail server answered 535: it refuses the login"
    assert not answer.is_final
    assert server.mails == []


async def test_a_missing_login_is_an_error_that_may_pass() -> None:
    with running_mail_server(login=LOGIN) as server:
        answer = await mailer(server).send(MESSAGE)

    assert answer.status_code == 530
    assert not answer.is_final
    assert server.mails == []


async def test_a_login_that_is_not_offered_is_an_error(server: MailServer) -> None:
    answer = await mailer(server, username="batchyard", password="canary").send(MESSAGE)

    assert answer.error == "the mail server offers no supported kind of login"
    assert server.mails == []


async def test_without_starttls_nothing_is_sent_in_the_clear() -> None:
    with running_mail_server("none", login=LOGIN) as server:
        sending = mailer(server, username=LOGIN[0], password=LOGIN[1])
        answer = await sending.send(MESSAGE)

    assert answer.error == "the mail server offers no STARTTLS, so nothing was sent"
    assert server.mails == []


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_that_nobody_vouches_for_is_refused(security: Security) -> None:
    with running_mail_server(security) as server:
        answer = await mailer(server, security=security, ssl_context=None).send(MESSAGE)

    assert answer.error == (
        "the mail server's TLS certificate is not trusted, or it does not use TLS"
    )
    assert server.mails == []


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_for_another_name_is_refused(security: Security) -> None:
    with running_mail_server(security, names=("elsewhere.example",)) as server:
        answer = await mailer(server, security=security).send(MESSAGE)

    assert answer.error == (
        "the mail server's TLS certificate is not trusted, or it does not use TLS"
    )
    assert server.mails == []


async def test_a_server_that_speaks_no_tls_is_not_spoken_to(server: MailServer) -> None:
    answer = await mailer(server, security="tls").send(MESSAGE)

    assert answer.error == (
        "the mail server's TLS certificate is not trusted, or it does not use TLS"
    )


async def test_a_message_that_is_put_off_is_taken_later(server: MailServer) -> None:
    server.refusals += ["451 Come again, canary", "452 Full"]

    answers = [await mailer(server).send(MESSAGE) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [451, 452, 250]
    assert answers[0].error == "the mail server answered 451: it refuses the message"
    assert not any(answer.is_final for answer in answers)
    assert len(server.mails) == 1


async def test_a_message_that_is_refused_for_good_is_final(server: MailServer) -> None:
    server.refusals.append("554 Spam from me@example.com")

    answer = await mailer(server).send(MESSAGE)

    assert answer.status_code == 554
    assert answer.error == "the mail server answered 554: it refuses the message"
    assert answer.is_final


@pytest.mark.parametrize(("code", "is_final"), [(450, False), (550, True)])
async def test_a_recipient_is_refused_for_now_or_for_good(
    server: MailServer, code: int, *, is_final: bool
) -> None:
    server.recipient_refusals.append(f"{code} me@example.com")

    answer = await mailer(server).send(MESSAGE)

    assert answer.status_code == code
    assert answer.error == f"the mail server answered {code}: it refuses the recipient"
    assert answer.is_final == is_final


async def test_a_server_that_is_down_cannot_be_reached() -> None:
    with running_mail_server() as server:
        pass

    answer = await mailer(server).send(MESSAGE)

    assert answer.error == "the mail server cannot be reached: check its host and port"


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
async def test_a_host_that_cannot_exist_cannot_be_reached(host: str) -> None:
    answer = await Mailer(host=host).send(MESSAGE)

    assert answer.error == "the mail server cannot be reached: check its host and port"


@pytest.mark.alone
async def test_a_silent_server_has_a_limited_time() -> None:
    async with talking_server() as port:
        began = time.monotonic()
        answer = await Mailer(host="127.0.0.1", port=port, timeout_seconds=0.3).send(MESSAGE)

    assert answer.error == "the mail server did not answer within 0.3 seconds"
    assert time.monotonic() - began < 2


async def test_a_server_that_is_not_ready_says_so() -> None:
    async with talking_server(b"421 Closing, canary\r\n") as port:
        answer = await Mailer(host="127.0.0.1", port=port).send(MESSAGE)

    assert answer.status_code == 421
    assert answer.error == "the mail server answered 421: it is not ready"


async def test_what_does_not_speak_smtp_has_no_status() -> None:
    async with talking_server(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        answer = await Mailer(host="127.0.0.1", port=port, security="none").send(MESSAGE)
    assert answer.status_code is None
    assert answer.error == "the mail server's answer is not SMTP: check its port"


async def test_a_message_is_sent_even_if_the_server_does_not_say_goodbye() -> None:
    lines = [b"220 Hello\r\n", b"250 me\r\n", b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n"]
    async with talking_server(*lines, b"250 taken\r\n") as port:
        answer = await Mailer(host="127.0.0.1", port=port, security="none").send(MESSAGE)

    assert answer.is_accepted


async def test_a_connection_that_breaks_is_an_error() -> None:
    async with talking_server(b"220 Hello\r\n", b"") as port:
        answer = await Mailer(host="127.0.0.1", port=port).send(MESSAGE)

    assert answer.error == "the connection to the mail server broke"


def test_a_password_does_not_show() -> None:
    assert "canary" not in repr(Mailer(host="mail.example.com", password="canary"))


@contextlib.asynccontextmanager
async def talking_server(*lines: bytes) -> AsyncIterator[int]:
    """A server that says one line after each that it hears, whatever it is; its port.

    After the last it is silent; at an empty one it closes the connection.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for line in lines:
            if not line:
                break
            writer.write(line)
            # The message itself is many lines, up to its point.
            ends = b"\r\n.\r\n" if line.startswith(b"354") else b"\r\n"
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(ends)
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
