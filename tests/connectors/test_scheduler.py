"""Goal: with the connector, every request ends with the tokens that it has without, KV that attention reads is right at every step,
blocks are loaded instead of computed, and nothing is held once nothing runs: whatever requests, vLLM and the daemon do.

Method: vLLM's own scheduler with a function of the tokens in place of a model (``small_engine``) and a real daemon. Moments that
are hard to hit are held by stopping the workers' threads; the rest is drawn at random from a seed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm.requests import RequestState, tenant_of
from tests.connectors.engine_cases import KINDS, Engines, Stop, fresh, right, save, until_asked, until_loading
from tests.connectors.parts import state as fresh_state
from tests.connectors.small_engine import BLOCK, CHUNK

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]


# ---- hits


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_loads(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh(300)
    save(engines, tokens, **kind)
    other = engines(**kind)
    assert other.generate("again", tokens, 5) == other.expected(tokens, 5)
    assert other.computed["again"] == 300 - 256 + 4
    right(other, "again")
    assert other.counts["loads|ok"] == 1
    assert other.counts["hit_tokens|cpu"] == 256
    assert other.counts["saves|ok"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_prompt_is_held(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh(256)
    engine = save(engines, tokens, **kind)
    engine.generate("again", tokens, 5)
    assert engine.computed["again"] == 5, "the last token of the prompt, and four generated ones"
    right(engine, "again")


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_hit_in_the_middle_of_a_chunk(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh(300)
    engine = save(engines, tokens, **kind)
    engine.generate("start", tokens[: 3 * BLOCK + 1], 1, params={"kvtierd.skip_load": True})
    engine.generate("again", tokens, 3)
    right(engine, "start", "again")
    assert engine.counts["loads|ok"] == 1
    assert engine.computed["again"] == 300 - 256 + 2


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_several_steps_and_at_once(kind: dict[str, Any], engines: Engines) -> None:
    common = fresh(200)
    engine = engines(budget=96, blocks=160, **kind)
    names = [f"r{n}" for n in range(6)]
    for n, name in enumerate(names):
        engine.add(name, common + fresh(100 + 37 * n), 4)
    engine.run(*names)
    right(engine, *names)
    engine.forget()
    again = [name + "'" for name in names]
    for name in names:
        engine.add(name + "'", list(engine.requests[name].all_token_ids)[: engine.prompt_lengths[name]], 4)
    engine.run(*again)
    right(engine, *again)
    assert engine.counts["loads|ok"] == 6


def test_requests_that_need_every_token_computed(engines: Engines) -> None:
    """The log probabilities of a prompt: vLLM 0.23 would take a hit all the same, and have none for what was loaded."""
    tokens = fresh()
    engine = save(engines, tokens)
    engine.generate("all", tokens, skip_reading=True)
    assert engine.computed["all"] >= 300
    right(engine, "all")


@pytest.mark.parametrize(
    ("params", "computed"),
    [
        ({"kvtierd.skip_load": True}, 301),
        ({"kvtierd.max_load_tokens": 100}, 301 - CHUNK),
        ({"kvtierd.max_load_tokens": 10}, 301),
        ({"kvtierd.unknown": 1}, 301),
        ({"kvtierd.tenant": "nobody's"}, 301),
    ],
)
def test_what_requests_ask_for(params: dict[str, Any], computed: int, engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens)
    engine.generate("asks", tokens, params=params)
    assert engine.computed["asks"] == computed
    right(engine, "asks")


def test_generated_tokens(engines: Engines) -> None:
    tokens = fresh(100)
    engine = engines(save_decode=True)
    made = engine.generate("talk", tokens, 200)
    right(engine, "talk")
    engine.forget()
    engine.generate("on", tokens + made)
    assert engine.computed["on"] == 300 - 256 + 1
    right(engine, "on")


def test_roles(engines: Engines) -> None:
    tokens = fresh()
    save(engines, tokens, role="save")
    engine = engines(role="save")
    engine.generate("again", tokens)
    assert engine.computed["again"] == 301
    reader = engines(role="load")
    reader.generate("again", tokens)
    assert reader.computed["again"] < 301
    other = fresh()
    reader.generate("new", other)
    right(reader, "again", "new")
    assert reader.counts["saves|ok"] == 0


# ---- the end at every moment


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["added", "asked", "promised", "loading", "loaded", "computing", "saving"])
def test_aborted(moment: str, kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    stop = Stop(engine) if moment in ("loading", "saving") else None
    name = "gone"
    if moment == "promised":
        taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.add(name, fresh() if moment in ("saving", "computing") else tokens, 50)
    request = engine.requests[name]
    if moment == "asked":
        until_asked(engine)
    elif moment == "promised":
        engine.until(lambda: engine.side._requests[name].promised_s > 0)
    elif moment == "loading":
        until_loading(engine, name)
        engine.step()
    elif moment == "loaded":
        until_loading(engine, name)
        engine.until(lambda: name in engine.scheduler.finished_recving_kv_req_ids or request.num_output_tokens > 0)
    elif moment == "computing":
        engine.step()
    elif moment == "saving":
        engine.until(lambda: engine.side._saves.held > 0 and bool(engine.ranks[0].connector._worker._saver._queue.qsize()))
    engine.abort(name)
    if moment == "promised":
        engine.pool.free_blocks(taken)
    engine.step()
    if stop is not None:
        assert engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1, "what a worker reads or writes is not given away"
        stop.go()
    engine.generate("after", tokens)
    right(engine, "after")


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_and_resumed(kind: dict[str, Any], engines: Engines) -> None:
    """Requests that do not fit together push each other out, and come back with what was saved of them."""
    engine = engines(blocks=30 if kind.get("groups") else 18, save_decode=True, **kind)
    for wave in range(8):
        names = [f"r{wave} {n}" for n in range(6)]
        for name in names:
            engine.add(name, fresh(80), 200)
        engine.run(*names)
        right(engine, *names)
        assert sum(engine.requests[name].num_preemptions for name in names)
        if engine.counts["loads|ok"]:
            break  # saves are behind the steps: at times none is done before its request comes back
    assert engine.counts["loads|ok"] > 0


def test_promised_but_no_blocks(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that vLLM has no blocks for is let go after a while, and found again."""
    from kvtierd.connectors.vllm import loads

    monkeypatch.setattr(loads, "PROMISE_S", 0.0)
    tokens = fresh()
    engine = save(engines, tokens)
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 2)
    engine.add("waits", tokens)
    seen: list[bool] = []

    def twice_promised() -> bool:
        promised = engine.side._requests["waits"].promised_s > 0 or engine.side._loads.asking == 0
        if not seen or seen[-1] != promised:
            seen.append(promised)
        return len(seen) > 4

    engine.until(twice_promised)
    engine.pool.free_blocks(taken)
    monkeypatch.setattr(loads, "PROMISE_S", 2.0)
    engine.run("waits")
    right(engine, "waits")
    assert engine.counts["loads|ok"] == 1


