"""One container of Azure or one bucket of Google, as :class:`~batchyard.storage.bucket.S3Bucket`.

Both by obstore, whose library is loaded when the first of them is used.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchyard.processes.threads import in_thread
from batchyard.storage.backoff import Backoff
from batchyard.storage.base import ListedObject
from batchyard.storage.blocks import BLOCK_BYTES, MIB, Tally, blocks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator
    from pathlib import Path

    from batchyard.storage.base import StoredObject

T = TypeVar("T")

_PART_BYTES: Final = 16 * MIB
"""Azure takes 50,000 parts of an object, Google 10,000: 156 GiB there."""
_PARTS_AT_ONCE: Final = 2
_RANGE_BYTES: Final = 8 * MIB
"""One request. Its answer is taken at once, so that who reads slowly holds no connection."""
_REQUEST_SECONDS: Final = 120
_RETRY_SECONDS: Final = 600
_CONNECT_SECONDS: Final = 10
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_NO_BUCKET: Final = {"ContainerNotFound", "NoSuchBucket"}
_DENIED: Final = {"PermissionDeniedError", "UnauthenticatedError"}
_PASSING: Final = {408, 409, 425, 429}


@dataclass(frozen=True, slots=True)
class AzureCredentials:
    """What is empty, obstore takes from the environment: ``AZURE_STORAGE_ACCOUNT_NAME`` ….

    Where there is nothing either, it asks the managed identity of the machine.
    """

    account_name: str = ""
    account_key: str = field(default="", repr=False)
    sas_token: str = field(default="", repr=False)
    tenant_id: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    endpoint_url: str = ""
    """The address of the account where it is not Azure's own."""
    ca_file: Path | None = None
    """Further certificate authorities to trust, in PEM."""

    def store(self, container: str, **options: Any) -> Any:
        """obstore's object for the container."""
        from obstore.store import AzureStore  # noqa: PLC0415 - most processes use none

        given = {
            "account_name": self.account_name,
            "account_key": self.account_key,
            "sas_key": self.sas_token,
            "tenant_id": self.tenant_id,
            "client_id": self.client_id,
            "client_secret": self.client_secret,
            "endpoint": self.endpoint_url,
        }
        config: Any = {name: value for name, value in given.items() if value}
        return AzureStore(container, config=config, **options)


@dataclass(frozen=True, slots=True)
class GoogleCredentials:
    """What is empty, obstore takes from the environment: ``GOOGLE_APPLICATION_CREDENTIALS`` ….

    Where there is nothing either, it asks the metadata server of the machine.
    """

    service_account_key: str = field(default="", repr=False)
    """The JSON of a service account's key."""
    endpoint_url: str = ""
    """The address of the service where it is not Google's own."""
    ca_file: Path | None = None

    def store(self, bucket: str, **options: Any) -> Any:
        """obstore's object for the bucket."""
        from obstore.store import GCSStore  # noqa: PLC0415 - most processes use none

        given = {"service_account_key": self.service_account_key, "base_url": self.endpoint_url}
        config: Any = {name: value for name, value in given.items() if value}
        return GCSStore(bucket, config=config, **options)


