"""Whether an answer is what its request asked for: complete, JSON, of its own schema. Pure.

It knows the shapes of chat completions, completions and responses. An answer of another endpoint
has no text, so nothing is wrong with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STEPS_OF_ALL: Final = 1_000_000
STEPS_OF_LINE: Final = 500
"""How many keywords and their values may be looked at, altogether and for each line more: a schema
of a client's can be written so that one answer takes forever."""
_KEYWORDS: Final = (
    *("$ref", "type", "enum", "const", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf"),
    *("not", "minProperties", "maxProperties", "propertyNames"),
)
"""Not those with regular expressions, in which one match can take forever, and not those whose
work cannot be counted."""
_decode = msgspec.json.Decoder().decode
_LENGTH: Final = "length"


class TooMuchToCheck(Exception):
    """The schemas take more steps than there are."""


def finish_reasons(answer: Any) -> set[str]:
    """Why the engine ended each choice. A response that is cut off has OpenAI's other word."""
    if not isinstance(answer, dict):
        return set()
    reasons = {choice.get("finish_reason") for choice in _dicts(answer.get("choices"))}
    details = answer.get("incomplete_details")
    if isinstance(details, dict):
        reason = details.get("reason")
        reasons.add(_LENGTH if reason == "max_output_tokens" else reason)
    return {reason for reason in reasons if isinstance(reason, str)}


def texts_of(answer: Any) -> Iterator[str]:
    """The text of each choice. A choice that calls a tool has none."""
    if not isinstance(answer, dict):
        return
    for choice in _dicts(answer.get("choices")):
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
        if isinstance(text, str):
            yield text
        elif not (isinstance(message, dict) and message.get("tool_calls")):
            yield ""
    for output in _dicts(answer.get("output")):
        if output.get("type") == "message":
            parts = _dicts(output.get("content"))
            yield "".join(str(part.get("text", "")) for part in parts)


def schema_of(body: Any) -> Any:
    """The JSON schema that a request's body asks its answer to have; None: it names none."""
    for keys in (
        ("response_format", "json_schema", "schema"),
        ("text", "format", "schema"),
        ("structured_outputs", "json"),
    ):
        found = body
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    return None


class OutputCheck:
    """Checks answers of one batch, within a number of steps for all of them."""

    def __init__(self) -> None:
        self._steps = STEPS_OF_ALL
        self._validator: Any = None

    def is_good(self, body: Any, answer: Any) -> bool:
        """Whether each text is JSON, and of the schema that the request's body has, if any.

        Raises :class:`TooMuchToCheck`.
        """
        self._steps += STEPS_OF_LINE
        try:
            values = [_decode(text) for text in texts_of(answer)]
        except (ValueError, RecursionError):
            return False
        schema = schema_of(body)
        return schema is None or all(self._fits(value, schema) for value in values)

    def _fits(self, value: Any, schema: Any) -> bool:
        from referencing import Registry  # noqa: PLC0415 - see _validator_class

        if self._validator is None:
            self._validator = _validator_class(self._take)
        # An empty registry, or a reference would be fetched from anywhere.
        try:
            plain = _without_dialects(schema)
            return bool(self._validator(plain, registry=Registry()).is_valid(value))
        except TooMuchToCheck:
            raise
        except Exception:  # noqa: BLE001 - jsonschema raises anything for what is no schema
            # It says nothing about an answer: the engine did not go by it either.
            return True

    def _take(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TooMuchToCheck


def _validator_class(take: Callable[[int], None]) -> Any:
    # Few commands need it, and it takes a tenth of a second to import.
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from jsonschema.validators import create  # noqa: PLC0415

    known = Draft202012Validator.VALIDATORS

    def counted(name: str) -> Callable[..., Iterable[Any]]:
        check = known[name]

        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any]:
            take(1 + (len(value) if isinstance(value, list | dict) else 0))
            if name == "additionalProperties" and "patternProperties" in schema:
                return ()
            return check(validator, value, instance, schema) or ()

        return run

    return create(
        meta_schema=Draft202012Validator.META_SCHEMA,
        validators={name: counted(name) for name in _KEYWORDS},
        type_checker=Draft202012Validator.TYPE_CHECKER,
        id_of=Draft202012Validator.ID_OF,
    )


def _without_dialects(schema: Any) -> Any:
    """Without any ``$schema``, for which jsonschema would take another validator than ours."""
    if isinstance(schema, dict):
        return {key: _without_dialects(each) for key, each in schema.items() if key != "$schema"}
    return [_without_dialects(each) for each in schema] if isinstance(schema, list) else schema


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
