"""Images of later versions of the product: those that are there, with a test's source in them.

Each has one more migration than the version before it (:mod:`tests.faults.newer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard import __version__
from tests.faults import newer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.containers.tools import Podman

PRODUCT: Final = "batchyard"
ENGINE_CPU: Final = "batchyard-engine-cpu"
_FILE: Final = """\
ARG BASE
FROM ${{BASE}}
COPY . {folder}/
"""


def _adds(folder: Path) -> Path:
    newer.that_adds(folder)
    return folder


def _renames(folder: Path) -> Path:
    newer.that_renames(folder)
    return folder


VERSIONS: Final[dict[str, Callable[[Path], Path]]] = {"adds": _adds, "renames": _renames}
"""By the image's tag: what makes the version's source in a folder."""


def build_version(
    podman: Podman, tag: str = __version__, source: Path | None = None
) -> dict[str, str]:
    """The variables of the compose file that select it; without ``source``, those of this one."""
    if source is not None:
        program = "import batchyard, pathlib; print(pathlib.Path(batchyard.__file__).parents[1])"
        words = ("podman", "run", "--rm", "--network=none", "--no-healthcheck")
        packages = podman.output(*words, f"{PRODUCT}:{__version__}", "python", "-c", program)
        file = source.with_suffix(".Containerfile")
        file.write_text(_FILE.format(folder=packages))
        for name in (PRODUCT, ENGINE_CPU):
            base = f"--build-arg=BASE=localhost/{name}:{__version__}"
            podman.build(file, f"{name}:{tag}", base, context=source)
    return {"BATCHYARD_IMAGE": f"{PRODUCT}:{tag}", "ENGINE_CPU_IMAGE": f"{ENGINE_CPU}:{tag}"}
