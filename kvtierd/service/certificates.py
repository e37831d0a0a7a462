"""Certificates of the TCP port, which are read again when their files change: a renewed one needs no restart."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from pathlib import Path
from typing import Final

import grpc

from kvtierd.errors import ConfigError
from kvtierd.plain_file import read_plain
from kvtierd.runtime.tokens import CHECK_S, Stamp, reason_of, stamp_of

MAX_FILE_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class Certificates:
    """The daemon's certificate and key, and the CA that client certificates must be signed by, if they are asked for.

    New connections get what was read last; those that are open stay as they were made.

    Args:
        cert: PEM certificate chain.
        key: PEM private key.
        client_ca: PEM CA; None asks for no client certificates.

    Raises:
        ConfigError: the files cannot be used; the text names the one, and what is wrong with it.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamps = self._look()
        self._current = self._read()
        self._handed = self._current
        # gRPC's own references do not keep this object alive, though it calls it at each handshake.
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._current,
            self._fetch,  # type: ignore[arg-type]  # None is what stands for "as before"
            require_client_authentication=client_ca is not None,
        )

    def refresh(self) -> None:
        """Read the files again if any has changed. Files that cannot be used change nothing."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._current = self._read()
        except ConfigError as e:
            log.error("%s; new connections get the certificate that was read before, until the files are mended", e)
        else:
            log.info("read the certificate %s again; new connections get it", self._cert)

    async def watch(self) -> None:
        """Look at the files from time to time. Runs as a supervised task."""
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.refresh)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC in a thread of its own at each handshake. None when nothing is new."""
        current = self._current
        if current is self._handed:
            return None
        self._handed = current
        return current

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(stamp_of(path) for path in (self._cert, self._key, self._client_ca) if path is not None)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert, key = _content("server.tls_cert", self._cert), _content("server.tls_key", self._key)
        ca = _content("server.tls_client_ca", self._client_ca) if self._client_ca else None
        with _File(cert) as cert_path, _File(key) as key_path:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(cert_path, key_path, password=_no_password)
            except (ssl.SSLError, ConfigError) as e:
                why = e.reason or "no PEM" if isinstance(e, ssl.SSLError) else str(e)
                raise ConfigError(
                    f"server.tls_cert {self._cert} and server.tls_key {self._key} are no PEM certificate and its key ({why})"
                ) from None
        if ca is not None:
            try:
                context.load_verify_locations(cadata=ca.decode())
            except (ssl.SSLError, ValueError) as e:
                raise ConfigError(f"server.tls_client_ca {self._client_ca} holds no PEM certificate ({e})") from None
        if self._key.stat().st_mode & stat.S_IROTH:
            log.warning("every user of this machine can read server.tls_key %s: chmod it to 0600", self._key)
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


class _File:
    """A path at which bytes that are in memory can be read, as ``ssl`` takes no others: what is tried is what will be used."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> str:
        self._fd = os.memfd_create("kvtierd-pem")
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._content)
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _no_password() -> bytes:
    raise ConfigError("the key has a password; store it without one, readable for the daemon's user only")


def _content(name: str, path: Path) -> bytes:
    try:
        return read_plain(str(path), MAX_FILE_BYTES)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {name} {path}: {reason_of(e)}") from None


__all__ = ["Certificates"]
