"""``batchyard tenants email``: the address for batches of a tenant that have none of their own."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.notify.email import check_address


def email(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="The new address. Default: show the current one."),
    ] = None,
    tenant: Annotated[str, options.TENANT] = "default",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the address.")] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Set or show the e-mail address of a tenant.

    It is used for batches without an address of their own, and if a webhook has failed for good.
    """
    if address is not None and remove:
        raise typer.BadParameter("Give an address or --remove, not both.", param_hint="ADDRESS")
    if address is not None:
        try:
            check_address(address)
        except ValueError:
            raise typer.BadParameter(
                "This must be one e-mail address.", param_hint="ADDRESS"
            ) from None
    found = asyncio.run(_email(tenant, address, is_change=remove or address is not None))
    if as_json:
        print_object({"tenant": tenant, "notify_email": found})
    else:
        typer.echo(found or "none")


async def _email(tenant: str, address: str | None, *, is_change: bool) -> str | None:
    async with offline_services() as services:
        tenants = services.store.tenants
        if is_change:
            await tenants.set_notify_email(tenant, address)
        if address is not None and services.settings.smtp.host is None:
            typer.echo(
                "batchyard: No e-mail is sent until BATCHYARD_SMTP__HOST names a mail server.",
                err=True,
            )
        return await tenants.notify_email(tenant)
