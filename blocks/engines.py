"""Engines: how a model is served. The block document is named after the model, as a slug."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.engine.remote import RemoteEngine
from batchyard.engine.vllm import VllmEngine

if TYPE_CHECKING:
    from pathlib import Path


def block_name(model: str) -> str:
    """The document's name for a model: ``org/Model-3.1-8B`` is ``org-model-3-1-8b``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


class VllmEngineBlock(Block):
    """A model that a GPU worker serves with its own vLLM."""

    _block_type_name = "Batchyard vLLM engine"
    _block_type_slug = "batchyard-vllm-engine"

    model: str = Field(description="The name that request bodies carry.")
    weights: str | None = Field(
        default=None, description="Path or hub id to load; empty: the same as the name."
    )
    options: list[str] = Field(
        default_factory=list,
        description="Options of `vllm serve`, one word each, for example --max-model-len, 8192.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the engine's process."
    )

    def build(self, *, python: Path, log_path: Path | None = None) -> VllmEngine:
        return VllmEngine(
            self.model,
            self.options,
            python=python,
            weights=self.weights,
            environment=self.environment,
            log_path=log_path,
        )


class RemoteEngineBlock(Block):
    """A model on an OpenAI-compatible server that runs already."""

    _block_type_name = "Batchyard remote engine"
    _block_type_slug = "batchyard-remote-engine"

    model: str = Field(description="The name that request bodies carry.")
    base_url: str = Field(description="For example http://10.0.0.5:8000/v1.")
    api_key: SecretStr | None = Field(default=None, description="Sent as a Bearer token.")
    max_num_seqs: int = Field(default=256, ge=1, description="Requests that it runs at once.")

    def build(self) -> RemoteEngine:
        return RemoteEngine(
            self.base_url,
            self.model,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            max_num_seqs=self.max_num_seqs,
        )
