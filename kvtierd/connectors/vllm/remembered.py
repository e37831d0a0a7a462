"""A bounded memory of keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_REMEMBERED: Final = 65_536


class Remembered:
    """Keys of tenants, each until a time. Changed by one thread only; the oldest go first when there are too many."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, tenant: str, key: bytes, until_s: float) -> None:
        """Remember a key until then."""
        name = tenant.encode() + key
        self._until_s[name] = until_s
        self._until_s.move_to_end(name)
        while len(self._until_s) > MAX_REMEMBERED:
            self._until_s.popitem(last=False)

    def until_s(self, tenant: str, key: bytes) -> float:
        """Until when a key is remembered; 0 when it is not."""
        return self._until_s.get(tenant.encode() + key, 0.0)

    def clear(self) -> None:
        """Forget everything."""
        self._until_s.clear()
