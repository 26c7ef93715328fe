"""What may be asked of a batch, and which ways in have it: commands, the API, Prefect, the page.

One row is one option. The commands' options, the keys of the API's body and the flows' parameters
are made from the rows; what was given goes into a ``BatchRequest`` under the same name. Where the
files are is no option: each way in says that in its own way.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
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
    NUMBER = int
    TEXT = str
    ENDPOINT = "endpoint"
    """One of those in :mod:`batchyard.lines.endpoints`."""
    WINDOW = "window"
    """A duration, or that there is no hurry."""
    LIFETIME = "lifetime"
    """A duration; in a body an object of OpenAI's."""
    URL = "url"
    """An https URL, which is a secret."""
    ADDRESS = "address"
    """One e-mail address."""
    TEMPLATE = "template"
    """The text of one; on a command line the file that has it."""
    OBJECTS = "objects"
    """The same of several, with an endpoint and a model each."""
    PAIRS = "pairs"
    """Names and texts; on a command line each for itself."""
    OBJECT = dict
    """The value is a set of names and values."""


class Door(StrEnum):
    """A way in that may offer an option. No other has options of its own.

    A Message Batch has Anthropic's shape, and a retry takes what was asked of the first batch. A
    batch of a new file has what the form has.
    """

    SUBMIT = "submit"
    """`batchyard submit`."""
    RUN = "run"
    """`batchyard run`."""
    ESTIMATE = "estimate"
    """`batchyard estimate`, if it changes what to expect of a file."""
    BODY = "body"
    """`POST /v1/batches`. The text is in the OpenAPI document."""
    FORM = "form"
    """The flow `submit-batch`. Prefect records parameters, so a URL with a query or a password is
    refused there."""
    PAGE = "page"
    """The form of the operator's page."""


COMMANDS: Final = frozenset({Door.SUBMIT, Door.RUN})
EVERYWHERE: Final = COMMANDS | {Door.BODY, Door.FORM}


def _in_commands(words: str) -> dict[Door, str]:
    return dict.fromkeys(COMMANDS, words)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """One option, and which ways in have it."""

    name: str
    """In a body and in Prefect; on a command line it has dashes."""
    value: Value
    doors: frozenset[Door]
    words: str
    """What it says of itself, in the commands' help and in the descriptions of body and form."""
    other_words: Mapping[Door, str] = field(default_factory=dict)
    """Where it says something else."""
    choices: type[StrEnum] | None = None
    """What a text may be, the default first; None: anything."""
    default: str | int | None = None
    """What commands and the form begin with; None: nothing."""
    is_required: bool = False
    """A body must have it, as OpenAI's has."""
    flag: str | None = None
    """Its name on a command line, if that is another one."""
    told_by: DeliveryKind | None = None
    """The channel over which it names a receiver, by a URL."""

    def help(self, door: Door) -> str:
        """What it says of itself there."""
        return self.other_words.get(door, self.words)


