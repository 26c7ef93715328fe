"""Counts the tokens of requests with the model's own tokenizer, and has vLLM check them.

Loaded by the engine environment's Python (``processes/child_loop.py``), never imported:
``counter.py`` is the other side. Requests and answers are JSON. The first request is the setup;
each further one is a list of ``[url, body]``, answered by a list of
``[tokens, longest, is_exact, refusals]``. ``tokens`` are those of all prompts of the body and
``longest`` those of its longest one, both null where that is not known. Where a part of a prompt
cannot be counted (media, tools as this vLLM writes them), they are what the rest certainly has, and
``is_exact`` is false. ``refusals`` are what ``request_models.py`` finds, null where it does not
know.

It renders as vLLM 0.32 does (``renderers/hf.py`` and ``chat_utils.py``) with the parts of
transformers that vLLM uses. It uses no GPU and loads nothing from the network.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.engine.prompt_counting.request_models import RequestModels
else:
    # Beside this file, which is no module here.
    from request_models import RequestModels

_LONGEST_TEXT = 4_000_000
"""Characters that are tokenized where the length of the context is not known."""
_LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Of config.json, as vLLM looks for them: the smallest counts. Not ``model_max_length``, which
overrules them for some models."""
_UNSCALED_ROPE = frozenset({None, "default", "llama3", "yarn", "deepseek_yarn"})
_OWN_RENDERERS = re.compile(r"gpt_oss|deepseek_v(32|4)|kimi|inkling|terratorch")
"""Model types whose chats vLLM renders by code of its own."""
_BILLING = "x-anthropic-billing-header"
"""vLLM takes a system text's first line away if it begins so."""
_ITERATES_CONTENT = re.compile(r"\{%-?\s*for\s+\w+\s+in\s+[^%]*content")
"""A template that vLLM may give contents as lists of parts."""

Text = tuple[str, bool]
"""A prompt, and whether the tokenizer adds its special tokens."""


class NotCountable(Exception):
    """Nothing certain can be said of this prompt."""


class Prompt:
    """One prompt of a body: token ids, or ways in which it may be rendered."""

    def __init__(self, *texts: Text, tokens: int = 0, is_whole: bool = True) -> None:
        self.texts = texts
        self.tokens = tokens
        self.is_whole = is_whole
        """Nothing of it is left out."""

    def count(self, counts: dict[Text, int]) -> tuple[int, bool]:
        """The least that it has, and whether it has no more."""
        ways = [counts[text] for text in self.texts] or [self.tokens]
        return min(ways), self.is_whole and min(ways) == max(ways)


