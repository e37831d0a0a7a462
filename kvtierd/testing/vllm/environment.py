"""The environment of an engine's process: no network, no telemetry, one thread of arithmetic, none of the caller's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import kvtierd

ROOT: Final = Path(kvtierd.__file__).resolve().parents[1]
"""Where this kvtierd is imported from; engines use the same one, whatever is installed beside them."""
ENGINE_TIMEOUT_S: Final = 240.0
LOG_TAIL: Final = 6000
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    # The runner's own folder must not come before the packages.
    "PYTHONSAFEPATH": "1",
    "PYTHONFAULTHANDLER": "1",
}


def engine_environment(multiprocess: bool = False, **more: str) -> dict[str, str]:
    """Environment of an engine: this process's, less what configures kvtierd, LMCache or vLLM, plus what is fixed here."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIERD_", "LMCACHE_", "VLLM_", "PYTHONHASHSEED"))}
    path = [str(ROOT), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    return (
        kept
        | ENVIRONMENT
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        }
        | more
    )
