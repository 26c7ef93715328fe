"""Scripts: what users, operators and accidents do to an installation, drawn from a seed.

A script is a list of JSON objects, so that one which fails can stand in a test. A step names the
batch that it is about; if its batch was removed, or was refused, the step does nothing. So any
part of a script is a script, and :func:`shrunk` can look for a small one that still fails.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tests.mixtures import lines
from tests.mixtures.lines import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

Step = dict[str, Any]
Script = list[Step]

SOURCES: Final = ("file", "files", "inline", "upload", "url", "dataset")
_PLAIN: Final = ("inline", "dataset")
"""Those that are never compressed."""
OPTIONS: Final = (
    "adapter",
    "background",
    "bad_lines",
    "chain",
    "compressed",
    "deduplicate",
    "idempotent",
    "invalid_output",
    "ledger",
    "lenient",
    "other_tenant",
    "priority",
    "result_urls",
    "short_lived",
    "threshold",
    "webhook",
)
"""Of a batch, each of them or not."""
KINDS: Final = ("message_batch", "responses")
ACTIONS: Final = (
    "cancel",
    "delete_input",
    "delete_results",
    "follow",
    "overdue",
    "pause",
    "redeliver",
    "retry",
    "retry_merged",
)
"""Done to one batch."""
ACCIDENTS: Final = (
    "kill_api",
    "kill_control",
    "kill_runner",
    "sleep_control",
    "sleep_runner",
    "receivers_down",
    "quota",
    "waiting_quota",
)
"""Done to the whole installation."""
_SLOWER = ("sleep_control", "sleep_runner")
"""They outlast a lease, so there are fewer."""


def script_of(seed: int) -> Script:
    """The script of this seed; the same one each time."""
    draw = random.Random(seed)
    names = [f"b{number}" for number in range(draw.randint(2, 4))]
    script: Script = []
    for name in names:
        script.append(_create(draw, name))
        for _ in range(draw.randint(1, 3)):
            script += _something(draw, names[: names.index(name) + 1])
    return script


def _something(draw: random.Random, names: list[str]) -> Script:
    what = draw.random()
    if what < 0.25:
        return [{"do": "wait", "seconds": round(draw.uniform(0.05, 0.6), 2)}]
    if what < 0.6:
        action = draw.choice(ACTIONS)
        steps: Script = [{"do": action, "batch": draw.choice(names)}]
        if action == "follow":
            steps[0]["order"] = draw.choice(("completion", "input"))
        if draw.random() < 0.5:
            steps.insert(0, {"do": "wait", "seconds": round(draw.uniform(0.1, 0.8), 2)})
        return steps
    accident = draw.choice(ACCIDENTS)
    if accident in _SLOWER and draw.random() < 0.5:
        accident = draw.choice(("kill_control", "kill_runner"))
    if accident == "kill_api":
        # While it does what is asked of it next.
        return [{"do": accident, "after": round(draw.uniform(0.0, 0.1), 3)}]
    return [{"do": accident}]


def _create(draw: random.Random, name: str) -> Step:
    kind = draw.choices(("batch", *KINDS), (8, 1, 1))[0]
    if kind != "batch":
        url = MESSAGES if kind == "message_batch" else RESPONSES
        asked = [_line(draw, f"{name}-{n}", url) for n in range(draw.randint(2, 10))]
        options = [each for each in ("other_tenant",) if draw.random() < 0.2]
        return {"do": "create", "batch": name, "kind": kind, "options": options, "lines": asked}
    options = [option for option in OPTIONS if draw.random() < 0.22]
    source = draw.choice(SOURCES)
    if source in _PLAIN and "compressed" in options:
        options.remove("compressed")
    urls: tuple[str, ...] = (CHAT, COMPLETIONS, EMBEDDINGS)
    if "chain" in options or source == "dataset":
        urls = (CHAT,)
    url = draw.choice(urls)
    count = draw.randint(3, 25)
    asked = [_line(draw, f"{name}-{n}", url) for n in range(count)]
    for line in asked:
        if "adapter" in options and draw.random() < 0.5:
            line["model"] = lines.ADAPTER
        if "deduplicate" in options and draw.random() < 0.5:
            line["words"] = f"{name} the same {draw.randint(0, 2)}"
        if "invalid_output" in options and url != EMBEDDINGS and draw.random() < 0.3:
            line["words"] += f" {draw.choice((lines.CUT, lines.ALWAYS_CUT))}"
    if {"bad_lines", "lenient"} & set(options) and source != "dataset":
        draw.choice(asked)["is_bad"] = True
    return {
        "do": "create",
        "batch": name,
        "kind": "batch",
        "source": source,
        "options": options,
        "lines": asked,
    }


def _line(draw: random.Random, custom_id: str, url: str) -> dict[str, Any]:
    words = f"question {custom_id}"
    if draw.random() < 0.2:
        words += f" {draw.choice(lines.FATES)}"
    return {"custom_id": custom_id, "url": url, "words": words}


def lines_of(step: Step) -> list[Line]:
    return [Line(**line) for line in step["lines"]]


# -- what a script mixes ----------------------------------------------------------------------


def features_of(script: Script) -> list[frozenset[str]]:
    """For each batch what met in it: source, options, what was done to it, the accidents."""
    accidents = {step["do"] for step in script if step["do"] in ACCIDENTS}
    found = []
    for step in script:
        if step["do"] != "create":
            continue
        own = {step.get("source", step["kind"]), *step["options"]}
        own |= {other["do"] for other in script if other.get("batch") == step["batch"]} - {"create"}
        found.append(frozenset(own | accidents))
    return found


def pairs_of(scripts: Iterable[Script]) -> Counter[tuple[str, str]]:
    """How often two features met in one batch."""
    met: Counter[tuple[str, str]] = Counter()
    for script in scripts:
        for features in features_of(script):
            met.update(itertools.combinations(sorted(features), 2))
    return met


def possible_pairs() -> set[tuple[str, str]]:
    """The pairs that can meet: a batch has one source, and the other kinds have few options."""
    of_batches = (*SOURCES, *OPTIONS)
    everywhere = (*ACTIONS, *ACCIDENTS)
    pairs = set(itertools.combinations(sorted((*of_batches, *everywhere)), 2))
    pairs -= set(itertools.combinations(sorted(SOURCES), 2))
    pairs -= {("compressed", each) for each in _PLAIN}
    for kind in KINDS:
        others = ("other_tenant", *everywhere)
        pairs |= {(min(kind, each), max(kind, each)) for each in others}
    return pairs


# -- smaller ones -----------------------------------------------------------------------------


async def shrunk(
    script: Script, fails: Callable[[Script], Awaitable[bool]], *, tries: int = 3
) -> Script:
    """A script without whatever it also fails without.

    Processes are not deterministic: a part counts as needed if ``tries`` runs without it pass.
    """

    async def still_fails(candidate: Script) -> bool:
        for _ in range(tries):
            if await fails(candidate):
                return True
        return False

    index = 0
    while index < len(script):
        candidate = script[:index] + script[index + 1 :]
        if candidate and await still_fails(candidate):
            script = candidate
        else:
            index += 1
    for name in [each["batch"] for each in script if each["do"] == "create"]:
        for option in OPTIONS:
            candidate = [_without(option, name, step) for step in script]
            if candidate != script and await still_fails(candidate):
                script = candidate
    return script


def _without(option: str, name: str, step: Step) -> Step:
    if step["do"] != "create" or step["batch"] != name:
        return step
    return {**step, "options": [each for each in step["options"] if each != option]}
