"""Drives an LMCache server; run in LMCache's environment. Reads one JSON command a line, answers with one JSON line each.

Commands (times in seconds, one list entry a request):
    {"do": "pass", "mib": 8, "number": 3}      store 20 requests, then retrieve them, then clear
    {"do": "lookup", "tokens": 4096, "hit": true}
"""

import argparse
import json
import os
import sys
import time
import urllib.request

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

# Whatever LMCache prints must not get between the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from lmcache.cli.commands.bench.server_bench import helpers  # noqa: E402
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient  # noqa: E402
from lmcache.cli.commands.bench.server_bench.config import BenchConfig  # noqa: E402

CHUNK_TOKENS = 256
REQUESTS = 20
CHUNKS = 2
LOOKUPS = 15
MAX_TOKENS = 131_072


def client_for(args: argparse.Namespace, shape: str, tokens: int, number: int) -> ServerBenchClient:
    helpers._INSTANCE_ID_BASE = 1000 + 10 * number
    helpers._MODEL_NAME = f"bench-{number}"
    client = ServerBenchClient(
        BenchConfig(
            rpc_url=args.rpc_url,
            http_url=args.http_url,
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=shape,
            num_blocks=512,
            block_size=16,
        ),
        lambda _text: None,
    )
    client.start()
    return client


class Sizes:
    """One client a chunk size; K and V of 8 heads of 128 in float16, so that a layer of one chunk takes 1 MiB."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clients: dict[int, ServerBenchClient] = {}

    def get(self, mib: int) -> ServerBenchClient:
        if mib not in self.clients:
            self.close()
            shape = f"(2,{self.args.kv_blocks},16,8,128):float16:{mib}"
            self.clients[mib] = client_for(self.args, shape, CHUNKS * CHUNK_TOKENS, mib)
        helpers._MODEL_NAME = f"bench-{mib}"
        return self.clients[mib]

    def close(self) -> None:
        """Give the memory of the last size back."""
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def clear(self) -> None:
        body = b'{"tier": "l1", "force": true}'
        request = urllib.request.Request(
            self.args.http_url + "/cache/clear", data=body, headers={"content-type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=60).read()

    def one_pass(self, mib: int, number: int) -> dict[str, list[float]]:
        client = self.get(mib)
        took: dict[str, list[float]] = {"save": [], "load": []}
        for kind in ("save", "load"):
            for i in range(REQUESTS):
                request = client.create_request(1 + i, f"{kind}-{mib}-{number}-{i}", kind)
                found = client.lookup(request)
                if found.hit_chunks != (0 if kind == "save" else CHUNKS):
                    raise RuntimeError(f"{kind}: {found.hit_chunks} chunks held")
                move = client.store if kind == "save" else client.retrieve
                if kind == "load" and number == 1:
                    before = client.compute_checksums(request, 0, request.num_full_tokens)
                    client.zero_destination(request, 0, request.num_full_tokens)
                began_s = time.perf_counter()
                result = move(request, 0, request.num_full_tokens)
                took[kind].append(time.perf_counter() - began_s)
                if not result.succeeded:
                    raise RuntimeError(f"{kind} failed: {result}")
                if kind == "load" and number == 1 and before != client.compute_checksums(request, 0, request.num_full_tokens):
                    raise RuntimeError("other bytes came back than were stored")
                client.end_session(request)
        self.clear()
        return took


class Lookups:
    """Lookups of long prompts; the chunks are tiny, since only their number counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = "bench-9999"
        self.client = client_for(args, f"(2,{MAX_TOKENS // 16 + 64},16,1,16):float16:1", MAX_TOKENS, 9999)
        self.number = 0

    def fill(self) -> None:
        helpers._MODEL_NAME = self.name
        request = self.client.create_request(1, "fill", "fill")
        step = 64 * CHUNK_TOKENS
        for start in range(0, request.num_full_tokens, step):
            result = self.client.store(request, start, min(step, request.num_full_tokens - start))
            if not result.succeeded:
                raise RuntimeError(f"filling failed: {result}")
        self.client.end_session(request)

    def run(self, tokens: int, *, hit: bool) -> list[float]:
        helpers._MODEL_NAME = self.name
        calls = self.client._req_client
        took = []
        for _ in range(LOOKUPS):
            self.number += 1
            ids = tuple(helpers._build_token_ids(1 if hit else 1000 + self.number, tokens)[:tokens])
            key = helpers._make_key(ids, f"lookup-{self.number}", start=0, end=tokens, world_size=1)
            began_s = time.perf_counter()
            calls.lookup(key, 1).result(timeout=30)
            found = calls.wait_prefetch_status(key.request_id, 10.0).result(timeout=30)
            took.append(time.perf_counter() - began_s)
            if found != (tokens // CHUNK_TOKENS if hit else 0):
                raise RuntimeError(f"lookup of {tokens} tokens found {found} chunks")
            if hit:
                calls.free_lookup_locks(key, 1).result(timeout=30)
            calls.end_session(key.request_id).result(timeout=30)
        return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rpc-url", required=True)
    parser.add_argument("--http-url", required=True)
    parser.add_argument("--kv-blocks", type=int, required=True)
    args = parser.parse_args()
    sizes = Sizes(args)
    lookups: Lookups | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "pass":
            answer: object = sizes.one_pass(command["mib"], command["number"])
        else:
            if lookups is None:
                lookups = Lookups(args)
                lookups.fill()
            answer = lookups.run(command["tokens"], hit=command["hit"])
        print(json.dumps(answer), file=ANSWERS, flush=True)
    sizes.close()
    if lookups is not None:
        lookups.client.close()


if __name__ == "__main__":
    main()
