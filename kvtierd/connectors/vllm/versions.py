"""What the connector has to know of the vLLM that it runs in: its version, what it can do, and what it does about failed loads."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

OLDEST: Final = (0, 23)
NEWEST_KNOWN: Final = (0, 33)

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


def recovers_groups() -> bool:
    """Whether this vLLM takes failed loads by request, and tells which blocks have left a window."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    by_request = "failed_recving" in KVConnectorOutput.__dataclass_fields__
    return by_request and "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__


def keeps_stepping() -> bool:
    """Whether this vLLM goes on stepping for saves that are under way."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "has_pending_push_work")


def check_policy(vllm_config: Any) -> None:
    """Warn when a load that fails would fail the user's request.

    Called where a worker is made, for only there vLLM tells the configuration that it acts on: inside MultiConnector,
    ``vllm_config`` is one of ours alone, and its policy is not looked at.
    """
    from vllm.config import get_current_vllm_config_or_none

    acting = (get_current_vllm_config_or_none() or vllm_config).kv_transfer_config
    policy = getattr(acting, "kv_load_failure_policy", None)
    if policy is not None and policy != "recompute":
        log.warning(
            "kvtierd: kv_load_failure_policy is %r: a load that fails (the daemon was restarted in the middle of it) fails the "
            'user\'s request. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config (beside %s) to have it computed.',
            policy,
            getattr(acting, "kv_connector", ""),
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
