"""A connector whose loads never arrive, for tests: the other child of a MultiConnector, when a client goes away meanwhile.

It promises all whole blocks of each request that asks for it by ``{"slow": true}`` in its ``kv_transfer_params``, and reports such
a load as ended, with nothing loaded, once vLLM has finished the request. Both roles have to be in one process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class SlowMetadata(KVConnectorMetadata):
    """Nothing."""


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """Promises and never loads."""

    _promised: set[str] = set()  # noqa: RUF012
    _ended: set[str] = set()  # noqa: RUF012

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Every whole block that the engine does not have."""
        if not (request.kv_transfer_params or {}).get("slow"):
            return 0, False
        tokens = request.num_tokens // 32 * 32 - num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember what was promised."""
        if num_external_tokens and (request.kv_transfer_params or {}).get("slow"):
            self._promised.add(request.request_id)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """The load is given up with its request."""
        if request.request_id in self._promised:
            self._promised.discard(request.request_id)
            self._ended.add(request.request_id)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Loads that were given up."""
        ended = set(self._ended)
        self._ended.clear()
        return None, ended or None

    def build_connector_meta(self, scheduler_output: Any) -> SlowMetadata:
        """Nothing."""
        return SlowMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
