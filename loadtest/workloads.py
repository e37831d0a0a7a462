#!/usr/bin/env python3
"""Makes traces of known kinds of traffic, in the schema that `kvtierd replay` reads.

    .venv/bin/python loadtest/workloads.py rag-chat --conversations 5000 > rag.jsonl
    .venv/bin/python loadtest/workloads.py agents > agents.jsonl
    .venv/bin/python loadtest/workloads.py documents > documents.jsonl

A prompt is a row of segments (a system prompt, a retrieved context, what each turn added), and the id of a block stands for all
tokens up to its end, so equal ids mean equal prefixes. The same seed gives the same trace. Lengths and pauses are those of the
options; each kind's docstring says what is drawn from which distribution.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BLOCK_TOKENS = 512
Segment = tuple[str, int]
"""A name that stands for the text, and its tokens."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: after a pause, a prompt that goes on from the last one."""

    pause_s: float
    segments: tuple[Segment, ...]
    output_tokens: int


class BlockIds:
    """Gives each distinct prefix of whole blocks (and each end that fills one in part) a number."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}

    def of(self, segments: tuple[Segment, ...]) -> list[int]:
        ids: list[int] = []
        parts: list[tuple[str, int, int]] = []
        room, last = self._block_tokens, -1
        for name, length in segments:
            start = 0
            while start < length:
                end = min(start + room, length)
                parts.append((name, start, end))
                room -= end - start
                start = end
                if room == 0:
                    last = self._ids.setdefault((last, tuple(parts)), len(self._ids))
                    ids.append(last)
                    parts, room = [], self._block_tokens
        if parts:
            ids.append(self._ids.setdefault((last, tuple(parts)), len(self._ids)))
        return ids


def zipf(count: int, exponent: float) -> Callable[[random.Random], int]:
    """Draws ranks from 0 on: rank k with a weight of 1 / (k + 1) ** exponent."""
    weights = [1 / (k + 1) ** exponent for k in range(count)]
    total, sums = 0.0, []
    for weight in weights:
        total += weight
        sums.append(total)
    return lambda rng: rng.choices(range(count), cum_weights=sums)[0]


def tokens(rng: random.Random, mean: float, spread: float = 0.6) -> int:
    """A length from a log-normal distribution with this mean."""
    return max(1, round(rng.lognormvariate(math.log(mean) - spread * spread / 2, spread)))


def turns_of(rng: random.Random, mean: float) -> int:
    """How many turns, from 1 on, geometrically distributed with this mean."""
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1


def rag_chat(rng: random.Random, number: int, o: argparse.Namespace) -> tuple[str, Iterator[Turn]]:
    """Chat over retrieved documents.

    A tenant's system prompt, a context whose popularity in the tenant's collection follows Zipf's law, then turns: what the user
    wrote and what the model answered before. Turns are geometric, lengths log-normal, think times exponential.
    """
    tenant = rng.randrange(o.tenants)
    context = o.pick(rng)

    def turns() -> Iterator[Turn]:
        prompt: list[Segment] = [(f"system {tenant % o.system_prompts}", o.system_tokens), (f"context {context}", o.context_tokens)]
        for turn in range(turns_of(rng, o.turns)):
            prompt.append((f"user {number} {turn}", tokens(rng, o.user_tokens)))
            output = tokens(rng, o.output_tokens)
            yield Turn(rng.expovariate(1 / o.think_s) if turn else 0.0, tuple(prompt), output)
            prompt.append((f"answer {number} {turn}", output))

    return f"tenant-{tenant}", turns()


def agents(rng: random.Random, number: int, o: argparse.Namespace) -> tuple[str, Iterator[Turn]]:
    """Agents: a long system prompt with tools, many short steps, and tool calls of which some take minutes (log-normal pauses)."""
    tenant = rng.randrange(o.tenants)

    def turns() -> Iterator[Turn]:
        prompt: list[Segment] = [
            (f"tools {tenant % o.system_prompts}", o.system_tokens),
            (f"task {number}", tokens(rng, o.user_tokens)),
        ]
        for turn in range(turns_of(rng, o.turns)):
            output = tokens(rng, o.output_tokens)
            pause_s = rng.lognormvariate(math.log(o.think_s) - 1.125, 1.5) if turn else 0.0
            yield Turn(pause_s, tuple(prompt), output)
            prompt += [(f"call {number} {turn}", output), (f"result {number} {turn}", tokens(rng, o.context_tokens, 1.0))]

    return f"tenant-{tenant}", turns()


def documents(rng: random.Random, number: int, o: argparse.Namespace) -> tuple[str, Iterator[Turn]]:
    """Long documents: a short instruction, a document whose popularity follows Zipf's law, and a few questions about it."""
    tenant = rng.randrange(o.tenants)
    document = o.pick(rng)

    def turns() -> Iterator[Turn]:
        base = ((f"instruction {tenant % o.system_prompts}", o.system_tokens), (f"document {document}", o.context_tokens))
        for turn in range(turns_of(rng, o.turns)):
            question = (f"question {number} {turn}", tokens(rng, o.user_tokens))
            yield Turn(rng.expovariate(1 / o.think_s) if turn else 0.0, (*base, question), tokens(rng, o.output_tokens))

    return f"tenant-{tenant}", turns()


