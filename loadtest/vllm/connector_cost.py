"""What the vLLM connector's scheduler side costs per request, on the engine's own thread.

A request of 128k tokens in blocks of 16 is wholly held by a daemon; counted is the processor time that the engine's thread
spends in each hook, from the request's arrival to its load job on the way to the workers. The daemon's work and the connector's
background threads run beside it, as in an engine. Then a request of as many tokens, of which nothing is held, is computed in steps
and saved: counted is what its steps cost, all together. Chunks of 32 tokens are what the connector takes by itself for a model of
128 KiB a token (Llama-3.1-8B in bf16); 16 is the least.

    .venv-vllm/bin/python loadtest/vllm/connector_cost.py [--tokens 131072] [--chunk-tokens 32] [--rounds 20]
"""

import argparse
import hashlib
import json
import pickle
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from kvtierd.connectors.vllm.layout import GroupLayout
from kvtierd.connectors.vllm.metadata import KvtierdWorkerMetadata, RankLayout, Report
from kvtierd.connectors.vllm.scheduler import SchedulerSide
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.lifetime import end_in_order, scratch_folder
from kvtierd.testing.daemon import DaemonProcess

BLOCK_TOKENS = 16
ASK = "get_num_new_matched_tokens"


def layout():
    fields = {
        "index": 0, "kind": "full", "block_tokens": BLOCK_TOKENS, "window": 0, "block_bytes": 256, "num_layers": 1,
        "kv_dtype": "bfloat16", "replicated": False, "description": "cost benchmark",
    }  # fmt: skip
    return RankLayout((GroupLayout(**fields),))


class Pool:
    """The part of vLLM's block pool that saves use."""

    def __init__(self, blocks):
        self.blocks = [SimpleNamespace(block_id=n, ref_cnt=1) for n in range(blocks + 1)]
        self.num_gpu_blocks, self.null_block = len(self.blocks), self.blocks[0]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1


def engine(address, chunk_tokens, blocks):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(model="cost", revision="1", dtype="bfloat16", hf_text_config=None),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(engine_id="cost"),
        speculative_config=None,
        lora_config=None,
    )
    caches = SimpleNamespace(hash_block_size=BLOCK_TOKENS, kv_cache_groups=[None])
    settings = Settings(address=address, chunk_tokens=chunk_tokens, gate=False, lookup_timeout_ms=10_000, max_held_fraction=1.0)
    side = SchedulerSide(config, caches, settings, recovers_groups=True, keeps_stepping=True, failed=lambda what: sys.exit(what))
    side.bind_block_pool(Pool(2 * blocks))
    side.learn({(0, 0): layout()})
    return side


def request(name, hashes, tokens):
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, num_tokens=tokens, num_prompt_tokens=tokens, kv_transfer_params=None,
        cache_salt=None, num_computed_tokens=0, is_finished=lambda: True,
    )  # fmt: skip


def fill(side, keys):
    """Have the daemon hold the keys."""
    client = side._ctx.pools.clients[0]
    assert client.wait_attached(10)
    for start in range(0, len(keys), 512):
        part = keys[start : start + 512]
        with client.reserve(b"".join(part), timeout_s=10, wait_s=1) as reservation:
            for index in reservation.granted:
                reservation.views(index)[0][:4] = b"test"
            reservation.commit(timeout_s=10)


class Stopwatch:
    """Adds up the thread's processor time."""

    def __init__(self):
        self.seconds = {}

    def run(self, name, call):
        begin = time.thread_time()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - begin
        return result


def one(side, number, hashes, tokens, blocks):
    watch = Stopwatch()
    req = request(f"r{number}", hashes, tokens)
    watch.run("on_new_request", lambda: side.arrived(req))
    begin = time.perf_counter()
    asked = 0
    while True:
        found, _ = watch.run(ASK if asked != 1 else "get_num_new_matched_tokens, while it waits", lambda: side.matched(req, 0))
        asked += 1
        if found is not None:
            break
        time.sleep(0.001)
    lookup_s = time.perf_counter() - begin
    assert found == tokens, found
    watch.run("update_state_after_alloc", lambda: side.allocated(req, blocks, found))
    meta = watch.run("build_connector_meta", lambda: side.build(step_output({})))
    pickled = watch.run("(pickling the metadata)", lambda: pickle.dumps(meta, pickle.HIGHEST_PROTOCOL))
    side.output(KvtierdWorkerMetadata(loads={job.job_id: Report() for job in meta.loads}), {req.request_id})
    return watch.seconds, lookup_s, len(pickled)


def step_output(scheduled):
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )  # fmt: skip


def save(side, number, tokens, blocks, step_tokens):
    """A request of which nothing is held, from its arrival until everything is saved. Milliseconds of all its steps."""
    hashes = [hashlib.sha256(b"%d of %d" % (n, number)).digest() for n in range(tokens // BLOCK_TOKENS)]
    req = request(f"s{number}", hashes, tokens)
    side._settings = replace(side._settings, prefetch=False)
    side.arrived(req)
    side.allocated(req, blocks, 0)
    seconds = 0.0
    begun = time.perf_counter()
    while req.num_computed_tokens < tokens or side.pending:
        now = min(step_tokens, tokens - req.num_computed_tokens)
        begin = time.thread_time()
        meta = side.build(step_output({req.request_id: now} if now else {}))
        seconds += time.thread_time() - begin
        req.num_computed_tokens += now
        begin = time.thread_time()
        side.output(KvtierdWorkerMetadata(saves={job.job_id: Report() for job in meta.saves}, step=meta.step), set())
        seconds += time.thread_time() - begin
        time.sleep(0.002)
    whole_s = time.perf_counter() - begun
    side.finished(req, blocks.get_block_ids())
    return seconds * 1e3, whole_s * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--chunk-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens computed in one step of the request that is saved")
    parser.add_argument("--output")
    args = parser.parse_args()
    hashes = [hashlib.sha256(b"%d" % n).digest() for n in range(args.tokens // BLOCK_TOKENS)]
    ids = list(range(1, len(hashes) + 1))
    blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
    end_in_order()
    with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-cost-") as folder:
        daemon = DaemonProcess(folder, {"cpu": {"capacity": "256MiB"}}, tie=True).start()
        side = engine(daemon.address, args.chunk_tokens, len(ids))
        try:
            keys = hashes[args.chunk_tokens // BLOCK_TOKENS - 1 :: args.chunk_tokens // BLOCK_TOKENS]
            fill(side, keys)
            saves = [save(side, n, args.tokens, blocks, args.step_tokens) for n in range(args.rounds // 2 + 1)][1:]
            fill(side, keys)
            runs = [one(side, n, hashes, args.tokens, blocks) for n in range(args.rounds + 3)][3:]
        finally:
            side.close()
            daemon.kill()
    hooks = {name: statistics.median(run[0][name] for run in runs) * 1e3 for name in runs[0][0]}
    report = {
        "tokens": args.tokens,
        "chunk_tokens": args.chunk_tokens,
        "keys": len(keys),
        "hook_ms": {name: round(ms, 3) for name, ms in hooks.items()},
        "total_ms": round(sum(hooks.values()), 3),
        "save_ms": round(statistics.median(run[0] for run in saves), 2),
        "save_step_ms": round(statistics.median(run[0] for run in saves) * args.step_tokens / args.tokens, 3),
        "saved": side.counts["saves|ok"] // (args.rounds // 2 + 1),
        "lookup_to_pinned_ms": round(statistics.median(run[1] for run in runs) * 1e3, 2),
        "metadata_bytes": runs[0][2],
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
