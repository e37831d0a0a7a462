"""What the scheduler's side knows about one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtierd.client import Prefetch
from kvtierd.connectors.lmcache import RequestSettings
from kvtierd.connectors.vllm.lookups import Lookup
from kvtierd.connectors.vllm.probes import Probe
from kvtierd.tracing import NO_SPAN, Span


@dataclass(slots=True)
class Load:
    """A load that was promised and allocated."""

    job_id: int
    request_id: str
    lookup: Lookup | None
    """What pins the blocks; None for a load that is only reported as failed."""
    chunks: tuple[int, int]
    """First and one past the last chunk."""
    tokens_by_tier: dict[str, int]
    started_s: float
    span: Span = NO_SPAN


@dataclass(slots=True)
class RequestState:
    """State of one request. Times are monotonic seconds.

    Attributes:
        request: vLLM's.
        settings: what its ``kv_transfer_params`` say.
        tenant: who is billed.
        bypass: no cache for this request any more (its parameters cannot be used, or its blocks are not known).
        no_load: nothing is loaded for it any more, as a load of it has failed. What it computes is saved.
        block_ids: the engine's blocks, one list a KV cache group, as last told.
        lookup: asked and not yet used.
        promised_s: when the lookup's hit was first promised; 0 when it was not.
        missed: the number of the first chunk that a lookup did not find, and when.
        probe: whether a load would find anything, as far as that is known.
        prefetches: running ahead of the lookup, one a pool.
        asked: vLLM has asked about this request.
        asked_s: when it last did.
        wait_until_s: until when vLLM may be told to ask again; 0 when it is not being told so.
        load: under way.
        next_chunk: first chunk that was not yet handed to the saves.
        names: keys of its first chunks, by KV cache group, as far as they were needed.
        matched_tokens: tokens that it did not have to compute when it was first scheduled; None before that.
        useless: so many chunks were looked at, and those from ``next_chunk`` on are of no use to save without later ones.
        local_tokens: tokens that the engine holds for it, or that this connector has loaded, since its blocks were allocated.
        computed: tokens that the last step it was part of has left in its blocks; 0 until there is one.
        doubtful_until: number of the step up to which it is not certain that its first blocks have any content.
        traceparent: what its spans belong to; "" for nothing.
        stale: it began before a reset, so its blocks must not be saved under new keys.
    """

    request: Any
    settings: RequestSettings
    tenant: str
    bypass: bool = False
    no_load: bool = False
    block_ids: tuple[list[int], ...] = ()
    lookup: Lookup | None = None
    promised_s: float = 0.0
    missed: tuple[int, float] | None = None
    probe: Probe | None = None
    prefetches: list[Prefetch] = field(default_factory=list)
    asked: bool = False
    asked_s: float = 0.0
    wait_until_s: float = 0.0
    load: Load | None = None
    next_chunk: int = 0
    names: dict[int, list[bytes]] = field(default_factory=dict)
    matched_tokens: int | None = None
    useless: int = 0
    local_tokens: int = 0
    computed: int = 0
    doubtful_until: int = 0
    stale: bool = False
    traceparent: str = ""

    def forget_probe(self) -> None:
        """Nobody wants to know that any more."""
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.forget()


def tenant_of(settings: RequestSettings, cache_salt: str | None, salt_tenants: Mapping[str, str]) -> str:
    """The request's tenant: named by its parameters, else by its salt; empty means the connector's own."""
    if settings.tenant:
        return str(settings.tenant)
    return str(salt_tenants.get(cache_salt, "")) if cache_salt else ""
