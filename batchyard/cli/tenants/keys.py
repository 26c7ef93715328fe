"""``batchyard keys``: the keys of the API. A key is shown only once, when it is created."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.cli.tenants.local_key import local_key_file, login_link
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import LINES, OBJECT, print_lines, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.options import DEFAULT_PORT, PORT_VARIABLE
from batchyard.cli.terminal.table import print_table, user_text
from batchyard.errors import RecordNotFound
from batchyard.logs.time_words import relative
from batchyard.steps.create.create import WINDOW_PATTERN, WINDOW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.text import Text

    from batchyard.store import ApiKeyRecord, NewKey

_COLUMNS = ("id", "tenant", "name", "key", "role", "created", "last used", "state")

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that says who uses the key, or for what.")
    ],
    tenant: Annotated[
        str, typer.Option(help="The tenant whose files and batches the key gives access to.")
    ] = "default",
    operator: Annotated[
        bool,
        typer.Option(
            "--operator", help="Let the key see the batches of all tenants, and act on them."
        ),
    ] = False,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="Let the key read only: it cannot create, change or delete."
        ),
    ] = False,
    expires_in: Annotated[
        str | None,
        typer.Option(
            metavar="30d|DATE",
            help="When the key stops working: after a number of minutes (m), hours (h) or days "
            "(d), or at the end of a day in UTC, for example 2027-03-31.",
        ),
    ] = None,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Create a key and print it. Only its hash is stored, so it cannot be shown again."""
    made = asyncio.run(_create(tenant, name, expires_in, operator=operator, read_only=read_only))
    if as_json:
        print_object({"key": made.secret, **key_object(made.record)})
    else:
        typer.echo(made.secret)
    typer.echo(
        f"batchyard: The key of {made.record.id} is shown only this once: keep it.", err=True
    )


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, options.ONLY_TENANT] = None,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """List keys, oldest first, including revoked ones."""
    keys, now = asyncio.run(_list(tenant))
    if as_json:
        print_lines(map(key_object, keys))
    else:
        print_table(_COLUMNS, _rows(keys, now))


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key.")]) -> None:
    """Revoke a key, at once and permanently."""
    asyncio.run(_revoke(key_id))


def key_object(key: ApiKeyRecord) -> dict[str, Any]:
    """A key for programs, without its secret. Times are Unix seconds."""
    return key.model_dump()


async def _create(
    tenant: str, name: str, expires_in: str | None, *, operator: bool, read_only: bool
) -> NewKey:
    async with offline_services() as services:
        now = int(await services.store.database.now())
        return await services.store.api_keys.create(
            tenant,
            name,
            is_operator=operator,
            may_write=not read_only,
            expires_at=None if expires_in is None else end_of_key(expires_in, now),
        )


def end_of_key(text: str, now: int) -> int:
    """The Unix time that ``--expires-in`` means. Raises ``typer.BadParameter``."""
    try:
        if match := re.fullmatch(WINDOW_PATTERN, text):
            return now + int(match.group(1)) * WINDOW_SECONDS[match.group(2)]
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
        end = int((day + timedelta(days=1)).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text} is neither a time like 30d, 12h or 45m nor a date like 2027-03-31.",
            param_hint="--expires-in",
        ) from None
    if end <= now:
        raise typer.BadParameter(f"{text} is in the past.", param_hint="--expires-in")
    return end


async def _list(tenant: str | None) -> tuple[Sequence[ApiKeyRecord], float]:
    """Keys, and the time by the clock that theirs are by."""
    async with offline_services() as services:
        keys = await services.store.api_keys.list(tenant)
        return keys, await services.store.database.now()


async def _revoke(key_id: str) -> None:
    async with offline_services() as services:
        await services.store.api_keys.revoke(key_id)


def _rows(keys: Iterable[ApiKeyRecord], now: float) -> Iterator[tuple[str | Text, ...]]:
    for key in keys:
        yield (
            key.id,
            user_text(key.tenant),
            user_text(key.name),
            f"{key.prefix}…",
            _role(key),
            relative(key.created_at - now),
            relative(key.last_used_at - now) if key.last_used_at else "never",
            _state(key, now),
        )


def _role(key: ApiKeyRecord) -> str:
    role = "operator" if key.is_operator else "tenant"
    return role if key.may_write else f"{role}, read-only"


def _state(key: ApiKeyRecord, now: float) -> str:
    if key.revoked_at:
        return "revoked"
    if key.expires_at is None:
        return "valid"
    word = "expired" if key.expires_at <= now else "expires"
    return f"{word} {relative(key.expires_at - now)}"


@app.command()
def login(
    port: Annotated[
        int, typer.Option(min=1, max=65535, envvar=PORT_VARIABLE, help="The port of the API.")
    ] = DEFAULT_PORT,
) -> None:
    """Print a link that logs a browser in once, as `batchyard up` does.

    It is for the key that `batchyard up` or `serve` has made in BATCHYARD_HOME.
    """
    typer.echo(asyncio.run(_login(port)))


async def _login(port: int) -> str:
    async with offline_services() as services:
        path = await local_key_file(services)
        if path is None:
            raise RecordNotFound(
                "This installation has no key of its own: log in with one from "
                "`batchyard keys create NAME --operator`."
            )
        address = services.settings.public_url or f"http://127.0.0.1:{port}"
        return await login_link(services, path, address)
