"""Runs vLLM engines from a job file and writes a report: the child process of the engine tests.

    python tests/vllm/engine.py JOB REPORT [CONTROL_FD]

A job names engines that run one after the other in this process, each with the arguments of ``vllm.LLM`` and steps. The
report has tokens, cached tokens, finish reasons and metrics for each step. What goes wrong in one engine is reported there
and the next engine runs. Over CONTROL_FD, a socket, a step can wait until the test says to go on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

QUIET_POLLS = 3
POLL_S = 0.1


class Control:
    """The line to the test."""

    def __init__(self, line: socket.socket | None) -> None:
        self._socket = line
        self._buffer = b""

    def wait(self, name: str) -> None:
        """Tell the test that the step ``name`` is reached and wait for its answer."""
        assert self._socket is not None, "a barrier needs a control socket"
        self.tell(name)
        while b"\n" not in self._buffer:
            more = self._socket.recv(4096)
            if not more:
                raise ConnectionError("the test has gone")
            self._buffer += more
        self._buffer = self._buffer.split(b"\n", 1)[1]

    def tell(self, name: str) -> None:
        """Tell the test that the step ``name`` is reached, without waiting."""
        if self._socket is not None:
            self._socket.sendall(name.encode() + b"\n")


class Engine:
    """One engine and what it has answered."""

    def __init__(self, job: dict[str, Any], control: Control) -> None:
        self.job = job
        self.control = control
        self.report: dict[str, Any] = {"name": job["name"], "error": "", "results": {}, "metrics": {}, "seconds": {}, "groups": 0}
        self.llm: Any = None

    def run(self) -> dict[str, Any]:
        """Run all steps and shut down. Never raises: the report says what went wrong."""
        try:
            from vllm import LLM

            began_s = time.monotonic()
            self.llm = LLM(**self.job["llm"])
            self.report["seconds"]["start"] = time.monotonic() - began_s
            self.report["groups"] = self.groups()
            for number, step in enumerate(self.job["steps"]):
                began_s = time.monotonic()
                getattr(self, f"do_{step['do']}")(step)
                name = step.get("name", f"{number}-{step['do']}")
                self.report["seconds"][name] = time.monotonic() - began_s
                self.report["metrics"][name] = self.metrics()
        except Exception:
            self.report["error"] = traceback.format_exc()
        finally:
            self.close()
        return self.report

    def close(self) -> None:
        """Shut the engine down as a program does that ends."""
        if self.llm is None:
            return
        began_s = time.monotonic()
        try:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        except Exception:
            self.report["error"] += traceback.format_exc()
        self.report["seconds"]["shutdown"] = time.monotonic() - began_s

    def groups(self) -> int:
        """KV cache groups, where the engine's core is in this process; else 0."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        return len(core.scheduler.kv_cache_config.kv_cache_groups) if core is not None else 0

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of the engine by name and those labels that tell series of one engine apart."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            labels = sorted((k, v) for k, v in (metric.labels or {}).items() if k not in ("model_name", "engine"))
            name = metric.name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else "")
            value = getattr(metric, "value", None)
            if value is not None:
                found[name] = float(value)
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is not None:
            found["free_blocks"] = float(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        return found

    # -- steps ---------------------------------------------------------------------------------------------------------

    def do_generate(self, step: dict[str, Any]) -> None:
        """Generate greedily for ``prompts``, all at once or, with ``one_by_one``, each alone."""
        prompts, params = [], []
        for wanted in step["prompts"]:
            prompt: dict[str, Any] = {"prompt_token_ids": wanted["tokens"]}
            if wanted.get("salt"):
                prompt["cache_salt"] = wanted["salt"]
            prompts.append(prompt)
            params.append(self._sampling(wanted, step))
        lora = self._lora(step)
        if step.get("one_by_one"):
            outputs = [self.llm.generate([p], s, use_tqdm=False, **lora)[0] for p, s in zip(prompts, params, strict=True)]
        else:
            outputs = self.llm.generate(prompts, params, use_tqdm=False, **lora)
        self.report["results"][step["name"]] = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "finish": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def _sampling(self, wanted: dict[str, Any], step: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": wanted["kv_transfer_params"]} if wanted.get("kv_transfer_params") else None
        return SamplingParams(
            temperature=0.0, max_tokens=wanted.get("max_tokens", step.get("max_tokens", 16)), ignore_eos=True, extra_args=extra
        )

    @staticmethod
    def _lora(step: dict[str, Any]) -> dict[str, Any]:
        if not step.get("lora"):
            return {}
        from vllm.lora.request import LoRARequest

        return {"lora_request": LoRARequest(step["lora"]["name"], step["lora"]["id"], step["lora"]["path"])}

    def do_forget(self, step: dict[str, Any]) -> None:
        """Forget the engine's own cached blocks. vLLM refuses while a save still holds some: take steps and ask again."""
        until_s = time.monotonic() + step.get("seconds", 30)
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > until_s:
                raise TimeoutError("the engine's prefix cache could not be reset")
            self._step()

    def do_reset_connector(self, step: dict[str, Any]) -> None:
        """Forget the engine's own cached blocks and have the connector forget what was saved."""
        self.report["results"][step["name"]] = self.llm.reset_prefix_cache(reset_connector=True)

    def do_try_reset(self, step: dict[str, Any]) -> None:
        """Ask once to forget the engine's own cached blocks, whatever saves hold."""
        self.report["results"][step["name"]] = self.llm.reset_prefix_cache()

    def do_sleep(self, step: dict[str, Any]) -> None:
        """Sleep and wake up again. CPUs keep weights and KV cache, the engine pauses and forgets its blocks as on any device."""
        self.llm.sleep(level=step["level"])
        self.llm.wake_up()

    def do_soak(self, step: dict[str, Any]) -> None:
        """Generate for ``prompts``, all at once, again and again for ``seconds``, forgetting the engine's own blocks in between.

        The result has the seconds of the slowest round, the number of rounds, and each distinct output of each prompt.
        """
        prompts = [{"prompt_token_ids": wanted["tokens"]} for wanted in step["prompts"]]
        params = [self._sampling(wanted, step) for wanted in step["prompts"]]
        found: list[list[list[int]]] = [[] for _ in prompts]
        slowest_s, rounds = 0.0, 0
        until_s = time.monotonic() + step["seconds"]
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            for known, output in zip(found, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
                tokens = list(output.outputs[0].token_ids)
                if tokens not in known:
                    known.append(tokens)
            slowest_s, rounds = max(slowest_s, time.monotonic() - began_s), rounds + 1
            self.llm.reset_prefix_cache()
        self.report["results"][step["name"]] = {"slowest_s": slowest_s, "rounds": rounds, "outputs": found}

    def do_events(self, step: dict[str, Any]) -> None:
        """Ask the engine's publisher for every KV event so far, over its replay socket ``endpoint``."""
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        found: list[dict[str, Any]] = []
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.setsockopt(zmq.RCVTIMEO, 60_000)
            replay.connect(step["endpoint"])
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                *_, sequence, payload = replay.recv_multipart()
                if int.from_bytes(sequence, "big", signed=True) < 0:
                    break
                for event in decoder.decode(payload).events:
                    blocks = [str(block) for block in getattr(event, "block_hashes", [])]
                    medium = getattr(event, "medium", None)
                    found.append({"kind": type(event).__name__, "medium": medium, "blocks": blocks})
        self.report["results"][step["name"]] = found

    def do_held(self, step: dict[str, Any]) -> None:
        """Note how many blocks the daemon holds."""
        from kvtierd.testing.daemon import DaemonProcess

        self.report["results"][step["name"]] = DaemonProcess(Path(step["daemon"])).status().blocks

    def do_spoil(self, step: dict[str, Any]) -> None:
        """Put the bytes of one block that the daemon holds under the key of another, as a client of this engine's namespace."""
        from kvtierd.client import Client
        from kvtierd.testing.daemon import DaemonProcess
        from kvtierd.v1 import admin_pb2
        from tests.vllm.faulty_connector import namespaces

        daemon = DaemonProcess(Path(step["daemon"]))
        with daemon.admin() as stub:
            blocks = stub.ListBlocks(admin_pb2.ListBlocksRequest(page_size=1000), timeout=10).blocks
        with Client(namespaces[-1], daemon.address, timeout_s=30, require=True) as client:
            (wrong,) = client.load_bytes([blocks[0].key]).blocks[0]
            assert client.evict([blocks[1].key]) > 0
            assert client.save([blocks[1].key], [wrong]).saved == 1

    def do_barrier(self, step: dict[str, Any]) -> None:
        """Wait until the test says to go on."""
        self.control.wait(step["name"])

    def do_tell(self, step: dict[str, Any]) -> None:
        """Tell the test how far this has come, and go on."""
        self.control.tell(step["name"])

    def do_attach(self, step: dict[str, Any]) -> None:
        """Let the engine take steps until it has a session with the daemon that runs now and says so."""
        from kvtierd.testing.daemon import DaemonProcess

        daemon = DaemonProcess(Path(step["daemon"]))
        until_s = time.monotonic() + step.get("seconds", 60)
        while True:
            self._step()
            attached = self.metrics().get("vllm:kvtierd_attached")
            if attached and daemon.status().sessions:
                return
            if time.monotonic() > until_s:
                raise TimeoutError(f"the engine did not attach: vllm:kvtierd_attached is {attached}")

    def do_abort(self, step: dict[str, Any]) -> None:
        """Begin requests for ``prompts``, take ``steps`` steps with pauses of ``pause_s``, and abort them."""
        engine = self.llm.llm_engine
        names = [f"{step['name']}-{number}" for number in range(len(step["prompts"]))]
        for name, wanted in zip(names, step["prompts"], strict=True):
            engine.add_request(name, {"prompt_token_ids": wanted["tokens"]}, self._sampling(wanted, step))
        for _ in range(step["steps"]):
            engine.step()
            time.sleep(step.get("pause_s", 0))
        engine.abort_request(names)
        self.report["results"][step["name"]] = {"unfinished": engine.has_unfinished_requests()}

    def do_nudge(self, step: dict[str, Any]) -> None:
        """Let the engine take steps for ``seconds``: requests too short to be saved, with pauses between."""
        until_s = time.monotonic() + step["seconds"]
        while time.monotonic() < until_s:
            self._step()

    def do_settle(self, step: dict[str, Any]) -> None:
        """Let the engine take steps until the daemon holds ``blocks`` and no session has an open ticket any more.

        An engine takes steps only while it has requests. The limit is long: what is slow here fails the checks that follow.
        """
        from kvtierd.testing.daemon import DaemonProcess

        daemon = DaemonProcess(Path(step["daemon"]))
        until_s = time.monotonic() + step.get("seconds", 20)
        quiet = 0
        while quiet < QUIET_POLLS and time.monotonic() < until_s:
            self._step()
            status = daemon.status()
            busy = any(session.tickets for session in status.sessions)
            quiet = quiet + 1 if not busy and status.blocks >= step.get("blocks", 1) else 0
        self.report["results"][step.get("name", "settle")] = {"blocks": status.blocks, "quiet": quiet == QUIET_POLLS}

    def _step(self) -> None:
        from vllm import SamplingParams

        self.llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        time.sleep(POLL_S)


def run(job: Path, report: Path, line: socket.socket | None = None) -> None:
    """Run the engines of a job one after the other and write the report."""
    engines = json.loads(job.read_text())["engines"]
    control = Control(line)
    import vllm

    reports = [Engine(engine, control).run() for engine in engines]
    part = report.with_suffix(".part")
    part.write_text(json.dumps({"vllm": vllm.__version__, "pid": os.getpid(), "engines": reports}, indent=1))
    part.replace(report)


def main() -> None:
    """Run the job that the command line names."""
    line = socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None
    run(Path(sys.argv[1]), Path(sys.argv[2]), line)


if __name__ == "__main__":
    main()
