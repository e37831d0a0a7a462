"""Whether blocks move between GPU memory and NVMe directly: tried out on each GPU that comes into use, and watched from then on."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Final

from kvtierd.config import NvmeConfig
from kvtierd.core.tier_core import TierCore
from kvtierd.cuda import CudaError, Device
from kvtierd.errors import StartupError
from kvtierd.tiers.device_io import open_device_io
from kvtierd.tiers.direct_path import DirectError, DirectPath
from kvtierd.tiers.direct_probe import ProbeResult
from kvtierd.tiers.hbm import HbmPool
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.transfer.executor import Executor

log = logging.getLogger(__name__)

CHECK_S: Final = 0.25
"""How often it is looked at."""
_NAMES: Final = {"gds": "GPUDirect Storage"}


class Direct:
    """The direct way of a daemon. Belongs to one event loop.

    Args:
        config: of the NVMe tier.
        hbm: the GPUs.
        nvme: the store.
        core: is told whether the way is open.
        executor: runs moves and trials.
        now: the core's clock.
        changed: runs the core's commands.
    """

    def __init__(
        self, config: NvmeConfig, hbm: HbmPool, nvme: NvmeStore, core: TierCore, executor: Executor,
        now: Callable[[], float], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._config = config
        self._hbm = hbm
        self._nvme = nvme
        self._core = core
        self._executor = executor
        self._now = now
        self._changed = changed
        self._path: DirectPath | None = None
        self._wanted = config.gds != "off" and not nvme.encrypted
        self._in_use = False
        self._tried: set[Device] = set()
        self._trying = asyncio.Lock()

    @property
    def name(self) -> str:
        """What moves blocks directly now, as metrics call it; "" for nothing."""
        return self._path.name if self._path is not None and self._in_use else ""

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended."""
        return self._path is not None and self._path.is_busy

    async def insist(self) -> None:
        """With ``nvme.gds = "on"``: try it out on all GPUs, whose contexts are made for that. Raises StartupError."""
        if self._config.gds != "on":
            return
        for place, device in enumerate(self._hbm.devices):
            try:
                await asyncio.to_thread(self._hbm.probe, place)
                await self._try(device)
            except (CudaError, DirectError, StartupError) as e:
                raise StartupError(
                    f'nvme.gds is "on", but blocks cannot go directly between {device.uuid} and NVMe: {e}; run kvtierd doctor, or '
                    'set nvme.gds to "auto"'
                ) from e

    async def opened(self, place: int) -> None:
        """A GPU has come into use: try it out there, unless that was done."""
        device = self._hbm.devices[place]
        try:
            await self._try(device)
        except StartupError as e:
            self._wanted = False
            log.info("blocks go between GPU memory and NVMe by CPU memory: %s", e)
        except DirectError as e:
            self._give_up(f"tried out on {device.uuid}: {e}")

    async def _try(self, device: Device) -> None:
        """Raises StartupError, DirectError."""
        async with self._trying:
            if not self._wanted or device in self._tried:
                return
            self._tried.add(device)
            path = await self._opened_path()
            results = await self._trial(path, device)
            if path.closed_by:  # on another GPU, meanwhile
                return
            if self._config.gds == "auto" and (slow := [r for r in results if r.is_slower]):
                self._give_up("", slow)
                return
            log.info(
                "blocks go directly between %s and NVMe by %s: %s", device.uuid, _NAMES.get(path.name, path.name), _told(results)
            )
            path.admit(device)
            self._use(True)

    async def _opened_path(self) -> DirectPath:
        if self._path is None:
            assert self._config.gds != "off"
            opening = functools.partial(open_device_io, self._config.gds, self._config.depth)
            self._path = DirectPath(await asyncio.to_thread(opening), self._config.gds_timeout)
            self._nvme.use_direct(self._path)
        return self._path

    async def _trial(self, path: DirectPath, device: Device) -> list[ProbeResult]:
        trial = self._executor.in_direct_thread(functools.partial(self._nvme.probe_direct, path, device))
        trial.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may wait for it by then
        while not trial.done():
            if path.hangs():
                raise DirectError(path.closed_by)
            await asyncio.wait({trial}, timeout=CHECK_S)
        return trial.result()

    def _give_up(self, why: str, slow: list[ProbeResult] | None = None) -> None:
        """Close it on all GPUs: blocks go one way or the other, whatever GPU they are on."""
        self._wanted = False
        if slow:
            log.info("blocks go between GPU memory and NVMe by CPU memory, which is faster: %s", _told(slow))
        if self._path is not None and (why or self._in_use):
            self._path.trip(why or f"it is slower than by CPU memory: {_told(slow or [])}")
        self.look()

    def _use(self, use: bool) -> None:
        self._in_use = use
        self._executor.use_direct(use)
        self._core.set_direct(self._now(), use)
        self._changed()

    def look(self) -> None:
        """Notice what has closed it."""
        if self._path is not None and (self._path.hangs() or self._path.closed_by) and self._in_use:
            self._use(False)

    async def watch(self) -> None:
        """Look at it all the time. Runs as a supervised task."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()


def _told(results: list[ProbeResult]) -> str:
    return ", ".join(
        f"{r.direct_bytes_per_s / 1e9:.1f} GB/s in {r.folder}, {r.by_cpu_bytes_per_s / 1e9:.1f} by CPU memory" for r in results
    )
