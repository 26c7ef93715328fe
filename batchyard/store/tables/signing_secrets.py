"""What webhooks are signed with: a secret, and for a day the one before it. No table here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import case, null, type_coerce

from batchyard.database.clock import clock_seconds
from batchyard.database.sealed import OpenedOrNone
from batchyard.intervals import DAY_SECONDS

if TYPE_CHECKING:
    from sqlalchemy import Column, ColumnElement, Row

OVERLAP_SECONDS: Final = DAY_SECONDS


class SecretColumns:
    """The three columns of a table that has signing secrets."""

    def __init__(self, secret: Column[Any], old: Column[Any], old_expires_at: Column[Any]) -> None:
        self._secret = secret
        self._old = old
        self._old_expires_at = old_expires_at

    def selected(self) -> list[ColumnElement[Any]]:
        """What :func:`secrets_in` reads; a secret that no key opens is not there."""
        counts = self._old_expires_at > clock_seconds()
        return [
            type_coerce(self._secret, OpenedOrNone).label("secret"),
            case((counts, type_coerce(self._old, OpenedOrNone)), else_=null()).label("old_secret"),
        ]

    def replaced_by(self, secret: str, *, keep_old: bool) -> dict[str, Any]:
        """An update to ``secret``; with ``keep_old`` the one before counts for another day."""
        # From column to column it stays as it is sealed, whether a key opens it or not.
        return {
            self._secret.name: secret,
            self._old.name: self._secret if keep_old else None,
            self._old_expires_at.name: clock_seconds() + OVERLAP_SECONDS if keep_old else None,
        }


def secrets_in(row: Row[Any]) -> tuple[str, ...]:
    """The secrets that are valid now, the newest first."""
    return tuple(secret for secret in (row.secret, row.old_secret) if secret is not None)
