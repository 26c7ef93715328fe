"""Request bodies in JSON as pydantic models, read within limits and only for known callers.

FastAPI's own reading of a body has no limit of size or time, comes before the caller's key is
checked, and depends on the content type. So a dependency reads the body, and
:class:`~batchyard.api.http.route.Route` puts the model into the OpenAPI document.
"""

# No postponed annotations: FastAPI cannot resolve those of a callable object.

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from batchyard.api.http.auth import Authenticated
from batchyard.api.http.body import read_json
from batchyard.api.http.request_lines import read_json_with_lines
from batchyard.files.upload import checked_lifetime
from batchyard.services.webhook_checks import MAX_URL_CHARS
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS, LEAST_LIFETIME_SECONDS

M = TypeVar("M", bound=BaseModel)


def _without_nul(value: Any) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise PydanticCustomError("string_type", "PostgreSQL cannot keep a NUL.")
    return value


def _array_of_objects(value: Any) -> Any:
    if not isinstance(value, list):
        raise PydanticCustomError("objects_type", "No array.")
    return value


def described(**schema: Any) -> Any:
    """What the OpenAPI document says of a value that is checked where the rule belongs."""
    return Field(json_schema_extra=schema)


WITHOUT_NUL: Final = BeforeValidator(_without_nul)
OF_OBJECTS: Final = BeforeValidator(_array_of_objects)
"""For lists of objects: pydantic's own error does not say what is in them."""

Text = Annotated[str, Strict(), WITHOUT_NUL]
Texts = Annotated[list[Annotated[str, Strict()]], Field(fail_fast=True)]
Integer = Annotated[int, Strict()]
Boolean = Annotated[bool, Strict()]
Url = Annotated[
    str,
    Strict(),
    Field(max_length=MAX_URL_CHARS, json_schema_extra={"format": "uri"}),
    WITHOUT_NUL,
]


class RequestBody(BaseModel):
    """A body, or an object within one. Values are never converted; null is as good as absent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        """Stop at the first unknown key: pydantic would collect a hundred thousand of them."""
        if isinstance(values, dict):
            unknown = next((key for key in values if key not in cls.model_fields), None)
            if unknown is not None:
                raise PydanticCustomError("extra_forbidden", "Unknown key.", {"key": unknown})
        return values

    async def fingerprint(self) -> str:
        """A hash of the body that is the same however its keys are ordered and spaced."""
        return self._fingerprint()

    def _fingerprint(self, **more: str) -> str:
        sent = self.model_dump(exclude_unset=True) | more
        return hashlib.sha256(msgspec.json.encode(sent, order="deterministic")).hexdigest()


class NoKeys(RequestBody):
    """An object without any key."""


class AnyKeys(BaseModel):
    """An object whose keys do not matter."""

    model_config = ConfigDict(extra="allow")


EXPIRY: Final[dict[str, JsonValue]] = {
    "anchor": {"type": "string", "const": "created_at"},
    "seconds": {
        "type": "integer",
        "minimum": LEAST_LIFETIME_SECONDS,
        "maximum": FILE_LIFETIME_SECONDS,
    },
}
"""Both are required; ``checked_lifetime`` says so in its own words."""


class ExpiresAfter(RequestBody):
    """How long a file is kept after it was created."""

    model_config = ConfigDict(json_schema_extra={"properties": EXPIRY, "required": list(EXPIRY)})

    anchor: Text | None = None
    seconds: Integer | None = None

    def lifetime_seconds(self) -> int:
        """Raises :class:`~batchyard.errors.RequestRefused`."""
        return checked_lifetime(self.anchor, self.seconds)


@dataclass(frozen=True)
class JsonBody(Generic[M]):
    """A dependency: the body as ``model``. ``may_be_empty``: no body at all is an empty object.

    ``has_lines``: it may have the lines of a batch, see :mod:`~batchyard.api.http.request_lines`.
    """

    model: type[M]
    may_be_empty: bool = False
    has_lines: bool = False

    async def __call__(self, request: Request, caller: Authenticated) -> M:
        """Raises 400, 408, 413 and 415, and 401 before any of the body is read."""
        if self.has_lines:
            limits = caller.services.settings.limits
            values = await read_json_with_lines(request, caller.tenant, limits.max_requests)
        else:
            values = await read_json(request, may_be_empty=self.may_be_empty)
        try:
            return self.model.model_validate(values)
        except ValidationError as error:
            raise RequestValidationError(
                [
                    {**each, "loc": ("body", *each["loc"])}
                    for each in error.errors(include_url=False)
                ]
            ) from None
