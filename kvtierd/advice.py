"""Why a hit rate is what it is, and what would change it: findings from figures. Pure; ``kvtierd advise`` gets the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

GOOD: Final = 0.7
USUAL: Final = 0.4
"""Hit rates from ``GOOD`` on are good, below ``USUAL`` something is wrong or nothing is shared."""
MIN_USES: Final = 200
"""With fewer uses of blocks nothing can be said."""
MIN_REQUESTS: Final = 20
NOTABLE: Final = 0.05
"""A change of the hit rate worth telling."""
LARGE_SHARE: Final = 0.3

Level = Literal["good", "note", "look"]


@dataclass(frozen=True)
class Engine:
    """What an engine's own metrics say, since its start."""

    prompt_tokens: float = 0.0
    prompts: float = 0.0
    local_queries: float = 0.0
    """Tokens looked up in the engine's own prefix cache."""
    local_hits: float = 0.0
    external_queries: float = 0.0
    external_hits: float = 0.0
    adapters: int = 0
    """LoRA adapters in use at the moment."""


@dataclass(frozen=True)
class Figures:
    """What a daemon says; uses are uses of blocks in the last hours (see ``GetReuse``)."""

    cpu_bytes: int
    nvme_bytes: int
    distances: Mapping[int, float] = field(default_factory=dict)
    """Uses by distance in bytes, cold ones not among them."""
    cold: float = 0.0
    found: float = 0.0
    added: float = 0.0
    continued: float = 0.0
    new: float = 0.0
    lost: float = 0.0
    block_tokens: int = 0
    sessions: int = 0
    rejected: Mapping[str, float] = field(default_factory=dict)
    """Keys that saves did not get slots for, by reason."""
    evicted: Mapping[str, float] = field(default_factory=dict)
    """Copies forgotten on the last tier, by reason."""
    not_admitted: float = 0.0
    engine: Engine | None = None

    @property
    def hit_ratio(self) -> float:
        """Blocks that loads found, of all that requests needed and the engines did not have."""
        return self.found / max(self.found + self.added, 1.0)

    def hits_at(self, size_bytes: float) -> float:
        """Ratio of uses that a cache of this size would hit, as far as the sample tells."""
        uses = sum(self.distances.values()) + self.cold
        return sum(n for size, n in self.distances.items() if size <= size_bytes) / max(uses, 1.0)


@dataclass(frozen=True)
class Finding:
    """One thing to know."""

    level: Level
    what: str
    do: str = ""
    """What to do about it; "" for nothing."""


def findings(figures: Figures) -> list[Finding]:
    """What figures say, the verdict first."""
    uses = figures.found + figures.added
    if not figures.sessions and not uses:
        return [Finding("look", "no engine is attached and none has used the daemon", _ATTACH), *_engine(figures)]
    if uses < MIN_USES:
        return [Finding("note", f"only {uses:.0f} blocks were used so far: too few to tell", _WAIT), *_engine(figures)]
    return [_verdict(figures), *_sizes(figures), *_beginnings(figures), *_refusals(figures), *_engine(figures)]


_ATTACH: Final = "see docs/vllm.md for the connector's settings, and the engine's log for why it did not attach"
_WAIT: Final = "ask again when some requests have run"


def _verdict(f: Figures) -> Finding:
    text = f"{f.hit_ratio:.0%} of the blocks that engines asked for were found"
    if f.hit_ratio >= GOOD:
        return Finding("good", text + ": good")
    if f.hit_ratio >= USUAL:
        return Finding("note", text + ": usual for mixed traffic")
    return Finding("look", text + ": low")


