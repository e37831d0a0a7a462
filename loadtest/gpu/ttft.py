"""Time to first token of a real vLLM on a GPU, by where the prompt's KV is.

    python3 loadtest/gpu/ttft.py none
    python3 loadtest/gpu/ttft.py offload                     # vLLM's own OffloadingConnector: CPU memory inside the engine
    python3 loadtest/gpu/ttft.py fs --folder DIR             # its tiers of CPU memory and files (with PYTHONHASHSEED=0)
    python3 loadtest/gpu/ttft.py lmcache --port 5555         # an LMCache server
    python3 loadtest/gpu/ttft.py kvtierd --address unix:…    # run it twice: the second run's first request is after a restart

A model of Llama-3.1-8B's shape with dummy weights, bfloat16, eager. For each length: the prompt for the first time; again, out of
the engine's own prefix cache; and, each time after that cache was emptied, out of the tier below; ``--before-hit`` is a command
that has emptied some of that first. Prompts are the same in every process. Prints one JSON line a length; `same_token` says whether
every run gave the same first token.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2


def transfer_config(args):
    if args.mode in ("offload", "fs"):
        extra = {"cpu_bytes_to_use": args.cpu_gib << 30}
        if args.mode == "fs":
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": args.folder}]}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if args.mode == "lmcache":
        extra = {"lmcache.mp.host": args.host, "lmcache.mp.port": args.port}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra = {"kvtierd.address": args.address, "kvtierd.gate": False, **json.loads(args.extra)}
    return {
        "kv_connector": "KvtierdConnector",
        "kv_connector_module_path": args.module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def engine(args, **more):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    folder = Path(tempfile.gettempdir()) / "llama-8b-shape"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    options = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 70_000,
        "gpu_memory_utilization": 0.5, "max_num_batched_tokens": 8192, "disable_log_stats": True,
    }  # fmt: skip
    if args.mode != "none":
        options["kv_transfer_config"] = KVTransferConfig(**transfer_config(args))
    return LLM(**(options | more))


def prompt_of(tokens):
    """The same in every process."""
    rng = random.Random(tokens)
    return [rng.randrange(1000, 120_000) for _ in range(tokens)]


def tell(result, path):
    """Print a result as a line of JSON, and append it to a file where there is one."""
    print(json.dumps(result), flush=True)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")


class Bench:
    def __init__(self, llm):
        from vllm import SamplingParams

        self.llm = llm
        self.sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self.tokens = set()

    def ttft_ms(self, prompt):
        begin = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": prompt}], self.sampling, use_tqdm=False)[0]
        took = (time.perf_counter() - begin) * 1e3
        self.tokens.add(output.outputs[0].token_ids[0])
        return round(took, 1), output.num_cached_tokens

    def empty_prefix_cache(self):
        """A connector may hold blocks for a moment; a hit would then come from the engine's own cache."""
        until = time.monotonic() + 15
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > until:
                sys.exit("blocks are still held 15 s after the last request")
            time.sleep(0.02)

    def length(self, tokens, hits, before_hit):
        prompt = prompt_of(tokens)
        self.tokens = set()
        first = self.ttft_ms(prompt)
        time.sleep(1.0)
        own = []
        for _ in range(hits):
            time.sleep(0.2)  # as before the others: a process that slept is slower for a moment
            own.append(self.ttft_ms(prompt))
        tier = []
        for _ in range(hits):
            self.empty_prefix_cache()
            if before_hit:
                subprocess.run(before_hit, shell=True, check=True, stdout=subprocess.DEVNULL)
            time.sleep(0.2)
            tier.append(self.ttft_ms(prompt))
        self.empty_prefix_cache()
        return first, own, tier


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["none", "offload", "fs", "lmcache", "kvtierd"])
    parser.add_argument("--label")
    parser.add_argument("--address", default="")
    parser.add_argument("--extra", default="{}", help="more of kv_connector_extra_config, as JSON")
    parser.add_argument("--module", default="kvtierd.connectors.vllm", help="where KvtierdConnector is; or that of timeline.py")
    parser.add_argument("--folder", help="of the files of fs")
    parser.add_argument("--host", default="tcp://127.0.0.1", help="of the LMCache server")
    parser.add_argument("--port", type=int, default=5555, help="of the LMCache server")
    parser.add_argument("--before-hit", help="a shell command before each hit of the tier")
    parser.add_argument("--output", help="append the lines to this file too")
    parser.add_argument("--cpu-gib", type=int, default=24)
    parser.add_argument("--lengths", default="4096,16384,32768,65536")
    parser.add_argument("--hits", type=int, default=4)
    args = parser.parse_args()
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    bench = Bench(engine(args))
    for _ in range(2):  # warm, and with prompts that nobody holds: what computing takes is known then
        bench.ttft_ms([random.randrange(1000, 120_000) for _ in range(4000)])
    for tokens in map(int, args.lengths.split(",")):
        first, own, tier = bench.length(tokens, args.hits, args.before_hit)
        times = [ms for ms, _ in tier]
        result = {
            "mode": args.label or args.mode,
            "tokens": tokens,
            "kv_gb": round(tokens * KV_BYTES_PER_TOKEN / 1e9, 3),
            "first_ms": first[0],
            "gpu_hit_ms": [ms for ms, _ in own],
            "gpu_hit_median_ms": round(statistics.median(ms for ms, _ in own), 1),
            "tier_hit_ms": times,
            "tier_hit_median_ms": round(statistics.median(times), 1),
            "cached_tokens": [first[1], own[0][1], *[cached for _, cached in tier]],
            "same_token": len(bench.tokens) == 1,
        }
        tell(result, args.output)


if __name__ == "__main__":
    main()
