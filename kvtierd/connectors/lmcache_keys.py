"""Every configuration key of LMCache 0.5.6 and what kvtierd makes of it. ``docs/lmcache.md`` shows this table; a test compares.

A key is *used* (it has an effect here), *ignored* (nothing is lost: it tunes machinery that kvtierd does not have or does by
itself), or has *no counterpart*: then a value other than "off" gives a warning that says what to use instead.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["CONNECTOR", "ENGINE", "EXTRA", "REQUEST", "SERVER", "TABLES", "VARIABLES", "Effect", "Key", "docs_tables", "find"]


class Effect(Enum):
    """What becomes of a key."""

    USED = "used"
    IGNORED = "ignored"
    MISSING = "no counterpart"


@dataclass(frozen=True)
class Key:
    """One row of the table.

    Attributes:
        names: keys that the row is about; a name that ends in ``*`` stands for all that begin so.
        effect: what becomes of them.
        text: used: what they become; ignored: why; no counterpart: what to use instead.
        quiet: values of a key without a counterpart that ask for nothing, besides false, 0 and nothing at all.
        form: of an argument of LMCache's server: "value", "list", "append", "flag" or "switch" (also as ``--no-...``).
    """

    names: tuple[str, ...]
    effect: Effect
    text: str
    quiet: tuple[str, ...] = ()
    form: str = "value"


def _used(names: str, text: str, form: str = "value") -> Key:
    return Key(tuple(names.split()), Effect.USED, text, form=form)


def _ignored(names: str, text: str, form: str = "value") -> Key:
    return Key(tuple(names.split()), Effect.IGNORED, text, form=form)


def _missing(names: str, text: str, *quiet: str, form: str = "value") -> Key:
    return Key(tuple(names.split()), Effect.MISSING, text, quiet, form)


_HASHES = "keys are the engine's own block hashes, or a chain of kvtierd's where those change with every process"
_EVENTS = "vLLM's kv_events_config switches KV events on; kvtierd's are among them"
_REMOTE = "kvtierd keeps blocks in memory and on disks of its own host: give the disks in nvme.folders"
_PD = "disaggregated prefill is the work of another connector: combine vLLM's NixlConnector with kvtierd by MultiConnector"
_P2P = "kvtierd does not exchange blocks with other hosts; route a user's requests to the same host"
_CONTROLLER = "there is no central controller; `kvtierd status`, `blocks`, `evict` and `pin` act on the daemon of a host"
_BLEND = "only whole prefixes are reused; there is no blending of text from the middle of a prompt"
_API = "the daemon answers instead: `kvtierd status --json`, and /metrics, /healthz and /readyz at server.metrics"
_SCRIPT = "kvtierd runs no code of others"
_HIDDEN = "only KV cache is kept, no hidden states"
_STATISTICS = "the daemon counts always: `kvtierd status` and /metrics"
_PLUGIN = "kvtierd loads no plugins; scrape server.metrics or call `kvtierd status --json` instead"
_OTEL = "metrics are read from server.metrics in Prometheus format; `kvtierd story` shows what happened to a block"
_OWN_COPY = "the engine's workers copy by themselves, through memory that the daemon gives them over its unix socket"

ENGINE: Final[tuple[Key, ...]] = (
    _used("chunk_size", "kvtierd.chunk_tokens"),
    _used("save_decode_cache", "kvtierd.save_decode"),
    _used("min_retrieve_tokens", "kvtierd.min_hit_tokens"),
    _used("lookup_timeout_ms", "kvtierd.lookup_timeout_ms"),
    _used("blocking_timeout_secs", "kvtierd.load_timeout_ms, in seconds here"),
    _used("max_local_cpu_size", "cpu.capacity; LMCache's size is for each worker process, kvtierd's for the host (`--ranks`)"),
    _used("local_cpu", "blocks always pass through cpu.capacity; false gives a warning that they also stay there"),
    _used("local_disk", "nvme.folders: a folder kvtierd in each of the folders"),
    _used("max_local_disk_size", "nvme.capacity; LMCache's size is for each worker process, kvtierd's for the host (`--ranks`)"),
    _used("enable_lazy_memory_allocator", "true: cpu.prefault = false, memory is taken when it is first used"),
    _used("extra_config", "see the keys of extra_config below"),
    _ignored(
        "lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size",
        "with cpu.prefault = false memory is taken page by page",
    ),
    _ignored("local_cpu_use_hugepages", "memory has huge pages where the kernel grants them (cpu.huge_pages)"),
    _missing("reserve_local_cpu_size", "cpu.capacity is a fixed limit: choose it so that this much memory stays free"),
    _ignored("local_disk_path_sharding gds_path_sharding", "blocks are spread over all folders"),
    _ignored("numa_mode", "a shard's memory comes from the NUMA node of its worker's device, where the worker knows it"),
    _missing("cache_policy", "the least recently used blocks go first; pin blocks that must stay", "lru"),
    _missing("retrieve_locations store_location", "a block is saved to memory and moves to NVMe by cpu.ttl and cpu.free_target"),
    _missing("priority_limit", "give requests that must not be saved kv_transfer_params kvtierd.skip_save"),
    _missing("save_unfull_chunk", "only whole chunks are kept; a smaller kvtierd.chunk_tokens leaves less out"),
    _missing("hit_miss_ratio", "hits are not made smaller; kvtierd.gate recomputes where that is faster than loading"),
    _missing("external_lookup_client", "lookups go to the daemon of the host"),
    _ignored(
        "use_layerwise enable_async_loading use_gpu_connector_v3 enable_scheduler_bypass_lookup lookup_server_worker_ids",
        "loads and saves run beside the engine's steps, and lookups ask the daemon, not workers",
    ),
    _ignored("pre_caching_hash_algorithm", _HASHES),
    _ignored("pin_timeout_sec pin_check_interval_sec", "blocks in use are held until the load ends or its deadline passes"),
    _ignored("py_enable_gc", "garbage collection of the engine's process is left alone"),
    _missing("remote_url remote_storage_plugins storage_plugins external_backends", _REMOTE),
    _ignored(
        "remote_serde",
        "belongs to remote_url; kvtierd keeps the engine's bytes as they are",
    ),
    _ignored("audit_actual_remote_url", "belongs to remote_url; every block has a checksum that is compared when it is read"),
    _missing("gds_path", "name the folder in nvme.folders and its size in nvme.capacity; reads go through CPU memory"),
    _ignored("gds_buffer_size use_gds gds_backend", "belong to gds_path"),
    _missing("maru_path", "kvtierd's memory is the host's own: raise cpu.capacity"),
    _ignored("maru_pool_size", "belongs to maru_path"),
    _missing("enable_blending", _BLEND),
    _ignored(
        "blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str", "belong to enable_blending"
    ),
    _missing("enable_p2p", _P2P),
    _ignored("p2p_host p2p_init_ports p2p_lookup_ports transfer_channel", "belong to enable_p2p"),
    _missing("enable_pd", _PD),
    _ignored(
        "pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port "
        "pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec "
        "pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional",
        "belong to enable_pd",
    ),
    _ignored(
        "nixl_backends nixl_buffer_size nixl_buffer_device nixl_peer_port",
        "belong to enable_pd, enable_p2p or extra_config.enable_nixl_storage",
    ),
    _missing("enable_controller", _CONTROLLER),
    _ignored(
        "lmcache_instance_id controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids "
        "lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time",
        "belong to enable_controller",
    ),
    _ignored("mp_host mp_port", "only SGLang's integration reads them; see lmcache.mp.host"),
    _missing("internal_api_server_enabled", _API),
    _ignored(
        "internal_api_server_host internal_api_server_port_start internal_api_server_include_index_list "
        "internal_api_server_socket_path_prefix",
        "belong to internal_api_server_enabled",
    ),
    _missing("run_script_api_enabled", _SCRIPT),
    _ignored("script_allowed_imports", "belongs to run_script_api_enabled"),
    _missing("runtime_plugin_locations plugin_locations", _PLUGIN),
    _missing("enable_chunk_statistics", _STATISTICS),
    _ignored(
        "chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours "
        "chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy",
        "belong to enable_chunk_statistics",
    ),
    _missing("enable_kv_events", _EVENTS),
    _missing("remote_config_url", "kvtierd fetches no configuration; roll a file or KVTIERD_* variables out instead"),
    _ignored("app_id", "belongs to remote_config_url"),
    _missing("enable_hidden_state_cache", _HIDDEN),
    _ignored("max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode", "belong to enable_hidden_state_cache"),
    _missing("ec_* ec", "kvtierd keeps no encoder outputs; give an encoder cache its own ec-transfer-config"),
)
"""Keys of the YAML file, ``LMCACHE_<NAME>`` and ``lmcache.<name>`` in ``kv_connector_extra_config``."""

EXTRA: Final[tuple[Key, ...]] = (
    _used("save_only_first_rank", "true: max_local_cpu_size and max_local_disk_size are not multiplied by `--ranks`"),
    _used("first_rank_max_local_cpu_size", "cpu.capacity, in place of max_local_cpu_size"),
    _ignored("use_odirect disk_io_threads", "nvme.direct and nvme.depth choose by themselves what suits the disk"),
    _ignored(
        "lookup_backoff_time lmcache_rpc_port local_cpu.pinned_align_bytes save_chunk_meta kv_msg_batch_* full_sync_* "
        "p2p_* internal_api_server_* chunk_statistics_* remote_enable_mla_worker_id_as0 worker_socket_*",
        "tune parts that kvtierd does not have",
    ),
    _missing("force_store_wait", "a save that finds no room is left out and never makes the engine wait"),
    _missing("gpu_to_numa_mapping", "workers find the NUMA node of their device; bind them with the engine's own options"),
    _missing("enable_nixl_storage", _REMOTE),
    _ignored("nixl_*", "belong to enable_nixl_storage"),
    _missing("audit_backend_enabled", "every block has a checksum that is compared when it is read"),
    _ignored("audit_*", "belong to audit_backend_enabled"),
    _missing("*", _REMOTE),
)
"""Keys inside ``extra_config`` of the engine's configuration. The last row is what all others belong to: stores elsewhere."""

