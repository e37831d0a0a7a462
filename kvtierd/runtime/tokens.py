"""Bearer tokens: who may call, for which tenants, and whether the admin API too. Their file may change while the daemon runs.

A token itself is kept nowhere: the file should hold its SHA-256, and of one that is written there in plain only that is remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from kvtierd.errors import ConfigError, Reason, RequestError
from kvtierd.plain_file import read_plain
from kvtierd.runtime.tenants import check_name
from kvtierd.tenant_config import fault_text, name_problem

log = logging.getLogger(__name__)

MAX_TOKENS: Final = 1024
MAX_FILE_BYTES: Final = 1 << 20
MIN_TOKEN_CHARS: Final = 16
"""A shorter token could be guessed."""
CHECK_S: Final = 1.0
"""How often the file is looked at."""

Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """What the bearer of a token may do."""

    name: str
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    tenants: tuple[str, ...] = ()
    """Names of tenants that it speaks for; ``*``, ``?`` and ``[…]`` as in file names."""
    admin: bool = False
    """Whether it may use the admin API."""

    def speaks_for(self, tenant: str) -> bool:
        """Whether it may act for a tenant."""
        return not name_problem(tenant) and any(fnmatchcase(tenant, pattern) for pattern in self.tenants)

    def check_tenant(self, tenant: str) -> None:
        """Raise RequestError: BAD_REQUEST when no tenant can have this name, PERMISSION unless it may act for the tenant."""
        check_name(tenant)
        if not self.speaks_for(tenant):
            text = (
                f"the token {self.name!r} does not speak for tenant {tenant[:128]!r}; add it to the token's tenants in the daemon"
            )
            raise RequestError(Reason.PERMISSION, text)


class _Entry(BaseModel):
    """One token of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str | None = None
    token: SecretStr | None = None
    tenants: list[str] = Field(default_factory=list, max_length=1024)
    admin: bool = False

    @field_validator("sha256")
    @classmethod
    def _is_digest(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch("[0-9a-fA-F]{64}", value):
            raise ValueError("write the 64 hex digits that sha256sum makes of the token")
        return value

    def digest(self, name: str) -> bytes:
        """SHA-256 of the token. Raises ConfigError when there is none, or one that could be guessed."""
        if (self.sha256 is None) == (self.token is None):
            raise ConfigError(f"tokens.{name} needs one of sha256 and token")
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        assert self.token is not None
        text = self.token.get_secret_value()
        if len(text) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"tokens.{name}.token has fewer than {MIN_TOKEN_CHARS} characters; make one with: openssl rand -hex 32"
            )
        return digest_of(text)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: dict[str, _Entry] = Field(default_factory=dict, max_length=MAX_TOKENS)


def stamp_of(path: Path) -> Stamp:
    """What tells that a file was changed or replaced; empty when it cannot be looked at."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def reason_of(error: OSError | ValueError) -> str:
    """Why a file cannot be read."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def digest_of(token: str) -> bytes:
    """SHA-256 of a token's text."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def read_grants(path: Path) -> dict[str, Grant]:
    """Tokens of a file, by name.

    Raises:
        ConfigError: it cannot be read or makes no sense; the text names the place, and never holds a token.
    """
    try:
        data, mode = read_plain(str(path), MAX_FILE_BYTES), path.stat().st_mode
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read the token file {path}: {reason_of(e)}") from e
    if mode & stat.S_IWOTH:
        raise ConfigError(f"every user of this machine can write to the token file {path}: chmod it to 0600")
    try:
        entries = _File.model_validate(tomllib.loads(data.decode())).tokens
    except ValidationError as e:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {fault_text(item)}" for item in e.errors(include_input=False))
        raise ConfigError(f"the token file {path}: {wrong}") from None
    except (ValueError, RecursionError) as e:
        why = "it is no UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)
        raise ConfigError(f"the token file {path} is not valid TOML: {why}") from None
    if not entries:
        raise ConfigError(f"the token file {path} holds no token, so nobody could call: write one into it")
    if mode & stat.S_IROTH and any(entry.token is not None for entry in entries.values()):
        log.warning(
            "every user of this machine can read the tokens in %s; write their sha256 there, or change its permissions", path
        )
    grants: dict[str, Grant] = {}
    known: dict[bytes, str] = {}
    for name, entry in entries.items():
        digest = entry.digest(name)
        if digest in known:
            raise ConfigError(f"the token file {path}: tokens.{known[digest]} and tokens.{name} are the same token")
        known[digest] = name
        grants[name] = Grant(name, digest, tuple(entry.tenants), entry.admin)
    return grants


class Tokens:
    """The tokens of a file.

    Raises:
        ConfigError: as :func:`read_grants`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp_of(path)
        self.grants: Mapping[str, Grant] = read_grants(path)

    def find(self, token: str) -> Grant | None:
        """Who a token belongs to. Takes as long whether and where it is found."""
        digest = digest_of(token)
        found = None
        for grant in self.grants.values():
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found

    def current(self, grant: Grant, tenants: Iterable[str]) -> Grant | None:
        """A grant as it is now; None when it was taken away, or does not speak for all of these tenants any more."""
        now = self.grants.get(grant.name)
        good = now is not None and now.digest == grant.digest and all(map(now.speaks_for, tenants))
        return now if good else None

    def refresh(self) -> bool:
        """Read the file again if it has changed. A file that cannot be read changes nothing. Returns whether anything changed."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            grants = read_grants(self._path)
        except ConfigError as e:
            log.error("%s; the tokens that were read before stay in force", e)
            return False
        changed, self.grants = grants != self.grants, grants
        if changed:
            log.info("read %d tokens from %s", len(grants), self._path)
        return changed

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look at the file from time to time, and call ``changed`` when there are other tokens. Runs as a supervised task."""
        while True:
            await asyncio.sleep(CHECK_S)
            if await asyncio.to_thread(self.refresh):
                changed()
