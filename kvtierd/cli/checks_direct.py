"""Whether blocks can move between GPU memory and NVMe directly, for ``kvtierd doctor``: settings in force, and a trial."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtierd.cli.findings import Finding, Level
from kvtierd.config import Config
from kvtierd.cuda import Device
from kvtierd.errors import StartupError
from kvtierd.tiers.device_io import KVIKIO_SETTINGS, DeviceIo, kvikio_settings, open_device_io
from kvtierd.tiers.direct_path import DirectError, DirectPath
from kvtierd.tiers.direct_probe import ProbeResult, probe
from kvtierd.tiers.hbm import HbmPool
from kvtierd.tiers.io_engine import ThreadEngine

__all__ = ["check_direct"]

NAME: Final = "GPU memory to NVMe"
BY_CPU: Final = "blocks go between GPU memory and NVMe by CPU memory"
TRIAL_S: Final = 60.0
"""Longest wait for a trial, on top of the time of one transfer."""


def check_direct(config: Config) -> Iterator[Finding]:
    """What the daemon would find out. Nothing where there are not both tiers."""
    if not (config.hbm.capacity and config.nvme.capacity):
        return
    if config.nvme.gds == "off":
        yield Finding(NAME, Level.OK, 'nvme.gds is "off"', BY_CPU)
        return
    if config.nvme.encryption_key_file or config.nvme.encryption_key_command:
        yield Finding(NAME, Level.OK, "blocks are encrypted, by the CPU", BY_CPU)
        return
    insists = config.nvme.gds == "on"
    try:
        io = open_device_io(config.nvme.gds, config.nvme.depth)
    except StartupError as e:
        meaning, fix = ("the daemon does not start", str(e)) if insists else (BY_CPU, "")
        yield Finding(NAME, Level.ERROR if insists else Level.OK, str(e), meaning, fix)
        yield from _settings()
        return
    yield from _settings()
    yield from _trials(config, io, insists=insists)


def _settings() -> Iterator[Finding]:
    """What kvikio and cuFile go by, where they can be asked."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("KVIKIO_", "CUFILE_"))]
    try:
        shown = [f"{name} {value}" for name, value in kvikio_settings().items()]
    except (ImportError, OSError, RuntimeError, KeyError, AttributeError):
        shown = [f"{name} unknown" for name in KVIKIO_SETTINGS[:1]]
    path = Path(os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json"))
    json = path if path.exists() else f"{path} (not there: cuFile's defaults)"
    yield Finding(
        "kvikio and cuFile", Level.OK, f"{', '.join(shown)}; cufile.json: {json}; {' '.join(variables) or 'no variables set'}"
    )


def _trials(config: Config, io: DeviceIo, *, insists: bool) -> Iterator[Finding]:
    failed = Level.ERROR if insists else Level.WARN
    places = config.nvme.folders
    missing = [place for place in places if not place.is_dir()]
    if missing:
        yield Finding(NAME, Level.OK, f"{io.name}; not tried out, as {missing[0]} does not exist yet")
        return
    for device in HbmPool.find(config.hbm).devices:
        try:
            results = _trial(DirectPath(io, config.nvme.gds_timeout), device, places, o_direct=config.nvme.direct != "off")
        except (DirectError, OSError) as e:
            fix = 'see the kernel\'s log and cufile.log, or set nvme.gds = "off"'
            yield Finding(NAME, failed, f"{device.uuid} by {io.name}: {e}", "the daemon does not start" if insists else BY_CPU, fix)
            continue
        text = "; ".join(
            f"{r.folder} {r.direct_bytes_per_s / 1e9:.1f} GB/s, {r.by_cpu_bytes_per_s / 1e9:.1f} by CPU memory" for r in results
        )
        slower = not insists and any(r.is_slower for r in results)
        yield Finding(NAME, Level.OK, f"{device.uuid} by {io.name}: {text}", f"{BY_CPU}, which is faster" if slower else "")


def _trial(direct: DirectPath, device: Device, folders: list[Path], *, o_direct: bool) -> list[ProbeResult]:
    """In a thread that is left behind should it hang. Raises DirectError, OSError."""
    files = [(str(folder / f"doctor-{uuid.uuid4().hex}.tmp"), o_direct) for folder in folders]
    results: list[ProbeResult] = []
    problems: list[Exception] = []

    def work() -> None:
        try:
            results.extend(probe(direct, ThreadEngine(), files, device))
        except Exception as e:
            problems.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(direct.timeout_s + TRIAL_S)
    if problems:
        raise problems[0]
    if thread.is_alive():
        raise DirectError("it has not ended")
    return results
