"""The key of a form: one that is sent twice, as by a double click, does its work once.

It is random, and made when a page is rendered. Only put it into a form that the page does not
renew by itself: such a form keeps its key for as long as a person looks at it, and whoever loads
the page again can do the work again.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.api.http.session import CSRF_FIELD
from batchyard.store import IdempotencyKey

if TYPE_CHECKING:
    from collections.abc import Mapping

FORM_KEY_FIELD: Final = "form_key"


def new_form_key() -> str:
    """Make a value for ``<input type="hidden" name="form_key" value="…">``."""
    return secrets.token_urlsafe(16)


def key_of(route: str, fields: Mapping[str, str]) -> IdempotencyKey | None:
    """The idempotency key of a form that was sent; None: it has none, as on a page that was
    loaded before forms had keys.

    The other fields are part of it: whoever goes back and chooses another window wants a second
    batch, and not a refusal.
    """
    if not fields.get(FORM_KEY_FIELD):
        return None
    said = sorted((name, value) for name, value in fields.items() if name != CSRF_FIELD)
    digest = hashlib.sha256(msgspec.json.encode(said)).hexdigest()
    return IdempotencyKey(route=route, key=digest, fingerprint=digest)
