"""What the connector costs an engine that never hits: the same work with and without it, in turn.

    python3 loadtest/vllm/step_cost.py --address unix:…            # a GPU; a model of Llama-3.1-8B's shape with dummy weights
    python3 loadtest/vllm/step_cost.py --address unix:… --small    # a CPU; copies and computing then share the cores

Two engines stand side by side on one device, one without any connector and one that saves every block to the daemon at the address.
They get the same prompts, which nobody has seen before, one engine after the other and in changing order: long prompts of one
output token (steps of prefill), and many requests that decode together (steps of decoding). Printed are milliseconds per engine
step and the median of the ratios of the rounds.
"""

import argparse
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


def engine(args, connector):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    folder = Path(tempfile.mkdtemp(prefix="kvtierd-model-"))
    (folder / "config.json").write_text(json.dumps(SHAPE | (SMALL if args.small else {})))
    options = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
        "max_model_len": args.prefill_tokens + 1024, "max_num_batched_tokens": 512 if args.small else 8192,
        "disable_log_stats": True,
    }  # fmt: skip
    if not args.small:
        options["gpu_memory_utilization"] = 0.45 if connector else 0.4  # of all memory, and counts the engine that came first
    if connector:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvtierdConnector",
            kv_connector_module_path="kvtierd.connectors.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"kvtierd.address": args.address, **json.loads(args.extra)},
        )
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
        """Milliseconds per step."""
        from vllm import SamplingParams

        args = self.args
        if kind == "prefill":
            count, tokens, output = args.prefills, args.prefill_tokens, 1
            steps = count * -(-tokens // self.batch_tokens)
        else:
            count, tokens, output = args.requests, args.prompt_tokens, args.output_tokens
            steps = output + -(-count * tokens // self.batch_tokens) - 1
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        prompts = self.prompts(number, count, tokens)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        hits = sum(o.num_cached_tokens or 0 for o in outputs)
        if hits:
            sys.exit(f"{hits} tokens of round {number} were not computed: use another --seed, or a fresh daemon")
        return took / steps * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--small", action="store_true", help="a small model, for a machine without a GPU")
    parser.add_argument("--extra", default="{}", help="more of kv_connector_extra_config, as JSON")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prefills", type=int, default=8)
    parser.add_argument("--prefill-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--output", help="write the JSON to this file too")
    args = parser.parse_args()
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    engines = {"without": engine(args, connector=False), "with": engine(args, connector=True)}
    work = Work(args)
    report = {"model": "small" if args.small else "Llama-3.1-8B shape", "rounds": args.rounds}
    for kind in ("prefill", "decode"):
        times = {name: [] for name in engines}
        for number in range(-1, args.rounds):  # one more that does not count
            for name in sorted(engines, reverse=bool(number % 2)):
                ms = work.run(engines[name], kind, f"{kind} {number}")
                if number >= 0:
                    times[name].append(ms)
                time.sleep(PAUSE_S)  # saves that are still under way are not the other engine's to pay for
        ratios = [b / a for a, b in zip(times["without"], times["with"], strict=True)]
        report[kind] = {
            "without_ms": round(statistics.median(times["without"]), 3),
            "with_ms": round(statistics.median(times["with"]), 3),
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(r, 4) for r in sorted(ratios)],
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
