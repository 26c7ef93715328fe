"""The files that are no Python: deployments, and how the engine's environment is made.

In a checkout they are where people look for them, at the project's root. In an installed wheel
they are in ``commands/data``, where pyproject.toml puts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_DATA = Path(__file__).with_name("data")

CHECKOUT: Final = None if _DATA.is_dir() else Path(__file__).resolve().parents[1]
"""The project's folder; None for an installed wheel."""
_INFRA = _DATA if CHECKOUT is None else CHECKOUT / "infra"

DEPLOYMENTS: Final = (CHECKOUT or _DATA) / "prefect.yaml"
MAKE_ENVIRONMENT: Final = _INFRA / "environment.sh"
MAKE_TINY_MODELS: Final = _INFRA / "engine" / "make_tiny_models.py"
ENGINE_LISTS: Final = _INFRA / "engine"
