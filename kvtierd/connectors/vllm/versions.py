"""Versions of vLLM that the connector is written for."""

from __future__ import annotations

import logging
import re
from typing import Final

OLDEST: Final = (0, 23)
NEWEST_KNOWN: Final = (0, 32)

log = logging.getLogger("vllm.kvtierd")


def check_version(version: str | None = None) -> None:
    """Look at vLLM's version.

    Raises:
        ValueError: it is older than the connector supports.
    """
    if version is None:
        import vllm

        version = str(getattr(vllm, "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        log.warning(
            "kvtierd: the version of vLLM (%r) is not known; %s to %s are supported", version, _text(OLDEST), _text(NEWEST_KNOWN)
        )
        return
    number = (int(found[1]), int(found[2]))
    if number < OLDEST and number != (0, 0) and number != (0, 1):
        raise ValueError(f"kvtierd's connector needs vLLM {_text(OLDEST)} or newer; this is {version}")
    if number > NEWEST_KNOWN:
        log.warning("kvtierd: vLLM %s is newer than the newest that was tried (%s)", version, _text(NEWEST_KNOWN))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
