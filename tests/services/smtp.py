"""A real mail server that keeps what it is given, and refuses as a test tells it to.

::

    with running_mail_server() as server:          # STARTTLS, which it insists on
        server.refusals.append("451 Come again")   # for the next message
        ...  # have something sent to localhost, server.port
        assert server.mails[0].recipients == ["me@example.com"]

It runs in a thread of its own. Clients trust it by ``server.client_context``, other processes by
``BATCHYARD_CA_FILE=server.ca_file`` in their environment.
"""

from __future__ import annotations

import contextlib
import email
import email.policy
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import EmailMessage

Security = Literal["starttls", "tls", "none"]


@dataclass(frozen=True, slots=True)
class Mail:
    """A message as it arrived: its envelope, and the bytes after ``DATA``."""

    sender: str
    recipients: list[str]
    content: bytes
    is_encrypted: bool
    username: str | None

    @property
    def message(self) -> EmailMessage:
        return email.message_from_bytes(self.content, policy=email.policy.default)


@dataclass(slots=True)
class MailServer:
    """``refusals`` are used up one per message, at the step that they name; then all is taken."""

    ca_file: Path
    """The certificate to trust, in PEM."""
    client_context: ssl.SSLContext
    """Trusts this server and no other. Its certificate is for ``localhost`` and ``127.0.0.1``."""
    login: tuple[str, str] | None
    host: str = "localhost"
    port: int = 0
    mails: list[Mail] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Like ``451 Come again``: the answer to the next message's content."""
    recipient_refusals: list[str] = field(default_factory=list)
    """Like ``550 No such user``: the answer to the next message's recipient."""

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _: SMTP, __: Session, envelope: Envelope, address: str, ___: list[str]
    ) -> str:
        if self.recipient_refusals:
            return self.recipient_refusals.pop(0)
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope
    ) -> str:
        if self.refusals:
            return self.refusals.pop(0)
        assert isinstance(envelope.content, bytes)
        login = session.auth_data
        mail = Mail(
            sender=envelope.mail_from or "",
            recipients=list(envelope.rcpt_tos),
            content=envelope.content,
            is_encrypted=session.ssl is not None or _is_tls(server),
            username=login.login.decode() if isinstance(login, LoginPassword) else None,
        )
        self.mails.append(mail)
        return "250 OK"

    def authenticate(self, _: SMTP, __: Session, ___: Envelope, ____: str, data: Any) -> AuthResult:
        """Whether this is the login; aiosmtpd's authenticator."""
        is_right = isinstance(data, LoginPassword) and self.login is not None
        is_right = is_right and (data.login.decode(), data.password.decode()) == self.login
        return AuthResult(success=is_right, handled=False, auth_data=data)


@contextlib.contextmanager
def running_mail_server(
    security: Security = "starttls",
    *,
    port: int = 0,
    login: tuple[str, str] | None = None,
    authority: trustme.CA | None = None,
    names: tuple[str, ...] = ("localhost", "127.0.0.1"),
) -> Iterator[MailServer]:
    """Listen on a port of 127.0.0.1, a free one by default, for the time of the block.

    ``login``: the user and password without which nothing is taken. ``authority``: whose
    certificate the server shows; ``names``: what it is for.
    """
    authority = authority or trustme.CA()
    with tempfile.TemporaryDirectory(prefix="smtp-") as folder:
        ca_file = Path(folder) / "ca.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*names).configure_cert(context)
        trusting = ssl.create_default_context(cafile=str(ca_file))
        server = MailServer(ca_file, trusting, login)
        controller = _FreePortController(
            server,
            hostname="127.0.0.1",
            port=port,
            ssl_context=context if security == "tls" else None,
            tls_context=context if security == "starttls" else None,
            require_starttls=security == "starttls",
            authenticator=server.authenticate if login else None,
            auth_required=login is not None,
            # aiosmtpd offers them even where it has nobody to ask.
            auth_exclude_mechanism=() if login else ("LOGIN", "PLAIN"),
            auth_require_tls=security == "starttls",
        )
        controller.start()
        try:
            server.port = controller.port
            yield server
        finally:
            controller.stop()


class _FreePortController(Controller):
    """Knows the port that it was given, where aiosmtpd would connect to port 0 to see it run."""

    def _trigger_server(self) -> None:
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


def _is_tls(server: SMTP) -> bool:
    transport = server.transport
    return transport is not None and transport.get_extra_info("ssl_object") is not None
