"""How huggingface_hub asks a hub: with time limits, and with errors that say what was answered.

Left to itself it waits without a limit for an answer, sleeps in its thread for as long as a 429
asks it to, and logs whole URLs, signatures included. It lets programs name the class of its HTTP
client, which is the one here, and this raises before it does any of that.
"""

from __future__ import annotations

import logging
import re
import ssl
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CONNECT_SECONDS: Final = 10
_READ_SECONDS: Final = 60
"""For the next bytes. A commit is answered when it is made."""
_PASSING: Final = {408, 409, 412, 425, 429}
"""412: another commit was made meanwhile."""
_SECONDS: Final = re.compile(r'(?:"\w+";\s*r=0;\s*t=)?(\d{1,6})')
_CODE: Final = re.compile(r"\w{1,40}")

_PREPARING: Final = Lock()
_prepared: list[Path | None] = []


class HubAnswered(Exception):
    """An answer that is no success. ``is_of_hub``: of the hub itself, not of its file storage."""

    def __init__(self, status: int, code: str, wait_seconds: float, *, is_of_hub: bool) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code
        self.wait_seconds = wait_seconds
        self.is_of_hub = is_of_hub


class HubSilent(Exception):
    """No whole answer came; the argument is the name of the reason."""


def check_installed() -> None:
    """Raise :class:`~batchyard.errors.LocationRefused` where huggingface_hub is missing."""
    try:
        import huggingface_hub  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise LocationRefused(
            "hf:// needs huggingface_hub, which is not installed where this is run: "
            "pip install 'batchyard[hub]'"
        ) from None


def prepare(ca_file: Path | None) -> None:
    """Have huggingface_hub use our client, once in a process: it has one for all.

    ``ca_file``: the certificate authorities to trust; None: the system's.
    """
    from huggingface_hub import constants, set_client_factory  # noqa: PLC0415 - an extra
    from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415 - an extra

    with _PREPARING:
        if _prepared == [ca_file]:
            return  # to set it again would close connections that are in use
        set_client_factory(lambda: _client(ca_file))
        hub_logging.set_verbosity(logging.ERROR)
        # They log every URL, and that of a file has a signature.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # Else it asks the hub for a list of programs, to say in each request which one runs it.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        _prepared[:] = [ca_file]


def _client(ca_file: Path | None) -> Any:
    import httpx2  # noqa: PLC0415 - an extra

    limits = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)

    class Client(httpx2.Client):
        def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            # Many calls of huggingface_hub ask for no limit at all.
            request.extensions["timeout"] = limits.as_dict()
            with silence_as_ours():
                response = super().send(request, **options)
            if response.status_code < 400:
                return response
            response.close()
            code = _CODE.fullmatch(response.headers.get("X-Error-Code", ""))
            raise HubAnswered(
                response.status_code,
                code[0] if code else "",
                _seconds_to_wait(response.headers),
                # Files are at another address, and only they are PUT.
                is_of_hub=request.method != "PUT" and response.url.netloc == request.url.netloc,
            )

    verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
    return Client(follow_redirects=True, verify=verify)


@contextmanager
def silence_as_ours() -> Iterator[None]:
    """Turn what httpx2 raises into :class:`HubSilent`; its own messages may have whole URLs."""
    import httpx2  # noqa: PLC0415 - an extra

    try:
        yield
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
        raise LocationRefused(
            "the hub's address is not a URL: give one such as https://huggingface.co"
        ) from None
    except (httpx2.RequestError, httpx2.StreamError) as error:
        raise HubSilent(type(error).__name__) from None


def _seconds_to_wait(headers: Any) -> float:
    """What the answer asks for, by either header; 0 if it asks for nothing."""
    for name in ("RateLimit", "Retry-After"):
        if found := _SECONDS.fullmatch(headers.get(name, "").strip()):
            return float(found[1])
    return 0.0


@contextmanager
def hub_errors_as_ours(name: str) -> Iterator[None]:
    """Turn what the client and huggingface_hub raise into the error of ours; ``name`` is shown."""
    try:
        yield
    except (StorageError, OSError):
        raise
    except Exception as error:
        # huggingface_hub wraps what goes wrong in an upload.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (HubAnswered, HubSilent, OSError)):
            cause = cause.__cause__
        if isinstance(cause, HubAnswered):
            raise _refusal(cause, name) from None
        if isinstance(cause, HubSilent):
            raise StorageUnavailable(f"{name}: the hub cannot be reached ({cause})") from None
        if isinstance(cause, OSError):
            raise cause from None
        if type(error).__name__ == "HFValidationError":
            raise LocationRefused(f"{name} is not the name of a dataset: check it") from None
        if isinstance(error, (ValueError, KeyError, TypeError)):
            # An answer that is none of a hub's, or one for each file of an upload.
            raise StorageUnavailable(
                f"{name}: the hub's answer cannot be used ({type(error).__name__})"
            ) from None
        raise


def _refusal(answer: HubAnswered, name: str) -> StorageError:
    status, said = answer.status, f"the hub answered {answer.status} {answer.code}".rstrip()
    if status == 507:
        return StorageFull(f"{name}: {said}, free some space there")
    if status in _PASSING or status >= 500 or not answer.is_of_hub:
        unavailable = StorageUnavailable(f"{name}: {said}")
        if answer.wait_seconds:
            unavailable = StorageUnavailable(f"{name}: {said}, after {answer.wait_seconds:g} s")
        unavailable.wait_seconds = answer.wait_seconds
        return unavailable
    if status == 413:
        return ObjectTooLarge(f"{name}: too large for the hub ({said})")
    if answer.code == "GatedRepo":
        return AccessDenied(
            f"not allowed to use {name} ({said}): ask for access on the dataset's page, with the "
            "account of the token"
        )
    if status in {401, 403}:
        return AccessDenied(
            f"not allowed to use {name} ({said}): check that the dataset exists, and that the "
            "token may use it"
        )
    if status == 404:
        return ObjectNotFound(f"{name}: {_missing(answer.code)} ({said})")
    return LocationRefused(f"{name}: {said}, check the name and the revision")


def _missing(code: str) -> str:
    if code == "RevisionNotFound":
        return "the dataset has no such branch, tag or commit"
    if code == "EntryNotFound":
        return "the dataset has no such file"
    return "there is no such dataset, or the token may not see it"
