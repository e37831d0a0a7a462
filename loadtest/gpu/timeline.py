"""Where the time of a request goes: kvtierd's connector, noting when each step of the engine, hook and background task ran.

    PYTHONPATH=loadtest/gpu TIMELINE=FILE python3 loadtest/gpu/ttft.py kvtierd --module timeline …
    python3 loadtest/gpu/timeline.py FILE [REQUEST]      # of one (the last): at which ms, how many ms, what, in which thread

Noting costs some ten microseconds each time, so a request takes a little longer than without.
"""

import functools
import json
import os
import sys
import threading
import time

HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv",
    "get_finished", "get_transfer_results", "update_connector_output", "request_finished", "request_finished_all_groups",
)  # fmt: skip
SHORTEST_MS = 0.15


def note_calls(file):
    """Have all calls of interest noted in a file. Returns the connector to use."""
    from vllm.v1.engine.core import EngineCore

    from kvtierd.connectors.vllm import KvtierdConnector, lookups, worker

    def note(owner, name, what):
        if not hasattr(owner, name):
            return  # another version of vLLM
        run = getattr(owner, name)

        @functools.wraps(run)
        def timed(*args, **kwargs):
            begun = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                took_ms = (time.perf_counter() - begun) * 1e3
                thread = threading.current_thread().name
                print(json.dumps({"at_ms": begun * 1e3, "took_ms": took_ms, "what": what, "thread": thread}), file=file)
                if what.startswith("request_finished"):
                    file.flush()

        setattr(owner, name, timed)

    for hook in HOOKS:
        note(KvtierdConnector, hook, hook)
    for name in ("_choose", "_fetch", "_wait", "run"):
        note(lookups.Lookup, name, f"lookup.{name}")
    for name in ("_load", "_copy"):
        note(worker.WorkerSide, name, f"worker.{name}")
    for name in ("add_request", "step", "step_with_batch_queue"):
        note(EngineCore, name, f"engine.{name}")
    return KvtierdConnector


def show(path, number):
    """Print one request's events, but for the shortest."""
    with open(path) as file:
        events = [json.loads(line) for line in file]
    arrivals = [e["at_ms"] for e in events if e["what"] == "engine.add_request"]
    begin_ms = arrivals[number]
    for event in sorted((e for e in events if e["at_ms"] >= begin_ms), key=lambda e: e["at_ms"]):
        if event["took_ms"] >= SHORTEST_MS or event["what"] in HOOKS[:3]:
            print(f"{event['at_ms'] - begin_ms:9.2f} {event['took_ms']:9.2f}  {event['what']:28} {event['thread']}")
        if event["what"].startswith("request_finished"):
            break


if __name__ == "__main__":
    show(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)
else:
    KvtierdConnector = note_calls(open(os.environ.get("TIMELINE", "timeline.jsonl"), "a", buffering=1 << 20))  # noqa: SIM115
