"""What may be asked of a batch at every way in: by the commands, the API and Prefect's form.

One row is one option. The commands' options, the keys of the API's body and the flow's parameters
are made from the rows; what was given goes into a ``BatchRequest`` under the same name. What one
way in has for itself, or says in its own way, is declared there.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

F = TypeVar("F", bound="Callable[..., Any]")


class DeliveryKind(StrEnum):
    """How a receiver is notified, or that it gets a file."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    FILE = "file"
    """A result file that is PUT to a URL once more."""

    @property
    def word(self) -> str:
        """What people call it."""
        return "e-mail" if self is DeliveryKind.EMAIL else self.value


class OnInvalid(StrEnum):
    """What becomes of a batch of which some lines are bad."""

    FAIL = "fail"
    """It fails at validation, and nothing of it runs."""
    ERROR_FILE = "error_file"
    """The bad lines are in its error file, and the others run."""


class Validation(StrEnum):
    """How much of each line is checked before anything runs."""

    BASIC = "basic"
    """What needs no engine: its shape, its fields, the limits."""
    DEEP = "deep"
    """Also its tokens, by the model's own tokenizer, its schemas and its tools."""


class Value(Enum):
    """What is given for an option."""

    FLAG = bool
    """The value is yes or no."""
    TEXT = str
    URL = "url"
    """An https URL, which is a secret."""
    ADDRESS = "address"
    """One e-mail address."""
    OBJECT = dict
    """The value is a set of names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """One option, and how each way in describes it."""

    name: str
    """In a body and in Prefect; on a command line it has dashes."""
    value: Value
    command: str
    """The help of `batchyard run` and `batchyard submit`."""
    body: str
    """The description in the OpenAPI document."""
    form: str | None = None
    """The help in Prefect's form. None: it is not there. Prefect records parameters, so the form
    takes no URL with a query or a password."""
    choices: tuple[str, ...] = ()
    """What a text may be, the default first; empty: anything."""
    told_by: DeliveryKind | None = None
    """The channel over which it names a receiver, by a URL."""


OPTIONS: Final = (
    BatchOption(
        name="webhook_url",
        value=Value.URL,
        command="An https URL that is notified when the batch ends.",
        body="An https URL that gets an event when the batch ends.",
        form="An https URL that gets an event when the batch ends. Prefect records it: a URL with "
        "a query or a password belongs to `batchyard webhooks create` or `batchyard submit`.",
        told_by=DeliveryKind.WEBHOOK,
    ),
    BatchOption(
        name="notify_email",
        value=Value.ADDRESS,
        command="An address that gets an e-mail when the batch ends.",
        body="The address of an e-mail when the batch ends, if the server sends any.",
        form="An address that gets an e-mail when the batch ends, if a mail server is set up.",
    ),
    BatchOption(
        name="deduplicate",
        value=Value.FLAG,
        command="Run identical deterministic requests only once.",
        body="Identical deterministic requests run once, for all their lines.",
        form="Whether identical deterministic requests run only once.",
    ),
    BatchOption(
        name="error_threshold",
        value=Value.TEXT,
        command="Stop the batch when this many lines have failed: 200, or 5% of the finished ones.",
        body="The batch is stopped when this many of its lines have failed: a number of lines, "
        '`"200"`, or a share of the finished ones, `"5%"`, judged from the 100th on, or from a '
        "tenth of a smaller batch. It ends as `failed`, with what is finished.",
        form="Stop the batch when this many lines have failed: 200, or 5% of the finished ones.",
    ),
    BatchOption(
        name="on_invalid",
        value=Value.TEXT,
        command="What happens to bad lines: `fail` (the default) refuses the whole file, "
        "`error_file` reports them in the error file and runs the others.",
        body="What happens to bad lines. `fail`: the batch fails at validation. `error_file`: they "
        "are in the error file, and the others run.",
        form="What happens to bad lines. `fail`: the batch fails at validation. `error_file`: they "
        "are in the error file, and the others run.",
        choices=tuple(OnInvalid),
    ),
    BatchOption(
        name="on_invalid_output",
        value=Value.OBJECT,
        command="Send requests again whose answers are cut off or not valid JSON, with other "
        "parameters: an object in JSON, or @FILE with it.",
        body="What happens to answers that are not what was asked for: their requests are sent "
        "again, with other parameters.",
        form="What happens to answers that are cut off or not valid JSON, for example "
        '{"finish_reasons": ["length"], "set": {"max_tokens": 4096}}.',
    ),
    BatchOption(
        name="validation",
        value=Value.TEXT,
        command="What is checked before anything runs: `basic` (the default), or `deep`: also "
        "prompts that are too long for the model, JSON schemas and tools.",
        body="What is checked before anything runs. `deep`: also prompts that are too long for the "
        "model, by its own tokenizer, JSON schemas and tools.",
        form="What is checked before anything runs. deep: also prompts that are too long for the "
        "model, by its own tokenizer, JSON schemas and tools.",
        choices=tuple(Validation),
    ),
)


RECEIVER_OPTIONS: Final = {option.told_by: option.name for option in OPTIONS if option.told_by}
"""The option that names a receiver, by its channel."""


def as_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given for options, by their names, as the fields of a ``BatchRequest``."""
    fields = {name: value for name, value in given.items() if value is not None}
    receivers = {
        kind: fields.pop(name) for kind, name in RECEIVER_OPTIONS.items() if name in fields
    }
    return {**fields, "receivers": receivers}


def with_parameters(function: F, parameters: list[inspect.Parameter]) -> F:
    """The function, which takes them as ``**options``, with them in its signature.

    Typer and Prefect read there what a function takes. They are keyword-only, and stand before
    its own keyword-only ones.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    first = [each for each in own if each.kind is not each.KEYWORD_ONLY]
    last = [each for each in own if each.kind is each.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*first, *parameters, *last])  # type: ignore[attr-defined]  # inspect reads it from any callable
    return function


def describe_parameters(function: Callable[..., Any], lines: Sequence[str]) -> None:
    """Put lines about parameters into its docstring, in place of ``{of_batch}`` below ``Args:``.

    Since Python 3.13 the compiler takes the indentation away; in the result it is gone in any case.
    """
    words = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = words.replace("{of_batch}", "\n    ".join(lines))


def parameter(option: BatchOption, annotation: Any, default: Any) -> inspect.Parameter:
    """The option as a parameter of a function."""
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
