"""Which models engines serve, and which adapters of theirs: what the model of a line means. Pure.

An adapter (LoRA) changes the weights of one model, by little enough that the model's engine has
several beside it. It has a name of its own, which lines carry in place of the model's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MOST_NAME_CHARS: Final = 200
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.:@+-]*(/[A-Za-z0-9][\w.:@+-]*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Offer:
    """``adapters``: by an adapter's name, its model. ``models`` None: any name may be a model's.

    Not ``is_known``: what there is now could not be read.
    """

    models: frozenset[str] | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    is_known: bool = True

    @classmethod
    def of(cls, adapters_of: Mapping[str, Iterable[str]]) -> Offer:
        """``adapters_of``: by model, the names of its adapters.

        A name that stands for several things is the model's, and no adapter's of several models:
        an answer of the wrong one would be taken for the right one.
        """
        unclear = clashes(adapters_of).keys()
        return cls(
            frozenset(adapters_of),
            {
                name: model
                for model, names in adapters_of.items()
                for name in names
                if name not in unclear
            },
        )

    def model_of(self, name: str) -> str:
        """The model whose engine serves the name: an adapter's model, or else the name itself."""
        return self.adapters.get(name, name)

    def has(self, name: str) -> bool:
        """Whether some engine serves the name."""
        return self.models is None or name in self.models or name in self.adapters


ANYTHING: Final = Offer()
"""Where no engine blocks say what there is: every name goes through to the engine."""
UNKNOWN: Final = Offer(is_known=False)


def clashes(adapters_of: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Names of adapters that stand for something else as well, each with its models.

    ``adapters_of``: by model, the names of its adapters.
    """
    models: defaultdict[str, list[str]] = defaultdict(list)
    for model, names in adapters_of.items():
        for name in names:
            models[name].append(model)
    return {
        name: named_by
        for name, named_by in models.items()
        if len(named_by) > 1 or name in adapters_of
    }


def check_adapter_names(model: str, names: Iterable[str]) -> None:
    """Raise ``ValueError`` for names that adapters of the model cannot have."""
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name) or len(name) > _MOST_NAME_CHARS:
            shown = ascii(name[:_MOST_NAME_CHARS])
            raise ValueError(
                f"the adapter name {shown} must be like a model's: letters, digits and . _ - : @ "
                "+, in parts with / between them, each of which begins with a letter or a digit. "
                "It is not a path."
            )
        if name == model:
            raise ValueError(f"the adapter {name} needs another name than its model")
        if name in seen:
            raise ValueError(f"the adapter {name} is named twice")
        seen.add(name)
