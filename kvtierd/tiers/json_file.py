"""Small files of JSON beside the blocks, read without trust, with their checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from kvtierd.plain_file import read_plain


def read_json(path: str) -> dict[str, Any]:
    """The object that a file holds. Raises as :func:`read_plain`, and ValueError when it holds no JSON object."""
    return parse_object(read_plain(path))


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a text is. Raises ValueError when it is none."""
    try:
        content = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def checksum(body: object) -> str:
    """Of a value as JSON has it: xxh3_128 in hex of its text with sorted keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says beside its checksum, which covers it. Raises KeyError when it has none, ValueError when it is wrong."""
    body = {key: value for key, value in content.items() if key != "checksum"}
    if content["checksum"] != checksum(body):
        raise ValueError("its checksum is wrong")
    return body


def seal(content: Mapping[str, Any]) -> str:
    """Covers the version of ``pool.json``, so that another version is told from a damaged one. The same in every version."""
    return checksum([content["format_version"], content["checksum"]])
