"""From records to the blocks that are still there. Pure numpy: no Python code runs once a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtierd.model import PAGE_BYTES, SLOT_INDEX_BITS
from kvtierd.tiers.base import RealmInfo, RecoveredExtent
from kvtierd.tiers.record import RECORD_DTYPE, Entry, Records, expiries_s

BATCH_BLOCKS: Final = 65_536
"""Blocks that are turned into Python objects at a time."""

Mask = npt.NDArray[np.bool_]


class LiveBlocks:
    """Whole blocks that the records of all folders describe.

    Args:
        records: arrays of each folder, with only the extents that the folder holds.
        extents: all segments found, by id.
        realms: known realms, by id.
    """

    def __init__(
        self,
        records: Sequence[tuple[Records, frozenset[int]]],
        extents: Mapping[int, RecoveredExtent],
        realms: Mapping[int, RealmInfo],
    ) -> None:
        held = [folder[_within(folder, ids, extents)] for folder, ids in records]
        together: Records = np.concatenate(held) if held else np.empty(0, RECORD_DTYPE)
        live = _last_of_each_slot(together)
        live = live[_fits(live, extents, realms)]
        self._records, self._starts, self._shards = _whole_blocks(live)
        self.older: list[Entry] = []
        """Older copies of blocks that are there. Their removals were lost: unless they are recorded, such a copy would be taken for
        the block at a later start, once the newer one has been removed."""
        self._drop_older_copies()

    @property
    def realm_ids(self) -> set[int]:
        """Realms that have blocks."""
        return set(np.unique(self._records["realm"]).tolist())

    def __len__(self) -> int:
        return len(self._starts)

    def _drop_older_copies(self) -> None:
        """Keep the newest of several copies of one block; there are none unless a removal was lost."""
        first = self._records[self._starts]
        words = np.ascontiguousarray(first["key"]).view("<u8").reshape(-1, 4)
        mixed = words[:, 0] ^ (first["realm"].astype("<u8") * np.uint64(0x9E3779B97F4A7C15))
        if len(np.unique(mixed)) == len(mixed):
            return
        # Blocks come oldest first, so the last of equal ones is the newest.
        names = zip(first["realm"].tolist(), first["key"].tolist(), strict=True)
        newest = {name: i for i, name in enumerate(names)}
        kept = np.array(sorted(newest.values()), np.intp)
        others = np.setdiff1d(np.arange(len(self._starts)), kept)
        self.older = list(self._entries(self._starts[others], self._shards[others]))
        self._starts, self._shards = self._starts[kept], self._shards[kept]

    def __iter__(self) -> Iterator[Entry]:
        """Realm id, key, generation, slots and expiry of each block, oldest generation first."""
        return self._entries(self._starts, self._shards)

    def _entries(self, all_starts: npt.NDArray[np.intp], all_shards: npt.NDArray[Any]) -> Iterator[Entry]:
        for at in range(0, len(all_starts), BATCH_BLOCKS):
            starts, shards = all_starts[at : at + BATCH_BLOCKS], all_shards[at : at + BATCH_BLOCKS]
            first = self._records[starts]
            slots: Iterator[tuple[int, ...]]
            if (shards == 1).all():
                slots = zip(first["slot"].tolist(), strict=True)
            else:
                slot_column = self._records["slot"]
                slots = (tuple(slot_column[a : a + n].tolist()) for a, n in zip(starts.tolist(), shards.tolist(), strict=True))
            columns = (first["realm"].tolist(), first["key"].tolist(), first["generation"].tolist())
            yield from zip(*columns, slots, expiries_s(first).tolist(), strict=True)


def live_extents(records: Sequence[Records]) -> frozenset[int]:
    """Ids of the extents that hold a block, by what a folder's records say."""
    live = _last_of_each_slot(np.concatenate([np.empty(0, RECORD_DTYPE), *records]))
    return frozenset(np.unique(live["slot"] >> SLOT_INDEX_BITS).tolist())


def _within(records: Records, ids: frozenset[int], extents: Mapping[int, RecoveredExtent]) -> Mask:
    """Which records lie in segments that the folder holds."""
    known = np.array(sorted(ids), "<u8")
    if not len(known) or not len(records):
        return np.zeros(len(records), bool)
    counts = np.array([extents[i].slot_count for i in known.tolist()], "<u8")
    extent, index = records["slot"] >> SLOT_INDEX_BITS, records["slot"] & 0xFFFF_FFFF
    at = np.minimum(np.searchsorted(known, extent), len(known) - 1)
    return np.asarray((known[at] == extent) & (index < counts[at]))


def _last_of_each_slot(records: Records) -> Records:
    """The record that holds for each slot, without those that say "gone"."""
    if not len(records):
        return records
    # Removals sort after a listing of the same generation, and later expiries after earlier ones, so the last record of a slot
    # is the one that holds.
    rank = (records["generation"] << 1) | (records["shards"] == 0)
    slots = records["slot"]
    order = np.lexsort((records["expires_ms"], rank, slots))
    sorted_slots = slots[order]
    last = np.empty(len(order), bool)
    last[-1] = True
    np.not_equal(sorted_slots[1:], sorted_slots[:-1], out=last[:-1])
    winners = records[order[last]]
    return winners[winners["shards"] > 0]


def _fits(records: Records, extents: Mapping[int, RecoveredExtent], realms: Mapping[int, RealmInfo]) -> Mask:
    """Which records name a known realm, a shard that it has, and a slot that is large enough."""
    if not realms or not len(records):
        return np.zeros(len(records), bool)
    ids = sorted(realms)
    shard_counts = [len(realms[i].namespace.shard_bytes) for i in ids]
    needs = np.array([PAGE_BYTES + n for i in ids for n in realms[i].namespace.slot_bytes], "<i8")
    offsets = np.concatenate([[0], np.cumsum(shard_counts)[:-1]]).astype("<i8")
    known = np.array(ids, "<i8")
    at = np.minimum(np.searchsorted(known, records["realm"]), len(ids) - 1)
    ok = (known[at] == records["realm"]) & (np.array(shard_counts)[at] == records["shards"])
    ok &= records["shard"] < records["shards"]
    extent_ids = np.array(sorted(extents), "<u8")
    sizes = np.array([extents[i].slot_bytes for i in extent_ids.tolist()], "<i8")
    size = sizes[np.minimum(np.searchsorted(extent_ids, records["slot"] >> SLOT_INDEX_BITS), len(sizes) - 1)]
    need = needs[np.minimum(offsets[at] + records["shard"], len(needs) - 1)]
    return np.asarray(ok & (need <= size))


def _whole_blocks(records: Records) -> tuple[Records, npt.NDArray[np.intp], npt.NDArray[Any]]:
    """Records ordered by generation and shard, where each whole block starts, and how many shards it has."""
    if (records["shards"] == 1).all():
        ordered = records[np.argsort(records["generation"], kind="stable")]
        return ordered, np.arange(len(ordered)), ordered["shards"]
    ordered = records[np.lexsort((records["shard"], records["generation"]))]
    generation = ordered["generation"]
    starts = np.flatnonzero(np.concatenate([[True], generation[1:] != generation[:-1]]))
    counts = np.diff(np.append(starts, len(ordered)))
    group = np.repeat(np.arange(len(starts)), counts)
    head = ordered[starts][group]
    fits = ordered["shard"] == np.arange(len(ordered)) - starts[group]
    for name in ("realm", "key", "shards"):
        fits &= ordered[name] == head[name]
    whole = np.logical_and.reduceat(fits, starts) & (counts == ordered["shards"][starts])
    return ordered, starts[whole], ordered["shards"][starts[whole]]
