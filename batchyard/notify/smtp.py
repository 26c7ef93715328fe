"""One message to the mail server. What it says is in ``email``, when to try again elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import aiosmtplib

from batchyard.notify.outcome import SendOutcome

if TYPE_CHECKING:
    from email.message import EmailMessage

_QUIT_SECONDS: Final = 1.0
_OK: Final = 250
_PERMANENT: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailer:
    """A mail server, and how it is talked to; each message has a connection of its own."""

    host: str
    port: int = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    """``starttls``: encrypt or give up, never go on in the clear; ``tls``: from the first byte
    on; ``none``: for a server on this machine."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl_context: ssl.SSLContext | None = None
    """How certificates are checked; None: as the system does."""
    timeout_seconds: float = 15.0
    """For the whole of it, from the connection to the answer."""

    async def send(self, message: EmailMessage) -> SendOutcome:
        """Send to the one address in ``To``, and say how it went.

        Never raises for what the network or the server does.
        """
        client = aiosmtplib.SMTP(
            hostname=self.host,
            port=self.port,
            use_tls=self.security == "tls",
            # Done by hand below, so that its absence has a message of its own.
            start_tls=False,
            tls_context=self.ssl_context,
            timeout=self.timeout_seconds,
        )
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await self._send(client, message)
            # It has been accepted or not, whatever becomes of the farewell.
            with contextlib.suppress(aiosmtplib.SMTPException, OSError):
                async with asyncio.timeout(_QUIT_SECONDS):
                    await client.quit()
        except TimeoutError:
            # aiosmtplib's own is one too.
            seconds = f"{self.timeout_seconds:g}"
            return SendOutcome(error=f"the mail server did not answer within {seconds} seconds")
        except (aiosmtplib.SMTPException, OSError, UnicodeError) as error:
            return _refusal(error)
        else:
            return answer
        finally:
            client.close()

    async def _send(self, client: aiosmtplib.SMTP, message: EmailMessage) -> SendOutcome:
        senders, recipients = message["From"].addresses, message["To"].addresses
        if len(senders) != 1 or len(recipients) != 1:
            raise ValueError("A message is from one address to one address.")
        await client.connect()
        await client.ehlo()
        if self.security == "starttls":
            if not client.supports_extension("starttls"):
                return SendOutcome(error="the mail server offers no STARTTLS, so nothing was sent")
            await client.starttls()
            # What was said in the clear counts no more.
            await client.ehlo()
        if self.username is not None:
            if not client.supported_auth_methods:
                return SendOutcome(error="the mail server offers no supported kind of login")
            await client.login(self.username.encode(), (self.password or "").encode())
        await client.send_message(
            message, sender=senders[0].addr_spec, recipients=[recipients[0].addr_spec]
        )
        return SendOutcome(status_code=_OK)


def _refusal(error: Exception) -> SendOutcome:
    """What an exception of aiosmtplib's means. The server's own text may hold the address."""
    match error:
        case aiosmtplib.SMTPResponseException(code=aiosmtplib.SMTPStatus.invalid_response):
            return SendOutcome(error="the mail server's answer is not SMTP: check its port")
        case aiosmtplib.SMTPRecipientsRefused(recipients=[refused, *_]):
            return _answered(refused.code, "refuses the recipient", is_final=_is_final(refused))
        case aiosmtplib.SMTPDataError(code=code):
            return _answered(code, "refuses the message", is_final=_is_final(error))
        # What follows is for the operator to mend, and then the message is taken.
        case aiosmtplib.SMTPAuthenticationError(code=code):
            return _answered(code, "refuses the login")
        case aiosmtplib.SMTPSenderRefused(code=code):
            return _answered(code, "refuses the sender")
        case aiosmtplib.SMTPResponseException(code=code):
            return _answered(code, "is not ready")
        case aiosmtplib.SMTPServerDisconnected():
            return SendOutcome(error="the connection to the mail server broke")
        case _ if _is_about_tls(error):
            return SendOutcome(
                error="the mail server's TLS certificate is not trusted, or it does not use TLS"
            )
        case aiosmtplib.SMTPConnectError() | OSError() | UnicodeError():
            return SendOutcome(error="the mail server cannot be reached: check its host and port")
        case _:
            return SendOutcome(error="the mail server did not do as asked")


def _answered(code: int, what: str, *, is_final: bool = False) -> SendOutcome:
    return SendOutcome(
        status_code=code,
        error=f"the mail server answered {code}: it {what}",
        is_final=is_final,
    )


def _is_final(refusal: aiosmtplib.SMTPResponseException) -> bool:
    return refusal.code >= _PERMANENT


def _is_about_tls(error: Exception) -> bool:
    """Whether it is a TLS error, or aiosmtplib's wrapping of one."""
    return isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError)
