"""One worker of an engine: its connector's side, a KV cache in CPU memory, and the client of the scheduler's side."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from kvtierd.client import Client
from kvtierd.connectors.vllm.metadata import KvtierdMetadata, LoadJob, Part, SaveJob, SessionInfo
from kvtierd.connectors.vllm.worker import WorkerSide
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors import kv_forms as forms

PATIENCE_S: Final = 60.0
PER_CHUNK: Final = 2
NOTHING: Final = np.empty(0, np.int64)


class Worker:
    """One rank with its KV cache of random bytes, and the client of the scheduler's side."""

    made = 0

    def __init__(self, daemon: DaemonProcess, rank: int = 0, tp: int = 1, per_chunk: int = PER_CHUNK) -> None:
        Worker.made += 1
        self._tag = Worker.made
        self.cache = forms.packed()
        config = forms.vllm_config(tp_size=tp)
        config.parallel_config.pipeline_parallel_size = 1
        self.side = WorkerSide(config, self.cache.config, (0, rank), tp)
        self.side.register(self.cache.tensors)
        assert self.side.rank_layout is not None
        assert not self.side.rank_layout.error
        self.block_bytes = self.side.rank_layout.groups[0].block_bytes
        self.client = Client(Namespace(shard_bytes=(per_chunk * self.block_bytes,) * tp, model="w"), daemon.address)
        assert self.client.wait_attached(30)
        self._ids = 0
        self.step(sessions=[self.session()])
        self.held: list[Any] = []

    def session(self) -> SessionInfo:
        return SessionInfo(0, self.client.session_token, self.client.descriptor_socket, False)

    def step(self, **more: Any) -> Any:
        """What a step of the engine does."""
        meta = KvtierdMetadata(**more)
        self.side.start_loads(meta)
        self.side.start_saves()
        return meta

    def _keys(self, first: int, count: int) -> list[bytes]:
        return [self._tag.to_bytes(16, "little") + (first + n).to_bytes(16, "little") for n in range(count)]

    def job_id(self) -> int:
        self._ids += 1
        return self._ids

    def save(self, *chunks: tuple[int, ...], key: int = 0, token: bytes | None = None) -> tuple[SaveJob, Any]:
        reservation = self.client.reserve(self._keys(key, len(chunks)), 10.0)
        assert len(reservation.granted) == len(chunks), reservation.outcomes
        self.held.append(reservation)
        slots = [slot for index in reservation.granted for slot in reservation.slots(index)]
        ids = np.asarray([b for chunk in chunks for b in chunk], np.int64)
        part = Part(0, reservation.session_token if token is None else token, np.asarray(slots, np.int64), ids)
        return SaveJob(self.job_id(), part), reservation

    def load(self, *chunks: tuple[int, ...], key: int = 0, timeout_s: float = 30.0, name: str = "r") -> LoadJob:
        fetch = self.client.fetch(self._keys(key, len(chunks)), 10.0)
        self.held.append(fetch)
        slots: list[int] = []
        while not fetch.done:
            slots += fetch.poll_slots(1.0)[1]
        ids = np.asarray([b for chunk in chunks for b in chunk], np.int64)
        part = Part(0, fetch.session_token, np.asarray(slots, np.int64), ids)
        return LoadJob(self.job_id(), name, [part], NOTHING, timeout_s)

    def saved(self, job: SaveJob) -> Any:
        """Wait for a save's report."""
        return self._wait(lambda meta: meta.saves.get(job.job_id))

    def loaded(self) -> tuple[set[str], set[str], set[int]]:
        """Wait for the end of loads."""
        until_s = time.monotonic() + PATIENCE_S
        while not (told := self.side.take_loads())[0]:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        return told

    def _wait(self, look: Callable[[Any], Any]) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < until_s
            meta = self.side.worker_meta()
            if meta is not None and (found := look(meta)) is not None:
                return found
            time.sleep(0.001)

    def content(self, block: int) -> bytes:
        return b"".join(t[block].contiguous().view(torch.uint8).numpy().tobytes() for t in self.cache.tensors.values())

    def close(self) -> None:
        self.side.close()
        for one in self.held:
            one.close()
        self.client.close()


def put(worker: Worker, key: int, *chunks: tuple[int, ...]) -> None:
    """Save chunks and publish them."""
    job, reservation = worker.save(*chunks, key=key)
    worker.step(saves=[job])
    assert worker.saved(job).ok
    assert reservation.commit() == len(chunks)
