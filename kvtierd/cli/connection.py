"""One connection of the command line to a daemon's admin service, and what its errors mean to a person."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtierd.cli.reaching import tcp_problem
from kvtierd.client.tokens import authorization
from kvtierd.errors import ConfigError, DaemonUnavailableError, Reason, RequestError
from kvtierd.plain_file import read_plain
from kvtierd.v1 import admin_pb2_grpc

__all__ = ["DEFAULT_TIMEOUT_S", "AdminConnection", "Target", "grpc_target"]

DEFAULT_TIMEOUT_S: Final = 10.0
_OF_THE_CONNECTION: Final = (
    "failed to connect", "errors resolving", "DNS resolution failed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY",
)  # fmt: skip
"""What gRPC itself says where nobody answers; any other text is the word of who does, such as a proxy."""
MAX_PEM_BYTES: Final = 1 << 20
_MAX_MESSAGE_BYTES: Final = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where a daemon listens, and how to trust it there."""

    address: str
    """Path of a unix socket, ``unix:PATH``, or ``host:port``."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: str = ""
    """File of the token to show; empty for none."""


def grpc_target(address: str) -> tuple[str, Path | None]:
    """gRPC's name of an address, and the socket's path when it is one.

    Raises:
        ConfigError: when it is neither a path nor ``host:port``.
    """
    if address.startswith("unix:"):
        # gRPC reads unix:PATH and unix:///PATH.
        path = Path(address.removeprefix("unix://" if address.startswith("unix:///") else "unix:"))
        return f"unix:{path}", path
    if "/" in address or address.endswith(".sock"):
        path = Path(address).expanduser()
        return f"unix:{path.absolute()}", path
    host, colon, port = address.rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and int(port) <= 65535:
        return address, None
    raise ConfigError(f"{address!r} is not an address; write the path of a unix socket or host:port")


class AdminConnection:
    """A channel to a daemon; a context manager. Calls raise only kvtierd's own errors."""

    def __init__(self, target: Target) -> None:
        self.address = target.address
        self._target = target
        name, self._path = grpc_target(target.address)
        options = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),  # a daemon is on this host or in this cluster, never behind a web proxy
        ]
        self._metadata = authorization(target.token_file)
        self._channel = _open(name, target, options)
        self.stub: Any = admin_pb2_grpc.KvTierAdminServiceStub(self._channel)

    def __enter__(self) -> AdminConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()

    def call(self, method: Callable[..., T] | Any, request: Message, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Call a method of :attr:`stub`.

        Raises:
            DaemonUnavailableError: nobody answers there, or not within ``timeout_s``.
            RequestError: the daemon refused, with its reason.
        """
        if self._path is not None:
            _check_socket(self._path)
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as e:
            raise self._explain(e, timeout_s) from e

    def _explain(self, error: grpc.RpcError, timeout_s: float) -> Exception:
        code, details = error.code(), error.details() or ""
        reason = _reason(error)
        if reason is not None:
            return RequestError(reason, details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DaemonUnavailableError(
                f"the daemon at {self.address} did not answer within {timeout_s:g} s; see its log, and whether it is one"
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            ours = not details or any(words in details for words in _OF_THE_CONNECTION)
            return DaemonUnavailableError(f"no daemon answers at {self.address}: {self._problem() if ours else details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RequestError(Reason.BAD_REQUEST, f"the daemon at {self.address} does not know this command; it may be older")
        return RequestError(Reason.INTERNAL, f"{code.name}: {details}")

    def _problem(self) -> str:
        """Why nobody answers, though a unix socket was fine a moment ago."""
        if self._path is not None:
            return "what listens there is no daemon, or one that ends just now; name the daemon's socket with --address"
        target = self._target
        return tcp_problem(target.address, target.tls_ca, tls=any((target.tls_ca, target.tls_cert, target.tls_key)))


def _open(name: str, target: Target, options: list[tuple[str, int]]) -> grpc.Channel:
    if target.tls_ca is None and target.tls_cert is None and target.tls_key is None:
        return grpc.insecure_channel(name, options=options)
    if bool(target.tls_cert) != bool(target.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together")
    if name.startswith("unix:"):
        raise ConfigError("TLS is for TCP addresses; a unix socket is guarded by its permissions")
    parts = [_read(path) for path in (target.tls_ca, target.tls_key, target.tls_cert)]
    credentials = grpc.ssl_channel_credentials(root_certificates=parts[0], private_key=parts[1], certificate_chain=parts[2])
    return grpc.secure_channel(name, credentials, options=options)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_plain(str(path), MAX_PEM_BYTES)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else e}") from e


def _check_socket(path: Path) -> None:
    """Say clearly what is wrong with a socket, where gRPC would only say that it is unavailable."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise DaemonUnavailableError(f"{path} is not a socket; name the daemon's socket with --address")
    except FileNotFoundError:
        raise DaemonUnavailableError(
            f"no daemon at {path}; start one with 'kvtierd serve', or name another with --address or KVTIERD_ADDRESS"
        ) from None
    except PermissionError:
        raise _no_permission(path) from None
    except OSError as e:
        raise DaemonUnavailableError(f"cannot use {path}: {e.strerror}") from e
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code == errno.ECONNREFUSED:
        raise DaemonUnavailableError(f"nobody listens on {path}: the daemon that made it has gone; start one with 'kvtierd serve'")
    if code == errno.EPROTOTYPE:
        raise DaemonUnavailableError(f"{path} is a socket of another kind, such as for descriptors; name that of server.socket")
    if code in (errno.EACCES, errno.EPERM):
        raise _no_permission(path)


def _no_permission(path: Path) -> DaemonUnavailableError:
    user = os.geteuid()
    return DaemonUnavailableError(
        f"no permission for {path}; run this as the daemon's user, or name user {user} in server.allow_users"
    )


def _reason(error: grpc.RpcError) -> Reason | None:
    if not isinstance(error, grpc.Call):
        return None
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the status: show the plain status instead
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == "kvtierd":
            return Reason.__members__.get(info.reason)
    return None
