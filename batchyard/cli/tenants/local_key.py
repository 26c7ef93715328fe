"""The key of an installation on one machine: made at its first start, kept in its home.

With a local database, the permissions of the file are enough to keep others out. An operator who
uses a database server, or creates or revokes keys, manages the keys from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.errors import KeyExpired, SettingsError
from batchyard.processes.threads import in_thread
from batchyard.storage.file import keep_secret
from batchyard.store.tenant.sessions import CODE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.settings import Settings

FILE_NAME = "api.key"
_TENANT = "default"
"""The tenant of ``batchyard submit``, so that the API shows its batches."""
_NAME = "local"


async def local_key_file(services: Services) -> Path | None:
    """The file with the local key, which is created if there is no key yet.

    None if an operator manages the keys.
    """
    path = key_path(services.settings)
    keys = services.store.api_keys
    if path.exists():
        secret = await in_thread(_read, path)
        try:
            return path if await keys.holder_of(secret) else None
        except KeyExpired:
            return None
    if not _is_embedded(services.settings):
        return None
    # A key without its file was left by a process that was killed between the two.
    if any(key.name != _NAME or key.revoked_at for key in await keys.list()):
        return None
    made = await keys.create(_TENANT, _NAME)
    if not await in_thread(_keep, path, made.secret):
        await keys.revoke(made.record.id)  # another process was faster
    return path


async def login_link(services: Services, path: Path, address: str) -> str:
    """A link to the page at ``address``, which logs a browser in once, as an operator.

    A user who can read the key can read the database as well. ``path``: the file of
    :func:`local_key_file`. If its key is no longer valid, the link only leads to the form.
    """
    holder = await services.store.api_keys.holder_of(await in_thread(_read, path))
    if holder is None:
        return f"{address}/login"
    code = await services.store.sessions.make_code(holder.key_id)
    return f"{address}/login?code={code} (logs in once, within {CODE_SECONDS // 60} minutes)"


def key_path(settings: Settings) -> Path:
    """Where the local key is, if there is one."""
    return settings.home_folder / FILE_NAME


def _is_embedded(settings: Settings) -> bool:
    return settings.database.startswith("sqlite")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The API key in {path} cannot be read: {error}.") from error


def _keep(path: Path, secret: str) -> bool:
    """Write the file; False where there is one already."""
    try:
        return keep_secret(path, secret)
    except OSError as error:
        raise SettingsError(f"The API key cannot be kept in {path}: {error.strerror}.") from error
