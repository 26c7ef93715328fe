"""Where settings come from: variables and a file, and what is refused there before it is read."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic_settings import EnvSettingsSource

from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

PREFIX: Final = "BATCHYARD_"
CONFIG_VARIABLE: Final = "BATCHYARD_CONFIG"
FILE_NAME: Final = "batchyard.toml"
OTHER_VARIABLES: Final = (
    CONFIG_VARIABLE,
    "BATCHYARD_API_HOST",
    "BATCHYARD_API_PORT",
    "BATCHYARD_ENGINE_API_KEY",
    "BATCHYARD_METRICS_FOLDER",
    "BATCHYARD_METRICS_HOST",
    "BATCHYARD_METRICS_PORT",
)
"""Variables of ours that are no settings."""
DEPLOYED: Final = ("models", "engines_at_once", "slurm", "s3", "azure", "google", "hub")
"""The parts of the file that `commands/prefect/deploy_file.py` reads, for `batchyard deploy`."""

_SERVICE_LINK: Final = re.compile(
    r"^\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)=|_PORT=(tcp|udp|sctp)://"
)


def config_file() -> Path | None:
    """The file of settings that this process reads; None: there is none.

    A flow run has a temporary working folder, so the folder where its worker was started counts
    as well, and the home. Raises :class:`~batchyard.errors.SettingsError` where BATCHYARD_CONFIG
    names a file that is not there, where a folder may not be entered, and where the working folder
    has been deleted.
    """
    if named := os.environ.get(CONFIG_VARIABLE):
        path = _absolute(named)
        if not is_file(path):
            raise SettingsError(f"{CONFIG_VARIABLE} names {path}, and there is no such file.")
        return path
    # PWD is the folder of the shell, and Prefect's workers leave it as it is.
    home = os.environ.get(f"{PREFIX}HOME", "~/.batchyard")
    folders = [_absolute(each) for each in (".", os.environ.get("PWD", "."), home)]
    return next((path for each in folders if is_file(path := each / FILE_NAME)), None)


def _absolute(path: str) -> Path:
    """Raises :class:`~batchyard.errors.SettingsError` where the working folder has been deleted."""
    try:
        return Path(path).expanduser().absolute()
    except FileNotFoundError as error:
        raise SettingsError(
            "The working folder has been deleted: change to a folder that exists."
        ) from error


def is_file(path: Path) -> bool:
    """Whether there is such a file.

    Raises :class:`~batchyard.errors.SettingsError` where that cannot be known, because this user
    may not enter a folder on the way, for one.
    """
    try:
        return path.is_file()
    except OSError as error:
        what = f"{path} cannot be used: {error.strerror}."
        if isinstance(error, PermissionError):
            what += " Check the owner and the mode of the folders above it."
        raise SettingsError(what) from error


def read_config(path: Path) -> dict[str, Any]:
    """What is in a file of settings. Raises :class:`~batchyard.errors.SettingsError`."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}.") from error


def check_names(model: type[BaseModel], environment: Mapping[str, str]) -> None:
    """Refuse variables that begin with our prefix and mean nothing; the message has a likely one.

    Those are left out that Kubernetes makes in each pod for a service named batchyard-….
    Raises :class:`~batchyard.errors.SettingsError`.
    """
    known = {f"{PREFIX}{name}" for name in _names(model)} | set(OTHER_VARIABLES)
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        if not _SERVICE_LINK.search(f"{name}={environment[name]}"):
            raise SettingsError(unknown_name(name, known, "setting"))


def unknown_name(name: str, known: Collection[str], kind: str) -> str:
    """The message for a name that is not among ``known``."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"There is no {kind} {name}. Do you mean {near[0]}?"


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name.upper()
        inner = field.annotation
        if isinstance(inner, type) and hasattr(inner, "model_fields"):
            yield from (f"{name.upper()}__{each}" for each in _names(inner))


class Variables(EnvSettingsSource):
    """Environment variables. A list is JSON, or its entries with commas between them."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """The value that validation gets: a list's entries, or what the JSON says."""
        if _is_list(field) and isinstance(value, str) and not value.lstrip().startswith("["):
            return [entry.strip() for entry in value.split(",") if entry.strip()]
        try:
            return super().decode_complex_value(field_name, field, value)
        except json.JSONDecodeError:
            return value  # validation refuses it, and names the variable


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is list


def settings_of(data: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """What is for settings, of what the file has.

    Raises :class:`~batchyard.errors.SettingsError` for a name that means nothing.
    """
    known = {*model.model_fields, *DEPLOYED}
    _check_table(data, known, "")
    for name, inside in data.items():
        inner = None if name in DEPLOYED else model.model_fields[name].annotation
        if isinstance(inside, dict) and (fields := getattr(inner, "model_fields", None)):
            _check_table(inside, fields, f"{name}.")
    return {name: value for name, value in data.items() if name not in DEPLOYED}


def _check_table(table: Mapping[str, Any], known: Collection[str], before: str) -> None:
    for name in table:
        if name not in known:
            names = [f"{before}{each}" for each in known]
            raise SettingsError(unknown_name(f"{before}{name}", names, "setting"))


def check_storage(place: str) -> None:
    """Refuse a place for the object store that is not the same one for every process.

    Flow runs have temporary working folders: below these they would look for a relative path, or
    for ``ftp://host``, which is one. Raises ``ValueError``.
    """
    if is_in_bucket(place) or Path(place).expanduser().is_absolute():
        return
    raise ValueError(
        "it is neither s3://bucket/prefix, az:// or gs://, nor the absolute path of a folder"
    )


def is_in_bucket(place: str) -> bool:
    """Whether the place for the object store is none of this machine."""
    return re.match(r"(s3|az|gs)://[^/]", place) is not None


def check_database(url: str) -> None:
    """Refuse a SQLite file that is not the same one for every process, as :func:`check_storage`.

    Raises ``ValueError``, without the URL, which may have a password.
    """
    if re.match(r"sqlite(\+\w+)?:///[^/:]", url):
        raise ValueError("the path is not absolute: with four slashes, sqlite:////srv/batchyard.db")
