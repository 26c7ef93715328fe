"""What a batch does with answers that are not what was asked for: `on_invalid_output`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from batchyard.errors import RequestRefused
from batchyard.lines.body_patch import BodyPatch
from batchyard.lines.json_depth import MAX_DEPTH, is_deeper_than

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.lines.body_policy import BodyPolicy

NAME: Final = "on_invalid_output"
MOST_ATTEMPTS: Final = 3
MAX_BYTES: Final = 16 * 1024
"""The most bytes as JSON: it is in the batch's row, which is read often."""
_OWN_FIELDS: Final = frozenset({"model", "stream"})
"""Another model needs another engine, and a stream is no answer of a batch."""
_ANY_ENDPOINT: Final = "/v1/responses"
"""Where most fields are refused."""
_MANY: Final = 1024


class OnInvalidOutput(msgspec.Struct, frozen=True):
    """When a good HTTP answer is a bad one, what is sent instead, and what becomes of the line.

    An answer is bad if it ended for one of ``finish_reasons`` or, with ``invalid_json``, is not
    JSON or does not fit the schema of its request. Then the request is sent again, up to
    ``attempts`` times, with the fields of ``set`` and without those of ``unset``. ``then`` says
    where the line goes if the last answer is bad as well: to the output file as it is, or to the
    error file.
    """

    finish_reasons: tuple[str, ...] = ()
    invalid_json: bool = False
    set: dict[str, Any] = {}
    unset: tuple[str, ...] = ()
    attempts: Annotated[int, msgspec.Meta(ge=1, le=MOST_ATTEMPTS)] = 1
    then: Literal["keep", "error_file"] = "keep"

    @classmethod
    def of(cls, given: Mapping[str, Any], policy: BodyPolicy | None) -> OnInvalidOutput:
        """What was given, if the ``policy`` accepts what it sets; None: anything.

        Raises :class:`~batchyard.errors.RequestRefused`.
        """
        unknown = next((key for key in given if key not in cls.__struct_fields__), None)
        if unknown is not None:
            raise _refused(
                f"has no key {unknown[:64]!r}; it has {', '.join(cls.__struct_fields__)}."
            )
        if is_deeper_than(list(given.values()), MAX_DEPTH):
            # As JSON in the batch's row it could not be read any more.
            raise _refused(f"is nested deeper than {MAX_DEPTH} levels.")
        try:
            rule = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise _refused(f"cannot be used: {error}.") from None
        if not (rule.finish_reasons or rule.invalid_json):
            raise _refused("needs a test: finish_reasons, invalid_json, or both.")
        if len(msgspec.json.encode(rule)) > MAX_BYTES:
            raise _refused(f"may have {MAX_BYTES} bytes at most.")
        rule.check_patch(policy)
        return rule

    @property
    def patch(self) -> BodyPatch:
        """What is changed in the body. Raises :class:`~batchyard.errors.RequestRefused`."""
        return BodyPatch.of(self.set, self.unset)

    def check_patch(self, policy: BodyPolicy | None) -> None:
        """Raise :class:`~batchyard.errors.RequestRefused` for fields that it may not change."""
        for path in (*self.set, *self.unset):
            if (name := path.partition(".")[0]) in _OWN_FIELDS:
                raise _refused(f"cannot change {name}.")
        try:
            changed = msgspec.json.decode(self.patch.applied_to_body(b"{}"))
        except RequestRefused as error:
            raise _refused(f"cannot be used: {error}") from None
        if policy is None:
            return
        size = len(msgspec.json.encode(changed))
        for refusal in policy.refusals(_ANY_ENDPOINT, changed, size, _MANY, _MANY):
            raise RequestRefused(refusal.message, param=NAME, code=refusal.code)


def _refused(what: str) -> RequestRefused:
    return RequestRefused(f"{NAME} {what}", param=NAME, code="invalid_value")
