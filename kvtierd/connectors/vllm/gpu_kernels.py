"""One kernel that gathers the runs of blocks into a slab, or scatters them. Needs Triton, which comes with torch for GPUs."""

from __future__ import annotations

from typing import Any, Final

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

UNITS_AT_ONCE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _move_runs(  # type: ignore[no-untyped-def]
    runs,
    block_ids,
    slab,
    block_units,
    to_slab: tl.constexpr,
    units_at_once: tl.constexpr,
):
    """One program moves one run of one block."""
    row = tl.program_id(0).to(tl.int64)
    run = runs + tl.program_id(1) * 4
    block = tl.load(block_ids + row)
    engine = (tl.load(run) + block * tl.load(run + 1)).to(slab.dtype)
    staged = slab + row * block_units + tl.load(run + 2)
    length = tl.load(run + 3)
    for start in range(0, length, units_at_once):
        places = start + tl.arange(0, units_at_once)
        mask = places < length
        if to_slab:
            tl.store(staged + places, tl.load(engine + places, mask=mask), mask=mask)
        else:
            tl.store(engine + places, tl.load(staged + places, mask=mask), mask=mask)


def move_runs(runs: Any, block_ids: Any, slab: Any, block_units: int, *, to_slab: bool) -> None:
    """Queue the kernel on the current stream.

    Args:
        runs: (run, 4) int64 on the device: address of block 0's run, bytes from block to block, place in the slab's row and length
            in units.
        block_ids: (row,) int64 on the device.
        slab: (row * block_units,) of the unit.
        block_units: units of one row.
        to_slab: gather; else scatter.
    """
    grid = (block_ids.numel(), runs.shape[0])
    _move_runs[grid](runs, block_ids, slab, block_units, to_slab=to_slab, units_at_once=UNITS_AT_ONCE)
