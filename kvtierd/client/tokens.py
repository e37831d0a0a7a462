"""The bearer token that a caller shows to a daemon that asks for one. It is read from its file anew for each session."""

from __future__ import annotations

import os
import re
from typing import Final

from kvtierd.errors import ConfigError
from kvtierd.plain_file import read_plain

TOKEN_VARIABLE: Final = "KVTIERD_TOKEN_FILE"  # noqa: S105 - a variable's name
MAX_TOKEN_BYTES: Final = 2048

Metadata = tuple[tuple[str, str], ...]


def default_token_file() -> str:
    """``$KVTIERD_TOKEN_FILE``; empty when it is not set."""
    return os.environ.get(TOKEN_VARIABLE, "")


def authorization(path: str | os.PathLike[str]) -> Metadata:
    """What a call carries to show the token of a file; nothing for no file ("").

    Raises:
        ConfigError: the file cannot be read, or holds no token; the text names the file and never what is in it.
    """
    if not path:
        return ()
    try:
        token = read_plain(os.fspath(path), MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(f"cannot read the token file {os.fspath(path)}: {why}") from e
    if not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise ConfigError(
            f"the token file {os.fspath(path)} holds no token: it takes one line of at most {MAX_TOKEN_BYTES} characters, no spaces"
        )
    return (("authorization", f"Bearer {token.decode()}"),)