OPTIONS: Final = (
    BatchOption(
        name="model",
        value=Value.TEXT,
        doors=frozenset({Door.SUBMIT, Door.ESTIMATE, Door.FORM}),
        words="The model that every line must name. Default: the one that the first line names.",
    ),
    BatchOption(
        name="template",
        value=Value.TEMPLATE,
        doors=EVERYWHERE,
        words="A Jinja2 template that makes the body of a request from each row, where the input "
        "is a dataset: Parquet, Arrow or JSON lines.",
    ),
    BatchOption(
        name="endpoint",
        value=Value.ENDPOINT,
        doors=EVERYWHERE | {Door.ESTIMATE, Door.PAGE},
        words="The endpoint that every line must name. Default: lines may name different ones, and "
        "a template's go to /v1/chat/completions.",
        other_words={Door.BODY: "The endpoint that every line must name."},
        is_required=True,
    ),
    BatchOption(
        name="completion_window",
        value=Value.WINDOW,
        doors=EVERYWHERE | {Door.ESTIMATE, Door.PAGE},
        words="How long the batch may take: a number and m, h or d, 30d at most unless the "
        "operator says otherwise. `background`: it runs only when nothing else wants its engine, "
        "and nothing is promised.",
        other_words={Door.ESTIMATE: "Warn if the batch would not be done in this time."},
        default="24h",
        is_required=True,
    ),
    BatchOption(
        name="metadata",
        value=Value.PAIRS,
        doors=EVERYWHERE | {Door.PAGE},
        words='Up to 16 pairs of text, kept with the batch, for example {"team": "search"}.',
        other_words=_in_commands("key=value; you may repeat this option."),
    ),
    BatchOption(
        name="then",
        value=Value.OBJECTS,
        # The parts of a chain are batches, and `batchyard run` runs one batch.
        doors=EVERYWHERE - {Door.RUN},
        words="Further stages that each line goes through, for example "
        '[{"endpoint": "/v1/embeddings", "template": "{\\"input\\": {{ content | tojson }}}"}]. '
        "The results are the last one's answers.",
        other_words=_in_commands("A TOML file of further stages that each line goes through."),
        flag="chain",
    ),
    BatchOption(
        name="priority",
        value=Value.NUMBER,
        doors=frozenset({Door.SUBMIT, Door.BODY, Door.FORM}),
        words="The tenant's batch with the highest priority runs first.",
        default=0,
    ),
    BatchOption(
        name="tenant",
        value=Value.TEXT,
        doors=frozenset({Door.SUBMIT, Door.ESTIMATE, Door.FORM}),
        words="The tenant that the batch belongs to.",
        other_words={
            Door.ESTIMATE: "The tenant whose earlier answers say how long these will be.",
            Door.FORM: "The tenant that the batch belongs to. Empty: the tenant of this "
            "deployment, or `default` if it has none. If it has one, no other tenant can be named.",
        },
    ),
    BatchOption(
        name="output_expires_after",
        value=Value.LIFETIME,
        doors=EVERYWHERE,
        words="How long the result files are kept: a number and m, h or d, from 1h to 30d. "
        "Default: 30 days.",
        other_words={Door.BODY: "How long the result files are kept; 30 days by default."},
    ),
    BatchOption(
        name="webhook_url",
        value=Value.URL,
        doors=EVERYWHERE,
        words="An https URL that gets an event when the batch ends.",
        other_words={
            Door.FORM: "An https URL that gets an event when the batch ends. Prefect records it: "
            "a URL with a query or a password belongs to `batchyard webhooks create` or "
            "`batchyard submit`."
        },
        told_by=DeliveryKind.WEBHOOK,
    ),
    BatchOption(
        name="notify_email",
        value=Value.ADDRESS,
        doors=EVERYWHERE,
        words="An address that gets an e-mail when the batch ends, if a mail server is set up.",
    ),
    BatchOption(
        name="deduplicate",
        value=Value.FLAG,
        doors=EVERYWHERE | {Door.ESTIMATE},
        words="Run identical deterministic requests only once, for all their lines.",
    ),
    BatchOption(
        name="ledger",
        value=Value.FLAG,
        doors=EVERYWHERE,
        words="Keep what each line used and cost, for `batchyard ledger` and "
        "`GET /v1/batches/{batch_id}/ledger`.",
    ),
    BatchOption(
        name="error_threshold",
        value=Value.TEXT,
        doors=EVERYWHERE,
        words="Stop the batch when this many of its lines have failed: a number of lines, `200`, "
        "or a share of the finished ones, `5%`, judged from the 100th on, or from a tenth of a "
        "smaller batch. It ends as `failed`, with what is finished.",
    ),
    BatchOption(
        name="on_invalid",
        value=Value.TEXT,
        doors=EVERYWHERE | {Door.PAGE},
        words="What happens to bad lines. `fail`: the batch fails at validation. `error_file`: "
        "they are in the error file, and the others run.",
        choices=OnInvalid,
    ),
    BatchOption(
        name="on_invalid_output",
        value=Value.OBJECT,
        doors=EVERYWHERE,
        words="What happens to answers that are cut off or not valid JSON: their requests are sent "
        "again, with other parameters, for example "
        '{"finish_reasons": ["length"], "set": {"max_tokens": 4096}}.',
        other_words=_in_commands(
            "Send requests again whose answers are cut off or not valid JSON, with other "
            "parameters: an object in JSON, or @FILE with it."
        ),
    ),
    BatchOption(
        name="validation",
        value=Value.TEXT,
        doors=EVERYWHERE | {Door.ESTIMATE},
        words="What is checked before anything runs. `deep`: also prompts that are too long for "
        "the model, by its own tokenizer, JSON schemas and tools.",
        other_words={
            Door.ESTIMATE: "`deep`: count tokens with the model's own tokenizer, and find prompts "
            "that are too long for it, and bodies that vLLM refuses or reads in part."
        },
        choices=Validation,
    ),
)


def options_of(door: Door) -> list[BatchOption]:
    """The values that it offers."""
    return [option for option in OPTIONS if door in option.doors]


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
