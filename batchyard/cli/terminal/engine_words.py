"""The options of a ``batchyard run`` command line that are for the engine.

vLLM has some two hundred options, and new ones with every release. So we know only our own, and
pass all other words on unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import BadParameter
from typer.core import TyperCommand

from batchyard.engine.vllm.lora import module_names
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.engine.withdrawn import WITHDRAWN, field_of, why_withdrawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_RUN_BATCH_ALONE = {
    "--enable-metrics": True,
    "--max-inflight": False,  # from vLLM 0.33 on
    "--output-tmp-dir": False,
    "--url": False,
}
"""Options of `vllm run-batch` that `vllm serve` refuses, and that mean nothing here; by whether
they are flags."""


class PassThroughCommand(TyperCommand):
    """Passes words that are not ours to the engine, unchanged and in their order.

    Click's own way of ignoring unknown options would read ``-ep`` as ``-e p``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our options, and keep the engine's in ``ctx.meta``."""
        ours, engine, left_out = split_options(args, self.own_options(ctx))
        ctx.meta["engine_options"] = engine
        ctx.meta["left_out"] = left_out
        return super().parse_args(ctx, ours)

    def own_options(self, ctx: Any) -> dict[str, bool]:
        """The command's own options, by whether they are flags."""
        return {
            name: getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }


def split_options(
    words: Sequence[str], own: Mapping[str, bool]
) -> tuple[list[str], list[str], list[str]]:
    """``(ours, the engine's, the names of those that are left out)``.

    ``own``: the names of ours, and whether each is a flag, which has no value. As vLLM does,
    ``--input_file`` is read as ``--input-file``. After ``--`` every word is the engine's. Raises
    ``typer.BadParameter`` for an option that was ours before.
    """
    known = {**own, **_RUN_BATCH_ALONE}
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
        if name not in known:
            if (field := field_of(name)) in WITHDRAWN:
                raise BadParameter(why_withdrawn(field, name))
            engine.append(word)
            continue
        values = [value] if separator else []
        if not separator and not known[name]:
            values = [following for following in [next(remaining, None)] if following is not None]
        if name in _RUN_BATCH_ALONE:
            left_out.append(name)
        elif not name.startswith("--") or not separator:
            ours += [name, *values]
        else:
            ours.append(f"{name}={value}")
    return ours, engine, left_out


def served_names(model: str, engine_options: Sequence[str]) -> tuple[str, ...]:
    """The names that request bodies may carry, by the rules of ``vllm serve``.

    Those of ``--served-model-name``, or else the model itself, and those of LoRA modules. The
    first is the model's own.
    """
    options = EngineOptions(engine_options)
    named_in_file = options.value("served-model-name")
    names = options.values("served-model-name") or ([named_in_file] if named_in_file else [model])
    return tuple(dict.fromkeys([*names, *module_names(engine_options)]))
