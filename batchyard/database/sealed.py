"""Columns that are encrypted at rest: presigned URLs and secrets. Keys live in memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator

from batchyard.errors import SettingsError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

# A column type belongs to the table, the keys to one open database; its dialect object is
# what SQLAlchemy shows the type of that database.
_KEYRINGS: WeakKeyDictionary[Dialect, MultiFernet] = WeakKeyDictionary()


def new_sealing_key() -> str:
    """A fresh key: 44 characters of URL-safe base64."""
    return Fernet.generate_key().decode()


def give_keys(dialect: Dialect, keys: Sequence[str]) -> None:
    """Seal with the first of ``keys`` and open with any, for the database behind ``dialect``.

    Raises :class:`~batchyard.errors.SettingsError` for a key of the wrong form.
    """
    if not keys:
        return
    try:
        _KEYRINGS[dialect] = MultiFernet([Fernet(key) for key in keys])
    except ValueError:
        # The cause is dropped: a message about a key may quote it.
        raise SettingsError(
            "A sealing key is not 44 characters of URL-safe base64; make one with new_sealing_key."
        ) from None


class Sealed(TypeDecorator[str]):
    """Text that is stored as a Fernet token. Equal values differ at rest, so never compare."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The text, encrypted with the newest key."""
        return None if value is None else _keyring(dialect).encrypt(value.encode()).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The text, decrypted.

        Raises :class:`~batchyard.errors.StoreError` if no key opens it.
        """
        if value is None:
            return None
        try:
            return _keyring(dialect).decrypt(value).decode()
        except InvalidToken:
            raise StoreError(
                "None of the sealing keys can decrypt a stored location or secret; "
                "list the older key after the current one."
            ) from None


class OpenedOrNone(Sealed):
    """The same as :class:`Sealed`, where a value that no key opens must not stop the others: it is
    None."""

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The text, decrypted; None if no key opens it."""
        try:
            return super().process_result_value(value, dialect)
        except (StoreError, SettingsError):
            return None


def _keyring(dialect: Dialect) -> MultiFernet:
    if dialect not in _KEYRINGS:
        raise SettingsError(
            "Locations and secrets are kept sealed and no sealing key is set; set one."
        )
    return _KEYRINGS[dialect]