CONNECTOR: Final[tuple[Key, ...]] = (
    _used(
        "lmcache.mp.host lmcache.mp.port lmcache.mp.server_urls",
        "the daemon is reached over a unix socket on the engine's own host: a loopback name means the default socket, "
        "another host gives a warning unless kvtierd.address is set",
    ),
    _used("lmcache.mp.save_decode_cache", "kvtierd.save_decode"),
    _used("lmcache.mp.eager_prefetch", "kvtierd.prefetch"),
    _used(
        "lmcache.mp.mq_timeout",
        "a limit, in seconds, on kvtierd.lookup_timeout_ms, load_timeout_ms and save_timeout_ms; "
        "it lowers them and never raises them",
    ),
    _used("lmcache.mp.autostart.server_args", "read like arguments of `lmcache server`"),
    _missing("lmcache.mp.autostart", "an engine starts no daemon: run `kvtierd serve` as a service, a sidecar or a DaemonSet"),
    _ignored("lmcache.mp.autostart.wait_timeout", "an engine does not wait for the daemon: it attaches when there is one"),
    _ignored("lmcache.mp.nonblocking_lookup_status", "lookups never block the scheduler"),
    _ignored("lmcache.mp.heartbeat_interval", "a daemon that goes away is noticed by its closed stream"),
    _ignored("lmcache.mp.mp_transfer_mode lmcache.mp.isolated_ipc lmcache.mp.use_vmm_api", _OWN_COPY),
    _ignored("lmcache.mp.hash_algorithm", _HASHES),
    _missing("lmcache.mp.transfer_intermediate_tensors", "only KV cache is kept, no query tensors"),
    _missing(
        "lmcache.mp.lazy_offload", 'blocks are saved when they are computed, in the background; kvtierd.role = "load" saves none'
    ),
    _ignored("lmcache.mp.lazy_offload_*", "belong to lmcache.mp.lazy_offload"),
    _missing("lmcache.max_tokens_per_load", "kvtierd.max_loads limits how many requests load at the same time"),
    _missing("skip_last_n_tokens", "lookups cover the whole prompt; vLLM computes the last token by itself"),
    _ignored("discard_partial_chunks", "only whole chunks are kept"),
)
"""Keys of ``kv_connector_extra_config`` that are no engine keys."""

