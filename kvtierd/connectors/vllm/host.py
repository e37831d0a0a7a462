"""Where this process runs: on which host, and next to which memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CPUS: Final = Path("/sys/devices/system/cpu")
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


def host_identity() -> str:
    """The host's name as this process sees it, and this boot of the kernel, for ``same_host``."""
    return f"{platform.node()} {_read(BOOT_ID)}"


def same_host(one: str, other: str) -> bool:
    """Whether two identities are of one host.

    Its kernel's boot tells: containers have names of their own, and two hosts may have the same. Names count where no kernel tells.
    That both can also reach the same daemon is known once they have joined its session, by a token that no other daemon takes.
    """
    boots = [identity.partition(" ")[2] for identity in (one, other)]
    return boots[0] == boots[1] if all(boots) else one == other


def device_node(device: Any) -> int:
    """NUMA node of a device's memory, for a device of torch's; -1 when it is not known.

    For "cpu" it is the node of the processors that this process may run on, if they are all of one.
    """
    if device.type == "cuda":
        import torch

        found = torch.cuda.get_device_properties(device)
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        if not all(isinstance(getattr(found, name, None), int) for name in names):
            return -1
        domain, bus, slot = (getattr(found, name) for name in names)
        text = _read(PCI_DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node")
        return int(text) if text.isdecimal() else -1
    nodes = {node.name for cpu in os.sched_getaffinity(0) for node in (CPUS / f"cpu{cpu}").glob("node[0-9]*")}
    return int(nodes.pop().removeprefix("node")) if len(nodes) == 1 else -1


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