# ---- resets


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_saved_before_a_reset_is_hit(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate("new", tokens)
    assert engine.computed["new"] == 301
    right(engine, "new")
    engine.forget()
    engine.generate("newer", tokens)
    assert engine.computed["newer"] < 301, "what was saved after it is"
    right(engine, "newer")


@pytest.mark.parametrize("moment", ["asked", "promised", "loading", "running"])
def test_reset_at_every_moment(moment: str, engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens)
    stop = Stop(engine) if moment == "loading" else None
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks()) if moment == "promised" else []
    engine.add("r", tokens, 20)
    if moment == "asked":
        until_asked(engine)
    elif moment == "promised":
        engine.until(lambda: engine.side._requests["r"].promised_s > 0)
    elif moment == "loading":
        until_loading(engine, "r")
    else:
        engine.until(lambda: engine.requests["r"].num_output_tokens > 2)
    engine.connector.reset_cache()
    engine.pool.free_blocks(taken)
    if stop is not None:
        stop.go()
    engine.run("r")
    right(engine, "r")
    if moment in ("asked", "promised"):
        assert engine.computed["r"] >= 300, "what it had been promised was of before"


def test_running_requests_are_not_saved_under_new_keys(engines: Engines) -> None:
    """Their blocks are of before the reset, when the weights may have been others."""
    engine = engines()
    engine.add("old", fresh(500), 5)
    engine.until(lambda: engine.computed["old"] > 0)
    engine.connector.reset_cache()
    state = engine.side._requests["old"]
    assert engine.side._saves.choice.due(state, 500) == 0
    engine.run("old")
    right(engine, "old")


# ---- small things


def output(new: list[Any] = [], cached: list[tuple[str, Any]] = [], resumed: list[str] = []) -> Any:  # noqa: B006
    """What an older vLLM tells of a step."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=ids) for name, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached], new_block_ids=[ids for _, ids in cached], resumed_req_ids=set(resumed)
        ),
    )


def test_block_tables_of_an_older_vllm(engines: Engines) -> None:
    side = engines().side
    state = side._requests["r"] = fresh_state()
    side._follow_blocks(output([("r", ([1, 2],))]))
    side._follow_blocks(output(cached=[("r", ([3],))]))
    side._follow_blocks(output(cached=[("r", None), ("other", ([9],))]))
    assert state.block_ids == ([1, 2, 3],)
    side._follow_blocks(output(cached=[("r", ([7, 8],))], resumed=["r"]))
    assert state.block_ids == ([7, 8],)
    del side._requests["r"]


def test_inside_another_connector_the_first_blocks_come_with_the_step(engines: Engines) -> None:
    """An older MultiConnector hands on no blocks to those that do not load. Blocks of later steps would be taken for the first."""
    side = engines().side
    state = side._requests["r"] = fresh_state()
    empty = SimpleNamespace(get_block_ids=lambda: ([],))
    side.allocated(state.request, empty, 0)
    side._follow_blocks(output([("r", ([1, 2],))]))
    side._follow_blocks(output(cached=[("r", ([3],))]))
    assert state.block_ids == ([1, 2, 3],)
    unknown = side._requests["u"] = RequestState(state.request, state.settings, "")
    side._follow_blocks(output(cached=[("u", ([3],))]))
    assert unknown.bypass
    assert unknown.block_ids == ()
    side._requests.clear()


def test_inside_another_connector_the_layout_comes_with_the_first_step(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told at the start goes to all of its parts, and one that does not know it ends the engine."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    tokens = fresh()
    save(engines, tokens)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    engine = engines(attach=False)
    assert engine.side._pools is None
    assert engine.ranks[0].connector.get_handshake_metadata() is None
    engine.generate("first", fresh())
    assert engine.side._pools.clients[0].wait_attached(30)
    engine.generate("again", tokens)
    assert engine.computed["again"] < 301
    right(engine, "first", "again")


def test_an_engine_without_that_many_blocks_stays_quiet(engines: Engines) -> None:
    """No step is made for nothing once all is saved."""
    engine = engines()
    engine.generate("r", fresh())
    engine.settle()
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize(
    ("named", "salt", "tenant"), [("", None, ""), ("a", "s", "a"), ("", "s", "t"), ("", "other", ""), ("", "", "")]
)
def test_tenants(named: str, salt: str | None, tenant: str) -> None:
    assert tenant_of(fresh_state(tenant=named).settings, salt, {"s": "t"}) == tenant