SERVER: Final[tuple[Key, ...]] = (
    _used("--chunk-size", "kvtierd.chunk_tokens"),
    _used("--l1-size-gb", "cpu.capacity; with --gds-l1-path nvme.capacity"),
    _used(
        "--l1-manager", "type DRAM: cpu.capacity; type GDS: nvme.folders and nvme.capacity; type DEVDAX gives a warning", "append"
    ),
    _used(
        "--l2-adapter",
        "type fs and fs_native: a folder kvtierd in base_path goes into nvme.folders, max_capacity_gb into "
        "nvme.capacity; other types give a warning",
        "append",
    ),
    _used("--gds-l1-path", "nvme.folders: a folder kvtierd in it"),
    _used("--l1-use-lazy", "cpu.prefault, the other way round", "switch"),
    _used("--http-host --http-port", "server.metrics, where /metrics, /healthz and /readyz are"),
    _ignored("--l1-init-size-gb --l1-align-bytes", "memory is taken in extents (cpu.extent)"),
    _ignored("--l1-use-hugepages", "memory has huge pages where the kernel grants them (cpu.huge_pages)", "switch"),
    _missing("--l1-devdax-path", "kvtierd's memory is the host's own: raise cpu.capacity"),
    _ignored("--gds-l1-backend", "nvme.io chooses the I/O engine"),
    _ignored("--gds-l1-use-direct-io", "nvme.direct probes for direct I/O", "switch"),
    _ignored(
        "--l1-write-ttl-seconds --l1-read-ttl-seconds --session-ttl-seconds",
        "time limits of locks; here every load and save has a deadline of its own",
    ),
    _missing(
        "--eviction-policy",
        "the least recently used blocks go first; for a share per user give tenants cpu_quota and nvme_quota",
        "lru",
    ),
    _ignored("--eviction-trigger-watermark --eviction-ratio", "space is made before it is needed, by cpu.free_target"),
    _missing("--l2-store-policy", "blocks move to NVMe by cpu.ttl and cpu.free_target", "default"),
    _ignored(
        "--l2-prefetch-policy --l2-prefetch-max-in-flight --periodic-notifier-interval-ms",
        "nvme.depth and nvme.max_bytes_in_flight limit reads",
    ),
    _ignored("--transport --host --port --grpc-server-workers", "the daemon listens on a unix socket, server.socket"),
    _ignored("--max-workers --max-gpu-workers --max-cpu-workers", "the daemon does not copy; nvme.depth limits its I/O"),
    _ignored("--supported-transfer-mode --shm-name", _OWN_COPY),
    _ignored("--isolated-ipc", _OWN_COPY, "switch"),
    _ignored("--hash-algorithm --null-block-id", _HASHES),
    _ignored("--separate-object-groups", "every KV cache group has blocks of its own", "switch"),
    _missing("--engine-type", _BLEND, "default"),
    _ignored("--enable-segmented-prefix --enable-dedup-content --enable-blend-reorder", "belong to --engine-type blend", "flag"),
    _missing("--enable", "only KV cache is kept, no query tensors", form="list"),
    _ignored("--worker-reap-timeout-seconds --worker-registration-grace-seconds", "a worker's end closes its stream, at once"),
    _ignored("--instance-id", "the daemon makes an identity at each start"),
    _missing("--runtime-plugin-locations", _PLUGIN, form="list"),
    _ignored("--runtime-plugin-config", "belongs to --runtime-plugin-locations"),
    _missing("--server-module", _PLUGIN, form="append"),
    _missing("--run-script-api-enabled", _SCRIPT, form="switch"),
    _ignored("--script-allowed-imports", "belongs to --run-script-api-enabled", "list"),
    _ignored("--kv-event-log-size", _EVENTS),
    _missing("--p2p-advertise-url", _P2P),
    _ignored("--p2p-listen-url --p2p-lookup-timeout --p2p-load-timeout --p2p-transfer-engine", "belong to --p2p-advertise-url"),
    _missing("--coordinator-url", _CONTROLLER),
    _ignored(
        "--coordinator-advertise-ip --coordinator-heartbeat-interval --coordinator-event-flush-interval "
        "--coordinator-event-transport --coordinator-kafka-bootstrap-servers --coordinator-kafka-topic "
        "--coordinator-kafka-delivery-timeout --coordinator-blend-timeout --coordinator-blend-match-concurrency "
        "--coordinator-l2-event-flush-interval",
        "belong to --coordinator-url",
    ),
    _ignored("--coordinator-event-reporting --coordinator-l2-event-reporting", "belong to --coordinator-url", "flag"),
    _missing("--disable-observability --disable-metrics", 'server.metrics = "" closes the metrics port', form="flag"),
    _ignored(
        "--disable-grpc-metrics --disable-logging --enable-extra-logging --enable-gc-monitor",
        "log.level chooses what is logged",
        "flag",
    ),
    _ignored(
        "--extra-logging-interval --gc-monitor-min-pause-ms --gc-monitor-top-objects --event-bus-queue-size --metrics-sample-rate",
        _STATISTICS,
    ),
    _ignored("--prometheus-port", "LMCache's server does not use it either; see --http-port"),
    _missing("--enable-tracing", _OTEL, form="flag"),
    _missing("--otlp-endpoint --trace-level --lookup-hash-log-dir", _OTEL),
    _ignored(
        "--trace-output --lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size --lookup-hash-log-max-files",
        "belong to --trace-level and --lookup-hash-log-dir",
    ),
)
"""Arguments of ``lmcache server``."""