KINDS: dict[str, tuple[Callable[..., tuple[str, Iterator[Turn]]], dict[str, float]]] = {
    "rag-chat": (rag_chat, {"system_tokens": 1500, "context_tokens": 8000, "user_tokens": 200, "output_tokens": 300, "turns": 6,
                            "think_s": 45.0, "contexts": 2000}),
    "agents": (agents, {"system_tokens": 6000, "context_tokens": 1200, "user_tokens": 800, "output_tokens": 250, "turns": 20,
                        "think_s": 30.0, "contexts": 1}),
    "documents": (documents, {"system_tokens": 300, "context_tokens": 48_000, "user_tokens": 60, "output_tokens": 400, "turns": 3,
                              "think_s": 60.0, "contexts": 500}),
}  # fmt: skip
RANGES = {"system_tokens": (0, 10_000_000), "context_tokens": (1, 10_000_000), "user_tokens": (1, 10_000_000),
          "output_tokens": (1, 10_000_000), "turns": (1, 100_000), "contexts": (1, 10_000_000)}  # fmt: skip
"""What whole numbers among the options of kinds may be."""


def requests(kind: str, options: argparse.Namespace) -> Iterator[tuple[float, str, Turn]]:
    """Requests in the order of time: seconds, tenant, and what is asked."""
    make = KINDS[kind][0]
    rng = random.Random(options.seed)
    options.pick = zipf(int(options.contexts), options.skew)
    waiting: list[tuple[float, int, str, Turn, Iterator[Turn]]] = []
    arrival_s, number = 0.0, 0
    while number < options.conversations or waiting:
        if number < options.conversations and (not waiting or arrival_s <= waiting[0][0]):
            tenant, turns = make(rng, number, options)
            first = next(turns)
            heapq.heappush(waiting, (arrival_s, number, tenant, first, turns))
            number += 1
            arrival_s += rng.expovariate(options.rate)
            continue
        at_s, which, tenant, turn, turns = heapq.heappop(waiting)
        yield at_s, tenant, turn
        following = next(turns, None)
        if following is not None:
            answered_s = at_s + turn.output_tokens / options.tokens_per_s
            heapq.heappush(waiting, (answered_s + following.pause_s, which, tenant, following, turns))


def trace(kind: str, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Requests in the order of time, as rows of the trace."""
    ids = BlockIds()
    for at_s, tenant, turn in requests(kind, options):
        yield {
            "timestamp": round(at_s * 1000),
            "input_length": sum(length for _, length in turn.segments),
            "output_length": turn.output_tokens,
            "hash_ids": ids.of(turn.segments),
            "tenant": tenant,
        }


def number(kind: type[int] | type[float], least: float, most: float = 1e9) -> Callable[[str], float]:
    """The type of an option: a whole number or any, within bounds."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # false for nan too
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} up to {most:g}")
        return value

    return read


def parser_of(kind: str, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of a kind, with its defaults."""
    count, positive = number(int, 1), number(float, 1e-6)
    parser.add_argument("--conversations", type=count, default=2000)
    parser.add_argument("--rate", type=positive, default=2.0, help="conversations that begin in a second, on average")
    parser.add_argument("--tokens-per-s", type=positive, default=30.0, help="how fast an answer comes")
    parser.add_argument("--tenants", type=count, default=20)
    parser.add_argument("--system-prompts", type=count, default=20, help="distinct ones; fewer than tenants: some share")
    parser.add_argument("--skew", type=number(float, 0, 20), default=0.9, help="Zipf exponent of what is retrieved")
    parser.add_argument("--seed", type=int, default=1)
    for name, value in KINDS[kind][1].items():
        reader = number(int, *RANGES.get(name, (1, 1e9))) if isinstance(value, int) else positive
        parser.add_argument("--" + name.replace("_", "-"), type=reader, default=value)
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        parser_of(kind, kinds.add_parser(kind, help=str(KINDS[kind][0].__doc__).splitlines()[0]))
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as any filter: it ends with who reads it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for row in trace(options.kind, options):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
