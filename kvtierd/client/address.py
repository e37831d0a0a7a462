"""Where a daemon is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ADDRESS_VARIABLE: Final = "KVTIERD_ADDRESS"


def socket_path(address: str) -> Path | None:
    """Path of the unix socket that an address names: ``unix:PATH`` or an absolute path; None for ``host:port``.

    Raises:
        ValueError: it is none of these.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        return Path("/" + path.lstrip("/")) if path.startswith("///") else Path(path)
    if address.startswith("/"):
        return Path(address)
    if ":" not in address:
        raise ValueError(f'{address!r} is no address; write "unix:PATH", an absolute path or "host:port"')
    return None


def socket_problem(path: Path) -> str:
    """Why this process cannot connect to the unix socket at a path, and what to do; empty when it can, as far as files tell."""
    try:
        path.stat()
    except PermissionError:
        pass
    except OSError:
        return f"no daemon at {path}: the socket does not exist; start `kvtierd serve`"
    if os.access(path, os.W_OK, effective_ids=True):
        return ""
    return f"no permission for {path}: run this as the daemon's user, or name user {os.geteuid()} in server.allow_users"


def default_address() -> str:
    """``$KVTIERD_ADDRESS``, or the socket that ``kvtierd serve`` opens by default."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        return address
    from kvtierd.config import ServerConfig  # costs an import of pydantic: only where it is needed

    return f"unix:{os.environ.get('KVTIERD_SERVER_SOCKET') or ServerConfig().socket}"
