"""Goal: SGLang's hierarchical cache keeps pages in kvtierd and gets the same bytes back, after a restart of either side too, and
goes on without them whatever happens to the daemon.

Method: SGLang's own pools, factory, cache controller and storage threads on CPU memory, over a real daemon. What is not run here is
the copy between GPU and host memory, which the backend has no part in.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from kvtierd.connectors.sglang.identity import UnsupportedPoolError, namespace_of
from kvtierd.connectors.sglang.settings import Settings
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.sglang import BACKEND, SMALL, Rank, mha, mla, one_rank

PAGE = SMALL.page


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path / "d", {})
    yield made.start()
    made.kill()


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    made: list[Rank] = []

    def make(daemon: DaemonProcess, *, v1: bool = True, **options: Any) -> Rank:
        shape = {name: options.pop(name) for name in ("pools", "layout", "dtype") if name in options}
        own = {"address": daemon.address, "revision": "1"} | options
        made.append(Rank("dynamic", BACKEND | {"interface_v1": int(v1)} | {f"kvtierd.{k}": v for k, v in own.items()}, **shape))
        return made[-1]

    with one_rank():
        yield make
        for one in made:
            one.close()


MakeEngine = Callable[..., Rank]


def tokens(count: int, seed: int = 0) -> list[int]:
    return list(itertools.islice(itertools.count(seed * 10_000), count))


def same(one: Rank, indices: torch.Tensor, other: Rank, where: torch.Tensor) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.pages(indices), other.pages(where), strict=True))


@pytest.mark.parametrize("pools, layout", [
    (mha, "page_first"), (mha, "page_first_direct"), (mha, "page_head"), (mla, "page_first"), (mla, "page_first_direct"),
])  # fmt: skip
@pytest.mark.parametrize("v1", [True, False])
def test_pages_come_back_in_a_new_engine(
    daemon: DaemonProcess, engine: MakeEngine, pools: Callable[..., tuple[Any, Any]], layout: str, v1: bool
) -> None:
    """Method: more than one of SGLang's batches of 128 pages; the prompt that is looked for is longer than what is kept."""
    first = engine(daemon, pools=pools, layout=layout, v1=v1)
    indices = first.fill(140 * PAGE, seed=1)
    assert first.back_up(indices, tokens(140 * PAGE)) == 140 * PAGE
    second = engine(daemon, pools=pools, layout=layout, v1=v1)
    second.fill(3 * PAGE, seed=2)
    read, where = second.prefetch(tokens(150 * PAGE))
    assert read == 140 * PAGE
    assert same(first, indices, second, where)
    assert second.prefetch(tokens(4 * PAGE, seed=9))[0] == 0
    assert second.backend.exists(second.hashes(tokens(PAGE))[0])


def test_a_daemon_restart_keeps_pages(daemon: DaemonProcess, engine: MakeEngine) -> None:
    one = engine(daemon)
    indices = one.fill(6 * PAGE, seed=3)
    assert one.back_up(indices, tokens(6 * PAGE)) == 6 * PAGE
    assert daemon.stop() == 0
    assert one.prefetch(tokens(6 * PAGE))[0] == 0, "without a daemon nothing is there, and nothing fails"
    assert one.back_up(indices, tokens(6 * PAGE)) == 0
    daemon.start()
    assert one.backend._attached().wait_attached(20.0)
    read, where = one.prefetch(tokens(6 * PAGE))
    assert read == 6 * PAGE and same(one, indices, one, where)


def test_a_daemon_that_hangs_holds_nobody_up(daemon: DaemonProcess, engine: MakeEngine) -> None:
    times = {"lookup_timeout_ms": 300, "load_timeout_ms": 300, "save_timeout_ms": 300}
    one = engine(daemon, **times)
    indices = one.fill(4 * PAGE, seed=4)
    assert one.back_up(indices, tokens(4 * PAGE)) == 4 * PAGE
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert one.prefetch(tokens(4 * PAGE))[0] == 0
        assert one.back_up(indices, tokens(4 * PAGE, seed=5)) == 0
        assert time.monotonic() - began_s < 10
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    until_s = time.monotonic() + 20
    while one.prefetch(tokens(4 * PAGE))[0] != 4 * PAGE:
        assert time.monotonic() < until_s, "it serves again"


