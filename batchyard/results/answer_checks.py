"""Whether an answer is what its request asked for: complete, JSON, of its own schema. Pure.

It knows the shapes of chat completions, completions, responses and messages. An answer of another
endpoint has no text, so nothing is wrong with it.
"""

from __future__ import annotations

import time
from decimal import Context, DivisionByZero, InvalidOperation
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STEPS_OF_ALL: Final = 1_000_000
STEPS_OF_LINE: Final = 500
"""How many values of schemas and answers may be looked at, altogether and for each line more: a
schema of a client's can be written so that one answer takes forever."""
SECONDS_AT_ONCE: Final = 0.1
SECONDS_OF_ANSWER: Final = 0.001
MOST_SECONDS: Final = 0.005
"""The seconds of a :class:`TimeBudget`: at first, with each answer more, and for one answer at
most. A schema with ten fields takes a fifth of a millisecond."""
_MOST_KEPT: Final = 16
"""Validators: a batch has one schema, or one for each line."""
_KEYWORDS: Final = (
    *("$ref", "type", "enum", "const", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf"),
    *("minProperties", "maxProperties", "propertyNames"),
)
"""Not those with regular expressions, in which one match can take forever, and not those whose
work cannot be counted. Not ``not``: more values fit a schema without these keywords, so that it
would forbid too many."""
_WALKING: Final = frozenset({"items", "additionalProperties", "propertyNames"})
"""Keywords that look at each value of an answer, also where their own value is empty."""
_COMPARING: Final = frozenset({"const", "enum"})
"""Keywords that hold an answer against all that is in their value, however deep."""
_BOOLEANS_OF_DRAFT_4: Final = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
"""There they say how to read ``minimum`` and ``maximum``."""
_EXACT_BELOW: Final = 2**53
"""A larger float need not be the number that was written."""
_DECIMALS: Final = Context(prec=40, traps=[DivisionByZero, InvalidOperation])
"""A quotient with more digits is an error at once, and takes no time."""
_NULL: Final = msgspec.Raw(b"null")


class _Asked(msgspec.Struct):
    """The fields of a body that may have a schema. Prompts are not decoded."""

    response_format: msgspec.Raw = _NULL
    text: msgspec.Raw = _NULL
    output_config: msgspec.Raw = _NULL
    structured_outputs: msgspec.Raw = _NULL


_decode = msgspec.json.Decoder().decode
_decode_asked = msgspec.json.Decoder(_Asked).decode
_LENGTH: Final = "length"


class Fault(StrEnum):
    """What is wrong with the text of an answer."""

    NOT_JSON = "is not JSON"
    NOT_OF_ITS_SCHEMA = "does not fit the JSON schema of its request"


class TooMuchToCheck(Exception):
    """The schemas take more than the budget has."""


def finish_reasons(answer: Any) -> set[str]:
    """Why the engine ended each choice. What says in other words that it is cut off is `length`."""
    if not isinstance(answer, dict):
        return set()
    reasons = {choice.get("finish_reason") for choice in _dicts(answer.get("choices"))}
    details = answer.get("incomplete_details")
    if isinstance(details, dict):
        reason = details.get("reason")
        reasons.add(_LENGTH if reason == "max_output_tokens" else reason)
    stopped = answer.get("stop_reason")
    reasons.add(_LENGTH if stopped == "max_tokens" else stopped)
    return {reason for reason in reasons if isinstance(reason, str)}


def texts_of(answer: Any) -> Iterator[str]:
    """The text of each choice. A choice that calls a tool has none, nor one that refuses."""
    if not isinstance(answer, dict):
        return
    for choice in _dicts(answer.get("choices")):
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
        if isinstance(text, str):
            yield text
        elif not (isinstance(message, dict) and _is_without_text(message)):
            yield ""
    for output in _dicts(answer.get("output")):
        parts = _dicts(output.get("content"))
        if output.get("type") == "message" and not any(map(_is_refusal, parts)):
            yield _joined(parts)
    blocks = _dicts(answer.get("content"))
    if any(block.get("type") == "text" for block in blocks):
        yield _joined(blocks)


def text_of(answer: Any) -> str | None:
    """The text of the first choice; None: it has none, as that of an embedding."""
    text = next(texts_of(answer), None)
    if text is None and isinstance(answer, dict) and isinstance(answer.get("content"), list):
        return _joined(_dicts(answer["content"]))  # of a message, whatever its blocks are
    return text


def schema_of(body: Any) -> Any:
    """The JSON schema that a request's body asks its answer to have; None: it names none."""
    for keys in (
        ("response_format", "json_schema", "schema"),
        ("text", "format", "schema"),
        ("output_config", "format", "schema"),
        ("structured_outputs", "json"),
    ):
        found = body
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    return None


class StepBudget:
    """So many steps for all answers together: for a caller who waits for the verdict on each."""

    def __init__(self) -> None:
        self._steps = STEPS_OF_ALL

    def begin(self) -> None:
        """The next answer is checked. Raises :class:`TooMuchToCheck`, as the other two do."""
        self._steps += STEPS_OF_LINE

    def take(self, steps: int) -> None:
        """The next steps are done. Raises :class:`TooMuchToCheck` when there were too many."""
        self._steps -= steps
        if self._steps < 0:
            raise TooMuchToCheck

    def end(self) -> None:
        """The answer is checked, or its time is over."""


class TimeBudget:
    """So much of this thread's processor time: where the work of others waits for each check.

    What an answer takes too much, later answers have less.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._left = SECONDS_AT_ONCE
        self._began = self._end = 0.0

    def begin(self) -> None:
        """See :meth:`StepBudget.begin`."""
        self._left = min(self._left + SECONDS_OF_ANSWER, SECONDS_AT_ONCE)
        self._began = self._clock()
        self._end = self._began + min(self._left, MOST_SECONDS)
        if self._left <= 0:
            raise TooMuchToCheck

    def take(self, steps: int) -> None:  # noqa: ARG002 - what they take is seen on the clock
        """See :meth:`StepBudget.take`."""
        if self._clock() > self._end:
            raise TooMuchToCheck

    def end(self) -> None:
        """See :meth:`StepBudget.end`."""
        self._left -= self._clock() - self._began


class OutputCheck:
    """Checks answers of one batch, within a budget.

    ``most_bytes``: of a schema, and of the texts of an answer that are held against it.
    """

    def __init__(
        self, budget: StepBudget | TimeBudget | None = None, *, most_bytes: int | None = None
    ) -> None:
        self._budget = budget or StepBudget()
        self._most_bytes = most_bytes
        self._class: Any = None
        self._validators: dict[tuple[bytes, ...], Any] = {}
        """The validators, by what requests' bodies say of the schema; None: they name none."""

    def load(self) -> None:
        """Import what checks schemas now, which takes a tenth of a second."""
        if self._class is None:
            self._class = _validator_class(self._budget.take)

    def fault_of(self, body: bytes, answer: Any) -> Fault | None:
        """What is wrong with a text of the answer to a request with this body, if anything.

        Raises :class:`TooMuchToCheck`, for a text that is JSON.
        """
        texts = [*texts_of(answer)]
        try:
            values = [_decode(text) for text in texts]
        except (ValueError, RecursionError):
            return Fault.NOT_JSON
        try:
            self._budget.begin()
            validator = self._validator_of(body) if values else None
            if validator is None:
                return None
            self._check_size(sum(map(len, texts)))
            is_good = all(_fits(validator, value) for value in values)
        finally:
            self._budget.end()
        return None if is_good else Fault.NOT_OF_ITS_SCHEMA

    def _validator_of(self, body: bytes) -> Any:
        asked = _decode_asked(body)
        said = tuple(bytes(getattr(asked, name)) for name in _Asked.__struct_fields__)
        if said not in self._validators:
            self._check_size(sum(map(len, said)))
            if len(self._validators) == _MOST_KEPT:
                self._validators.clear()
            named = zip(_Asked.__struct_fields__, map(_decode, said), strict=True)
            self._validators[said] = self._make(schema_of(dict(named)))
        return self._validators[said]

    def _make(self, schema: Any) -> Any:
        from referencing import Registry  # noqa: PLC0415 - see _validator_class

        if schema is None:
            return None
        self.load()
        try:
            # An empty registry, or a reference would be fetched from anywhere.
            return self._class(schema, registry=Registry())
        except Exception:  # noqa: BLE001 - see _fits
            return None

    def _check_size(self, size: int) -> None:
        if self._most_bytes is not None and size > self._most_bytes:
            raise TooMuchToCheck


def _fits(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except TooMuchToCheck:
        raise
    except Exception:  # noqa: BLE001 - jsonschema raises anything for what is no schema
        # It says nothing about an answer: the engine did not go by it either.
        return True


def _validator_class(take: Callable[[int], None]) -> Any:
    # Few commands need it, and it takes a tenth of a second to import.
    from attrs import evolve  # noqa: PLC0415 - see above
    from jsonschema import Draft202012Validator, ValidationError  # noqa: PLC0415 - see above
    from jsonschema.validators import create  # noqa: PLC0415 - see above

    def multiple_of(validator: Any, divisor: Any, value: Any, _schema: Any) -> Iterable[Any]:
        if validator.is_type(value, "number") and not _is_multiple(value, divisor):
            yield ValidationError("Not a multiple.")

    known = dict(Draft202012Validator.VALIDATORS)
    # A keyword that is not checked may be all that tells two branches apart.
    known["oneOf"] = known["anyOf"]
    known["multipleOf"] = multiple_of

    def counted(name: str) -> Callable[..., Iterable[Any]]:
        check = known[name]

        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any]:
            take(_steps(name, value, instance))
            if name == "additionalProperties" and "patternProperties" in schema:
                return ()
            if name in _BOOLEANS_OF_DRAFT_4 and isinstance(value, bool):
                return ()
            return check(validator, value, instance, schema) or ()

        return run

    made = create(
        meta_schema=Draft202012Validator.META_SCHEMA,
        validators={name: counted(name) for name in _KEYWORDS},
        type_checker=Draft202012Validator.TYPE_CHECKER,
        id_of=Draft202012Validator.ID_OF,
    )
    # jsonschema's own looks for `$schema` in each part of a schema, also in what a reference finds
    # in an example, and takes the validator of that dialect: one that runs regular expressions.
    made.evolve = evolve
    return made


def _steps(name: str, value: Any, instance: Any) -> int:
    """How many values a keyword looks at, those of the answer among them."""
    if name in _COMPARING:
        return 1 + _count(value)
    return 1 + _length(value) + (_length(instance) if name in _WALKING else 0)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _count(value: Any) -> int:
    """Count the value and all that is in it."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += 1
        if isinstance(each, list | dict):
            left += each.values() if isinstance(each, dict) else each
    return count


def _is_multiple(number: float, divisor: Any) -> bool:
    """Whether it is one in decimals: 0.07 is a multiple of 0.01, but not as floats.

    A number that cannot be divided, or may have lost digits, counts as one.
    """
    if type(divisor) not in (int, float):
        return True
    try:
        if isinstance(number, int) and isinstance(divisor, int):
            return number % divisor == 0
        if max(abs(number), abs(divisor)) >= _EXACT_BELOW:
            return True
        read = _DECIMALS.create_decimal
        return not _DECIMALS.remainder(read(repr(number)), read(repr(divisor)))
    except ArithmeticError:
        return True


def _is_without_text(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls") or message.get("refusal"))


def _is_refusal(part: dict[str, Any]) -> bool:
    return part.get("type") == "refusal"


def _joined(parts: list[dict[str, Any]]) -> str:
    return "".join(str(part.get("text", "")) for part in parts)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
