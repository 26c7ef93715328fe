"""The bodies of ``/batches``: OpenAI's parameters and ours.

What holds for every way in (endpoint, window, metadata, priority, receivers) is checked in
``steps.create``; here it is described.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.errors import missing
from batchyard.api.http.json_body import (
    OF_OBJECTS,
    WITHOUT_NUL,
    Boolean,
    ExpiresAfter,
    Integer,
    RequestBody,
    Text,
    Texts,
    Url,
    described,
)
from batchyard.api.http.request_lines import KEY, MAX_BODY_BYTES, RequestLines
from batchyard.batch.batch_options import Door, Value, options_of
from batchyard.batch.chains import MAX_STAGES
from batchyard.errors import RequestRefused, StorageError
from batchyard.lines.body_patch import MOST_PATHS
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.templates import MOST_TEMPLATE_CHARS
from batchyard.locations.location import parse_location
from batchyard.locations.parted_url import MOST_PARTS, PartedUrl
from batchyard.locations.presigned import check_not_expired
from batchyard.notify.email import MAX_ADDRESS_CHARS
from batchyard.results.output_rules import MOST_ATTEMPTS
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.steps.create.create import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PRIORITY,
    WINDOW_PATTERN,
    request_of,
)
from batchyard.web.resolve import check_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.batch.batch_options import BatchOption
    from batchyard.delivery.redeliver import Kind
    from batchyard.locations.access import Location
    from batchyard.settings import Settings
    from batchyard.steps.create.create import BatchRequest

M = TypeVar("M", bound=BaseModel)

_MAX_ID_CHARS: Final = 256
_MOST_FILES: Final = 100
"""Their ids are kept in the batch's row, which is read often."""

_FileId = Annotated[str, Strict(), Field(min_length=1, max_length=_MAX_ID_CHARS), WITHOUT_NUL]

Metadata = Annotated[
    dict[str, Any],
    described(
        maxProperties=MAX_METADATA,
        propertyNames={"maxLength": MAX_METADATA_KEY},
        additionalProperties={"type": "string", "maxLength": MAX_METADATA_VALUE},
    ),
]


class NextStage(RequestBody):
    """A further stage, through which each line goes once it has the answer of the one before."""

    endpoint: Annotated[Text, described(enum=list(ENDPOINTS))]
    template: Annotated[Text, described(maxLength=MOST_TEMPLATE_CHARS)] = Field(
        description="A Jinja2 template of the request's body, a JSON object. Its variables are "
        "`request` and `response`, the bodies of the stage before, `content`, the text of that "
        "answer, `custom_id`, and `first`, the line's own body. Write values with `tojson`."
    )
    model: Text | None = Field(
        default=None, description="The model of all its requests; that of the batch if not given."
    )


class UploadUrls(RequestBody):
    """A multipart upload of S3 that the client has begun, for files of more than 5 GiB."""

    part_urls: Annotated[list[Url], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)] = (
        Field(description="Presigned URLs of `UploadPart`, for the part numbers 1, 2, 3 and so on.")
    )
    complete_url: Url = Field(description="A presigned URL of `CompleteMultipartUpload`.")


_LINE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "custom_id": {"type": "string"},
        "method": {"const": "POST"},
        "url": {"type": "string"},
        "body": {"type": "object"},
    },
    "required": ["custom_id", "method", "url", "body"],
}
"""A line of an input. It is checked when the batch is validated, as in a file."""

_RequestLines = Annotated[
    RequestLines | None,
    WithJsonSchema(
        {"anyOf": [{"type": "array", "minItems": 1, "items": _LINE_SCHEMA}, {"type": "null"}]}
    ),
]
_Upload = Annotated[UploadUrls | None, Field(description="Instead of the URL: a multipart upload.")]


_SOURCES: Final = {
    "input_file_id": "string",
    "input_url": "string",
    "input_file_ids": "array",
    KEY: "array",
}
"""Where the lines may come from, with the types of these parameters."""


def _only(key: str) -> dict[str, Any]:
    others: dict[str, Any] = {other: {"type": "null"} for other in _SOURCES if other != key}
    return {"required": [key], "properties": {key: {"type": _SOURCES[key]}, **others}}