class Counter:
    """The tokenizer of one model, and what is known of the engine's options."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        model = setup["model"]
        revision = setup.get("revision")
        config = _read_json(_model_file(model, "config.json", revision)) or {}
        _check_tokenizer_kind(setup, config)
        transformers = importlib.import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            setup.get("tokenizer") or model,
            revision=setup.get("tokenizer_revision") or revision,
            trust_remote_code=bool(setup.get("trust_remote_code")),
            local_files_only=True,
        )
        self.max_model_len = setup.get("max_model_len") or _context_of(setup, model, config)
        self._chars_per_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self._renders_chats = _renders_as_transformers(setup, model, config)
        self._lowers = any(_lowers(path) for path in Path(model).glob("sentence_*_config.json"))
        self._own_names = frozenset(
            inspect.signature(self.tokenizer.apply_chat_template).parameters
        )
        self._template = _given_template(setup.get("chat_template"))
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        self._backend = backend
        text_config = config.get("text_config", config)
        self._models = RequestModels(
            # Of this model vLLM reads calls without being told how.
            {**setup, "has_tool_parser": True} if _is_harmony(config) else setup,
            self.tokenizer,
            text_config.get("vocab_size"),
        )

    def answer(self, requests: list[list[Any]]) -> list[list[Any]]:
        """``[tokens, longest, is_exact, refusals]`` of each."""
        prompts = [self._prompts_or_none(url, body) for url, body in requests]
        counts = self._counts({text for each in prompts for p in each or () for text in p.texts})
        answers: list[list[Any]] = []
        for (url, body), found in zip(requests, prompts, strict=True):
            # Last: it changes the body.
            refusals = self._models.refusals(url, body)
            if found is None:
                answers.append([None, None, False, refusals])
                continue
            each = [prompt.count(counts) for prompt in found]
            tokens = [number for number, _ in each]
            answers.append([sum(tokens), max(tokens), all(sure for _, sure in each), refusals])
        return answers

    # -- tokens -----------------------------------------------------------------------------

    def _counts(self, texts: set[Text]) -> dict[Text, int]:
        counts: dict[Text, int] = {}
        longest = (self.max_model_len or 0) * self._chars_per_token or _LONGEST_TEXT
        for special in (False, True):
            wanted = []
            for each in texts:
                if each[1] is special and len(each[0]) > longest:
                    # vLLM refuses it by its characters, too.
                    counts[each] = -(-len(each[0]) // self._chars_per_token)
                elif each[1] is special:
                    wanted.append(each)
            found = self._encode([text for text, _ in wanted], special=special)
            counts.update(zip(wanted, found, strict=True))
        return counts

    def _encode(self, texts: list[str], *, special: bool) -> list[int]:
        if self._backend is None:
            encode = self.tokenizer.encode
            return [len(encode(text, add_special_tokens=special)) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special)
        return list(map(len, encodings))

    # -- prompts ----------------------------------------------------------------------------

    def _prompts_or_none(self, url: str, body: dict[str, Any]) -> list[Prompt] | None:
        try:
            return self._prompts(url, body) or None
        except Exception:  # noqa: BLE001 - as the next line says
            # A body that is not as it should be, or a template that refuses it: the engine says.
            return None

    def _prompts(self, url: str, body: dict[str, Any]) -> list[Prompt]:
        if url == "/v1/completions":
            return _plain_prompts(body["prompt"], special=body.get("add_special_tokens", True))
        if url == "/v1/embeddings" and not self._lowers:
            return _plain_prompts(body["input"], special=body.get("add_special_tokens", True))
        if not self._renders_chats:
            raise NotCountable
        if url == "/v1/chat/completions":
            return [self._chat(body["messages"], body)]
        if url == "/v1/responses":
            return [self._chat(_messages_of_response(body), body)]
        if url == "/v1/messages":
            return [self._chat(_messages_of_anthropic(body), {"messages": body["messages"]})]
        raise NotCountable

    def _chat(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> Prompt:
        if body.get("chat_template") is not None or body.get("kv_transfer_params"):
            raise NotCountable
        tools = None if body.get("tool_choice") == "none" else _plain_tools(body.get("tools"))
        template = self.tokenizer.get_chat_template(self._template, tools=tools)
        kwargs = _template_kwargs(body, self._setup.get("template_kwargs") or {})
        if not self._own_names.isdisjoint(kwargs):
            raise NotCountable
        special = bool(body.get("add_special_tokens", False))
        texts = []
        for as_parts in self._formats(template):
            conversation = _conversation(messages, as_parts=as_parts)
            if '"developer"' not in template and "'developer'" not in template:
                conversation = _without_developer(conversation)
            with contextlib.suppress(Exception):
                text = self.tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=body.get("add_generation_prompt", True),
                    continue_final_message=body.get("continue_final_message", False),
                    documents=body.get("documents"),
                    **kwargs,
                )
                texts.append((text, special))
        if not texts:
            raise NotCountable
        is_whole = not body.get("tools") and all(map(_is_text_only, messages))
        return Prompt(*texts, is_whole=is_whole)

    def _formats(self, template: str) -> tuple[bool, ...]:
        """Whether contents are lists of parts; both where only vLLM knows."""
        given = self._setup.get("content_format")
        if given in {"string", "openai"}:
            return (given == "openai",)
        return (False, True) if _ITERATES_CONTENT.search(template) else (False,)


def _plain_prompts(value: Any, *, special: bool) -> list[Prompt]:
    """A text, a list of token ids, or a list of either."""
    if isinstance(value, str):
        return [Prompt((value, special))]
    if value and all(type(each) is int for each in value):
        return [Prompt(tokens=len(value))]
    return [prompt for each in value for prompt in _plain_prompts(each, special=special)]


def _messages_of_response(body: dict[str, Any]) -> list[dict[str, Any]]:
    given, instructions = body["input"], body.get("instructions")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if any(set(each) - {"role", "content", "type"} for each in messages):
        raise NotCountable
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _messages_of_anthropic(body: dict[str, Any]) -> list[dict[str, Any]]:
    system, messages = body.get("system"), body["messages"]
    if body.get("tools") or not isinstance(system, str | None):
        raise NotCountable
    if not all(isinstance(each["content"], str) for each in messages):
        raise NotCountable
    return [{"role": "system", "content": system}, *messages] if system else messages


def _conversation(messages: list[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
    """What vLLM gives to the template, without what is not text."""
    conversation = []
    for message in messages:
        role, texts = message["role"], _texts(message.get("content"))
        if role == "system":
            texts = [text for text in texts if not text.startswith(_BILLING)]
        content: Any = "\n".join(texts)
        if as_parts and role != "tool":
            content = [{"type": "text", "text": text} for text in texts]
        made: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            if message.get("tool_calls"):
                made["tool_calls"] = list(map(_parsed_call, message["tool_calls"]))
            if message.get("reasoning") is not None:
                made["reasoning"] = made["reasoning_content"] = message["reasoning"]
        for key in ("name", "tool_call_id") if role == "tool" else ("name",):
            if isinstance(message.get(key), str):
                made[key] = message[key]
        conversation.append(made)
    return conversation


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = (each if isinstance(each, str) else each.get("text") for each in content)
    return [text for text in texts if isinstance(text, str)]


def _is_text_only(message: dict[str, Any]) -> bool:
    """Whether all of its content is counted."""
    content = message.get("content")
    if message.get("tool_calls"):
        return False
    if not isinstance(content, list):
        return not (isinstance(content, str) and content.startswith(_BILLING))
    return all(isinstance(each, str) or set(each) == {"type", "text"} for each in content)


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _without_developer(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = [each["role"] for each in conversation]
    if "developer" not in roles:
        return conversation
    if any(role in {"developer", "system"} for role in roles[1:]):
        raise NotCountable  # vLLM joins them
    return [{**conversation[0], "role": "system"}, *conversation[1:]]


def _plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Only what every vLLM writes of them: each release adds fields with defaults."""
    if not tools:
        return None
    names = ("name", "description", "parameters")
    functions = [each.get("function", each) for each in tools]
    return [
        {"type": "function", "function": {name: each[name] for name in names if name in each}}
        for each in functions
    ]


