"""How a Prefect server that we start is closed to others.

Anyone who can call Prefect's API can run commands as the user of its workers: a flow run may name
its own command. Binding to loopback is not enough: other users of the machine reach the port, and
so does any web page in a browser on it.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Final

from batchyard.errors import SettingsError
from batchyard.storage.file import keep_secret

LOGIN_FILE: Final = "prefect.login"
PRIVATE_UMASK: Final = 0o077
"""Prefect's database holds parameters and logs. Workers keep the user's umask: results may be
shared."""
HOSTS: Final = ("127.0.0.1", "localhost")
"""The only host names that the server accepts; others may be made to resolve to this machine."""

_FACTORY = "commands.prefect.server_plugin:create_app"
_OUR_PACKAGES = Path(__file__).resolve().parents[2]


def new_login() -> str:
    """``user:password``, as Prefect has it; the UI asks for the whole of it as its password."""
    return f"batchyard:{secrets.token_urlsafe(32)}"


def login_file(home: Path) -> Path:
    """The file with the login of this home's server, made at its first start.

    Raises :class:`~batchyard.errors.SettingsError` if it cannot be written or read.
    """
    path = home / LOGIN_FILE
    try:
        if not path.exists():
            keep_secret(path, new_login())
    except OSError as error:
        raise SettingsError(
            f"Prefect's login cannot be kept in {path}: {os.strerror(error.errno or 0)}."
        ) from error
    return path


def read_login(path: Path) -> str:
    """``user:password`` from the file. Raises SettingsError."""
    try:
        login = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"Prefect's login in {path} cannot be read: {error}.") from error
    if ":" not in login:
        raise SettingsError(f"There is no login in {path}: delete the file, and a new one is made.")
    return login


def server_command(port: int, log_level: str) -> list[str]:
    """The command that runs the server on loopback.

    ``prefect server start`` would not check the Host header. The current folder may have a user's
    own `commands.py`: with ``-m`` Python looks there first, and without ``--app-dir`` uvicorn does.
    """
    return [
        *(sys.executable, "-P", "-m", "uvicorn", "--factory", _FACTORY, "--lifespan", "on"),
        *("--app-dir", str(_OUR_PACKAGES)),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", log_level),
    ]


def server_environment(port: int, login: str) -> dict[str, str]:
    """The server's settings, each under the name that takes precedence over older ones."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
            f"http://{host}:{port}" for host in HOSTS
        ),
    }


def client_environment(login: str) -> dict[str, str]:
    """The settings of everything that calls the server."""
    return {"PREFECT_API_AUTH_STRING": login, "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true"}
