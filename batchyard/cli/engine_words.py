"""The options of a ``batchyard run`` command line that are for the engine.

vLLM has some two hundred options, and new ones with every release. So we know only our own, and
pass all other words on unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typer.core import TyperCommand

from batchyard.engine.vllm_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

_SHORT = frozenset({"-h", "-i", "-o", "-e"})
_LONG = frozenset(
    {
        *("--help", "--input-file", "--output-file", "--errors", "--model", "--engine-url"),
        *("--endpoint", "--completion-window", "--metadata", "--resume"),
        *("--webhook-url", "--notify-email", "--deduplicate"),
        *("--engine-seats", "--exclusive", "--client-rules", "--no-client-rules"),
    }
)
_FLAGS = frozenset(
    {
        *("-h", "--help", "--enable-metrics", "--deduplicate", "--exclusive"),
        *("--client-rules", "--no-client-rules"),
    }
)
_RUN_BATCH_ALONE = frozenset({"--output-tmp-dir", "--enable-metrics", "--url"})
"""Options of `vllm run-batch` that `vllm serve` refuses, and that mean nothing here."""


class PassThroughCommand(TyperCommand):
    """Passes words that are not ours to the engine, unchanged and in their order.

    Click's own way of ignoring unknown options would read ``-ep`` as ``-e p``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our options, and keep the engine's in ``ctx.meta``."""
        ours, engine, left_out = split_options(args)
        ctx.meta["engine_options"] = engine
        ctx.meta["left_out"] = left_out
        return super().parse_args(ctx, ours)


def split_options(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """``(ours, the engine's, the names of those that are left out)``.

    As vLLM does, ``--input_file`` is read as ``--input-file``. After ``--`` every word is the
    engine's.
    """
    ours: list[str] = []
    engine: list[str] = []
    left_out: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            engine += remaining
            break
        name, separator, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name not in _SHORT | _LONG | _RUN_BATCH_ALONE:
            engine.append(word)
            continue
        values = [value] if separator else []
        if not separator and name not in _FLAGS:
            values = [following for following in [next(remaining, None)] if following is not None]
        if name in _RUN_BATCH_ALONE:
            left_out.append(name)
        elif name in _SHORT or not separator:
            ours += [name, *values]
        else:
            ours.append(f"{name}={value}")
    return ours, engine, left_out


def served_names(model: str, engine_options: Sequence[str]) -> tuple[str, ...]:
    """The names that request bodies may carry, by the rules of ``vllm serve``.

    Those of ``--served-model-name``, or else the model itself, and those of LoRA modules. The
    first is the model's own.
    """
    given = _values("--served-model-name", engine_options)
    named_in_file = EngineOptions(engine_options).value("served-model-name")
    names = given or ([named_in_file] if named_in_file else [model])
    adapters = (_adapter_name(value) for value in _values("--lora-modules", engine_options))
    return tuple(dict.fromkeys([*names, *filter(None, adapters)]))


def _values(option: str, words: Sequence[str]) -> list[str]:
    """The values of an option that takes several; of two mentions, the last holds."""
    values: list[str] = []
    for position, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name.replace("_", "-") == option:
            values = [value] if separator else list(_until_option(words[position + 1 :]))
    return values


def _until_option(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("-"):
            return
        yield word


class _Adapter(msgspec.Struct):
    name: str = ""


def _adapter_name(value: str) -> str:
    """Of ``name=path``, or of a JSON object with a name."""
    if not value.startswith("{"):
        return value.partition("=")[0]
    try:
        return msgspec.json.decode(value, type=_Adapter).name
    except msgspec.MsgspecError:
        return ""  # vLLM says so better than we could
