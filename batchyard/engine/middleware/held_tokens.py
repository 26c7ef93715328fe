"""Tokens of requests that are answered whole: a scheduler for ``vllm serve``.

vLLM's core sends each new token of each request to the API process, which decodes it, counts it
and, for a request that is not streamed, shows it to nobody until the last one is there. With many
short steps that is a good part of the processor time of both processes. Here such tokens wait in
the core, for :data:`HELD_SECONDS` at most, so that the server's metrics and whoever watches them
for progress still see an engine at work; the last token brings along what is held.

Nothing is held of a request whose tokens somebody else looks at on the way: one that is streamed,
that has stop strings (which the API process looks for), or log probabilities. The first token is
never held, so the time to it is measured as ever.

The scheduler is vLLM's own, whichever it takes for this configuration, and what is held is decided
after it has decided everything. Of outputs that have another shape than those of vLLM 0.32 nothing
is held.

Only vLLM loads this file, inside the process of the engine's core (``--scheduler-cls``).
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELD_SECONDS: Final = 1.0

KNOWN_FIELDS: Final = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
    "ec_transfer_params",
    "trace_headers",
    "prefill_stats",
    "routed_experts",
    "num_nans_in_logits",
    "mm_cache_miss_hashes",
    "new_sampling_mask",
    "spec_decode_metrics",
    "prompt_token_id_logprobs",
)
"""Of an output of vLLM 0.32's core. One that it does not have might not be lost with impunity."""


def scheduler(*args: Any, **options: Any) -> Any:
    """An instance of vLLM's scheduler for ``options["vllm_config"]``, with tokens held if it can.

    vLLM calls it as the class that ``--scheduler-cls`` names.
    """
    chosen = _chosen_by_vllm(options["vllm_config"])
    if _output_fields() != KNOWN_FIELDS:
        return chosen(*args, **options)
    return type("HeldTokens", (HoldsTokens, chosen), {})(*args, **options)


def _chosen_by_vllm(config: Any) -> Any:
    """The class that it would take if none was named."""
    if getattr(config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler  # noqa: PLC0415 - only for such models

        is_async = config.scheduler_config.async_scheduling
        name = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name)
    named = config.scheduler_config.scheduler_cls
    config.scheduler_config.scheduler_cls = None
    try:
        return config.scheduler_config.get_scheduler_cls()
    finally:
        config.scheduler_config.scheduler_cls = named


def _output_fields() -> tuple[str, ...]:
    from vllm.v1.engine import EngineCoreOutput  # noqa: PLC0415 - only where there is vLLM

    return tuple(EngineCoreOutput.__struct_fields__)


class HoldsTokens:
    """What is put before a scheduler of vLLM's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._answered_whole: set[str] = set()
        self._held: dict[str, list[int]] = {}
        self._all_pass_at = 0.0

    def add_request(self, request: Any) -> None:
        if _is_answered_whole(request):
            self._answered_whole.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]  # the scheduler's

    def finish_requests(self, *args: Any, **options: Any) -> Any:
        ended = super().finish_requests(*args, **options)  # type: ignore[misc]  # the scheduler's
        for request in ended:
            self._forget(request.request_id)
        return ended

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        found = super().update_from_output(*args, **options)  # type: ignore[misc]  # the scheduler's
        now = monotonic()
        all_pass = now >= self._all_pass_at
        if all_pass:
            self._all_pass_at = now + HELD_SECONDS
        for outputs in found.values():
            if outputs.outputs:
                outputs.outputs = list(self._passing(outputs.outputs, all_pass=all_pass))
        return found

    def _passing(self, outputs: Sequence[Any], *, all_pass: bool) -> Iterator[Any]:
        """Those that are not held, each with what was held of its request before."""
        for output in outputs:
            request_id = output.request_id
            if not all_pass and request_id in self._answered_whole and _is_only_tokens(output):
                self._held.setdefault(request_id, []).extend(output.new_token_ids)
                continue
            before = self._held.pop(request_id, None)
            if before:
                output.new_token_ids = before + output.new_token_ids
            if output.finish_reason is not None:
                self._forget(request_id)
            yield output

    def _forget(self, request_id: str) -> None:
        self._answered_whole.discard(request_id)
        self._held.pop(request_id, None)


def _is_answered_whole(request: Any) -> bool:
    """Whether nobody looks at its tokens before the last one."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind.name == "FINAL_ONLY"
        and not params.stop
        and not request.resumable
        and params.num_logprobs is None
    )


def _is_only_tokens(output: Any) -> bool:
    """What each output has (``trace_headers``) is looked at with the last one."""
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.events is None
        and output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.stop_reason is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
        and output.mm_cache_miss_hashes is None
        and output.new_sampling_mask is None
        and output.spec_decode_metrics is None
        and output.prompt_token_id_logprobs is None
    )
