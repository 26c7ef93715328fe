"""Change fields of a request's body and nothing else: every other byte stays as the user wrote it.

A path names a field of the body, with dots between the keys of objects within it:
``max_tokens``, ``response_format.json_schema.strict``. An entry of a list has no path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MOST_PATHS: Final = 64
_MOST_PATH_CHARS: Final = 512
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class BodyPatch:
    """What is removed from each body, and then what is set, by path; values are JSON."""

    values: Mapping[str, bytes] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values or self.removed)

    @classmethod
    def of(cls, values: Mapping[str, Any], removed: Iterable[str]) -> BodyPatch:
        """The patch of these values. Raises :class:`~batchyard.errors.RequestRefused`."""
        patch = cls({path: msgspec.json.encode(each) for path, each in values.items()}, (*removed,))
        if len(patch.values) + len(patch.removed) > MOST_PATHS:
            raise _refused("set", f"A retry may change {MOST_PATHS} fields at most.")
        for param, paths in (("set", patch.values), ("unset", patch.removed)):
            for path in paths:
                if len(path) > _MOST_PATH_CHARS or not all(path.split(".")):
                    raise _refused(
                        param,
                        f"{path[:_MOST_PATH_CHARS]!r} is not a path: give the name of a field of "
                        "the body, with dots for fields of objects, for example "
                        "response_format.type.",
                    )
        return patch

    @property
    def model(self) -> str | None:
        """The model that it sets; None: it sets none."""
        if "model" not in self.values:
            return None
        model = msgspec.json.decode(self.values["model"])
        if not isinstance(model, str):
            raise _refused("set", "model must be a string.")
        return model

    def applied(self, line: bytes) -> bytes:
        """The request line with the patch in its body.

        Raises :class:`~batchyard.errors.RequestRefused` where a path leads through something that
        is no object.
        """
        if not self:
            return line
        fields = _decode_fields(line)
        fields["body"] = msgspec.Raw(self.applied_to_body(bytes(fields["body"])))
        return msgspec.json.encode(fields)

    def applied_to_body(self, body: bytes) -> bytes:
        """The same for a body without its line."""
        for path in self.removed:
            body = _without(body, path.split("."))
        for path, value in self.values.items():
            body = _with(body, path.split("."), value, path)
        return body


NO_PATCH: Final = BodyPatch()


def parse_assignment(text: str) -> tuple[str, Any]:
    """Path and value of ``max_tokens=4096``: the value is JSON, and text if it is not."""
    path, has_value, value = text.partition("=")
    if not has_value:
        raise _refused("set", f"{text!r} sets nothing: give a field and a value, max_tokens=4096.")
    try:
        return path, msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return path, value


def _with(data: bytes, keys: Sequence[str], value: bytes, path: str) -> bytes:
    fields = _fields(data)
    if fields is None:
        raise _refused(
            "set", f"{path} leads through a value that is not an object in some request."
        )
    key, *deeper = keys
    if deeper:
        inner = bytes(fields.get(key, b"{}"))
        value = _with(b"{}" if inner == b"null" else inner, deeper, value, path)
    fields[key] = msgspec.Raw(value)
    return msgspec.json.encode(fields)


def _without(data: bytes, keys: Sequence[str]) -> bytes:
    """What is not there need not be removed."""
    fields = _fields(data)
    key, *deeper = keys
    if fields is None or key not in fields:
        return data
    if deeper:
        fields[key] = msgspec.Raw(_without(bytes(fields[key]), deeper))
    else:
        del fields[key]
    return msgspec.json.encode(fields)


def _fields(data: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _decode_fields(data)
    except msgspec.ValidationError:
        return None


def _refused(param: str, message: str) -> RequestRefused:
    return RequestRefused(message, param=param, code="invalid_value")
