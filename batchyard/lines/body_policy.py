"""Which fields and media URLs a client's request bodies may have. Pure.

An engine takes more than OpenAI's API has: templates that it runs, parameters for its own parts,
URLs that it fetches. What reaches so far into it is refused before anything runs, unless the
operator allows it. The names are those of vLLM 0.32 and of the releases before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REFUSED_FIELDS: Final = {
    "background": "answers before the request is done",
    "chat_template": "is a program that the engine runs",
    "data": "is for a plugin of the engine, which may fetch or read what it names",
    "ec_transfer_params": "is for transfers between engines",
    "guided_decoding_backend": "chooses a part of the engine",
    "kv_transfer_params": "is for transfers between engines",
    "logits_processors": "names code that the engine loads",
    "media_io_kwargs": "sets how the engine decodes media",
    "mm_payload": "is for calls between engines",
    "mm_processor_kwargs": "sets how the engine prepares media",
    "previous_input_messages": "is for calls between engines",
    "previous_response_id": "names an answer that the engine keeps, of any user",
    "priority": "would put the request before those of other batches",
    "prompt_embeds": "puts tensors into the model in place of text",
    "request_id": "is the engine's own name for the request",
    "return_mm_kwargs": "is for calls between engines",
    "session_id": "names state in the engine that others share",
    "vllm_xargs": "is for plugins of the engine",
}
"""Of a request body, and why. ``null``, ``false`` and 0 say nothing, and pass."""

REFUSED_PARTS: Final = frozenset({"audio_embeds", "image_embeds", "prompt_embeds", "video_embeds"})
"""Parts of a message that put tensors into the model."""

REFUSABLE: Final = REFUSED_PARTS | REFUSED_FIELDS.keys()
"""What an operator may allow."""

_CHOICES: Final = frozenset({"n", "best_of"})
_LOGPROBS: Final = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
_NUMBERS: Final = _CHOICES | _LOGPROBS
_LISTS: Final = frozenset(
    {"allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids", "stop_token_ids"}
)
_SCHEMAS: Final = frozenset(
    {
        *("functions", "guided_choice", "guided_json", "output_config", "response_format"),
        *("structured_outputs", "text", "tools"),
    }
)
_CHAT: Final = "/v1/chat/completions"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"
_GRAMMARS: Final = frozenset({"guided_grammar", "guided_regex"})
_GRAMMARS_OF_OUTPUTS: Final = frozenset({"grammar", "regex", "structural_tag"})
_SIZED: Final = _SCHEMAS | _GRAMMARS
_MEDIA: Final = frozenset({"images", "image", "audio", "video", "videos"})
"""Fields of a body that hold media or a list of them, in whatever form."""

_URL_KEYS: Final = frozenset({"audio_url", "file_url", "image_url", "video_url"})
"""Where vLLM looks for media, as the URL itself or an object with ``url``."""
_SOURCE: Final = "source"
"""Where a block of Anthropic's messages has its media: inside, or as the type ``url``."""
_PART_KEYS: Final = _URL_KEYS | REFUSED_PARTS | {_SOURCE}
_NO_MEDIA: Final = _SIZED | {"metadata", "tool_choice"}
"""Fields of a body whose keys are the client's own words."""
_HTTP_URL: Final = re.compile(
    r"https?://([a-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?#][^\s\\]*)?", re.IGNORECASE | re.ASCII
)
"""Whose host every parser finds in the same place: no user name, backslash or space."""


def is_host(name: str) -> bool:
    """Whether ``media_domains`` may hold it: a name or an IPv4 address, nothing around it."""
    return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name) is not None


class Refusal(NamedTuple):
    """Why a body is refused, as an entry of a batch's errors."""

    code: str
    message: str
    param: str