def _sizes(f: Figures) -> list[Finding]:
    """Would more room help, and on which tier?"""
    made = []
    last, name = (f.nvme_bytes, "nvme") if f.nvme_bytes else (f.cpu_bytes, "cpu")
    now, best = f.hits_at(last), f.hits_at(float("inf"))
    if best - now >= NOTABLE:
        for factor in (2, 4, 8):
            if (gain := f.hits_at(factor * last) - now) >= NOTABLE:
                made.append(
                    Finding(
                        "look",
                        f"{best - now:.0%} of the uses are of blocks that were forgotten before they came back",
                        f"{factor} times {name}.capacity would hit about {gain:+.0%} more"
                        + (" (or add NVMe: nvme.capacity is 0)" if name == "cpu" else ""),
                    )
                )
                break
        else:
            made.append(
                Finding(
                    "note", f"{best - now:.0%} of the uses come back after more than 8 times {name}.capacity: hardly worth room"
                )
            )
    if f.nvme_bytes:
        in_memory = f.hits_at(f.cpu_bytes)
        gain = f.hits_at(2 * f.cpu_bytes) - in_memory
        if gain >= NOTABLE:
            made.append(
                Finding(
                    "note",
                    f"{in_memory:.0%} of the uses fit into CPU memory, {now - in_memory:.0%} have to come from NVMe",
                    f"twice cpu.capacity would serve about {gain:+.0%} from memory",
                )
            )
    return made


def _beginnings(f: Figures) -> list[Finding]:
    """Do requests share their beginnings?"""
    requests = f.continued + f.new + f.lost
    if requests < MIN_REQUESTS:
        return []
    made = []
    if f.new / requests >= LARGE_SHARE:
        made.append(
            Finding(
                "look" if f.hit_ratio < USUAL else "note",
                f"{f.new / requests:.0%} of the requests that saved something begin with a block that was never seen",
                "if they should share a system prompt: put what changes (dates, names, ids) behind it; see whether each request "
                "has a cache_salt or LoRA adapter of its own, and whether engines run with the same model, dtype and hash seed",
            )
        )
    if f.lost / requests >= LARGE_SHARE:
        made.append(
            Finding(
                "look",
                f"{f.lost / requests:.0%} of the requests begin with a block that was held once and is held no more",
                "more capacity, a longer TTL on the last tier, or a quota for the tenant that pushes it out",
            )
        )
    return made


def _refusals(f: Figures) -> list[Finding]:
    """Was it not even saved?"""
    made = []
    refused = sum(f.rejected.values())
    if refused and refused / (refused + f.added) >= NOTABLE:
        worst = max(f.rejected, key=lambda reason: f.rejected[reason])
        do = {
            "quota": "raise the tenant's quota (kvtierd tenants list)",
            "busy": "writing down does not keep up: see kvtierd top; raise cpu.capacity or cpu.free_target, or add NVMe folders",
        }.get(worst, "see docs/errors.md")
        made.append(
            Finding("look", f"{refused / (refused + f.added):.0%} of the blocks to save got no room, most for {worst!r}", do)
        )
    expired = sum(n for reason, n in f.evicted.items() if reason in ("ttl", "expired"))
    gone = sum(f.evicted.values())
    if gone >= MIN_USES and expired / gone >= LARGE_SHARE:
        made.append(
            Finding(
                "note", f"{expired / gone:.0%} of what the last tier forgot had come to its TTL", "raise it, or set it to never"
            )
        )
    if f.not_admitted and f.not_admitted / max(f.added, 1.0) >= LARGE_SHARE:
        made.append(
            Finding(
                "note",
                f"NVMe did not take {f.not_admitted:.0f} blocks",
                "see nvme.admission and nvme.write_budget (docs/policy.md)",
            )
        )
    return made


def _engine(f: Figures) -> list[Finding]:
    """What the engine's own figures add."""
    e = f.engine
    if e is None:
        return []
    made = []
    if not e.prompts and not e.local_queries:
        made.append(Finding("note", "the engine has had no request since its start", _WAIT))
    if e.prompts and f.block_tokens and e.prompt_tokens / e.prompts < 2 * f.block_tokens:
        made.append(
            Finding(
                "look",
                f"prompts have {e.prompt_tokens / e.prompts:.0f} tokens on average, a block {f.block_tokens}: what does "
                "not fill a block is not saved",
                "set kvtierd.chunk_tokens to less",
            )
        )
    if e.local_queries and not e.external_queries:
        made.append(Finding("look", "the engine has asked no external cache", _ATTACH))
    elif e.local_queries:
        local, external = e.local_hits / e.local_queries, e.external_hits / e.external_queries
        text = f"the engine's own prefix cache has {local:.0%} of the prompt tokens; of the others {external:.0%} came from here"
        made.append(Finding("note", text))
    if e.adapters > 1:
        made.append(
            Finding(
                "note", f"{e.adapters} LoRA adapters are in use: a prefix is held once for each, as its KV differs with the adapter"
            )
        )
    return made
