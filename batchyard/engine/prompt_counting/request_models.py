"""What vLLM says of a request before it runs it: by its own request models and its own rules.

Imported by ``script.py``, in the engine's environment. As a program of its own there, it answers
any request with the routes that it knows, as an OpenAPI document like that of vLLM's server.

A request is given to the model that vLLM's route has for it, its options to vLLM's check of them,
and its schema to the library that makes answers of it. What vLLM would find out later (media, an
adapter's name) is not known here.

Written for vLLM 0.32. Where another release has its models elsewhere, nothing is known: that is
said, and nothing is refused.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODELS: Final = {
    "/v1/chat/completions": (
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest",
    ),
    "/v1/completions": ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    "/v1/embeddings": ("vllm.entrypoints.pooling.embed.protocol", "EmbeddingRequest"),
    "/v1/messages": ("vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
    "/v1/responses": ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
}
_ANTHROPIC: Final = ("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages")
"""What makes a chat of a message."""
_CLIENT_ERROR: Final = "VLLMClientError"
_SCHEMA_SECONDS: Final = 120.0
"""For all schemas of one input: one can be written so that compiling it takes forever."""
_MOST_SCHEMAS: Final = 10_000
"""Whose verdicts are remembered: most files have a handful."""
_SHOWN_CHARS: Final = 300
_INVALID: Final = "invalid_request"
_INNER: Final = ("response_format", "json_schema")
"""Objects of which vLLM reads nothing but the fields of their models. Of tools, a template may read
any; in messages, a processor."""
_ORIGIN: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class Refusal(NamedTuple):
    """An entry of a batch's errors."""

    code: str
    message: str
    param: str


class NotKnown(Exception):
    """Raised when this vLLM is not as expected."""


class Refused(Exception):
    """vLLM refuses the request."""

    def __init__(self, message: str, param: str = "body", code: str = _INVALID) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message, param)


class RequestModels:
    """vLLM's request models, loaded as they are needed.

    ``setup`` is that of ``script.py``, ``vocabulary`` the number of the model's tokens; None: it is
    not known.
    """

    def __init__(self, setup: dict[str, Any], tokenizer: Any, vocabulary: int | None) -> None:
        self._setup = setup
        self._tokenizer = tokenizer
        self._model_config = SimpleNamespace(
            is_diffusion=False,
            max_logprobs=setup.get("max_logprobs", 20),
            get_vocab_size=lambda: _known(vocabulary),
        )
        self._adapters: dict[str, Any] = {}
        self._schema_seconds = _SCHEMA_SECONDS
        self._verdicts: dict[str, str | None] = {}
        """Why a schema cannot be used, None: it can; by all that is asked of the answer."""

    def refusals(self, url: str, body: dict[str, Any]) -> list[Refusal] | None:
        """Why vLLM refuses the request, or which fields it ignores; None: it is not known.

        ``body`` is changed.
        """
        given = [name for name, value in body.items() if value is not None]
        try:
            parsed = self._parsed(url, body)
            unknown = list(_unknown(parsed, given, body))
            self._check(url, parsed, body)
        except Refused as refused:
            return [refused.refusal]
        except NotKnown:
            return None
        return unknown

    def _parsed(self, url: str, body: dict[str, Any]) -> Any:
        """The body as the engine reads it."""
        adapter = self._adapter(url)
        try:
            return adapter.validate_python(body)
        except Exception as error:
            raise _refused(error, body) from error

    def _adapter(self, url: str) -> Any:
        if url not in _MODELS:
            raise NotKnown
        if url not in self._adapters:
            model = _attribute(*_MODELS[url])
            self._adapters[url] = importlib.import_module("pydantic").TypeAdapter(model)
        return self._adapters[url]

    def _check(self, url: str, parsed: Any, body: dict[str, Any]) -> None:
        """Raises :class:`Refused` for what vLLM finds once it has read the body."""
        if url == "/v1/embeddings":
            return
        for name in ("messages", "prompt", "input"):
            if body.get(name) == []:
                raise Refused(f"body.{name} must not be empty.", f"body.{name}")
        try:
            chat = _as_chat(parsed) if url == "/v1/messages" else parsed
            if url != "/v1/responses":
                self._check_tools(chat)
            for number, message in enumerate(getattr(chat, "messages", ())):
                _read_parts(message, number, body)
            if not getattr(chat, "use_beam_search", False):
                self._check_options(chat)
        except (Refused, NotKnown):
            raise
        except Exception as error:
            raise _refused(error, body) from error

    def _check_tools(self, chat: Any) -> None:
        """As vLLM's renderer of chats: what may call a tool needs a parser of such calls.

        vLLM 0.32 reads ``--tool-call-parser`` only beside ``--enable-auto-tool-choice``.
        """
        choice = getattr(chat, "tool_choice", None)
        if choice not in (None, "none") and not self._setup["has_tool_parser"]:
            raise Refused(
                'The engine takes tools with the tool_choice "none" only, as its options lack '
                "--enable-auto-tool-choice and --tool-call-parser.",
                "body.tools",
            )

    def _check_options(self, request: Any) -> None:
        limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        given = (getattr(request, name, None) for name in limits)
        limit = next((each for each in given if each is not None), 1)
        params = request.to_sampling_params(limit, {})
        outputs, params.structured_outputs = params.structured_outputs, None
        params.verify(self._model_config, None, None, self._tokenizer)
        if outputs is not None:
            why = self._why_not(params, outputs)
            if why is not None:
                raise Refused(
                    f"The engine cannot make answers of this form: {why}",
                    _format_param(request),
                    "invalid_json_schema",
                )

    def _why_not(self, params: Any, outputs: Any) -> str | None:
        """Why the engine's library cannot make answers of this form; each is tried once."""
        key = json.dumps(vars(outputs), default=str)
        if key not in self._verdicts and self._schema_seconds > 0:
            began = time.monotonic()
            backend = self._setup.get("structured_backend") or "auto"
            config = SimpleNamespace(backend=backend, disable_any_whitespace=False)
            params.structured_outputs = outputs
            if len(self._verdicts) >= _MOST_SCHEMAS:
                self._verdicts.clear()
            try:
                params._validate_structured_outputs(  # noqa: SLF001 - what the engine calls
                    self._model_config, config, self._tokenizer
                )
                self._verdicts[key] = None
            except Exception as error:  # noqa: BLE001 - another vLLM than this was written for
                self._verdicts[key] = _words(error) if _is_of_client(error) else None
            finally:
                self._schema_seconds -= time.monotonic() - began
        return self._verdicts.get(key)


