"""Goal: processes of one host know each other as such, and a device's memory node is named or said to be unknown, never guessed.

Method: files as the kernel has them, in a folder of the test's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import host

CPU = SimpleNamespace(type="cpu")
CUDA = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a 1", "a 1", True),
        ("prefill-0 1", "decode-0 1", True),
        ("a 1", "a 2", False),
        ("a 1", "b 2", False),
        ("a ", "a ", True),
        ("a ", "b ", False),
        ("a 1", "a ", False),
    ],
)
def test_a_host_is_the_boot_of_its_kernel(one: str, other: str, same: bool) -> None:
    """Containers of one host have names of their own; where the kernel does not tell, names count."""
    assert host.same_host(one, other) == host.same_host(other, one) == same


def test_a_host_is_its_name_and_its_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.host_identity()
    assert here == host.host_identity()
    assert len(here.split()) == 2
    monkeypatch.setattr(host, "BOOT_ID", tmp_path / "boot_id")
    assert host.host_identity() != here, "where the kernel does not tell, the name alone counts"
    (tmp_path / "boot_id").write_text("another\n")
    assert host.host_identity().endswith(" another")


@pytest.mark.parametrize(("nodes", "found"), [([0, 0], 0), ([3, 3], 3), ([0, 1], -1), ([None, None], -1)])
def test_the_node_of_a_cpu(nodes: list[int | None], found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for cpu, node in enumerate(nodes):
        (tmp_path / f"cpu{cpu}" / ("topology" if node is None else f"node{node}")).mkdir(parents=True)
    assert host.device_node(CPU) == found


@pytest.mark.parametrize(("text", "found"), [("1\n", 1), ("-1\n", -1), (None, -1)])
def test_the_node_of_a_gpu(text: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Any = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA3, pci_device_id=0)
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda device: properties))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(host, "PCI_DEVICES", tmp_path)
    if text is not None:
        (tmp_path / "0000:a3:00.0").mkdir()
        (tmp_path / "0000:a3:00.0" / "numa_node").write_text(text)
    assert host.device_node(CUDA) == found
    del properties.pci_bus_id
    assert host.device_node(CUDA) == -1, "an older torch does not tell"
