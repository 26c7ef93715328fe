"""Adapters (LoRA) of an engine that we start: what vLLM is told of them.

vLLM reserves room for ``--max-loras`` adapters of ``--max-lora-rank`` on its device, whatever is
used of it, and runs requests of so many adapters at once. Requests of others wait until one of
these has none any more. ``--max-cpu-loras`` are kept in main memory; what is not there is read
from disk again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.engine.vllm.vllm_options import EngineOptions, is_path
from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ones for which vLLM 0.32 has room."""
_MOST_AT_ONCE: Final = 4
"""One batch has two in the engine, as one ends and the next begins. More cost memory on the device:
84 MB each of rank 16, for all linear layers of a model of eight billion weights in 16 bits."""
_CONFIG: Final = "adapter_config.json"
_OURS: Final = "lora-modules"


def check_options(adapters: Mapping[str, str], options: EngineOptions) -> None:
    """Raise ``ValueError`` where the operator's options say the same or the opposite."""
    if not adapters:
        return
    if _OURS in options:
        raise ValueError(f"adapters sets --{_OURS}, which the options have too: leave one out.")
    if "enable-lora" in options and options.value("enable-lora") is None:
        raise ValueError("adapters need --enable-lora: leave --no-enable-lora out.")


def module_names(options: Sequence[str]) -> list[str]:
    """The names in an operator's own ``--lora-modules``."""
    return list(filter(None, map(_module_name, EngineOptions(options).values(_OURS))))


class _Module(msgspec.Struct):
    name: str = ""


def _module_name(value: str) -> str:
    """Of ``name=path``, or of a JSON object with a name."""
    if not value.startswith("{"):
        return value.partition("=")[0]
    try:
        return msgspec.json.decode(value, type=_Module).name
    except msgspec.MsgspecError:
        return ""  # vLLM says what is wrong with it


def lora_options(
    adapters: Mapping[str, str], options: EngineOptions, *, on_cpu: bool = False
) -> list[str]:
    """The options for ``adapters``, paths or repositories by name, that the operator left open.

    Reads the adapters' files. Raises :class:`~batchyard.errors.SettingsError` for an adapter
    that cannot be used, and for options with which answers would be wrong.
    """
    count = len(adapters) + len(module_names(options.words))
    at_once = _at_once(count, options, on_cpu=on_cpu)
    words: list[str] = []

    def default(name: str, *values: str) -> None:
        if name not in options:
            words.extend((f"--{name}", *values))

    if adapters:
        folders = {name: folder_of(path) for name, path in adapters.items()}
        ranks = [_rank(name, folder) for name, folder in folders.items() if folder is not None]
        modules = [
            {"name": name, "path": str(folders[name] or adapters[name])} for name in adapters
        ]
        default(_OURS, *map(json.dumps, modules))
        default("enable-lora")
        default("max-cpu-loras", str(max(at_once, count)))
        if ranks:
            # vLLM's own is 16, whatever the adapters need.
            default("max-lora-rank", str(_room_for(max(ranks))))
    if adapters or (count and on_cpu):
        default("max-loras", str(at_once))
    return words


def _at_once(count: int, options: EngineOptions, *, on_cpu: bool) -> int:
    """How many adapters run at once, of so many.

    On CPUs, vLLM 0.32 gives requests of the model itself the adapter in the last place, if they
    run in one step with requests of an adapter. There is none if the places are more than the
    adapters: it fills the first free one.
    """
    given = options.number("max-loras")
    if given is None:
        return count + 1 if on_cpu else min(count, _MOST_AT_ONCE)
    if on_cpu and count and given <= count:
        raise SettingsError(
            f"On a CPU, --max-loras {given} would give wrong answers for the model itself: leave "
            f"it out, or give {count + 1}, one more than there are adapters."
        )
    return given


def folder_of(path: str) -> Path | None:
    """The adapter's folder on this machine; None: it is a repository of the hub."""
    folder = Path(path).expanduser()
    if is_path(str(folder)) or path.startswith(("/", "./", "../", "~")):
        return folder
    return None


def are_here(adapters: Iterable[str]) -> bool:
    """Whether none of these paths is a repository of the hub."""
    return all(folder_of(path) is not None for path in adapters)


def _rank(name: str, folder: Path) -> int:
    if not folder.is_dir():
        raise SettingsError(
            f"The adapter {name} has its weights at {folder}, which is not a folder on this "
            "machine."
        )
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
    except FileNotFoundError:
        raise SettingsError(
            f"The adapter {name} has no {_CONFIG} in {folder}: is that a LoRA adapter, as PEFT "
            "saves one?"
        ) from None
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"The {_CONFIG} of the adapter {name} in {folder} cannot be read "
            f"({type(error).__name__})."
        ) from error
    rank = _greatest_rank(config)
    if rank is None:
        raise SettingsError(
            f"The {_CONFIG} of the adapter {name} in {folder} has no rank: `r` must be a number "
            f"from 1 to {_RANKS[-1]}."
        )
    return rank


def _greatest_rank(config: Any) -> int | None:
    """``r``, or the greatest one of single modules."""
    if not isinstance(config, dict):
        return None
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    known = [rank for rank in ranks if isinstance(rank, int) and 0 < rank <= _RANKS[-1]]
    return max(known) if len(known) == len(ranks) else None


def _room_for(rank: int) -> int:
    return next(room for room in _RANKS if room >= rank)
