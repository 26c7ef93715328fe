"""One address and nothing else, judged by what a real mail server gets."""

from __future__ import annotations

import pytest

from batchyard.notify.email import batch_email, check_address
from batchyard.notify.smtp import Mailer
from tests.services.smtp import running_mail_server
from tests.unit.notify.batches import ended_batch

ONE_ADDRESS = [
    "me@example.com",
    "ME@EXAMPLE.COM",
    "a@b",
    "root@localhost",
    "first.last@mail.example.co.uk",
    "me+batches@example.com",
    "o'brien@example.com",
    "!#$%&'*+/?=^_`{|}~-@example.com",
    "one%two@example.com",
    "one!two@example.com",
    "-me@example.com",
    "1@1.example",
    "me@xn--bcher-kva.example",
    "a" * 64 + "@example.com",
    "me@" + "a" * 63 + ".example",
    "m" * 64 + "@" + ".".join(["d" * 62] * 3),
]

NO_ADDRESS = [
    # nothing, or not one
    "",
    " ",
    "me",
    "@",
    "@example.com",
    "me@",
    "me@@example.com",
    "me@you@example.com",
    # more than one
    "me@example.com,you@example.com",
    "me@example.com, you@example.com",
    "me@example.com;you@example.com",
    "me@example.com you@example.com",
    "me@example.com\tyou@example.com",
    "me@example.com>,<you@example.com",
    "team:me@example.com,you@example.com;",
    "undisclosed-recipients:;",
    # line ends and other control characters
    "me@example.com\r\nBcc: you@example.com",
    "me@example.com\nBcc: you@example.com",
    "me@example.com\rBcc: you@example.com",
    "me@example.com\r\n",
    "me@example.com\n",
    "\nme@example.com",
    "me\r\n@example.com",
    "me@example.com\r\n\r\nA body of its own",
    "me@example.com\r\n.\r\nMAIL FROM:<you@example.com>",
    "me@example.com\0",
    "me\0@example.com",
    "me@example.com\x0bBcc: you@example.com",
    "me@example.com\x0cBcc: you@example.com",
    "me@example.com\x85Bcc: you@example.com",
    "me@example.com\u2028Bcc: you@example.com",
    "me@example.com\u2029Bcc: you@example.com",
    "me@example.com%0d%0aBcc: you@example.com",
    "me@example.com%0aBcc:you@example.com",
    "=?utf-8?q?me?=@example.com",
    "=?utf-8?q?me=2Cyou?=@example.com",
    "=?utf-8?b?bWUseW91?=@example.com",
    "=?utf-8?q?me=0d=0aBcc:_you?=@example.com",
    "me@example.com\x7f",
    # names, comments, quotes, routes, literals
    "Me <me@example.com>",
    "<me@example.com>",
    "me@example.com>",
    '"me" <me@example.com>',
    "me(you@example.com)@example.com",
    "me@example.com (you@example.com)",
    '"me"@example.com',
    '"me, you"@example.com',
    '"me\\"@you"@example.com',
    "me\\@example.com",
    "<@relay.example:me@example.com>",
    "@relay.example:me@example.com",
    "mailto:me@example.com",
    "me@[127.0.0.1]",
    "me@[IPv6:::1]",
    "me@example.com SIZE=1000000",
    "me@example.com> NOTIFY=NEVER",
    # dots and hyphens where none may be
    ".me@example.com",
    "me.@example.com",
    "m..e@example.com",
    "me@.example.com",
    "me@example..com",
    "me@example.com.",
    "me@-example.com",
    "me@example-.com",
    "me@exa_mple.com",
    # beyond ASCII
    "mé@example.com",
    "me@bücher.example",
    "ｍｅ＠example.com",
    "me@example\u3002com",
    "m\u0435@example.com",
    "me\u202e@example.com",
    "\ufeffme@example.com",
    "me\u200b@example.com",
    "me@example.com\ud800",
    # too long
    "a" * 65 + "@example.com",
    "me@" + "a" * 64 + ".example",
    "me@" + ".".join(["a" * 60] * 5),
    "a" * 100_000 + "@example.com",
    "me@" + "a." * 50_000 + "com",
]


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_what_is_not_one_address_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="This is not one e-mail address") as refusal:
        check_address(text)
    assert str(refusal.value) == "This is not one e-mail address, like name@example.com."
    with pytest.raises(ValueError, match="This is not one e-mail address"):
        batch_email(ended_batch(), to=text, sender="batchyard@example.com", delivery_id="mail_1")


@pytest.mark.parametrize("address", ONE_ADDRESS)
def test_one_address_is_itself(address: str) -> None:
    assert check_address(address) == address


async def test_a_mail_server_gets_exactly_one_recipient_and_no_header_more() -> None:
    sent = []
    with running_mail_server() as server:
        mailer = Mailer(host=server.host, port=server.port, ssl_context=server.client_context)
        for text in [*NO_ADDRESS, *ONE_ADDRESS]:
            try:
                message = batch_email(
                    ended_batch(), to=text, sender="batchyard@example.com", delivery_id="mail_1"
                )
            except ValueError:
                continue
            answer = await mailer.send(message)
            assert answer.is_accepted, (text, answer)
            sent.append(text)

    assert sent == ONE_ADDRESS
    for address, mail in zip(sent, server.mails, strict=True):
        assert mail.sender == "batchyard@example.com"
        assert mail.recipients == [address]
        assert mail.message.keys() == [
            "From",
            "To",
            "Subject",
            "Date",
            "Message-ID",
            "Auto-Submitted",
            "MIME-Version",
            "Content-Type",
        ]
        # As it stands there, and not as it might be decoded.
        head = mail.content.partition(b"\r\n\r\n")[0]
        assert b"you@" not in head
        assert [each.addr_spec for each in mail.message["To"].addresses] == [address]
