"""What the connector costs an engine that never hits: the same work with and without it, in turn.

    python3 loadtest/vllm/step_cost.py --address unix:…            # a GPU; a model of Llama-3.1-8B's shape with dummy weights
    python3 loadtest/vllm/step_cost.py --address unix:… --small    # a CPU; copies and computing then share the cores

Engines stand side by side on one device: one without any connector, one that saves every block to the daemon at the address, and
with --peer one with vLLM's own OffloadingConnector. They get the same prompts, which nobody has seen before, one engine after the
other and in changing order: long prompts of one output token (steps of prefill), many requests that come at once and then decode
together (both), and the decoding part of these alone (from the moment when the last of them has its first token). Printed are
milliseconds per engine step, the ratios of the rounds in their order, and the median of these; of decoding also the 50th and 99th
percentile of all steps, as their outputs reach the caller.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

PAUSE_S = 0.5
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))
from ttft import SHAPE  # noqa: E402

SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip


def transfer_config(args, mode):
    if mode == "offload":
        extra = {"cpu_bytes_to_use": args.cpu_gib << 30}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "KvtierdConnector",
        "kv_connector_module_path": "kvtierd.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvtierd.address": args.address, **json.loads(args.extra)},
    }


def engine(args, mode):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    folder = Path(tempfile.mkdtemp(prefix="kvtierd-model-"))
    (folder / "config.json").write_text(json.dumps(SHAPE | (SMALL if args.small else {})))
    options = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": args.prefill_tokens + 1024,
        "max_num_batched_tokens": 512 if args.small else 8192, "disable_log_stats": False, "enforce_eager": not args.graphs,
    }  # fmt: skip
    if args.graphs:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options["gpu_memory_utilization"] = 0.15 if args.small else 0.3  # of the machine's memory where there is no GPU
    if mode != "without":
        options["kv_transfer_config"] = KVTransferConfig(**transfer_config(args, mode))
    return LLM(**options)


class Work:
    """Prompts that are new in each round, the same for both engines."""

    def __init__(self, args):
        self.args = args
        self.vocabulary = (SHAPE | (SMALL if args.small else {}))["vocab_size"] - 1000
        self.batch_tokens = 512 if args.small else 8192

    def prompts(self, number, count, tokens):
        rng = random.Random(f"{self.args.seed} {number} {tokens}")
        return [{"prompt_token_ids": [rng.randrange(500, self.vocabulary) for _ in range(tokens)]} for _ in range(count)]

    def run(self, llm, kind, number):
        """Milliseconds per step, of all and of the steps that only decode."""
        from vllm import SamplingParams

        args = self.args
        if kind == "prefill":
            count, tokens, output = args.prefills, args.prefill_tokens, 1
        else:
            count, tokens, output = args.requests, args.prompt_tokens, args.output_tokens
        steps = output - 1 + -(-count * tokens // self.batch_tokens)
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        prompts = self.prompts(number, count, tokens)
        began = time.perf_counter()
        outputs, decoded = generate(llm, prompts, sampling)
        took = time.perf_counter() - began
        hits = sum(o.num_cached_tokens or 0 for o in outputs)
        if hits:
            sys.exit(f"{hits} tokens of round {number} were not computed: use another --seed, or a fresh daemon")
        found = {kind: took / steps * 1e3}
        if output > 1:
            last_first = max(o.metrics.first_token_ts for o in outputs)
            last = max(o.metrics.last_token_ts for o in outputs)
            found["decoding alone"] = (last - last_first) / (output - 1) * 1e3
            found["each step of decoding"] = decoded
        return found


def generate(llm, prompts, sampling):
    """The outputs, and how long each step took once all of them had begun, in ms."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, sampling)
    outputs, begun, ends = [], set(), []
    while engine.has_unfinished_requests():
        made = engine.step()
        if made and len(begun) == len(prompts):
            ends.append(time.perf_counter())
        begun.update(o.request_id for o in made)
        outputs += [o for o in made if o.finished]
    return outputs, [(b - a) * 1e3 for a, b in itertools.pairwise(ends)]


def percentiles(steps):
    """Of all steps of all rounds, and ratios to the engine without a connector."""
    found = {}
    for percent in (50, 99):
        at = {mode: statistics.quantiles(itertools.chain(*some), n=100)[percent - 1] for mode, some in steps.items()}
        found |= {f"{mode}_p{percent}_ms": round(ms, 3) for mode, ms in at.items()}
        found |= {f"{mode}_p{percent}_ratio": round(ms / at["without"], 4) for mode, ms in at.items() if mode != "without"}
    return found | {"steps": len(list(itertools.chain(*steps["without"])))}


def summary(times):
    """Medians and ratios to the engine without a connector."""
    found = {f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()}
    for name, values in times.items():
        if name != "without":
            ratios = [b / a for a, b in zip(times["without"], values, strict=True)]
            found[f"{name}_ratio"] = round(statistics.median(ratios), 4)
            found[f"{name}_ratios"] = [round(r, 3) for r in ratios]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--small", action="store_true", help="a small model, for a machine without a GPU")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for decoding, instead of eager steps")
    parser.add_argument("--peer", action="store_true", help="a third engine with vLLM's OffloadingConnector")
    parser.add_argument("--cpu-gib", type=int, default=16, help="CPU memory of the OffloadingConnector")
    parser.add_argument("--extra", default="{}", help="more of kv_connector_extra_config, as JSON")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only-prefill", action="store_true", help="leave the requests that decode out")
    parser.add_argument("--only-decoding", action="store_true", help="leave the long prompts out")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prefills", type=int, default=8)
    parser.add_argument("--prefill-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--output", help="write the JSON to this file too")
    args = parser.parse_args()
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    modes = ["without", "kvtierd", *(["offload"] if args.peer else [])]
    engines = {mode: engine(args, mode) for mode in modes}
    work = Work(args)
    report = {"model": "small" if args.small else "Llama-3.1-8B shape", "graphs": args.graphs, "rounds": args.rounds}
    for kind in ("prefill", "prefill and decoding")[1 if args.only_decoding else 0 : 1 if args.only_prefill else 2]:
        times = {}
        for number in range(-1, args.rounds):  # one more that does not count
            for mode in sorted(modes, reverse=bool(number % 2)):
                for part, ms in work.run(engines[mode], kind, f"{kind} {number}").items():
                    if number >= 0:
                        times.setdefault(part, {}).setdefault(mode, []).append(ms)
                time.sleep(PAUSE_S)  # saves that are still under way are not the next engine's to pay for
        report |= {part: (percentiles if part.startswith("each") else summary)(by_mode) for part, by_mode in times.items()}
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
