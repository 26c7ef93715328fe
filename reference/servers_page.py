"""The servers that Batchyard knows, from the modules of their kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.engine.kinds.kind import Usage
from batchyard.engine.kinds.recognition import KINDS
from reference.markdown import table

if TYPE_CHECKING:
    from batchyard.engine.kinds.kind import Known, ServerKind

_BEGIN: Final = """# Servers that run already

A [server that runs already](../how-to/configure-engines.md#a-server-that-runs-already) is asked \
once what it is, by `/v1/models` and, if that does not say it, `/openapi.json`, `/info` and \
`/props`. Nothing is sent to an endpoint for this. These kinds are known; every other server with \
the OpenAI API works as well. Where neither the server nor its block says how many requests it \
runs at once, a batch [finds what is fastest](../how-to/configure-engines.md#where-nobody-says-it).

*Run* says that our tests run this version: vLLM in all of them, the others with `make \
test-engines`. What is known of the others comes from their source, and their answers were written \
down from it: **they were not run.** What is ignored \
holds for the version that is named.
"""
_WORDS: Final = {
    Usage.TOKENS: "tokens",
    Usage.CHARACTERS: "**characters**, which it calls tokens: so do quotas and prices",
    Usage.ONE_CHOICE: "tokens; of `n` choices or several prompts only those of one",
    Usage.NOT_KNOWN: "what it likes",
}


_KNOWN: Final = [(kind, kind.known) for kind in KINDS if kind.known is not None]


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            _BEGIN,
            "## What works\n",
            table(("server", "version", "", "endpoints"), [_works(*each) for each in _KNOWN]),
            "## How it runs requests\n",
            table(
                ("server", "at once", "load that we read", "usage counts"),
                [_runs(*each) for each in _KNOWN],
            ),
            "## What a batch keeps in flight\n",
            _IN_FLIGHT,
            "## What it ignores\n",
            _IGNORED,
            table(
                ("server", "endpoint", "fields with no effect"),
                [row for kind in KINDS for row in _ignores(kind)],
            ),
            "## What it refuses\n",
            _REFUSED,
            table(
                ("server", "a prompt that is too long", "busy", "another model"),
                [_refuses(kind) for kind in KINDS],
            ).rstrip(),
        ]
    )


_IN_FLIGHT: Final = """Answers per second with fixed numbers in flight, and with the one that a \
batch finds where nobody says it: in a whole run with its search (150 seconds, 80 for the two that \
run little at once), between two of the best fixed number, and after that, in turns with it \
(`python -m benchmarks.other_servers`). Tiny models, server and client on the same two cores.

| server | 1 | 2 | 4 | 8 | 16 | 32 | 64 | 128 | 256 | whole run | of the best | then | of the best |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
| Infinity | 89 |  | 204 | 329 | 516 | 687 | 697 | 640 | 759 \
| 708 | 0.99 of 256 | 712 with 64 | 0.95 |
| llama-cpp-python | 53 | 79 | 86 | 70 | 80 |  |  |  |  | 86 | 1.01 of 4 | 82 with 2 | 1.08 |
| `transformers serve` | 29 | 28 | 28 | 30 | 31 |  |  |  |  | 29 | 1.04 of 16 | 30 with 4 | 0.98 |
| vLLM | 15 |  | 61 | 117 | 177 | 289 | 421 | 531 | 638 | 575 | 1.02 of 256 | 550 with 256 | 0.93 |

One run each, that of vLLM beside other work. **The machine's own speed differs by more than these \
parts**: two earlier runs of vLLM had 0.98 and 0.93 for the whole one, and 0.93 is with the very \
number that it is compared with. Eight more pairs of 15 seconds, both with 256 in flight, lay \
between 0.73 and 1.32. An earlier run of Infinity had 0.98 and 0.99. Before the search, a batch \
kept 8 in flight on all of them but the two that begin with one.
"""
_IGNORED: Final = """The server takes these fields with a good status and does nothing with them. \
A batch whose lines have one gets a [warning](../input-format.md), as for a field that the \
server's own description does not name: `max_completion_tokens` of llama-cpp-python is one, and \
without `max_tokens` its answers have no limit.
"""
_REFUSED: Final = """\"Busy\" costs no line: such answers are \
[refusals](../how-to/configure-engines.md#when-the-server-refuses).
"""


def _works(kind: ServerKind, known: Known) -> tuple[str, ...]:
    endpoints = ", ".join(f"`{path}`" for path in known.works)
    if kind.without_v1:
        endpoints += ", which it has without `/v1`"
    return kind.name, known.version, "run" if known.is_run else "not run", endpoints


def _runs(kind: ServerKind, known: Known) -> tuple[str, ...]:
    gauges = kind.gauges
    load = "none" if gauges is None else f"`{gauges.running}`, `{gauges.waiting}`"
    return kind.name, known.at_once, load, _WORDS[kind.usage]


def _ignores(kind: ServerKind) -> list[tuple[str, ...]]:
    return [
        (kind.name, f"`{path}`", ", ".join(f"`{field}`" for field in sorted(fields)))
        for path, fields in kind.ignored.items()
    ]


def _refuses(kind: ServerKind) -> tuple[str, ...]:
    too_long = " or ".join(f"{each.status}, `{each.words}`" for each in kind.too_long)
    busy = " or ".join(str(each.status) for each in kind.busy)
    other = " or ".join(str(each.status) for each in kind.unknown_model)
    return (
        kind.name,
        too_long or "is not refused",
        busy or "waits",
        other or "is answered with the model that it has",
    )