def _unknown(parsed: Any, given: list[str], body: dict[str, Any]) -> list[Refusal]:
    """The fields of which the engine's models know nothing, so that it ignores them."""
    found = [name for name in given if name not in _names(type(parsed))]
    inner, path = parsed, ""
    holder: Any = body
    for name in _INNER:
        inner, holder = getattr(inner, name, None), holder.get(name)
        path += f"{name}."
        if not hasattr(inner, "model_fields_set") or not isinstance(holder, dict):
            break
        found += [path + each for each in holder if each not in _names(type(inner))]
    return [
        Refusal("unknown_parameter", f"The engine ignores {param}.", param)
        for param in (f"body.{_shown(each)}" for each in found)
    ]


_NAMES: dict[type, frozenset[str]] = {}


def _names(model: Any) -> frozenset[str]:
    """The fields of a model, as a body may write them."""
    if model not in _NAMES:
        fields = model.model_fields
        written = {field.alias or name for name, field in fields.items()}
        by_name = model.model_config.get("populate_by_name") or model.model_config.get(
            "validate_by_name"
        )
        _NAMES[model] = frozenset(written | (set(fields) if by_name else set()))
    return _NAMES[model]


def _as_chat(parsed: Any) -> Any:
    """The chat that the engine makes of Anthropic's request."""
    return _attribute(*_ANTHROPIC).to_chat_completion_request(parsed)


def _read_parts(message: Any, number: int, body: dict[str, Any]) -> None:
    """Have each part of a message checked, which the model puts off until it is read."""
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str):
        return
    try:
        for _ in content:
            pass
    except Exception as error:
        raise _refused(error, body, "messages", number, "content") from error


def _format_param(request: Any) -> str:
    """The field that says what form the answer has."""
    names = ("structured_outputs", "response_format", "text", "output_config")
    given = getattr(request, "model_fields_set", ())
    return next((f"body.{name}" for name in names if name in given), "body")


def _refused(error: Exception, body: dict[str, Any], *place: int | str) -> Exception:
    """What an error of vLLM's means that it has found in this place of the body."""
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a choice of models, each says what it lacks: the one that got furthest was meant.
        path, message = max(
            ((_path((*place, *each["loc"]), body), each["msg"]) for each in details),
            key=lambda found: found[0].count(".") + found[0].count("["),
        )
        return Refused(f"{path}: {message}"[:_SHOWN_CHARS], path)
    if _is_of_client(error):
        named = getattr(error, "parameter", None)
        param = f"body.{named}" if named and str(named).split(".")[0] in body else "body"
        return Refused(_words(error), param)
    return NotKnown(type(error).__name__)


def _is_of_client(error: Exception) -> bool:
    """Whether vLLM answers it with a 4xx. Not TypeError, for which this may be the reason."""
    kinds = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, ValueError) or _CLIENT_ERROR in kinds


def _words(error: Exception) -> str:
    message = str(error.args[0]) if error.args else type(error).__name__
    # The values of all fields, and where in its own code a library has found it, and when.
    message = _ORIGIN.sub("", message.partition(": {'")[0])
    return " ".join(message.split())[:_SHOWN_CHARS]


def _path(place: tuple[int | str, ...], body: Any) -> str:
    """Where in the body it is, without the names of models among the fields."""
    path, value = "body", body
    for last, each in enumerate(place, 1 - len(place)):
        if isinstance(each, int) and isinstance(value, list) and each < len(value):
            path, value = f"{path}[{each}]", value[each]
        elif isinstance(value, dict) and each in value:
            path, value = f"{path}.{_shown(each)}", value[each]
        elif not last and isinstance(each, str) and isinstance(value, dict) and each.islower():
            path = f"{path}.{_shown(each)}"  # what is missing
    return path


def _shown(name: object) -> str:
    """A client's own word, as it may stand in a message."""
    kept = "".join(c if c.isalnum() or c in "_.-" else "?" for c in str(name)[:40])
    return kept or "?"


def description() -> dict[str, Any]:
    """The routes and what their bodies may have, as OpenAPI describes them."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for url, place in _MODELS.items():
        adapter = importlib.import_module("pydantic").TypeAdapter(_attribute(*place))
        schema = adapter.json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        body = {"content": {"application/json": {"schema": schema}}}
        paths[url] = {"post": {"requestBody": body}}
    return {"paths": paths, "components": {"schemas": schemas}}


def _known(value: int | None) -> int:
    if value is None:
        raise NotKnown
    return value


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotKnown from error


def answers(requests: Iterator[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The description, for each request."""
    for _ in requests:
        yield True, json.dumps(description()).encode()