class InvalidOutput(RequestBody):
    """When an answer is a bad one, and what is sent instead. One of the tests must be there."""

    finish_reasons: Texts | None = Field(
        default=None,
        description="Answers that ended with one of these are bad; `length`: they were cut off.",
    )
    invalid_json: Boolean | None = Field(
        default=None,
        description="Answers that are not JSON, or do not fit the JSON schema in their request, "
        "are bad.",
    )
    set: dict[str, Any] | None = Field(
        default=None,
        max_length=MOST_PATHS,
        description="Fields of the body and their values for the next attempt, for example "
        '`{"max_tokens": 4096}`. Dots lead into nested objects.',
    )
    unset: Texts | None = Field(default=None, description="Fields to remove for the next attempt.")
    attempts: Annotated[Integer, described(minimum=1, maximum=MOST_ATTEMPTS)] | None = Field(
        default=None, description="How often a request is sent again at most; 1 by default."
    )
    then: Annotated[Text, described(enum=["keep", "error_file"])] | None = Field(
        default=None,
        description="Where the line goes if its last answer is bad, too. `keep`, the default: to "
        "the output file with this answer. `error_file`: to the error file, with the code "
        "`invalid_output`.",
    )


_VALUES: Final[dict[Value, Any]] = {
    Value.FLAG: Boolean,
    Value.NUMBER: Annotated[Integer, described(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)],
    Value.TEXT: Text,
    Value.ENDPOINT: Annotated[Text, described(enum=list(ENDPOINTS))],
    Value.WINDOW: Annotated[Text, described(pattern=f"^({WINDOW_PATTERN}|{BACKGROUND_WINDOW})$")],
    Value.LIFETIME: ExpiresAfter,
    Value.URL: Url,
    Value.ADDRESS: Annotated[Text, described(format="email", maxLength=MAX_ADDRESS_CHARS)],
    Value.TEMPLATE: Annotated[Text, described(maxLength=MOST_TEMPLATE_CHARS)],
    Value.OBJECTS: Annotated[
        list[NextStage], Field(max_length=MAX_STAGES, fail_fast=True), OF_OBJECTS
    ],
    Value.PAIRS: Metadata,
}
_OBJECTS: Final = {"on_invalid_output": InvalidOutput}
"""The options whose values are objects."""


def _field(option: BatchOption) -> Any:
    """The option's annotation and the rest of its field."""
    value = _OBJECTS[option.name] if option.value is Value.OBJECT else _VALUES[option.value]
    if option.choices:
        value = Annotated[value, described(enum=list(option.choices))]
    words = option.help(Door.BODY)
    if option.is_required:
        return value, Field(description=words)
    return value | None, Field(default=None, description=words)


_OPTIONS: Final = {option.name: _field(option) for option in options_of(Door.BODY)}


def _with_options(body: type[M]) -> type[M]:
    """The body with a key for each option of a batch."""
    return create_model(body.__name__, __base__=body, __doc__=body.__doc__, **_OPTIONS)


@_with_options
class CreateBatch(RequestBody):
    """A batch that is to run. What OpenAI does not have is sent by the SDKs with ``extra_body``."""

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        json_schema_extra={"oneOf": [_only(key) for key in _SOURCES]},
    )

    input_file_id: _FileId | None = Field(
        default=None, description="A file that was uploaded for batches."
    )
    input_url: Url | None = Field(
        default=None, description="Instead of `input_file_id`: where the input is fetched from."
    )
    input_file_ids: (
        Annotated[list[_FileId], Field(min_length=1, max_length=_MOST_FILES, fail_fast=True)] | None
    ) = Field(
        default=None,
        description="Instead of `input_file_id`: several files, whose lines are one batch, in this "
        "order.",
    )
    requests: _RequestLines = Field(
        default=None,
        validate_default=True,
        description="Instead of `input_file_id`: the lines themselves. A body with them may have "
        f"{MAX_BODY_BYTES // 1024**2} MiB.",
    )
    output_url: Url | None = Field(
        default=None,
        description="A presigned URL that the output file is PUT to as well. If its path ends in "
        "`.parquet`, it gets a table of the results, joined to the rows of the dataset.",
    )
    error_url: Url | None = Field(default=None, description="The same for the error file.")
    output_upload: _Upload = None
    error_upload: _Upload = None

    @field_validator(KEY)
    @classmethod
    def _has_input(cls, lines: RequestLines | None, info: ValidationInfo) -> RequestLines | None:
        # The last of the sources, so that no input is found before anything else is missing.
        if lines is None and all(info.data.get(key) is None for key in _SOURCES):
            raise PydanticCustomError("missing", "No input.", {"key": "input_file_id"})
        return lines

    async def to_request(self, tenant: str, settings: Settings) -> BatchRequest:
        """What the client asks for. Raises 400, and ``RequestRefused`` for its lifetime."""
        source = await _place("input_url", self.input_url, settings)
        first, *others = (key for key in _SOURCES if getattr(self, key) is not None)
        if others:
            raise _invalid(others[0], f"Give '{first}' or '{others[0]}', not both.")
        return request_of(
            {name: _plain(getattr(self, name)) for name in _OPTIONS},
            tenant=tenant,
            input_file_id=self.input_file_id,
            input_file_ids=tuple(self.input_file_ids or ()),
            input=source,
            output=await _destination("output", self.output_url, self.output_upload, settings),
            error=await _destination("error", self.error_url, self.error_upload, settings),
            public_urls=True,
        )

    async def fingerprint(self) -> str:
        """The fingerprint of the body; with lines it is the same only if they are."""
        if self.requests is None:
            return await super().fingerprint()
        return self._fingerprint(**{KEY: await self.requests.fingerprint()})


