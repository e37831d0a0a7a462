"""What is at a TCP address where no daemon answers, and what to do: gRPC tells it in words that only its authors understand."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

__all__ = ["tcp_problem"]

PROBE_TIMEOUT_S: Final = 3.0


def tcp_problem(address: str, ca: Path | None, *, tls: bool) -> str:
    """Why nothing came of a call.

    Args:
        address: ``host:port``.
        ca: what TLS trusts; None for what the system trusts.
        tls: it was tried with TLS.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        probe = socket.create_connection((host, int(port)), PROBE_TIMEOUT_S)
    except socket.gaierror as e:
        return f"{host!r} is not the name of a host here ({e.strerror})"
    except ConnectionRefusedError:
        return "nobody listens there; TCP is off unless the daemon has server.listen"
    except OSError as e:
        return f"it cannot be reached ({e.strerror or e}); is the host up, and the port open in its firewall?"
    with probe:
        found = _handshake(probe, host)
    if not tls and found:
        return "it asks for TLS; name its CA with --tls-ca, or use its unix socket"
    if not tls:
        return (
            "what listens there is no daemon, or one that ends just now; name the address of server.listen, which is not that of "
            "server.metrics"
        )
    if not found:
        return "what listens there does not speak TLS; leave --tls-ca, --tls-cert and --tls-key out, or name another address"
    return _distrust(address, host, int(port), ca)


def _handshake(probe: socket.socket, host: str) -> bool:
    """Whether it speaks TLS at all, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent
    try:
        with context.wrap_socket(probe, server_hostname=host):
            return True
    except ssl.SSLError as e:
        return "ALERT" in (e.reason or "")  # it answers in TLS
    except OSError:
        return False


def _distrust(address: str, host: str, port: int, ca: Path | None) -> str:
    """Why a server that speaks TLS and this side did not come together."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError):
        return f"{ca} has no certificates; name the PEM file of its CA with --tls-ca"
    try:
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as probe,
            context.wrap_socket(probe, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as e:
        return f"its certificate is not trusted ({e.verify_message}); name its CA with --tls-ca, and its host as it is in it"
    except OSError as e:
        return f"TLS fails ({e.strerror or e})"
    return f"{address} does not take this side's certificate; name one of its server.tls_client_ca with --tls-cert and --tls-key"