VARIABLES: Final[tuple[Key, ...]] = (
    _used("LMCACHE_CONFIG_FILE", "the YAML file that is read"),
    _used("LMCACHE_FORCE_SKIP_SAVE", 'any text: kvtierd.role = "load"'),
    _used("LMCACHE_LOG_LEVEL", "log.level of the daemon; VLLM_LOGGING_LEVEL sets the connector's"),
    _ignored("LMCACHE_TRACK_USAGE LMCACHE_USAGE_TRACK_*", "kvtierd reports to nobody"),
    _ignored("LMCACHE_MP_TRANSFER_MODE", _OWN_COPY),
    _ignored(
        "LMCACHE_USE_UPSTREAM_MP LMCACHE_DISABLE_BANNER LMCACHE_DEVICE_BACKEND LMCACHE_GPU_STAGING_BUFFER_BYTES LMCACHE_MUSA_* "
        "LMCACHE_ROCM_* LMCACHE_OFFLOAD_RPC_PORT LMCACHE_SERVER_URL LMCACHE_MQ_TIMEOUT LMCACHE_RUNTIME_PLUGIN_* "
        "LMCACHE_PLUGIN_*",
        "choose or tune parts that kvtierd does not have",
    ),
    _missing("LMCACHE_COORDINATOR_URL", _CONTROLLER),
    _ignored("LMCACHE_COORDINATOR_*", "belong to LMCACHE_COORDINATOR_URL"),
    _ignored("LMCACHE_CONTROLLER_*", "belong to LMCache's controller"),
    _missing("LMCACHE_RESP_HOST LMCACHE_AEROSPIKE_HOSTS", _REMOTE),
    _ignored("LMCACHE_RESP_* LMCACHE_AEROSPIKE_*", "belong to LMCACHE_RESP_HOST and LMCACHE_AEROSPIKE_HOSTS"),
    _missing("LMCACHE_EC_*", "kvtierd keeps no encoder outputs; give an encoder cache its own ec-transfer-config"),
    _missing("LMCACHE_REQUEST_TELEMETRY_TYPE", "vLLM's own metrics and traces tell about requests", "noop"),
    _ignored("LMCACHE_REQUEST_TELEMETRY_*", "belong to LMCACHE_REQUEST_TELEMETRY_TYPE"),
)
"""Variables besides ``LMCACHE_<NAME>`` of the engine's keys."""

