"""How one attempt went, of a webhook or an e-mail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """What the other side said. No word of it is here: it may repeat what it was sent."""

    status_code: int | None = None
    """HTTP's or SMTP's; None: there was no answer."""
    error: str | None = None
    """In our words, without the URL or the address; None: it was accepted."""
    retry_after_seconds: float | None = None
    """How long the receiver asks us to wait before the next attempt: at most a day."""
    is_final: bool = False
    """Whether it will never be accepted: the receiver is gone (410), or a mail server refuses the
    recipient or the message for good."""

    @property
    def is_accepted(self) -> bool:
        """Whether the receiver accepted the notification."""
        return self.error is None
