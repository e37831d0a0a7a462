"""Encryption of slots at rest: the key, and what it does to a payload.

A payload is encrypted with XAES-256-GCM (C2SP): AES-256-GCM under a key of its own, which follows from the pool's key and half of a
random nonce of 192 bits. As many random bits are never drawn twice, so no pair of key and nonce is, whatever a power cut made of
generations and slots. The header page stays readable; it is authenticated with the payload (key, realm, generation, shard, slot)
and holds nonce and tag, which together are called the seal here.

The pool's key follows from the one that is configured and the pool's id. Each ``pool.json`` has a check value of it, by which a
start sees whether blocks were written with the same key.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import os
import secrets
import select
import shlex
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 24
TAG_BYTES: Final = 16
SEAL_BYTES: Final = NONCE_BYTES + TAG_BYTES
MAX_ONE_CALL_BYTES: Final = (1 << 31) - 1
"""The quickest way to encrypt takes no more."""
MAX_KEY_FILE_BYTES: Final = 4096
KEY_COMMAND_S: Final = 60.0
"""Longest time that a key command may take."""
_MADE_BY: Final = "make one with: openssl rand -hex 32"


def read_key(config: NvmeConfig) -> bytes | None:
    """The key that is configured; None for none. Blocking. The texts of its errors never hold a key.

    Raises:
        StartupError: it cannot be had, others can read its file, or the package that encrypts is missing.
    """
    if config.encryption_key_file is not None:
        key = _from_file(config.encryption_key_file)
    elif config.encryption_key_command:
        key = _from_command(config.encryption_key_command)
    else:
        return None
    SlotCipher(key)  # what encrypts is here, before anything is done
    return key


def _package(name: str) -> Any:
    """A module of the package that encrypts. Raises StartupError where it is missing."""
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as e:
        raise StartupError(f"nvme.encryption_key_* needs a package that is missing ({e}): install kvtierd[encryption]") from e


def _from_file(path: Path) -> bytes:
    name = f"nvme.encryption_key_file {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise StartupError(f"{name} cannot be read: {e.strerror}") from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise StartupError(f"{name} is no plain file")
        # A group may read it: so it is with Secrets of Kubernetes and credentials of systemd.
        if info.st_mode & 0o027:
            raise StartupError(
                f"{name} has permissions {stat.S_IMODE(info.st_mode):04o}: others have access to it; chmod it to 0600"
            )
        if info.st_uid not in (0, os.geteuid()):
            raise StartupError(f"{name} belongs to user {info.st_uid}, who can change it; chown it to root or user {os.geteuid()}")
        return _parsed(os.read(fd, MAX_KEY_FILE_BYTES), name)
    except OSError as e:
        raise StartupError(f"{name} cannot be read: {e.strerror}") from e
    finally:
        os.close(fd)


def _from_command(command: str) -> bytes:
    name = "nvme.encryption_key_command"
    try:
        words = shlex.split(command)
        if not words:
            raise StartupError(f"{name} names no program: name one, or leave the key out")
        # What it says of errors goes where the daemon's log goes; its output goes nowhere.
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:  # noqa: S603 - the operator's own
            try:
                output, status = _output_of(process)
            finally:
                process.kill()  # nothing where it has ended
    except subprocess.TimeoutExpired:
        raise StartupError(f"{name} took longer than {KEY_COMMAND_S:.0f} s; see what it waits for") from None
    except (OSError, ValueError) as e:
        raise StartupError(f"{name} cannot be run: {e}") from None
    if status:
        raise StartupError(f"{name} ended with status {status}; run it by hand as the daemon's user to see why")
    return _parsed(output, f"the output of {name}")


def _output_of(process: subprocess.Popen[bytes]) -> tuple[bytes, int]:
    """What a process writes, no more than is looked at, and its status. Raises TimeoutExpired."""
    assert process.stdout is not None
    until_s = time.monotonic() + KEY_COMMAND_S
    ready, output = select.poll(), b""
    ready.register(process.stdout, select.POLLIN)
    while len(output) <= MAX_KEY_FILE_BYTES:
        if not ready.poll(max(until_s - time.monotonic(), 0) * 1000):
            raise subprocess.TimeoutExpired(process.args, KEY_COMMAND_S)
        piece = os.read(process.stdout.fileno(), MAX_KEY_FILE_BYTES)
        if not piece:
            return output, process.wait(max(until_s - time.monotonic(), 0))
        output += piece
    return output, 0  # it is no key, however it would go on


def _parsed(text: bytes, name: str) -> bytes:
    """The key that a text stands for. Raises StartupError without telling the text."""
    text = text.strip()
    key = b""
    with contextlib.suppress(ValueError):  # which a wrong character is
        key = bytes.fromhex(text.decode("ascii")) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
    if len(key) != KEY_BYTES:
        raise StartupError(f"{name} is no key: it is to be 64 hex digits, or 32 bytes in base64, and no more; {_MADE_BY}")
    if len(set(key)) == 1:
        raise StartupError(f"{name} is no key: it is one byte again and again; {_MADE_BY}")
    return key


class SlotCipher:
    """Encrypts and decrypts payloads. Thread-safe; the interpreter lock is free meanwhile.

    Args:
        key: 32 bytes, for nothing else.

    Raises:
        StartupError: the package that does it is missing or too old.
    """

    def __init__(self, key: bytes) -> None:
        ciphers, aead = _package("hazmat.primitives.ciphers"), _package("hazmat.primitives.ciphers.aead")
        self._cipher, self._aes, self._modes = ciphers.Cipher, ciphers.algorithms.AES, ciphers.modes
        self._gcm = aead.AESGCM
        self._wrong: type[Exception] = _package("exceptions").InvalidTag
        if not hasattr(self._gcm, "encrypt_into"):
            raise StartupError(
                "nvme.encryption_key_* needs a newer version of the package cryptography: install kvtierd[encryption]"
            )
        self._key = key
        first = int.from_bytes(self._blocks(bytes(16)), "big") << 1
        self._subkey = first & ((1 << 128) - 1) ^ (0x87 if first >> 128 else 0)

    def _blocks(self, data: bytes) -> bytes:
        """AES of whole blocks."""
        return bytes(self._cipher(self._aes(self._key), self._modes.ECB()).encryptor().update(data))

    def _key_of(self, nonce: bytes) -> bytes:
        """The key that the first half of a nonce stands for."""
        half = nonce[:12]
        blocks = (int.from_bytes(bytes([0, n, 0x58, 0]) + half, "big") ^ self._subkey for n in (1, 2))
        return self._blocks(b"".join(block.to_bytes(16, "big") for block in blocks))

    def encrypt(self, payload: memoryview, bound: bytes, into: memoryview) -> bytes:
        """Encrypt a payload.

        Args:
            payload: n bytes.
            bound: must be the same when it is decrypted.
            into: n + 16 bytes of other memory: the encrypted payload, and then the tag.

        Returns:
            The seal, 40 bytes.
        """
        nonce, size = secrets.token_bytes(NONCE_BYTES), payload.nbytes
        if size <= MAX_ONE_CALL_BYTES:
            self._gcm(self._key_of(nonce)).encrypt_into(nonce[12:], payload, bound, into)
        else:
            encryptor = self._cipher(self._aes(self._key_of(nonce)), self._modes.GCM(nonce[12:])).encryptor()
            encryptor.authenticate_additional_data(bound)
            encryptor.update_into(payload, into[:size])
            encryptor.finalize()
            into[size:] = encryptor.tag
        return nonce + bytes(into[size:])

    def decrypt(self, payload: memoryview, bound: bytes, seal: bytes) -> bool:
        """Decrypt a payload in its place. False when it is not what was encrypted with this key, ``bound`` and seal; then it is
        zeros."""
        nonce, tag = seal[:NONCE_BYTES], seal[NONCE_BYTES:]
        decryptor = self._cipher(self._aes(self._key_of(nonce)), self._modes.GCM(nonce[12:], tag)).decryptor()
        decryptor.authenticate_additional_data(bound)
        decryptor.update_into(payload, payload)
        try:
            decryptor.finalize()
        except self._wrong:
            payload[:] = bytes(payload.nbytes)
            return False
        return True


def cipher_of(key: bytes, pool_id: bytes) -> SlotCipher:
    """What encrypts a pool's payloads, with a key that follows from the configured one. Raises StartupError."""
    return SlotCipher(hashlib.blake2b(pool_id, key=key, digest_size=KEY_BYTES, person=b"kvtierd-slots").digest())


def check_value(key: bytes, pool_id: bytes) -> str:
    """Tells keys apart and nothing of them, in hex."""
    return hashlib.blake2b(pool_id, key=key, digest_size=16, person=b"kvtierd-check").hexdigest()
