"""Goal: the kernel moves every unit of a block's runs to where its row is, and back, and nothing else.

Method: Triton's own interpreter, which runs kernels on host memory; in a process of its own, for it has to be chosen beforehand.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: run make test-vllm")

KERNEL = """
import sys
import torch
from kvtierd.connectors.vllm import gpu_kernels

unit, length = getattr(torch, sys.argv[1]), int(sys.argv[2])
size = unit.itemsize
engine = torch.randint(-100, 100, (5, 3, length + 2), dtype=unit)  # each run with two units behind it that are not its own
before = engine.clone()
runs = torch.tensor([[engine[0, r].data_ptr(), 3 * (length + 2) * size, r * length, length] for r in range(3)])
slots = torch.zeros(4, 3 * length, dtype=unit)
blocks, places = [3, 0, 4], [2, 0, 3]
ids, rows = torch.tensor(blocks), torch.tensor([slots[p].data_ptr() for p in places])
gpu_kernels.move_runs(runs, ids, rows, slots, to_rows=True)
for block, place in zip(blocks, places):
    assert torch.equal(slots[place], before[block, :, :length].flatten()), (block, place)
assert not slots[1].any() and torch.equal(engine, before)
slots.add_(1)
gpu_kernels.move_runs(runs, ids, rows, slots, to_rows=False)
before[blocks, :, :length] += 1
assert torch.equal(engine, before)
"""


@pytest.mark.parametrize("unit, length", [("int64", 16), ("int64", 1030), ("int32", 7), ("int16", 1024), ("uint8", 3)])
def test_runs_go_to_their_rows_and_back(unit: str, length: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = KERNEL.replace("-100, 100", "0, 100") if unit == "uint8" else KERNEL
    done = subprocess.run([sys.executable, "-c", code, unit, str(length)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
