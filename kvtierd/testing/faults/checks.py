"""What must hold after each round: every listed block, every limit, and the figures against the files."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from kvtierd.client import Client
from kvtierd.model import PAGE_BYTES, Tier
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.faults.contents import REALMS, Realm
from kvtierd.v1 import admin_pb2 as pb

SETTLE_S: Final = 10.0
"""How long files may take to follow the figures: dropped segments are deleted by a thread."""
BATCH: Final = 16
BEGIN_BYTES: Final = 16
"""So many bytes tell contents apart."""
LOAD_TIMEOUT_S: Final = 30.0
Listing = dict[Realm, list[bytes]]


def listing(daemon: DaemonProcess) -> Listing:
    """Keys of all blocks that the daemon lists, by realm. Raises AssertionError for one of a realm that nobody made."""
    known = {(realm.tenant, realm.namespace.fingerprint()): realm for realm in REALMS}
    found: Listing = defaultdict(list)
    with daemon.admin() as stub:
        token = ""
        while True:
            page = stub.ListBlocks(pb.ListBlocksRequest(page_size=1000, page_token=token), timeout=LOAD_TIMEOUT_S)
            for block in page.blocks:
                realm = known.get((block.tenant, block.fingerprint))
                assert realm is not None, f"a block of {block.tenant!r} that nobody saved: {block}"
                assert block.bytes == sum(realm.shard_bytes), block
                found[realm].append(block.key)
            token = page.next_page_token
            if not token:
                return found


def tiers(daemon: DaemonProcess) -> dict[Tier, pb.TierStatus]:
    """Figures by tier. Raises AssertionError when a tier holds more than it may."""
    found = {Tier(tier.tier - 1): tier for tier in daemon.status().tiers}
    for tier in found.values():
        assert tier.used_bytes <= tier.reserved_bytes <= tier.capacity_bytes, tier
    return found


def check_memory(pid: int, capacity_bytes: int) -> int:
    """The machine's word for what the CPU tier takes: pages of all memory files that a process holds. Returns them."""
    total = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:kvtierd"):
                total += entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    assert total <= capacity_bytes, f"the CPU tier takes {total} bytes of memory; its capacity is {capacity_bytes}"
    return total


def check_files(folders: list[Path], capacity_bytes: int) -> int:
    """The machine's word for what the NVMe tier takes. Returns it."""
    sizes: dict[Path, int] = {}
    for path in _files(folders):
        try:
            sizes[path] = path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    aside = [path.name for path in sizes if ".old-format-" in path.name]
    assert not aside, f"taken for files of another version: {aside}"
    total = sum(sizes.values())
    assert total <= capacity_bytes, f"files take {total} bytes of {capacity_bytes}: {sizes}"
    return total


def check_accounts(daemon: DaemonProcess, folders: list[Path], found: Listing) -> None:
    """Right after a start: used bytes are those of the listed blocks, reserved bytes those of the segment files."""
    nvme = tiers(daemon)[Tier.NVME]
    listed = sum(len(keys) * realm.nvme_bytes for realm, keys in found.items())
    assert nvme.used_bytes == listed, f"{nvme.used_bytes} bytes in use, and listed blocks take {listed}"
    until_s = time.monotonic() + SETTLE_S
    while True:
        files = [path.name for path in _files(folders) if path.suffix == ".kv"]
        size = sum(int(name.split("-")[2]) * int(name.split("-")[3].removesuffix(".kv")) for name in files)
        reserved = tiers(daemon)[Tier.NVME].reserved_bytes
        if reserved == size:
            return
        assert time.monotonic() < until_s, f"{reserved} bytes reserved, and segments take {size}: {files}"
        time.sleep(0.05)


def check_hidden(folders: list[Path], found: Listing) -> None:
    """No page of a segment begins as a payload of a listed block does: all of them are encrypted."""
    begins: set[bytes] = set()
    for path in _files(folders):
        if path.suffix == ".kv":
            with contextlib.suppress(FileNotFoundError):  # dropped segments are deleted by a thread
                begins |= {page.tobytes() for page in np.fromfile(path, np.uint8).reshape(-1, PAGE_BYTES)[:, :BEGIN_BYTES]}
    for realm, keys in found.items():
        for key in keys:
            plain = [shard for shard in realm.content(key) if shard[:BEGIN_BYTES].tobytes() in begins]
            assert not plain, f"the block {key.hex()} of {realm} is on disk as it is"


def _files(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        if folder.exists():
            yield from folder.iterdir()


def load_all(clients: dict[Realm, Client], found: Listing) -> dict[Realm, list[bytes]]:
    """Load every listed block and compare it. Returns those that are none.

    Raises:
        AssertionError: a block has other bytes than its own.
    """
    missing: dict[Realm, list[bytes]] = defaultdict(list)
    for realm, keys in found.items():
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            out = [realm.empty() for _ in some]
            result = clients[realm].load(some, out, each=True, timeout_s=LOAD_TIMEOUT_S)
            for index in result.indexes:
                right = realm.content(some[index])
                assert all((got == want).all() for got, want in zip(out[index], right, strict=True)), (
                    f"wrong bytes for key {some[index].hex()} of {realm}"
                )
            there = set(result.indexes)
            missing[realm] += [key for index, key in enumerate(some) if index not in there]
    return {realm: keys for realm, keys in missing.items() if keys}