@dataclass(frozen=True, slots=True)
class BodyPolicy:
    """What is accepted. Defaults are OpenAI's limits where it has one, and no field and no URL.

    ``allowed_fields``: of :data:`REFUSED_FIELDS` and :data:`REFUSED_PARTS`. ``media_domains``:
    the only hosts that http and https URLs of media may name; ``data:`` URLs always pass.
    """

    allowed_fields: frozenset[str] = frozenset()
    media_domains: frozenset[str] = frozenset()
    max_choices: int = 8
    max_logprobs: int = 20
    max_stops: int = 4
    max_list_items: int = 1024
    max_schema_bytes: int = 128 * 1024
    max_grammar_bytes: int = 16 * 1024
    _checked: frozenset[str] = field(init=False)
    _limits: dict[str, int] = field(init=False)
    _small_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        refused = frozenset(REFUSED_FIELDS) - self.allowed_fields
        limits = dict.fromkeys(_CHOICES, self.max_choices)
        limits |= dict.fromkeys(_LOGPROBS, self.max_logprobs)
        limits |= dict.fromkeys(_LISTS, self.max_list_items) | {"stop": self.max_stops}
        object.__setattr__(self, "_limits", limits)
        object.__setattr__(self, "_checked", refused | _MEDIA | limits.keys())
        small = min(self.max_grammar_bytes, self.max_schema_bytes)
        object.__setattr__(self, "_small_bytes", small)

    def refusals(
        self, url: str | None, body: dict[str, Any], size: int, braces: int, brackets: int
    ) -> Sequence[Refusal]:
        """What is wrong with ``body``, parsed from a line of ``size`` bytes.

        ``braces`` and ``brackets`` are how often ``{`` and ``[`` stand in the line. They tell of
        most bodies that no media can be in them, and spare the look into every message.
        """
        # The line, its body, and the part that is media: three braces. In a chat it is in the
        # list of a message's parts, within the list of messages.
        may_hold_media = braces > 2 and (brackets > 1 or url != _CHAT)
        if self._checked.isdisjoint(body) and size <= self._small_bytes and not may_hold_media:
            return ()
        found: list[Refusal] = []
        for name in self._checked.intersection(body):
            value, limit = body[name], self._limits.get(name, -1)
            kind = type(value)
            if kind is int and 0 <= value <= limit:
                continue
            if kind is list and len(value) <= limit and name not in _NUMBERS:
                continue
            found += self._check_field(name, value)
        if size > self._small_bytes:
            for name in _SIZED.intersection(body):
                found += self._check_size(name, body[name])
        if may_hold_media:
            found += self._check_media(url, body)
        return sorted(found, key=_param_of) if len(found) > 1 else found

    def _check_field(self, name: str, value: Any) -> Iterator[Refusal]:
        limit = self._limits.get(name)
        if name in REFUSED_FIELDS:
            if value not in (None, False):
                yield _field_refused(name, f"body.{name}", REFUSED_FIELDS[name])
        elif limit is None:
            yield from self._check_media_field(name, value)
        elif name in _NUMBERS:
            yield from _check_number(name, value, limit)
        elif isinstance(value, list | dict) and len(value) > limit:
            message = f"body.{name} may have at most {limit} items here."
            yield Refusal("array_above_max_length", message, f"body.{name}")

    def _check_size(self, name: str, value: Any) -> Iterator[Refusal]:
        if name == "structured_outputs" and isinstance(value, dict):
            for key in sorted(_GRAMMARS_OF_OUTPUTS.intersection(value)):
                yield from _check_bytes(f"{name}.{key}", value[key], self.max_grammar_bytes)
        limit = self.max_grammar_bytes if name in _GRAMMARS else self.max_schema_bytes
        yield from _check_bytes(name, value, limit)

    # -- media ------------------------------------------------------------------------------

    def _check_media(self, url: str | None, body: dict[str, Any]) -> list[Refusal]:
        for name, value in body.items():
            kind = type(value)
            if not (kind is list or kind is dict) or name in _NO_MEDIA or _is_plain(value):
                continue
            if self._may_offend(value):
                is_anthropic = url == _MESSAGES and name == "messages"
                looked_into = _without_arguments(value) if is_anthropic else value
                refusal = self._inside(f"body.{name}", looked_into)
                if refusal is not None:
                    return [refusal]
        tools = body.get("tools") if url == _RESPONSES else None
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and tool.get("server_url") is not None:
                reason = "names a server that the engine would connect to"
                return [_field_refused("server_url", "body.tools", reason)]
        return []

    def _may_offend(self, value: list[Any] | dict[str, Any]) -> bool:
        """Whether :meth:`_inside` needs to look: it writes down where everything is."""
        left: list[Any] = [value]
        while left:
            node = left.pop()
            children = node
            if type(node) is dict:
                for key in _PART_KEYS.intersection(node):
                    if self._check_entry("", key, node[key]) is not None:
                        return True
                if "type" in node and self._check_entry("", "type", node["type"]) is not None:
                    return True
                children = node.values()
            left += [child for child in children if type(child) is dict or type(child) is list]
        return False

    def _inside(self, path: str, value: Any) -> Refusal | None:
        """The first refusal in a list or an object, which is at ``path``."""
        if isinstance(value, dict):
            for key, child in value.items():
                where = f"{path}.{_shown(key)}"
                refusal = self._check_entry(where, key, child) or self._inside(where, child)
                if refusal is not None:
                    return refusal
        elif isinstance(value, list):
            for place, child in enumerate(value):
                refusal = self._inside(f"{path}[{place}]", child)
                if refusal is not None:
                    return refusal
        return None

    def _check_entry(self, path: str, key: str, value: Any) -> Refusal | None:
        """Of an object within a list of parts: what its key says that the value is."""
        if key in _URL_KEYS:
            wanted = value.get("url") if isinstance(value, dict) else value
            for url in wanted if isinstance(wanted, list) else [wanted]:
                if isinstance(url, str) and not self._may_fetch(url):
                    return self._url_refused(path)
            return None
        if key == _SOURCE:
            is_url = isinstance(value, dict) and value.get("type") == "url"
            url = value.get("url") if is_url else None
            may_pass = not isinstance(url, str) or self._may_fetch(url)
            return None if may_pass else self._url_refused(path)
        name = value if key == "type" and isinstance(value, str) else key
        if name in REFUSED_PARTS and name not in self.allowed_fields and value is not None:
            return _field_refused(name, path, "puts tensors into the model")
        return None

    def _check_media_field(self, name: str, value: Any) -> Iterator[Refusal]:
        """A field that is media itself, or a list of them: text that begins like a URL."""
        for url in value if isinstance(value, list) else [value]:
            if isinstance(url, str) and "://" in url[:64] and not self._may_fetch(url):
                yield self._url_refused(f"body.{name}")
                return

    def _may_fetch(self, url: str) -> bool:
        if not url or url[:5].lower() == "data:":
            return True
        match = _HTTP_URL.fullmatch(url) if self.media_domains else None
        return match is not None and match[1].lower() in self.media_domains

    def _url_refused(self, path: str) -> Refusal:
        others = ""
        if self.media_domains:
            others = f", or an http or https URL of {', '.join(sorted(self.media_domains))}"
        message = f"{path} must be a data: URL{others}: the engine fetches nothing else here."
        return Refusal("media_url_refused", message, path)


