"""Checks of CUDA, GPUDirect Storage and Python packages for ``kvtierd doctor``."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from typing import Final

from kvtierd.cli.findings import Finding, Host, Level
from kvtierd.config import Config

__all__ = ["Cuda", "check_cuda", "check_gds", "check_packages", "find_cuda"]

MAX_DEVICES: Final = 64
_OPTIONAL: Final = ("cupy-cuda12x", "cupy-cuda13x", "kvikio-cu12", "kvikio-cu13", "torch", "vllm", "matplotlib")
_EXTRA_FIX: Final = "pip install 'kvtierd[cuda13]' (or [cuda12]) on a host with an NVIDIA driver"


@dataclass(frozen=True)
class Cuda:
    """What the driver answers: devices by name, or why there is none."""

    devices: tuple[str, ...]
    error: str = ""
    library: bool = False
    """True when the driver's library could be loaded."""


def find_cuda(library: str = "libcuda.so.1") -> Cuda:
    """Ask the CUDA driver for its devices, without CUDA's runtime or any package. Makes no context on a device."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as e:
        return Cuda((), f"{library} cannot be loaded: {e}")
    count, names = ctypes.c_int(0), []
    for step, code in (("cuInit", cuda.cuInit(0)), ("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))):
        if code:
            return Cuda((), f"{step} answers error {code}", library=True)
    for index in range(min(count.value, MAX_DEVICES)):
        text, device = ctypes.create_string_buffer(100), ctypes.c_int(0)
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0 and cuda.cuDeviceGetName(text, 100, device) == 0:
            names.append(text.value.decode(errors="replace"))
    return Cuda(tuple(names), "" if names else "the driver has no device", library=True)


def check_cuda(config: Config, cuda: Cuda) -> Finding:
    """Whether there is a GPU, and whether the configuration needs one."""
    if cuda.devices:
        kinds = {name: cuda.devices.count(name) for name in cuda.devices}
        return Finding("CUDA", Level.OK, ", ".join(f"{n} x {name}" for name, n in kinds.items()))
    if config.hbm.capacity:
        meaning, fix = "hbm.capacity is set, and the HBM tier needs a GPU", "install the NVIDIA driver, or set hbm.capacity to 0"
        return Finding("CUDA", Level.ERROR, cuda.error, meaning, fix)
    if cuda.library:
        meaning = "the driver is there but does not work; the CPU and NVMe tiers need none"
        return Finding("CUDA", Level.WARN, cuda.error, meaning, "see nvidia-smi and the kernel's log")
    return Finding("CUDA", Level.OK, "no CUDA driver", "the CPU and NVMe tiers need none")


def check_gds(host: Host, config: Config, cuda: Cuda) -> Finding:
    """Whether GPUDirect Storage and kvikio can be used, and whether the configuration insists on them."""
    driver = host.read("/proc/driver/nvidia-fs/version")
    kvikio = _import_error("kvikio") if cuda.library else "needs libcuda.so.1"
    text = f"nvidia-fs {driver or 'not loaded'}; kvikio {kvikio or 'works'}"
    if config.nvme.io == "kvikio" and kvikio:
        fix = f'{_EXTRA_FIX}, or set nvme.io = "auto"'
        return Finding("GPUDirect Storage", Level.ERROR, text, 'nvme.io = "kvikio" cannot start', fix)
    if driver and not kvikio:
        return Finding("GPUDirect Storage", Level.OK, text)
    meaning = "NVMe is read and written through CPU memory, as on any host without it"
    return Finding("GPUDirect Storage", Level.OK, text, meaning)


def _import_error(module: str) -> str:
    """Why a module cannot be imported; empty when it can."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as e:  # a broken GPU package may fail in any way, and that is the answer
        return f"cannot be imported: {e}"
    return ""


def check_packages() -> Finding:
    """Whether the packages that kvtierd needs are there; which optional ones are."""
    try:
        wanted = importlib.metadata.requires("kvtierd") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("Python packages", Level.OK, "kvtierd runs from a source tree, whose requirements are not recorded")
    names = [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in wanted if "extra ==" not in text]
    missing = [name for name in names if _version(name) is None]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        return Finding("Python packages", Level.ERROR, f"missing: {', '.join(missing)}", "parts of kvtierd cannot run", fix)
    optional = [f"{name} {version}" for name in _OPTIONAL if (version := _version(name)) is not None]
    return Finding("Python packages", Level.OK, f"all {len(names)} there; optional: {', '.join(optional) or 'none'}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
