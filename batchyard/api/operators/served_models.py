"""``/models``: the models on offer, which are those of the engine blocks in Prefect."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import msgspec
from fastapi import APIRouter, Request

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.route import Route
from batchyard.dispatch import PrefectApi, offer_of
from batchyard.errors import BatchyardError, SettingsError
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from fastapi import FastAPI

    from batchyard.dispatch import OfferedModel

log = event_logger(__name__)

_KEPT_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0
_KNOWN_SECONDS = 60.0
"""How long live requests do not wait for Prefect to say the same again of a name."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The Model object. An adapter has the model that it changes as its root and parent."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "batchyard"
    root: str | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: this list has no pages."""

    object: Literal["list"] = "list"
    data: list[Model]


class ModelCatalogue:
    """What Prefect said last, asked for again after some seconds.

    While Prefect is away it is what was known before. ``prefect`` None: nothing is ever known.
    """

    def __init__(self, prefect: PrefectApi | None) -> None:
        self._prefect = prefect
        self._models: dict[str, OfferedModel] = {}
        self._asked_at = -_KEPT_SECONDS
        self._asking = asyncio.Lock()
        self._failure: str | None = None

    async def models(self) -> dict[str, OfferedModel]:
        """The models under their names, in the order of the names."""
        async with self._asking:
            if self._prefect is not None and time.monotonic() - self._asked_at >= _KEPT_SECONDS:
                await self._ask(self._prefect)
                self._asked_at = time.monotonic()
        return self._models

    async def find(self, name: str) -> OfferedModel | None:
        """The model of this name, or the one of which it names an adapter; None: there is none."""
        found = None
        if time.monotonic() - self._asked_at < _KNOWN_SECONDS:
            found = _find(self._models, name)
        return found or await self.find_again(name)

    async def find_again(self, name: str) -> OfferedModel | None:
        """The same by what Prefect says now, or said some seconds ago."""
        return _find(await self.models(), name)

    async def prefect_answers(self) -> bool | None:
        """Whether Prefect's server did when it was last asked; None: there is none to ask."""
        await self.models()
        return None if self._prefect is None else self._failure is None

    async def _ask(self, prefect: PrefectApi) -> None:
        failure: str | None = None
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                self._models = {model.name: model for model in await prefect.offered_models()}
        except TimeoutError:
            failure = "Prefect is too slow."
        except BatchyardError as error:
            failure = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            failure = f"Prefect's answer is not as expected ({type(error).__name__})."
        if failure is not None and failure != self._failure:
            log.warning("models.not_read", failure)
        self._failure = failure


@asynccontextmanager
async def catalogue(app: FastAPI) -> AsyncIterator[None]:
    """The router's lifespan: ``app.state.catalogue`` is there while the application runs."""
    try:
        prefect = PrefectApi.from_environment()
    except SettingsError:
        app.state.catalogue = ModelCatalogue(None)
        yield
        return
    async with prefect:
        app.state.catalogue = ModelCatalogue(prefect)
        yield


router = APIRouter(prefix="/models", lifespan=catalogue, route_class=Route)


@router.get("", summary="List the models")
async def list_models(request: Request, _: Authenticated) -> JsonResponse[ModelList]:
    """The models that batches may name, each followed by its adapters."""
    return JsonResponse(ModelList(data=list(_listed(await request.app.state.catalogue.models()))))


# A model's name may hold slashes, which clients send as they are or encoded.
@router.get("/{model:path}", summary="Look at a model")
async def retrieve_model(model: str, request: Request, _: Authenticated) -> JsonResponse[Model]:
    """One model that batches may name."""
    listed = _listed(await request.app.state.catalogue.models())
    found = next((each for each in listed if each.id == model), None)
    if found is None:
        raise ApiError(
            404, f"The model '{model}' does not exist.", param="model", code="model_not_found"
        )
    return JsonResponse(found)


def _find(models: Mapping[str, OfferedModel], name: str) -> OfferedModel | None:
    return models.get(offer_of(models.values()).model_of(name))


def _listed(models: Mapping[str, OfferedModel]) -> Iterator[Model]:
    adapters = offer_of(models.values()).adapters
    for model in models.values():
        yield Model(id=model.name, created=model.created_at)
        for name in sorted(model.adapters):
            if name in adapters:
                yield Model(id=name, created=model.created_at, root=model.name, parent=model.name)