_param_of = attrgetter("param")


def _is_plain(value: list[Any] | dict[str, Any]) -> bool:
    """Whether it is a list of texts and numbers, or of objects that hold nothing else.

    So are the messages of most chats, and no media can be in them.
    """
    if type(value) is not list:
        return False
    for item in value:
        kind = type(item)
        if kind is dict:
            for inner in item.values():
                if type(inner) is not str:
                    return False
            if not _PART_KEYS.isdisjoint(item) or item.get("type") in REFUSED_PARTS:
                return False
        elif kind is list:
            return False
    return True


def _without_arguments(messages: Any) -> Any:
    """Anthropic's messages without the arguments of tools, whose keys are the client's own words.

    vLLM writes the ``input`` of a ``tool_use`` block down as JSON. It does so with the blocks of a
    message only, so what looks like one anywhere else, as in the content of a result, is kept.
    """
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": [_without_input(block) for block in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _without_input(block: Any) -> Any:
    if not isinstance(block, dict) or block.get("type") != "tool_use":
        return block
    return {key: value for key, value in block.items() if key != "input"}


def _field_refused(name: str, param: str, reason: str) -> Refusal:
    message = (
        f"{param} is not accepted here, for {name} {reason}: leave it out. An operator may allow "
        "it (BATCHYARD_BODIES__ALLOWED_FIELDS)."
    )
    return Refusal("unsupported_parameter", message, param)


def _check_number(name: str, value: Any, limit: int) -> Iterator[Refusal]:
    param = f"body.{name}"
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int | float):
        # Engines read numbers out of strings.
        yield Refusal("invalid_request", f"{param} must be a number.", param)
    elif not 0 <= value <= limit:
        message = f"{param} must be between 0 and {limit} here."
        yield Refusal("integer_above_max_value", message, param)


def _check_bytes(name: str, value: Any, limit: int) -> Iterator[Refusal]:
    if len(msgspec.json.encode(value)) > limit:
        message = f"body.{name} is larger than the {limit} bytes that are accepted here."
        yield Refusal("schema_too_large", message, f"body.{name}")


def _shown(key: str) -> str:
    return re.sub(r"[^\w.:-]", "?", key)[:40]