def test_tenants_and_clearing(daemon: DaemonProcess, engine: MakeEngine) -> None:
    """Goal: no tenant finds another's pages, and clearing the storage forgets its own only."""
    one, two = (engine(daemon, tenant=name) for name in ("one", "two"))
    for each in (one, two):
        assert each.back_up(each.fill(2 * PAGE, seed=6), tokens(2 * PAGE)) == 2 * PAGE
    assert one.prefetch(tokens(2 * PAGE))[0] == 2 * PAGE
    one.backend.clear()
    assert one.prefetch(tokens(2 * PAGE))[0] == 0
    assert two.prefetch(tokens(2 * PAGE))[0] == 2 * PAGE


def test_a_full_daemon_keeps_what_it_can(tmp_path: Path, engine: MakeEngine) -> None:
    """Goal: where the tenant may hold no more, SGLang is told that pages were not kept, and goes on."""
    daemon = DaemonProcess(tmp_path / "small", {"tenants": {"little": {"cpu_quota": "64KiB", "nvme_quota": 0}}})
    try:
        one = engine(daemon.start(), tenant="little", save_timeout_ms=500)
        assert one.back_up(one.fill(40 * PAGE, seed=7), tokens(40 * PAGE)) == 0
        assert one.prefetch(tokens(40 * PAGE))[0] < 40 * PAGE
    finally:
        daemon.kill()


CONFIG = {
    "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
    "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
}  # fmt: skip


def names(pool: Any, settings: Settings = Settings(revision="1"), **changes: Any) -> bytes:  # noqa: B008 - frozen
    return namespace_of(HiCacheStorageConfig(**CONFIG | changes), pool, settings).fingerprint()


def test_ranks_and_dtypes_are_told_apart() -> None:
    """Goal: ranks of a model with K and V have pages of their own, ranks of a latent one share them."""
    _, host = mha("page_first", torch.bfloat16)
    _, latent = mla("page_first", torch.bfloat16)
    assert names(host) == names(host)
    assert len({names(host), names(host, tp_rank=1), names(host, pp_rank=1, pp_size=2), names(host, model_name="other")}) == 4
    assert names(latent, is_mla_model=True) == names(latent, is_mla_model=True, tp_rank=1)
    assert names(host) != names(host, Settings(revision="2"))
    assert names(host) != names(mha("page_first_direct", torch.bfloat16)[1])
    assert names(host) != names(mha("page_first", torch.float16)[1])
    _, fp8 = mha("page_first", torch.float8_e4m3fn)
    assert fp8.dtype is torch.uint8
    kinds = {names(fp8, Settings(revision="1", kv_dtype=kind)) for kind in ("fp8_e4m3", "fp8_e5m2")}
    assert len(kinds) == 2
    with pytest.raises(UnsupportedPoolError, match=r"kvtierd\.kv_dtype"):
        names(fp8)
    with pytest.raises(UnsupportedPoolError, match="leave it out"):
        names(host, Settings(revision="1", kv_dtype="fp8_e4m3"))
    with pytest.raises(UnsupportedPoolError, match="tp_lcm_size"):
        names(host, should_split_heads=True)


def test_what_is_not_served_is_refused_at_once(daemon: DaemonProcess, engine: MakeEngine) -> None:
    with pytest.raises(UnsupportedPoolError, match="--hicache-mem-layout page_first"):
        engine(daemon, layout="layer_first")
    one = engine(daemon)
    with pytest.raises(UnsupportedPoolError, match="'swa'"):
        one.backend.register_mem_host_pool_v2(one.host, "swa")
    one.backend.register_mem_host_pool_v2(one.host, "kv")
    with pytest.raises(ValueError, match=r"did you mean kvtierd\.tenant"):
        engine(daemon, tenannt="a")


def test_nothing_raises_in_its_threads(daemon: DaemonProcess, engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a call that cannot be is nothing, and is told once a minute."""
    one = engine(daemon)
    for _ in range(3):
        assert one.backend.batch_get_v1(["a", "b"], torch.arange(PAGE)) == [False, False]
    assert one.backend.batch_set(["a"], [torch.zeros(3)]) is False
    assert one.backend.batch_get(["a"], [torch.zeros(3)]) == [None]
    assert one.backend.get("a") is None and one.backend.set("a") is False
    assert caplog.text.count("batch_get_v1 failed") == 1
    one.backend.close()
    assert one.backend.batch_exists(["a"]) == 0 and one.backend.exists("a") is False