class CloudBucket:
    """Reads, writes, lists and deletes. Every call is retried while the service is unavailable.

    ``scheme`` is that of the addresses that messages show.
    """

    def __init__(
        self,
        scheme: Literal["az", "gs"],
        name: str,
        credentials: AzureCredentials | GoogleCredentials,
        *,
        part_bytes: int = _PART_BYTES,
        backoff: Backoff | None = None,
    ) -> None:
        self._address = f"{scheme}://{name}"
        self._part_bytes = part_bytes
        self._backoff = backoff or Backoff()
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            # Where the endpoint that the operator has given is one. There is no other without TLS.
            "allow_http": True,
        }
        if credentials.ca_file is not None:
            client["root_certificate"] = credentials.ca_file.read_text()
        with self._as_ours(""):
            # Backoff retries, and says so in one place. Parts and pages are asked for by obstore.
            retry: Any = {"max_retries": 0}
            self._store = credentials.store(name, client_options=client, retry_config=retry)
            retry = {
                "max_retries": self._backoff.attempts - 1,
                "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(seconds=self._backoff.first_seconds),
                    "max_backoff": timedelta(seconds=self._backoff.longest_seconds),
                },
            }
            self._patient = credentials.store(name, client_options=client, retry_config=retry)

    def shown(self, key: str) -> str:
        """The object's address, for messages."""
        return f"{self._address}/{key}"

    async def write(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Store ``parts`` under ``key``: one request when they are few, else in several parts.

        After a failure or a cancellation what was sent stays invisible, until the service removes
        it: Azure after a week, Google by a lifecycle rule of the bucket.
        """
        import obstore  # noqa: PLC0415 - most processes use none

        self._check(key)
        tally = Tally()
        async with contextlib.aclosing(blocks(parts, self._part_bytes)) as stream:
            block = await anext(stream, b"")
            await in_thread(tally.add, block)
            if len(block) < self._part_bytes:
                await self._call(
                    key, lambda: obstore.put_async(self._store, key, block, use_multipart=False)
                )
                return tally.stored(key)
            with self._as_ours(key):
                writer = obstore.open_writer_async(
                    self._patient,
                    key,
                    buffer_size=self._part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
                await writer.write(block)
            async for block in stream:
                await in_thread(tally.add, block)
                with self._as_ours(key):
                    await writer.write(block)
            with self._as_ours(key):
                await writer.close()
        return tally.stored(key)

    async def read(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Stream bytes ``start`` to ``stop``, one range after the other, all of one version.

        Raises :class:`~batchyard.errors.ObjectChanged` when the object was replaced meanwhile.
        """
        import obstore  # noqa: PLC0415 - most processes use none

        meta = await self._meta(key)
        stop = meta["size"] if stop is None else min(stop, meta["size"])
        while start < stop:
            options: Any = {"range": (start, min(start + _RANGE_BYTES, stop))}
            if meta["e_tag"] is not None:
                options["if_match"] = meta["e_tag"]

            async def range_of(options: Any = options) -> memoryview:
                found = await obstore.get_async(self._store, key, options=options)
                return memoryview(await found.bytes_async())

            try:
                content = await self._call(key, range_of)
            except ObjectNotFound as error:
                raise ObjectChanged(f"{self.shown(key)} was removed while it was read") from error
            if not content:
                raise StorageUnavailable(f"{self.shown(key)}: the store sent nothing")
            start += len(content)
            for at in range(0, len(content), BLOCK_BYTES):
                yield bytes(content[at : at + BLOCK_BYTES])

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        return int((await self._meta(key))["size"])

    async def delete(self, key: str) -> None:
        """Remove the object, if it is there."""
        import obstore  # noqa: PLC0415 - most processes use none

        with contextlib.suppress(ObjectNotFound):
            await self._call(key, lambda: obstore.delete_async(self._store, key))

    async def list(self, prefix: str) -> AsyncGenerator[str]:
        """Every key that starts with ``prefix``, in byte order, fetched page by page."""
        async with contextlib.aclosing(self.listing(prefix)) as entries:
            async for entry in entries:
                yield entry.key

    async def listing(self, prefix: str) -> AsyncGenerator[ListedObject]:
        """List what :meth:`list` does, with sizes, ages and ETags. Ages are by our own clock."""
        import obstore  # noqa: PLC0415 - most processes use none

        # For obstore a prefix is a folder.
        folder = prefix.rpartition("/")[0] or None
        with self._as_ours(prefix):
            async for page in obstore.list(self._patient, folder):
                now = datetime.now(UTC)
                for meta in page:
                    if not meta["path"].startswith(prefix):
                        if meta["path"] > prefix:
                            return
                        continue
                    age_seconds = max(0.0, (now - meta["last_modified"]).total_seconds())
                    yield ListedObject(meta["path"], meta["size"], age_seconds, meta["e_tag"] or "")

    async def abort_uploads(self, _prefix: str, _older_than_seconds: float) -> int:
        """Always 0: what was not completed has no name that obstore could list. See `write`."""
        return 0

    async def close(self) -> None:
        """Do nothing: obstore closes its connections when they are idle."""

    async def _meta(self, key: str) -> Any:
        import obstore  # noqa: PLC0415 - most processes use none

        return await self._call(key, lambda: obstore.head_async(self._store, key))

    async def _call(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """One request, tried again while the service is unavailable."""

        async def attempt() -> T:
            with self._as_ours(key):
                return await call()

        self._check(key)
        return await self._backoff.retry(attempt)

    def _check(self, key: str) -> None:
        if key != key.strip("/"):
            # obstore leaves these slashes out, and so means another object.
            raise LocationRefused(
                f"{self.shown(key)}: a key may not begin or end with a slash in this kind of store"
            )

    @contextlib.contextmanager
    def _as_ours(self, key: str) -> Iterator[None]:
        """Turn what obstore raises into the error of ours that it stands for.

        Its own messages have whole URLs and headers, and are not shown.
        """
        from obstore import exceptions as raised  # noqa: PLC0415 - most processes use none

        name = self.shown(key)
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET & set(_CODE.findall(str(error))):
                raise ObjectNotFound(
                    f"{name}: the bucket does not exist, create it first"
                ) from None
            raise ObjectNotFound(f"{name} does not exist") from None
        except (raised.PreconditionError, raised.NotModifiedError):
            raise ObjectChanged(f"{name} was replaced while it was read") from None
        except (raised.InvalidPathError, ValueError):
            raise LocationRefused(f"{name} is not a valid key: check the name") from None
        except (raised.BaseError, OSError) as error:
            # Its writer raises OSError for all of them.
            raise _refusal(error, name) from None


def _said(error: Exception) -> str:
    """The service's status and code, and nothing else of its answer."""
    text = str(error)
    found = [*_STATUS.findall(text)[:1], *_CODE.findall(text)[:1]]
    return f"the store answered {' '.join(found)}" if found else type(error).__name__


def _refusal(error: Exception, name: str) -> StorageError:
    text, said = str(error), _said(error)
    if "token request" in text or "Account must be specified" in text:
        return AccessDenied(
            f"no credentials for {name}: give them in a block, or in the environment"
        )
    statuses = _STATUS.findall(text)
    status = int(statuses[0]) if statuses else 0
    if _NO_BUCKET & set(_CODE.findall(text)):
        return ObjectNotFound(f"{name}: the bucket does not exist, create it first")
    if status in {401, 403} or type(error).__name__ in _DENIED:
        return AccessDenied(
            f"not allowed to use {name} ({said}): check the credentials and their role"
        )
    if status == 507:
        return StorageFull(f"no room to write {name} ({said}): free some space and try again")
    if status == 413:
        return ObjectTooLarge(f"{name} is too large for this store ({said})")
    if status == 0 or status in _PASSING or status >= 500:
        return StorageUnavailable(f"{name}: the store failed ({said})")
    return AccessDenied(
        f"the store takes no such request for {name} ({said}): check credentials and endpoint"
    )


def azure_container(
    name: str, credentials: AzureCredentials, backoff: Backoff | None = None
) -> CloudBucket:
    """The container of this name."""
    return CloudBucket("az", name, credentials, backoff=backoff)


def google_bucket(
    name: str, credentials: GoogleCredentials, backoff: Backoff | None = None
) -> CloudBucket:
    """The bucket of this name."""
    return CloudBucket("gs", name, credentials, backoff=backoff)
