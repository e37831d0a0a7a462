"""Steps of engine jobs, and what tests do to daemons between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, kvtier_pb2
from tests.vllm.runner import transfer_config

MAX_TOKENS = 16
WAIT_S = 60
FORGET = {"do": "forget"}
FAULTY = {"name": "FaultyConnector", "module": "tests.vllm.faulty_connector"}

Baseline = Callable[..., list[list[int]]]
"""See the fixture ``baseline``."""


def engine(name: str, llm: dict[str, Any], *steps: dict[str, Any]) -> dict[str, Any]:
    """One engine of a job."""
    return {"name": name, "llm": llm, "steps": list(steps)}


def generate(name: str, wanted: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Ask for prompts, one after the other."""
    return {"do": "generate", "name": name, "prompts": list(wanted), "one_by_one": True, "max_tokens": MAX_TOKENS} | more


def barrier(name: str) -> dict[str, Any]:
    """Wait for the test."""
    return {"do": "barrier", "name": name}


def tell(name: str) -> dict[str, Any]:
    """Say how far this has come."""
    return {"do": "tell", "name": name}


def settle(daemon: DaemonProcess, name: str = "settle", blocks: int = 1) -> dict[str, Any]:
    """Take steps until the daemon holds ``blocks`` and nothing is under way."""
    return {"do": "settle", "name": name, "daemon": str(daemon.folder), "blocks": blocks}


def attach(daemon: DaemonProcess) -> dict[str, Any]:
    """Take steps until there is a session with the daemon that runs now."""
    return {"do": "attach", "daemon": str(daemon.folder)}


def faulty(daemon: DaemonProcess, faults: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Configuration of a connector whose copies go wrong."""
    config = transfer_config(daemon.address, **FAULTY, **settings)
    config["kv_connector_extra_config"]["kvtierd_test.faults"] = faults
    return config


def to_nvme(daemon: DaemonProcess) -> None:
    """Write everything down and forget the copies in memory."""
    with daemon.admin() as stub:
        assert stub.Drain(admin_pb2.DrainRequest(timeout_s=30, resume=True), timeout=60).dirty_bytes == 0
        stub.EvictBlocks(admin_pb2.EvictBlocksRequest(tier=kvtier_pb2.TIER_CPU), timeout=30)


def blocks_of(daemon: DaemonProcess) -> list[admin_pb2.BlockInfo]:
    """Every block that the daemon holds, up to a thousand."""
    with daemon.admin() as stub:
        return list(stub.ListBlocks(admin_pb2.ListBlocksRequest(page_size=1000), timeout=10).blocks)


def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Wait for a state. The limit is there to end a test that has failed."""
    until_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < until_s, f"not reached: {what}"
        time.sleep(0.02)


def wait_until_idle(daemon: DaemonProcess) -> None:
    """Wait until no session has an open ticket."""
    wait_until(lambda: not any(session.tickets for session in daemon.status().sessions), "no open tickets")


def segments(folder: Path) -> list[Path]:
    """Segment files of a daemon's NVMe tier."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
