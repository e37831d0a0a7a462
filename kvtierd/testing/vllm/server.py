"""vLLM's OpenAI API server as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvtierd.testing.vllm.environment import ENGINE_TIMEOUT_S, LOG_TAIL, ROOT, engine_environment

SWITCHES = {True: "--{}", False: "--no-{}"}


class ApiServer:
    """One server on a free port of the loopback interface.

    Args:
        folder: for its log.
        arguments: of ``vllm.LLM``; they become the options of the command line.
        python: interpreter of an environment with vLLM.
    """

    def __init__(self, folder: Path, arguments: dict[str, Any], python: str = sys.executable) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        for name, value in arguments.items():
            option = name.replace("_", "-")
            if name in ("distributed_executor_backend", "disable_log_stats"):
                continue
            if isinstance(value, bool):
                options.append(SWITCHES[value].format(option))
            else:
                options += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.openai.api_server", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(True),
                cwd=ROOT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it serves. The limit ends a test that has failed."""
        until_s = time.monotonic() + ENGINE_TIMEOUT_S
        while True:
            assert self.process.poll() is None, f"the server ended:\n{self.log()[-LOG_TAIL:]}"
            try:
                self.get("/health")
                return
            except OSError:
                assert time.monotonic() < until_s, f"the server does not answer:\n{self.log()[-LOG_TAIL:]}"
                time.sleep(0.2)

    def log(self) -> str:
        """What it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> str:
        """Body of a page. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            body: bytes = answer.read()
            return body.decode()

    def complete(self, tokens: list[int], max_tokens: int, rank: int | None = None, **more: Any) -> dict[str, Any]:
        """Greedy completion of a prompt: ``{"tokens", "cached", "finish"}``; by that engine of several, where a rank is named."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"return_token_ids": True} | more
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ENGINE_TIMEOUT_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{e}: {e.read().decode(errors='replace')}\n{self.log()[-LOG_TAIL:]}") from e
        choice = found["choices"][0]
        details = found["usage"].get("prompt_tokens_details") or {}
        return {"tokens": choice["token_ids"], "finish": choice["finish_reason"], "cached": details.get("cached_tokens", 0)}

    def metrics(self) -> dict[str, float]:
        """Series of ``/metrics`` summed over all labels but "result", "tier" and "source"."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                kept = ",".join(f"{k}={sample.labels[k]}" for k in ("result", "tier", "source") if k in sample.labels)
                name = sample.name + (f"{{{kept}}}" if kept else "")
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its process group. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    close = stop
