"""The pages of docs/reference, written from the code: ``python -m reference`` (`make docs`).

One module is one page. What a page says is said in the code first (a setting's docstring, an
option's help, the OpenAPI document); only error codes are described here, in ``error_codes.py``,
and windows, in ``windows.toml``.
Not shipped with the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from reference import (
    api_page,
    cli_page,
    errors_page,
    events_page,
    logs_page,
    metrics_page,
    network_faults_page,
    servers_page,
    settings_page,
    windows_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
COMMAND: Final = ".venv/bin/python -m reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": settings_page.page,
    "cli.md": cli_page.page,
    "api.md": api_page.page,
    "errors.md": errors_page.page,
    "events.md": events_page.page,
    "logs.md": logs_page.page,
    "metrics.md": metrics_page.page,
    "windows.md": windows_page.page,
    "network-faults.md": network_faults_page.page,
    "servers.md": servers_page.page,
}


def written(name: str) -> str:
    """The page as it must be now."""
    begin, _, rest = PAGES[name]().partition("\n")
    return f"{begin}\n\n<!-- Written by `{COMMAND}`: change the code and not this page. -->\n{rest}"
