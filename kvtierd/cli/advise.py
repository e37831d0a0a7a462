"""``kvtierd advise``: figures of a daemon, and of an engine, turned into findings."""

from __future__ import annotations

import threading
import time
import urllib.request
from dataclasses import asdict
from http.client import HTTPException
from queue import Empty, Queue
from typing import Final

import click
from rich.text import Text

from kvtierd.advice import Engine, Figures, findings
from kvtierd.cli.connection import AdminConnection
from kvtierd.cli.options import Settings, admin_options, json_option
from kvtierd.cli.output import clean, console, format_bytes, print_json
from kvtierd.cli.rates import Scrape, parse
from kvtierd.errors import ConfigError, DaemonUnavailableError
from kvtierd.v1 import admin_pb2

__all__ = ["advise"]

TIMEOUT_S: Final = 10.0
MAX_CURVE: Final = 12
MAX_METRICS_BYTES: Final = 64 << 20
COLORS: Final = {"good": "green", "note": "", "look": "yellow"}
NO_ROOM: Final = ("busy", "quota", "too_large")


@click.command()
@admin_options
@click.option("--vllm", "url", metavar="URL", help="An engine's /metrics, for example http://localhost:8000/metrics.")
@json_option()
@click.pass_context
def advise(ctx: click.Context, url: str | None, as_json: bool) -> None:
    """Say why the hit rate is what it is, and what would change it.

    Looks at what engines have used in the last hours: how often blocks come back, after how much else, and what became of them
    meanwhile. From 70 % on a hit rate is good, 40 % is usual, and below there is something to find.
    """
    engine = None if url is None else _engine(_read(url))
    with ctx.ensure_object(Settings).connect() as daemon:
        figures = _figures(daemon, engine)
    found = findings(figures)
    if as_json:
        print_json({"hit_ratio": round(figures.hit_ratio, 4), "findings": [asdict(f) for f in found], "hits_at": _curve(figures)})
        return
    for finding in found:
        text = Text(f"{finding.level:>5}  ", style=COLORS[finding.level])
        text.append(clean(finding.what), style="default")
        if finding.do:
            text.append(f"\n       → {clean(finding.do)}", style="dim")
        console().print(text)
    if curve := _curve(figures):
        console().print(Text("\nuses of blocks that a cache of a size would hit, from a sample:", style="dim"))
        for size, ratio in curve.items():
            console().print(f"  {format_bytes(int(size)):>10}  {ratio:6.1%}")


def _curve(figures: Figures) -> dict[str, float]:
    """Hit ratio by bytes, at a dozen sizes at most, up to the one beyond which nothing more would be hit."""
    sizes = list(figures.distances)
    step = -(-len(sizes) // MAX_CURVE)
    return {str(size): round(figures.hits_at(size), 4) for size in reversed(sizes[:: -step or None])}


def _figures(daemon: AdminConnection, engine: Engine | None) -> Figures:
    reuse: admin_pb2.GetReuseResponse = daemon.call(daemon.stub.GetReuse, admin_pb2.GetReuseRequest())
    text: admin_pb2.GetMetricsResponse = daemon.call(daemon.stub.GetMetrics, admin_pb2.GetMetricsRequest())
    now = parse(text.text, time.monotonic())
    capacity = {tier: int(now.value("kvtierd_tier_capacity_bytes", tier=tier)) for tier in ("cpu", "nvme")}
    last = "nvme" if capacity["nvme"] else "cpu"
    return Figures(
        cpu_bytes=capacity["cpu"],
        nvme_bytes=capacity["nvme"],
        distances={d.upper_bytes: d.uses for d in reuse.distances},
        cold=reuse.cold_uses,
        found=reuse.found_uses,
        added=reuse.added_uses,
        continued=reuse.continued_requests,
        new=reuse.new_requests,
        lost=reuse.lost_requests,
        block_tokens=reuse.block_tokens,
        sessions=int(now.value("kvtierd_sessions")),
        rejected={r: n for labels, n in now.rows("kvtierd_rejections_total") if (r := labels["reason"]) in NO_ROOM and n},
        evicted={labels["reason"]: n for labels, n in now.rows("kvtierd_evictions_total") if labels["tier"] == last and n},
        not_admitted=now.sum("kvtierd_nvme_not_admitted_blocks_total"),
        engine=engine,
    )


def _read(url: str) -> Scrape:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the address of an engine's metrics; write http://HOST:PORT/metrics")
    try:
        seen = parse(_fetch(url).decode(), time.monotonic())
    except OSError as e:
        raise DaemonUnavailableError(f"the engine's metrics cannot be read from {url}: {getattr(e, 'reason', e)}") from e
    except (ValueError, HTTPException) as e:
        raise ConfigError(f"{url} does not answer with metrics: {str(e)!r:.200}; write http://HOST:PORT/metrics") from e
    if not any(name.startswith("vllm:") for name in seen.samples):
        raise ConfigError(f"{url} answers, but not with metrics of vLLM; name the /metrics of its API server")
    return seen


def _fetch(url: str) -> bytes:
    """What is there, within a time and a size: time-outs of sockets count from byte to byte. Raises OSError and others."""
    got: Queue[bytes | Exception] = Queue()

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the scheme was looked at
                got.put(answer.read(MAX_METRICS_BYTES + 1))
        except Exception as e:
            got.put(e)

    threading.Thread(target=fetch, name="fetch", daemon=True).start()  # a read without an end ends with the process
    try:
        found = got.get(timeout=TIMEOUT_S)
    except Empty:
        raise TimeoutError(f"no end of its answer within {TIMEOUT_S:g} s; is it an engine's /metrics?") from None
    if isinstance(found, Exception):
        raise found
    if len(found) > MAX_METRICS_BYTES:
        raise ValueError(f"more than {MAX_METRICS_BYTES >> 20} MiB")
    return found


def _engine(seen: Scrape) -> Engine:
    """vLLM's figures, over all engines of the address."""
    adapters = {
        name
        for labels, _ in seen.rows("vllm:lora_requests_info")
        for name in labels.get("running_lora_adapters", "").split(",")
        if name
    }
    return Engine(
        prompt_tokens=seen.sum("vllm:request_prompt_tokens_sum"),
        prompts=seen.sum("vllm:request_prompt_tokens_count"),
        local_queries=seen.sum("vllm:prefix_cache_queries_total"),
        local_hits=seen.sum("vllm:prefix_cache_hits_total"),
        external_queries=seen.sum("vllm:external_prefix_cache_queries_total"),
        external_hits=seen.sum("vllm:external_prefix_cache_hits_total"),
        adapters=len(adapters),
    )
