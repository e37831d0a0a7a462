"""One kernel that gathers the runs of blocks into rows of device memory, or scatters them. Needs Triton, as torch for GPUs does."""

from __future__ import annotations

from typing import Any, Final

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

UNITS_AT_ONCE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _move_runs(  # type: ignore[no-untyped-def]
    runs,
    block_ids,
    rows,
    unit,
    to_rows: tl.constexpr,
    units_at_once: tl.constexpr,
):
    """One program moves one run of one block."""
    number = tl.program_id(0).to(tl.int64)
    run = runs + tl.program_id(1) * 4
    block = tl.load(block_ids + number)
    engine = (tl.load(run) + block * tl.load(run + 1)).to(unit.dtype)
    row = tl.load(rows + number).to(unit.dtype) + tl.load(run + 2)
    length = tl.load(run + 3)
    for start in range(0, length, units_at_once):
        places = start + tl.arange(0, units_at_once)
        mask = places < length
        if to_rows:
            tl.store(row + places, tl.load(engine + places, mask=mask), mask=mask)
        else:
            tl.store(engine + places, tl.load(row + places, mask=mask), mask=mask)


def move_runs(runs: Any, block_ids: Any, rows: Any, unit: Any, *, to_rows: bool) -> None:
    """Queue the kernel on the current stream.

    Args:
        runs: (run, 4) int64 on the device: address of block 0's run, bytes from block to block, place in a row and length in units.
        block_ids: (row,) int64 on the device.
        rows: (row,) int64 on the device: addresses, where each block is whole.
        unit: any tensor on the device of the type that is moved at a time.
        to_rows: gather; else scatter.
    """
    grid = (block_ids.numel(), runs.shape[0])
    _move_runs[grid](runs, block_ids, rows, unit, to_rows=to_rows, units_at_once=UNITS_AT_ONCE)
