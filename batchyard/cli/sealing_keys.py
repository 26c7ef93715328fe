"""``batchyard secrets``: the keys that URLs and signing secrets are sealed with in the database."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard.cli.offline import offline_services
from batchyard.errors import SettingsError
from batchyard.services.secret_key import Rotation, RotationStep
from batchyard.settings import read_settings
from batchyard.store import reseal

_RESTART = "Restart every process that uses this home (batchyard up or serve, workers)"
_GO_ON = "then run: batchyard secrets rotate --restarted"

app = typer.Typer(help="Keys that seal secrets in the database.", no_args_is_help=True)


@app.callback()
def secrets() -> None:
    """Keys that seal secrets in the database."""


@app.command()
def rotate(
    restarted: Annotated[
        bool,
        typer.Option("--restarted", help="Every process was restarted since the step before."),
    ] = False,
) -> None:
    """Change the key that seals secrets, in three steps: run it three times.

    1: makes a new key, which opens and does not seal yet. Restart everything.

    2, with --restarted: the new key seals, and everything is sealed anew with it. Restart
    everything.

    3, with --restarted: what was sealed meanwhile is sealed anew, and the old key is dropped.

    Processes read keys as they start: one that missed a step could not open what others seal.
    Where BATCHYARD_SECRET_KEY is set, this only seals everything anew with its first key.
    """
    typer.echo(asyncio.run(_rotate(restarted)))


@app.command()
def adopt() -> None:
    """Go on with this machine's key where the database's is lost.

    URLs and signing secrets that were sealed with the lost key cannot be opened any more: batches
    that need them fail, and webhooks need new secrets. Results are not touched.
    """
    typer.echo(asyncio.run(_adopt()))


async def _adopt() -> str:
    async with offline_services(checks_keys=False) as services:
        if await services.store.sealing_proof.is_opened():
            return "The key of this machine is the database's: there is nothing to do."
        await services.store.sealing_proof.adopt()
    return (
        "The key of this machine is the database's from now on. Give it to every machine that "
        "uses this database, and restart what runs there."
    )


async def _rotate(restarted: bool) -> str:
    settings = read_settings()
    if settings.secret_key is not None:
        return await _reseal()
    rotation = Rotation(settings)
    if restarted and rotation.step is RotationStep.ANNOUNCE:
        raise SettingsError("There is no rotation under way: begin one without --restarted.")
    if not restarted and rotation.step is not RotationStep.ANNOUNCE:
        raise SettingsError(f"A rotation is under way. {_RESTART}, {_GO_ON}")
    async with offline_services() as services:
        now = await services.store.database.now()
        late = await rotation.not_restarted(services.store, within_seconds=settings.lease_seconds)
        if late:
            raise SettingsError(
                f"{len(late):,} runners are older than the step before and do not know its keys: "
                f"{', '.join(each.id for each in late)}. {_RESTART}, {_GO_ON}"
            )
        match rotation.step:
            case RotationStep.ANNOUNCE:
                rotation.announce(now)
                return (
                    "1 of 3: there is a new key. It opens and does not seal yet.\n"
                    f"{_RESTART}, {_GO_ON}"
                )
            case RotationStep.DROP:
                count = await rotation.drop_older(services.store, now)
                return f"3 of 3: {count:,} values are sealed with the new key, the old one is gone."
            case RotationStep.SEAL:
                rotation.begin_to_seal(now)
    # Opened once more: with the new key first.
    async with offline_services() as services:
        count = await rotation.seal_anew(services.store)
    return (
        f"2 of 3: the new key seals, and {count:,} values are sealed with it.\n"
        f"{_RESTART} once more, {_GO_ON}"
    )


async def _reseal() -> str:
    async with offline_services() as services:
        count = await reseal(services.store.database)
    return (
        f"{count:,} values are sealed with the first key of BATCHYARD_SECRET_KEY. Those behind it "
        "may go, if every process has had it first since it started."
    )
