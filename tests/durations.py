"""How long each file's tests take, in ``durations.json``: what `make test` may begin with.

``python -m tests.durations RESULTS.xml …`` writes the file from what pytest has written with
``--junitxml``. The seconds are those of the process that runs the tests, while others run beside
it. A file that no RESULTS name keeps what it has, as long as it is there.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).resolve().parent.parent
PATH: Final = ROOT / "tests" / "durations.json"


def read() -> dict[str, float]:
    """The seconds of each file's tests, by its path."""
    return dict(json.loads(PATH.read_text()))


def found_in(results: Iterable[Path]) -> dict[str, float]:
    """The same, from what pytest has written."""
    seconds: collections.Counter[str] = collections.Counter()
    for path in results:
        for test in ElementTree.parse(path).getroot().iter("testcase"):  # noqa: S314 - our own file
            # A class of tests is behind the file's name.
            words = test.attrib["classname"].split(".")
            names = ["/".join(words[:end]) + ".py" for end in range(1, len(words) + 1)]
            name = next((each for each in names if (ROOT / each).is_file()), None)
            if name is not None:
                seconds[name] += float(test.attrib["time"])
    return dict(seconds)


def main(results: Iterable[Path]) -> None:
    seconds = (read() if PATH.exists() else {}) | found_in(results)
    there = {name: round(seconds[name], 1) for name in sorted(seconds) if (ROOT / name).is_file()}
    PATH.write_text(json.dumps(there, indent=2) + "\n")


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
