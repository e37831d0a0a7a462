"""The bearer token that a caller shows to a daemon that asks for one. It is read from its file anew for each session."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from kvtierd.errors import ConfigError

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
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise ConfigError(f"cannot read the token file {os.fspath(path)}: it is no plain file")
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"cannot read the token file {os.fspath(path)}: {e.strerror}") from e
    token = data.strip()
    if len(data) > MAX_TOKEN_BYTES or not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise ConfigError(
            f"the token file {os.fspath(path)} holds no token: it takes one line of at most {MAX_TOKEN_BYTES} characters, no spaces"
        )
    return (("authorization", f"Bearer {token.decode()}"),)
