"""A daemon's admin service that answers from a script, on a real unix socket, and a runner of the command line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvtierd.cli import cli
from kvtierd.v1 import admin_pb2, admin_pb2_grpc


class FakeAdmin(admin_pb2_grpc.KvTierAdminServiceServicer):
    """Remembers requests; answers with ``answers[method]`` (a message, or a function of the request) or fails as told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[Any] = []
        self.answers: dict[str, Any] = {}
        self.error: tuple[grpc.StatusCode, str, str] | None = None
        """Status, ErrorReason's name ("" for none) and text of every answer."""

    def _answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.error is not None:
            code, reason, text = self.error
            details = []
            if reason:
                packed = any_pb2.Any()
                packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvtierd"))
                details.append(packed)
            assert code.value[0] in code_pb2.Code.values()
            context.abort_with_status(rpc_status.to_status(status_pb2.Status(code=code.value[0], message=text, details=details)))
        answer = self.answers[method]
        return answer(request) if callable(answer) else answer


def _add_method(name: str) -> None:
    def method(self: FakeAdmin, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer(name, request, context)

    setattr(FakeAdmin, name, method)


for _method in admin_pb2.DESCRIPTOR.services_by_name["KvTierAdminService"].methods:
    _add_method(_method.name)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def admin(short_dir: Path) -> Iterator[FakeAdmin]:
    """A fake admin service that listens."""
    path = short_dir / "a.sock"
    fake = FakeAdmin(str(path))
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_KvTierAdminServiceServicer_to_server(fake, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield fake
    server.stop(None).wait()


Kvtierd = Callable[..., Result]


@pytest.fixture
def kvtierd(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> Kvtierd:
    """Run ``kvtierd ARGS``; the surroundings' variables do not count."""
    for name in ("KVTIERD_ADDRESS", "KVTIERD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv("XDG_CACHE_HOME", str(short_dir / "cache"))

    def run(*args: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, [str(a) for a in args], input=stdin, prog_name="kvtierd")

    return run
