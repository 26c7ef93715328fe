"""What boto3 raises, in our words."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from botocore.exceptions import ClientError

# S3 answers these with 4xx although the next try may well succeed.
PASSING_CODES = {
    *("RequestTimeout", "OperationAborted", "Throttling", "ThrottlingException"),
    # The body was damaged or cut short on the way.
    *("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody"),
}
_PASSING_STATUS = {408, 409, 425, 429, 499}
_CLOCKS = {"RequestTimeTooSkewed", "RequestExpired"}


@contextlib.contextmanager
def s3_errors_as_ours(name: str) -> Iterator[None]:
    """Turn what boto3 raises into the error of ours that it stands for; ``name`` is shown."""
    from botocore import exceptions as raised  # noqa: PLC0415 - most processes use no bucket
    from urllib3.exceptions import HTTPError as TransportError  # noqa: PLC0415 - as above

    try:
        yield
    except raised.ClientError as error:
        raise _refusal(error, name) from error
    except (
        raised.NoCredentialsError,
        raised.PartialCredentialsError,
        raised.CredentialRetrievalError,
        raised.ProfileNotFound,
    ) as error:
        raise AccessDenied(
            f"no S3 credentials for {name}: give an access key and its secret, "
            "or set up the credentials chain of boto3"
        ) from error
    except raised.ParamValidationError as error:
        raise LocationRefused(f"{name} is not a valid S3 bucket and key: check the name") from error
    except (RecursionError, raised.BotoCoreError, TransportError, OSError) as error:
        if _has_no_end(error):
            raise AccessDenied(
                f"S3 redirects every request for {name}: "
                "check the endpoint, http or https, and region"
            ) from error
        raise StorageUnavailable(f"S3 failed on {name} ({type(error).__name__})") from error


def _has_no_end(error: BaseException | None) -> bool:
    """Whether boto3 has asked until Python's stack was full, wherever in boto3 that was noticed.

    It takes each redirect for another region's, and asks the endpoint which one that is.
    """
    while error is not None and not isinstance(error, RecursionError):
        error = error.__cause__ or error.__context__
    return error is not None


def _refusal(error: ClientError, name: str) -> StorageError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"S3 answered {status} {code}"
    if status == 507 or code.endswith("QuotaExceeded"):
        return StorageFull(f"no room to write {name} ({said}): free some space and try again")
    if code in PASSING_CODES or status in _PASSING_STATUS or status >= 500:
        return StorageUnavailable(f"{name}: {said}")
    if code in {"NoSuchUpload", "InvalidPart"}:
        return StorageUnavailable(f"{name}: S3 lost the upload, write the object again")
    if code == "NoSuchBucket":
        return ObjectNotFound(f"{name}: the bucket does not exist, create it first")
    match status:
        case 404:
            return ObjectNotFound(f"{name} does not exist")
        case 401 | 403:
            check = "the clock of this machine" if code in _CLOCKS else "key and bucket policy"
            return AccessDenied(f"not allowed to use {name} ({said}): check {check}")
        case 412:
            return ObjectChanged(f"{name} was replaced while it was read")
        case 413:
            return ObjectTooLarge(f"{name} is too large for this server ({said})")
    if code == "EntityTooLarge":
        return ObjectTooLarge(f"{name} is too large for this server ({said})")
    # Expired credentials and a wrong region are 400: what is refused is this process, no object.
    return AccessDenied(
        f"S3 takes no such request for {name} ({said}): check credentials, region and endpoint"
    )