REQUEST: Final[tuple[Key, ...]] = (
    _used("lmcache.tag.tenant", "the tenant of the request; kvtierd.tenant counts more"),
    _used("lmcache.ttl", "seconds until the request's blocks are forgotten, never sooner than without it; kvtierd.ttl counts more"),
    _used("lmcache.skip_save", "nothing of the request is saved; kvtierd.skip_save counts more"),
    _used("lmcache.max_offload_tokens", "only the first so many tokens are saved; kvtierd.max_save_tokens counts more"),
    _ignored("lmcache.tag.*", "other tags name nothing here; vLLM's cache_salt keeps requests apart"),
)
"""Keys of a request's ``kv_transfer_params``."""

TABLES: Final[tuple[tuple[str, tuple[Key, ...]], ...]] = (
    ("Engine configuration: YAML file, `LMCACHE_<NAME>`, `lmcache.<name>`", ENGINE),
    ("Keys inside `extra_config`", EXTRA),
    ("`kv_connector_extra_config`", CONNECTOR),
    ("Arguments of `lmcache server`", SERVER),
    ("Variables", VARIABLES),
    ("A request's `kv_transfer_params`", REQUEST),
)
"""All tables with their titles in the documentation."""


def find(table: tuple[Key, ...], name: str) -> Key | None:
    """The row of a key: the first that names it, else the first whose ``*`` fits. None when it is not LMCache's."""
    for row in table:
        if name in row.names:
            return row
    for row in table:
        if any(n.endswith("*") and fnmatch.fnmatchcase(name, n) for n in row.names):
            return row
    return None


def docs_tables() -> Iterator[str]:
    """Lines of the tables in Markdown, as ``docs/lmcache.md`` holds them."""
    for title, rows in TABLES:
        yield from (f"### {title}", "", "| key of LMCache | in kvtierd | |", "| --- | --- | --- |")
        for row in rows:
            names = "all others" if row.names == ("*",) else ", ".join(f"`{name}`" for name in row.names)
            yield f"| {names} | {row.effect.value} | {row.text} |"
        yield ""
