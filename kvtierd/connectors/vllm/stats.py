"""What the connector tells vLLM's own metrics and log line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtierd.connectors.vllm.metadata import CAUSES

GAUGES: Final = {
    "attached": "Whether the engine is attached to the daemon.",
    "breaker": "Circuit breaker of the calls to the daemon: 0 closed, 1 a trial is under way, 2 open.",
    "loading": "Requests that are being loaded for.",
    "looking_up": "Requests that look up, or whose hit is held for them.",
    "waiting": "Requests that wait for their turn to look up.",
    "holding_blocks": "Blocks of the KV cache that saves hold.",
}
LOAD_RESULTS: Final = ("ok", "failed", "miss", "small", "slower", "timeout", "busy", "paused")
"""What became of a question about a request; each has one."""
SAVE_RESULTS: Final = (
    "ok",
    "failed",
    "held",
    "lost",
    "busy",
    "in_progress",
    "quota",
    "too_large",
    "draining",
    "limit",
    "unavailable",
    "deadline",
    "window",
    "stale",
)
TIERS: Final = ("hbm", "cpu", "nvme")


@dataclass
class KvtierdStats(KVConnectorStats):
    """Counts since the last look, and gauges. ``data`` maps "name" or "name|label" to a number."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add counts of another rank or step; of a gauge the later one counts."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        data = self.data
        hits = {tier: data.get(f"hit_tokens|{tier}", 0) for tier in TIERS}
        loaded, saved = data.get("load_bytes", 0), data.get("save_bytes", 0)
        load_s, save_s = data.get("load_us", 0) / 1e6, data.get("save_us", 0) / 1e6
        return {
            **{f"kvtierd hit tokens ({tier})": hits[tier] for tier in TIERS if hits[tier]},
            "kvtierd loads": data.get("loads|ok", 0),
            "kvtierd failed loads": data.get("loads|failed", 0),
            "kvtierd loaded GB": round(loaded / 1e9, 3),
            "kvtierd load GB/s": round(loaded / 1e9 / load_s, 2) if load_s else 0,
            "kvtierd saved blocks": data.get("saves|ok", 0),
            "kvtierd saved GB": round(saved / 1e9, 3),
            "kvtierd save GB/s": round(saved / 1e9 / save_s, 2) if save_s else 0,
        }

    def __getitem__(self, name: str) -> Any:
        """As the dictionary that it becomes on its way to another process: vLLM 0.23's MultiConnector reads it as one always."""
        return {"data": self.data}[name]

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


def take_stats(counts: Counter[str], gauges: dict[str, int]) -> KvtierdStats:
    """Move counts into a message."""
    data: dict[str, Any] = {name: value for name, value in counts.items() if value}
    counts.clear()
    return KvtierdStats(data=data | gauges)


class KvtierdPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus series of the engine's own ``/metrics``, present from the start."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._cells: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        self._counters("loads", "Loads by result.", "result", LOAD_RESULTS, labelnames)
        self._counters("load_failures", "Loads that failed, by cause.", "cause", CAUSES, labelnames)
        self._counters("saves", "Blocks offered to be saved, by result.", "result", SAVE_RESULTS, labelnames)
        self._counters("hit_tokens", "Tokens loaded instead of computed, by the tier that held them.", "tier", TIERS, labelnames)
        for name, text in (
            ("load_bytes", "Bytes loaded into the engine's KV cache."),
            ("save_bytes", "Bytes saved from the engine's KV cache."),
            ("load_us", "Microseconds spent copying loads."),
            ("save_us", "Microseconds spent copying saves."),
            ("save_delays", "Times that saves waited because too many blocks were held."),
            ("pin_failures", "Blocks that could not be pinned as a request asked."),
            ("hook_failures", "Unexpected failures inside the connector; each was answered with no cache."),
        ):
            counter = self._counter_cls(name=f"vllm:kvtierd_{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._cells[engine][name] = counter.labels(*values)
        for name, text in GAUGES.items():
            gauge = self._gauge_cls(
                name=f"vllm:kvtierd_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for engine, values in per_engine_labelvalues.items():
                self._cells[engine][name] = gauge.labels(*values)

    def _counters(self, name: str, text: str, label: str, known: tuple[str, ...], labelnames: list[str]) -> None:
        counter = self._counter_cls(name=f"vllm:kvtierd_{name}", documentation=text, labelnames=[*labelnames, label])
        for engine, values in self.per_engine_labelvalues.items():
            for value in known:
                self._cells[engine][f"{name}|{value}"] = counter.labels(*values, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count one message."""
        cells = self._cells.get(engine_idx, {})
        for name, value in transfer_stats_data.items():
            cell = cells.get(name)
            if cell is None:
                continue
            if name in GAUGES:
                cell.set(value)
            else:
                cell.inc(max(0, value))  # a counter refuses to fall, and an exception here would end the API process