def _template_kwargs(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kwargs = defaults | (body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
    return kwargs


# -- the model's files ----------------------------------------------------------------------


def _check_tokenizer_kind(setup: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises ValueError for a tokenizer that is not one of transformers in this vLLM."""
    mode = setup.get("tokenizer_mode") or "auto"
    if mode not in {"auto", "hf"}:
        raise ValueError(f"the engine uses the tokenizer mode {mode}")
    tokenizer = setup.get("tokenizer") or setup["model"]
    is_mistral = _model_file(tokenizer, "tekken.json", setup.get("tokenizer_revision"))
    if mode == "auto" and (is_mistral or any(Path(tokenizer).glob("tokenizer.model.v*"))):
        raise ValueError("the engine uses a tokenizer of Mistral's")
    if "terratorch" in str(config.get("model_type")):
        raise ValueError("the model has no tokenizer")


def _is_harmony(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "gpt_oss"


def _renders_as_transformers(setup: dict[str, Any], model: str, config: dict[str, Any]) -> bool:
    """Not by code of vLLM's own, nor by the template of a processor, which vLLM prefers."""
    if _OWN_RENDERERS.search(str(config.get("model_type"))):
        return False
    revision = setup.get("revision")
    processor = _read_json(_model_file(model, "processor_config.json", revision)) or {}
    has_another = "chat_template" in processor or _model_file(model, "chat_template.json", revision)
    return setup.get("chat_template") is not None or not has_another


def _given_template(given: str | None) -> str | None:
    """The text of a template that is a path, as vLLM takes it; or the template itself."""
    if given is None or "{" in given:
        return given
    return Path(given).read_text()


def _context_of(setup: dict[str, Any], model: str, config: dict[str, Any]) -> int | None:
    """The engine's ``max_model_len``, where config.json leaves no doubt of it."""
    if setup.get("is_context_doubtful"):
        return None
    if any(Path(model).glob("sentence_*_config.json")):
        return None
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict) or "model_max_length" in text_config:
        return None
    ropes = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    inner = [each for each in ropes.values() if isinstance(each, dict)]
    for rope in inner or [ropes]:
        if rope.get("rope_type", rope.get("type")) not in _UNSCALED_ROPE:
            return None
        if rope.get("rope_type", rope.get("type")) in {None, "default"} and "factor" in rope:
            return None
    lengths = [text_config.get(key) for key in _LENGTH_KEYS]
    known = [length for length in lengths if type(length) is int and length > 0]
    return min(known) if known and "max_position_embeddings" in text_config else None


def _model_file(model: str, name: str, revision: str | None) -> Path | None:
    """A file of the model, in its folder or in the cache of the hub."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    hub = importlib.import_module("huggingface_hub")
    found = hub.try_to_load_from_cache(model, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _lowers(path: Path) -> bool:
    """Whether the engine tokenizes texts in lower case."""
    return bool((_read_json(path) or {}).get("do_lower_case"))


def _read_json(path: Path | None) -> dict[str, Any] | None:
    return None if path is None else json.loads(path.read_text())


# -- the process ----------------------------------------------------------------------------


def answers(requests: Iterator[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The answer to the setup, and to each list of requests."""
    try:
        counter = Counter(json.loads(next(requests)))
    except Exception as error:  # noqa: BLE001 - the other side says it
        words = str(error).strip().partition("\n")[0][:300]
        yield True, _encode({"error": f"{type(error).__name__}: {words}"})
        return
    yield True, _encode({"max_model_len": counter.max_model_len})
    for request in requests:
        yield True, _encode(counter.answer(json.loads(request)))


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()
