"""Routes that describe themselves in the OpenAPI document.

FastAPI writes the document, and knows parameters, security and summaries. What it cannot see is
added here, from the handler's own signature: the body that :class:`JsonBody` reads, the struct in
the :class:`JsonResponse`, and the errors that a route of its kind can answer with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

from fastapi.routing import APIRoute

from batchyard.api.http.auth import READING
from batchyard.api.http.json_body import JsonBody
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.message_errors import is_for_messages
from batchyard.api.http.pages import ListPage

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

Json = dict[str, Any]

REF: Final = "#/components/schemas/{name}"
MESSAGE_ERROR: Final = "messages_{}"
"""What the document calls an answer that is an error, where Anthropic's API has the same."""
HEADERS: Final = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}

_ALWAYS = {400, 401, 500, 503}
_WITH_BODY = {408, 413, 415}
_WITH_ID = {404}
ERRORS: Final = {
    400: "The request is not possible; `param` and `code` say why.",
    401: "No API key, or one that is unknown, revoked or expired.",
    403: "The API key is read-only.",
    404: "No object has this id, or it belongs to another tenant.",
    408: "The body arrived too slowly.",
    409: "The object's status does not allow it; trying again does not help.",
    413: "The body is too large.",
    415: "The body is compressed.",
    416: "The range begins after the end of the file.",
    429: "Too much at a time; `Retry-After` says how many seconds to wait.",
    500: "A defect of the server.",
    503: "The database or the storage does not answer; `Retry-After` says how many seconds to "
    "wait.",
    504: "The engine did not answer in time; trying again does not help.",
}


def operation_id(route: APIRoute) -> str:
    """``createBatch`` of the handler ``create_batch``."""
    first, *others = route.name.split("_")
    return first + "".join(each.title() for each in others)


def component_name(shape: Any) -> str:
    """What the document calls a struct; a page of batches is a ``BatchList``."""
    if get_origin(shape) is ListPage:
        return f"{get_args(shape)[0].__name__}List"
    name: str = shape.__name__
    return name


def json_of(name: str) -> Json:
    """The ``content`` that is JSON of the shape or the model ``name``."""
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}


def may_refuse(*statuses: int, for_messages: bool = False) -> dict[int | str, Json]:
    """For ``responses=``: errors beside those that every route of its kind has.

    ``for_messages``: in the shape of Anthropic's API.
    """
    name = MESSAGE_ERROR if for_messages else "{}"
    return {
        status: {
            "$ref": f"#/components/responses/{name.format(status)}",
            "description": ERRORS[status],
        }
        for status in statuses
    }


def form(fields: Json, *, required: list[str]) -> Json:
    """For ``openapi_extra=``: a multipart form, which is read as a stream."""
    schema = {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }


class Route(APIRoute):
    """A :class:`fastapi.routing.APIRoute` with its body, its answer and its errors described.

    ``model``: that of its JSON body; ``shape``: the struct that it answers with.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        # Without a response model: the answer is not FastAPI's to write.
        super().__init__(path, endpoint, **{**options, "response_model": None})
        self.model = self._describe_body()
        self.shape = self._describe_answer()
        statuses = set(_ALWAYS)
        if not READING.issuperset(self.methods or ()):
            statuses.add(403)
        if self.openapi_extra:
            statuses |= _WITH_BODY
        if self.dependant.path_params:
            statuses |= _WITH_ID
        refusals = may_refuse(*sorted(statuses), for_messages=is_for_messages(f"/v1{path}"))
        self.responses = {**self.responses, **refusals}

    def _describe_body(self) -> type[BaseModel] | None:
        read = [each.call for each in self.dependant.dependencies]
        body = next((call for call in read if isinstance(call, JsonBody)), None)
        if body is None:
            return None
        content = json_of(body.model.__name__)
        self.openapi_extra = {
            "requestBody": {"required": not body.may_be_empty, "content": content}
        }
        return body.model

    def _describe_answer(self) -> Any:
        answered = get_type_hints(self.endpoint)["return"]
        if get_origin(answered) is not JsonResponse:
            return None
        (shape,) = get_args(answered)
        name = component_name(shape)
        self.responses = {**self.responses, 200: {"headers": HEADERS, "content": json_of(name)}}
        return shape
