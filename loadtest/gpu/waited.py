"""What a request that has waited for a busy engine still has to wait for, when its KV was in CPU memory.

    python3 -m kvtierd serve --set hbm.capacity=16GiB --set hbm.ttl=1s --set cpu.capacity=40GiB --set nvme.capacity=0 …
    python3 loadtest/gpu/waited.py --address unix:…

An engine that runs one request at a time decodes one, while another one with a long prompt that kvtierd holds waits for it: its
blocks go on to the HBM tier meanwhile. Measured, by the engine's own clock, is the time from the last token of the first to the
first token of the second: with a hit in the engine's own cache (`own_ms`), with what prefetches leave of a load from CPU memory
(`with_ms`), or with all of it (`--no-prefetch`: `without_ms`). Prints a JSON line a length.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import ttft

FIRST_TOKENS = 48


class Pair(ttft.Bench):
    def __init__(self, llm):
        from vllm import SamplingParams

        super().__init__(llm)
        self.many = SamplingParams(max_tokens=FIRST_TOKENS, ignore_eos=True, temperature=0, detokenize=False)
        self.first = {"prompt_token_ids": list(range(1000, 1100))}

    def between_ms(self, prompt):
        """From the last token of the first request to the first one of this."""
        prompts = [self.first, {"prompt_token_ids": prompt}]
        first, second = self.llm.generate(prompts, [self.many, self.sampling], use_tqdm=False)
        self.tokens.add(second.outputs[0].token_ids[0])
        return (second.metrics.first_token_ts - first.metrics.last_token_ts) * 1e3

    def median_ms(self, prompt, rounds, before):
        found = []
        for _ in range(rounds):
            before()
            found.append(self.between_ms(prompt))
        return round(statistics.median(found), 1), [round(ms, 1) for ms in found]

    def forget(self):
        """The engine's own cache is emptied, and the HBM tier's time goes by."""
        self.empty_prefix_cache()
        time.sleep(2.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    extra = json.dumps({"kvtierd.prefetch": not args.no_prefetch})
    options = argparse.Namespace(mode="kvtierd", address=args.address, extra=extra, module="kvtierd.connectors.vllm")
    pair = Pair(ttft.engine(options, max_num_seqs=1, disable_log_stats=False))
    for tokens in map(int, args.lengths.split(",")):
        prompt = ttft.prompt_of(tokens)
        pair.tokens = set()
        pair.between_ms(prompt)
        time.sleep(1.0)
        own = pair.median_ms(prompt, args.rounds, lambda: time.sleep(0.2))
        loaded = pair.median_ms(prompt, args.rounds, pair.forget)
        name = "without" if args.no_prefetch else "with"
        result = {
            "tokens": tokens, "own_ms": own[0], f"{name}_ms": loaded[0], "each_own_ms": own[1], f"each_{name}_ms": loaded[1],
            "same_token": len(pair.tokens) == 1,
        }  # fmt: skip
        ttft.tell(result, args.output)


if __name__ == "__main__":
    main()
