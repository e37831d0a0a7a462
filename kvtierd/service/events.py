"""KV events in the format of vLLM 0.32: which blocks are held where, for routers that send requests to where their blocks are.

A message has three frames: topic, sequence number (8 bytes, big-endian) and a MessagePack array ``[time, events, null]``. Events
are maps, as vLLM's ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared``. ``block_hashes`` are kvtierd's keys, 32 bytes each;
``medium`` is GPU, CPU or STORAGE. Tokens and parents are not in them, as the daemon knows neither: an engine's own events tell
them of the same hashes. The fields ``tenant``, ``model`` and ``namespace`` are kvtierd's own; readers of vLLM's format skip them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

from kvtierd.core.realm import Realm
from kvtierd.core.state import CoreState
from kvtierd.core.stats import Change
from kvtierd.model import Tier

MEDIA: Final = {Tier.HBM: "GPU", Tier.CPU: "CPU", Tier.NVME: "STORAGE"}
MAX_KEYS: Final = 1024
"""Keys of one message."""
CLEARED: Final = {"type": "AllBlocksCleared"}
OWNER: Final = "kvtierd"


def batches(changes: Iterable[Change]) -> Iterator[list[dict[str, Any]]]:
    """Events of changes, in order, in lists of at most ``MAX_KEYS`` keys."""
    source = iter(changes)
    while chunk := list(itertools.islice(source, MAX_KEYS)):
        yield [_event(*which, keys=[c.key for c in run]) for which, run in itertools.groupby(chunk, _kind)]


def _kind(change: Change) -> tuple[Realm, Tier, bool]:
    return change.realm, change.tier, change.readable


def _event(realm: Realm, tier: Tier, stored: bool, *, keys: list[bytes]) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "BlockStored" if stored else "BlockRemoved", "block_hashes": keys, "medium": MEDIA[tier]}
    if stored:
        event |= {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": realm.namespace.block_tokens,
            "lora_id": None,
            "lora_name": None,
        }
    event |= {"locality": "LOCAL", "ownership": OWNER}
    return event | {"tenant": realm.tenant.name, "model": realm.namespace.model, "namespace": realm.fingerprint}


async def held(state: CoreState) -> AsyncIterator[list[Change]]:
    """Every readable copy, as if it had just come, in portions; other work goes on in between."""
    for realm in list(state.realms.values()):
        keys = realm.own_keys()
        for start in range(0, len(keys), MAX_KEYS):
            blocks = [b for key in keys[start : start + MAX_KEYS] if (b := realm.index.get(key)) is not None and b.realm is realm]
            for tier in Tier:
                found = [Change(realm, b.key, tier, True) for b in blocks if b.mask & tier.bit]
                if found:
                    yield found
            await asyncio.sleep(0)
