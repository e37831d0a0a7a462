"""A descriptor server in a loop of its own, an authority that obeys the test, and raw and real clients of it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from kvtierd.config import CpuConfig
from kvtierd.errors import Reason, RequestError
from kvtierd.service.fdpass import DescriptorServer, ExtentInfo, JoinGrant
from kvtierd.service.peers import Peers
from kvtierd.tiers.cpu import CpuPool
from kvtierd.v1 import fdpass_pb2 as pb

MIB = 1 << 20
SLOT = 64 << 10
SLOTS = 16
PATIENCE_S = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for something that another thread or process brings about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come about"
        time.sleep(0.002)


def memfds(prefix: str = "kvtierd-") -> Iterator[int]:
    """Descriptors of this process's memfds."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{prefix}"):
                yield int(name)


def page_bytes_of(fd: int) -> int:
    """Bytes of the pages that a memfd has."""
    return os.fstat(fd).st_blocks * 512


def memfd_page_bytes() -> int:
    """Bytes of all pages in this process's memfds of the pool."""
    total = 0
    for fd in memfds():
        with contextlib.suppress(OSError):  # another thread may have closed it meanwhile
            total += page_bytes_of(fd)
    return total


class Authority:
    """Extents belong to (session id, shard); everything that the server reports is noted."""

    def __init__(self, pool: CpuPool) -> None:
        self.pool = pool
        self.sessions: dict[bytes, int] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        self.joins: list[dict[str, Any]] = []
        self.gone: list[tuple[int, int]] = []
        self.unmappings: list[tuple[int, list[int]]] = []
        self.released: list[int] = []
        self.asked: list[int] = []
        self.probes: list[tuple[int, str, bytes, int]] = []
        self.fail_with: Exception | None = None

    def join(self, session: bytes, shard: int, pins_memory: bool, numa_node: int, pid: int, uid: int, conn_id: int) -> JoinGrant:
        if self.fail_with is not None:
            raise self.fail_with
        if session not in self.sessions:
            raise RequestError(Reason.UNKNOWN_SESSION, "no such session; attach again")
        self.joins.append({"shard": shard, "pins": pins_memory, "node": numa_node, "pid": pid, "uid": uid, "conn_id": conn_id})
        return JoinGrant(77, (SLOT, SLOT), self.sessions[session])

    def probe(self, session_id: int, tenant: str, key: bytes, count: int) -> bool:
        self.probes.append((session_id, tenant, key, count))
        return key == b"held"

    def may_map(self, session_id: int, extent_id: int, shard: int) -> ExtentInfo | None:
        self.asked.append(extent_id)
        owner = self.owners.get(extent_id)
        if owner is None or owner[0] != session_id:
            return None
        return ExtentInfo(self.pool.size_bytes(extent_id), SLOT, owner[1], self.pool.fd(extent_id))

    def device_joined(self, session_id: int, conn_id: int, shard: int, uuid: str) -> None:
        raise AssertionError("no process here names a GPU")

    def device_proved(self, session_id: int, conn_id: int, content: bytes, error: str) -> None:
        raise AssertionError("no process was asked")

    def unmapped(self, conn_id: int, extent_ids: list[int]) -> None:
        self.unmappings.append((conn_id, extent_ids))

    def process_gone(self, session_id: int, conn_id: int) -> None:
        self.gone.append((session_id, conn_id))

    def extent_released(self, extent_id: int) -> None:
        self.released.append(extent_id)
        self.pool.released(extent_id)


class Daemon:
    """A pool and a descriptor server in a thread with its event loop."""

    def __init__(self, path: Path, loop_kind: str = "uvloop", mode: int = 0o600, capacity: str = "16MiB") -> None:
        self.path = path
        self.pool = CpuPool(CpuConfig(capacity=capacity, extent="1MiB", prefault=False))
        self.authority = Authority(self.pool)
        self.server = DescriptorServer(path, Peers(mode), self.authority)
        self.errors: list[dict[str, Any]] = []
        self._loop = LOOPS[loop_kind]()
        self._loop.set_exception_handler(lambda _loop, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-daemon")
        self._next = 0

    def start(self) -> Daemon:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.server.start(), self._loop).result(PATIENCE_S)
        except BaseException:
            self._stop_loop()
            raise
        return self

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something in the event loop."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def session(self, number: int) -> bytes:
        token = b"token-%d" % number
        self.authority.sessions[token] = number
        return token

    def extent(self, session_id: int = 1, shard: int = 0) -> int:
        """Make an extent of a session. Returns its id."""
        self._next += 1
        extent_id = self._next
        self.call(self.pool.create, extent_id, SLOT, SLOTS)
        self.authority.owners[extent_id] = (session_id, shard)
        return extent_id

    def retire(self, *extent_ids: int) -> None:
        """As the runtime does it: memory first, then the clients."""

        def run() -> None:
            for extent_id in extent_ids:
                del self.authority.owners[extent_id]
                self.pool.retire(extent_id)
            self.server.revoke(extent_ids)

        self.call(run)

    def holders(self, extent_id: int) -> set[int]:
        found: set[int] = self.call(self.server.holders, extent_id)
        return found

    @property
    def connections(self) -> int:
        count: int = self.call(len, self.server)
        return count

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(PATIENCE_S)
        self._stop_loop()
        assert not self.errors

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.pool.close()


class Raw:
    """A client that says whatever the test wants."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(path))

    def send(self, **message: Any) -> None:
        self.sock.send(pb.DescriptorRequest(**message).SerializeToString())

    def join(self, token: bytes, shard: int = -1, pins: bool = False) -> pb.DescriptorResponse:
        self.send(join=pb.Join(session=token, shard=shard, pins_memory=pins, numa_node=-1))
        return self.receive()[0]

    def map(self, *extent_ids: int) -> tuple[pb.ExtentDescriptors, list[int]]:
        self.send(map=pb.MapExtents(extents=extent_ids))
        answer, fds = self.receive()
        assert answer.HasField("extents"), answer
        return answer.extents, fds

    def unmapped(self, *extent_ids: int) -> None:
        self.send(unmapped=pb.ExtentsUnmapped(extents=extent_ids))

    def receive(self) -> tuple[pb.DescriptorResponse, list[int]]:
        data, fds, _flags, _ = socket.recv_fds(self.sock, 65536, 64)
        assert data, "the daemon hung up"
        return pb.DescriptorResponse.FromString(data), list(fds)

    def send_with_descriptor(self, fd: int) -> None:
        data = pb.DescriptorRequest(map=pb.MapExtents(extents=[1])).SerializeToString()
        self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    @property
    def ended(self) -> bool:
        """Whether the next thing to read is the end."""
        return self.sock.recv(65536) == b""

    @property
    def silent(self) -> bool:
        """Whether there is nothing to read now."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self.sock.close()


class Worker:
    """A real process with an ExtentMap (see worker.py), told what to do line by line."""

    def __init__(self, path: Path, token: bytes, shard: int = -1, pins: bool = False) -> None:
        arguments = json.dumps({"path": str(path), "token": token.hex(), "shard": shard, "pins": pins})
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        return json.loads(line)

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
