"""``batchyard secrets``: the keys that encrypt URLs and signing secrets in the database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.offline import offline_services
from batchyard.errors import SettingsError
from batchyard.services.machine.home import in_home
from batchyard.services.machine.secret_key import Rotation, RotationStep
from batchyard.settings import read_settings
from batchyard.store import reseal

if TYPE_CHECKING:
    from batchyard.settings import Settings
    from batchyard.store import Resealed

_RESTART = "Restart every process that uses this home (batchyard up or serve, workers)"
_GO_ON = "then run: batchyard secrets rotate --restarted"

app = typer.Typer(
    help="Manage the keys that encrypt secrets in the database.", no_args_is_help=True
)


@app.callback()
def secrets() -> None:
    """Manage the keys that encrypt secrets in the database."""


@app.command()
def rotate(
    restarted: Annotated[
        bool,
        typer.Option("--restarted", help="All processes were restarted after the last step."),
    ] = False,
) -> None:
    """Change the key that encrypts secrets. Run this command three times.

    1: makes a new key, which decrypts and does not encrypt yet. Then restart everything.

    2, with --restarted: encrypts everything again with the new key. Then restart everything.

    3, with --restarted: encrypts again what was added since step 2, and removes the old key.

    Processes read keys when they start: after a missed step they could not decrypt new secrets.
    If BATCHYARD_SECRET_KEY is set, this encrypts everything again with its first key.
    """
    typer.echo(asyncio.run(_rotate(restarted)))


@app.command()
def adopt() -> None:
    """Continue with this machine's key if the database's key is lost.

    URLs and signing secrets that were encrypted with the lost key are lost: batches that need them
    fail, and webhooks need new secrets. Results stay readable.
    """
    typer.echo(asyncio.run(_adopt()))


async def _adopt() -> str:
    async with offline_services(checks_keys=False) as services:
        if await services.store.sealing_proof.is_opened():
            return "The database already uses the key of this machine: there is nothing to do."
        await services.store.sealing_proof.adopt()
        await services.store.audit.note("secrets.adopted", services.settings.this_machine.name)
    return (
        "The database now uses the key of this machine. Copy the key to every machine that uses "
        "this database, and restart all processes there."
    )


async def _rotate(restarted: bool) -> str:
    settings = read_settings()
    if settings.secret_key is not None:
        return await _reseal()
    with in_home(settings):
        return await _next_step(settings, restarted)


async def _next_step(settings: Settings, restarted: bool) -> str:
    rotation = Rotation(settings)
    if restarted and rotation.step is RotationStep.ANNOUNCE:
        raise SettingsError("No rotation has begun: begin one without --restarted.")
    if not restarted and rotation.step is not RotationStep.ANNOUNCE:
        raise SettingsError(f"A rotation has already begun. {_RESTART}, {_GO_ON}")
    async with offline_services() as services:
        now = await services.store.database.now()
        late = await rotation.not_restarted(services.store, within_seconds=settings.lease_seconds)
        if late:
            raise SettingsError(
                f"{len(late):,} runners started before the last step and do not have its keys: "
                f"{', '.join(each.id for each in late)}. {_RESTART}, {_GO_ON}"
            )
        match rotation.step:
            case RotationStep.ANNOUNCE:
                rotation.announce(now)
                return (
                    "1 of 3: there is a new key. It decrypts and does not encrypt yet.\n"
                    f"{_RESTART}, {_GO_ON}"
                )
            case RotationStep.DROP:
                resealed = await rotation.drop_older(services.store, now)
                return (
                    f"3 of 3: {resealed.written:,} values encrypted with the new key, old key "
                    f"removed.{_lost_words(resealed)}"
                )
            case RotationStep.SEAL:
                rotation.begin_to_seal(now)
    # Opened once more: with the new key first.
    async with offline_services() as services:
        resealed = await rotation.encrypt_again(services.store)
        await services.store.audit.note("secrets.rotated", services.settings.this_machine.name)
    return (
        f"2 of 3: the new key encrypts, and {resealed.written:,} values were encrypted with it."
        f"{_lost_words(resealed)}\n"
        f"{_RESTART} once more, {_GO_ON}"
    )


async def _reseal() -> str:
    async with offline_services() as services:
        resealed = await reseal(services.store.database)
    return (
        f"{resealed.written:,} values are encrypted with the first key of BATCHYARD_SECRET_KEY. "
        "You can remove the other keys if every process was started with this one first."
        f"{_lost_words(resealed)}"
    )


def _lost_words(resealed: Resealed) -> str:
    """The end of a sentence: what no key decrypts."""
    if not resealed.lost:
        return ""
    return (
        f"\n{resealed.lost:,} values were left as they are: no key decrypts them. They are lost "
        "with their key."
    )
