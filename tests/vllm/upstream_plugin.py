"""pytest plugin for vLLM's own tests: what they configure without naming a connector gets kvtierd's, and a tiny local model; a
MultiConnector of working children gets kvtierd's as one more.

Loaded by name into pytest processes that run vLLM's tests. ``KVTIERD_UPSTREAM_MODEL`` and ``KVTIERD_UPSTREAM_ADDRESS`` say which
model and which daemon; the number of connectors that were made goes to the file ``KVTIERD_UPSTREAM_COUNT``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

made = 0


def pytest_sessionstart(session: Any) -> None:
    """Before the tests import the function."""
    import tests.v1.kv_connector.unit.utils as utils  # vLLM's, from the working directory

    from kvtierd.connectors.vllm import register
    from kvtierd.connectors.vllm.connector import KvtierdConnector

    register()
    original = utils.create_vllm_config

    @functools.wraps(original)
    def create_vllm_config(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs.setdefault("model", os.environ["KVTIERD_UPSTREAM_MODEL"])
        ours = {"kvtierd.address": os.environ["KVTIERD_UPSTREAM_ADDRESS"]}
        extra = dict(kwargs.get("kv_connector_extra_config") or {})
        if "kv_connector" not in kwargs:
            kwargs["kv_connector"] = "KvtierdConnector"
            kwargs["kv_connector_module_path"] = "kvtierd.connectors.vllm"
            kwargs.setdefault("kv_role", "kv_both")
            kwargs["kv_connector_extra_config"] = extra | ours
        elif any(child["kv_connector"] == "TestExampleConnector" for child in extra.get("connectors", ())):
            child = {"kv_connector": "KvtierdConnector", "kv_role": "kv_both", "kv_connector_extra_config": ours}
            kwargs["kv_connector_extra_config"] = extra | {"connectors": [*extra["connectors"], child]}
        return original(*args, **kwargs)

    utils.create_vllm_config = create_vllm_config
    init = KvtierdConnector.__init__

    @functools.wraps(init)
    def counted(self: KvtierdConnector, *args: Any, **kwargs: Any) -> None:
        global made
        made += 1
        init(self, *args, **kwargs)

    KvtierdConnector.__init__ = counted  # type: ignore[method-assign]


def pytest_sessionfinish(session: Any) -> None:
    """Tell how often the connector was made."""
    Path(os.environ["KVTIERD_UPSTREAM_COUNT"]).write_text(str(made))
