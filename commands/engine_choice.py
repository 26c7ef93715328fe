"""Which engine a command line asks for: a vLLM of its own, or a server that runs already."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from batchyard.cli.terminal.engine_words import served_names
from batchyard.engine.vllm.lora import module_names
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.errors import ObjectNotFound
from batchyard.lines.endpoints import IN_VLLM
from batchyard.lines.offer import ANYTHING, Offer, check_adapter_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.engine.base import Engine
    from batchyard.settings import Settings


_OPTIONS: Final = {"exclusive": "--exclusive", "adapters": "--engine-adapter"}
"""The options of the fields that are not named as their option."""


@dataclass(frozen=True, slots=True)
class ServerUse:
    """How a batch may use a server that runs already; None: not said."""

    seats: int | None = None
    exclusive: bool = False
    ttft_ms: float | None = None
    itl_ms: float | None = None
    latency_quantile: float | None = None
    reserve_seats: int | None = None
    priority: int | None = None
    adapters: tuple[str, ...] = ()
    """The names of those that it has for the model."""

    @property
    def options(self) -> list[str]:
        """The options that say it."""
        said = [name for name, value in asdict(self).items() if value != getattr(ServerUse(), name)]
        return [_OPTIONS.get(name, f"--engine-{name.replace('_', '-')}") for name in said]

    def check(self) -> None:
        """Raises ``typer.BadParameter`` for options that contradict each other."""
        has_latency = self.ttft_ms is not None or self.itl_ms is not None
        if self.exclusive and (has_latency or self.reserve_seats is not None):
            raise typer.BadParameter(
                "The server has no other users, or they are to be considered: leave one of the two "
                "out.",
                param_hint="--exclusive",
            )
        if self.latency_quantile is not None and not has_latency:
            raise typer.BadParameter(
                "Say of which latency: --engine-ttft-ms or --engine-itl-ms.",
                param_hint="--engine-latency-quantile",
            )


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine of one batch. ``models`` are the names that lines may carry; empty for any.

    With ``client_rules`` it fetches media only from where clients' bodies may name them.
    """

    models: tuple[str, ...]
    weights: str
    options: tuple[str, ...]
    url: str | None
    use: ServerUse = ServerUse()
    client_rules: bool = False

    @property
    def endpoints(self) -> frozenset[str] | None:
        """What it may serve, depending on its model; None: it is a server that we do not know."""
        return IN_VLLM if self.url is None else None

    @property
    def offer(self) -> Offer:
        """Its adapters, whose requests are kept together; any other name goes through to it."""
        names = [*module_names(self.options), *self.use.adapters]
        return Offer(adapters=dict.fromkeys(names, self.models[0])) if names else ANYTHING

    @classmethod
    def of(
        cls,
        model: str | None,
        options: Sequence[str],
        url: str | None,
        *,
        use: ServerUse = ServerUse(),
        client_rules: bool = False,
    ) -> EngineChoice:
        """The engine for these options.

        Raises ``typer.BadParameter`` for options that contradict each other, and
        :class:`~batchyard.errors.ObjectNotFound` for a folder that does not exist.
        """
        if url is None and use != ServerUse():
            raise typer.BadParameter(
                "They are for a server that runs already: give its --engine-url, or leave them "
                "out.",
                param_hint=", ".join(use.options),
            )
        use.check()
        if url is not None and options:
            raise typer.BadParameter(
                f"{shlex.join(options)} would have no effect: batchyard run has no such option, "
                "and those of vLLM are for an engine that it starts. Leave one of the two out.",
                param_hint="--engine-url",
            )
        if url is not None:
            _check_adapters(model, use.adapters)
            return cls((model, *use.adapters) if model else (), "", (), url, use)
        model = model or EngineOptions(options).value("model")
        if not model:
            raise typer.BadParameter("Say which model to load.", param_hint="--model")
        if model.startswith(("/", ".", "~")) and not Path(model).exists():
            raise ObjectNotFound(
                f"--model {model} does not exist: give a folder, or a name on the hub."
            )
        names = served_names(model, options)
        return cls(names, model, tuple(options), None, use, client_rules)

    def make(self, settings: Settings, model: str) -> Engine:
        """The engine, not started. Raises :class:`~batchyard.errors.SettingsError`."""
        from batchyard.dispatch import block_name  # noqa: PLC0415 - `--help` stays quick
        from batchyard.engine.objective import Objective  # noqa: PLC0415 - see above
        from batchyard.engine.remote.remote import RemoteEngine  # noqa: PLC0415 - see above
        from batchyard.engine.vllm.vllm import VllmEngine  # noqa: PLC0415 - see above
        from batchyard.services.machine.engine_python import engine_python  # noqa: PLC0415 - see above
        from flows.process.worker import engine_log  # noqa: PLC0415 - see above

        name = self.models[0] if self.models else model
        if self.url is not None:
            use, api_key = self.use, os.environ.get("BATCHYARD_ENGINE_API_KEY")
            return RemoteEngine(
                self.url,
                name,
                api_key=api_key,
                max_num_seqs=use.seats,
                exclusive=use.exclusive,
                objective=Objective.of(use.ttft_ms, use.itl_ms, use.latency_quantile or 0.99),
                reserve_seats=use.reserve_seats,
                priority=use.priority,
                adapters=use.adapters,
                ssl_context=settings.tls_context,
            )
        return VllmEngine(
            name,
            self.options,
            python=engine_python(settings),
            weights=self.weights,
            log_path=engine_log(settings, block_name(name)),
            media_domains=settings.bodies.media_domains if self.client_rules else None,
        )


def _check_adapters(model: str | None, names: Sequence[str]) -> None:
    option = _OPTIONS["adapters"]
    if names and model is None:
        raise typer.BadParameter("Say of which --model.", param_hint=option)
    try:
        check_adapter_names(model or "", names)
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint=option) from None