class DeliverResults(RequestBody):
    """Where the result files of a batch are to go: one URL or both."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [key], "properties": {key: {"type": shape}}}
                for shape, key in (
                    *(("string", "output_url"), ("string", "error_url")),
                    *(("object", "output_upload"), ("object", "error_upload")),
                )
            ]
        }
    )

    output_url: Url | None = Field(
        default=None, description="A presigned URL that the output file is PUT to."
    )
    error_url: Url | None = Field(default=None, description="The same for the error file.")
    output_upload: _Upload = None
    error_upload: _Upload = None

    async def places(self, settings: Settings) -> dict[Kind, Location]:
        """The URLs that are given, which are usable as far as one can see now. Raises 400."""
        output = await _destination("output", self.output_url, self.output_upload, settings)
        error = await _destination("error", self.error_url, self.error_upload, settings)
        if output is None and error is None:
            raise missing("output_url")
        if output == error:
            raise _invalid("error_url", "'output_url' and 'error_url' must be two URLs.")
        asked: dict[Kind, Location | None] = {"output": output, "error": error}
        return {kind: place for kind, place in asked.items() if place is not None}


def _plain(value: Any) -> Any:
    """An option without the objects of its description."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, ExpiresAfter):
        return _lifetime(value)
    if not isinstance(value, BaseModel):
        return value
    return {name: each for name, each in value if each is not None}


def _lifetime(asked: ExpiresAfter) -> int:
    try:
        return asked.lifetime_seconds()
    except RequestRefused as error:
        # The rules are those of a file's own `expires_after`; the name is another.
        raise ApiError(
            400,
            str(error).replace("expires_after", "output_expires_after"),
            param=f"output_{error.param}",
            code=error.refusal_code,
        ) from None


async def _destination(
    kind: Kind, url: str | None, upload: UploadUrls | None, settings: Settings
) -> Location | None:
    """Where a result file goes, if anywhere. Raises 400."""
    if upload is None:
        return await _place(f"{kind}_url", url, settings)
    key = f"{kind}_upload"
    if url is not None:
        raise _invalid(key, f"Give '{kind}_url' or '{key}', not both.")
    for each in (*upload.part_urls, upload.complete_url):
        _check_scheme(key, each, settings)
    with _usable(key):
        place = PartedUrl(tuple(upload.part_urls), upload.complete_url)
        await place.check_output()
        for host in {urlsplit(each).netloc: each for each in place.urls}.values():
            await check_address(host, settings.address_guard)
    return place


async def _place(key: str, url: str | None, settings: Settings) -> Location | None:
    """An https URL, which is a secret from here on; http where the operator allows it."""
    if url is None:
        return None
    # Never a path or an s3:// of this machine's.
    _check_scheme(key, url, settings)
    with _usable(key):
        location = parse_location(url)
        if key == "input_url":
            check_not_expired(url)
        else:
            await location.check_output()
        await check_address(url, settings.address_guard)
    return location


def _check_scheme(key: str, url: str, settings: Settings) -> None:
    schemes = "https?" if settings.allow_private_urls else "https"
    if not re.match(rf"{schemes}://", url, re.IGNORECASE):
        raise _invalid(key, f"'{key}' must be an https:// URL.")


@contextmanager
def _usable(key: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise _invalid(key, f"'{key}' cannot be used: {error}.") from None


def _invalid(key: str, message: str) -> ApiError:
    return ApiError(400, message, param=key, code="invalid_value")
