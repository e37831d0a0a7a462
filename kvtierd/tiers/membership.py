"""Which folders hold one pool, so that a folder that was away for a while is told from those that went on without it.

Each folder's ``pool.json`` has a tag, and the paths of all folders that had the same one when it was written. When a folder that
belongs to them is lost, the others get a new tag before anything is served. So a folder whose tag is another's than the present
one has missed something: its blocks may have been evicted meanwhile, and their numbers given out again. They are deleted. The same
goes for a folder in whose place there was an empty one. Of two halves that went on without each other, the one with more changes
counts, and of equal ones the first in ``nvme.folders``.

A new tag is written into one folder after the other. Until it is in all of them each has the former one too, and nothing is served:
a start that is cut off takes no folder for one that was away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

TAG_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Membership:
    """What a folder knows of the pool's folders. Paths are resolved; they map to the mount point of their file system, or ""."""

    tag: str
    changes: int = 0
    """How often the tag was renewed."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Folders that had this tag when it was written down last."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Folders that were configured then and could not be used."""
    before: str = ""
    """The tag that this one takes the place of, until it is in all folders; then ""."""

    @property
    def in_force(self) -> str:
        """The tag under which blocks were served last."""
        return self.before or self.tag

    @property
    def turn(self) -> int:
        """How often the tag in force was renewed."""
        return self.changes - bool(self.before)

    def was_there(self, former: Membership) -> bool:
        """True for a folder that has been with those of ``former`` for as long as they were served."""
        return former.in_force in (self.tag, self.before)

    def knows(self, path: str) -> bool:
        """True for a folder that has been in use."""
        return path in self.members or path in self.lost

    def may_have(self, path: str) -> bool:
        """Whether a folder that says nothing of itself may have been there all along."""
        return not self.members or path in self.members

    def mount_of(self, path: str) -> str:
        """Mount point that a folder had; "" when that is not known."""
        return self.members.get(path) or self.lost.get(path, "")

    def after(self, present: Mapping[str, str], lost: Sequence[str], silent: Set[str] = frozenset()) -> Membership:
        """What to write down when these folders are present and those are lost.

        The tag is another when a member is missing, and when one that is present is ``silent``, saying nothing of itself: it may be
        another device, and the one that was there may come back.
        """
        away = {path: self.mount_of(path) for path in lost}
        if not self.before and self.members.keys() <= present.keys() - silent:
            return replace(self, members=dict(present), lost=away)
        return Membership(os.urandom(TAG_BYTES).hex(), self.turn + 1, dict(present), away, self.in_force)

    def settled(self) -> Membership:
        """What to write down once all folders have this tag."""
        return replace(self, before="")

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        before = {"before": self.before} if self.before else {}
        return {"tag": self.tag, "changes": self.changes, "members": dict(self.members), "lost": dict(self.lost)} | before


def first_membership(pool_id: bytes) -> Membership:
    """Of a pool that has no other: equal in all its folders."""
    return Membership(pool_id.hex())


def membership_from(item: Mapping[str, Any]) -> Membership:
    """From JSON. Raises KeyError, TypeError, ValueError or AttributeError when it is none."""
    tag, changes, before = item["tag"], item["changes"], item.get("before", "")
    if not (isinstance(tag, str) and tag and isinstance(changes, int) and isinstance(before, str)):
        raise ValueError("its list of folders is none")
    paths = {name: {str(p): str(m) for p, m in item[name].items()} for name in ("members", "lost")}
    return Membership(tag, changes, paths["members"], paths["lost"], before)


def latest(found: Sequence[Membership]) -> Membership:
    """The one that counts, of at least one."""
    return max(found, key=lambda membership: membership.turn)  # the first of equal ones
