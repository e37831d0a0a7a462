"""Which folders hold one pool, so that a folder that was away for a while is told from those that went on without it.

Each folder's ``pool.json`` has a tag, and the paths of all folders that had the same one when it was written. When a folder that
belongs to them is lost, or another device is in its place, the others get a new tag before anything is served. So a folder whose
tag is another's than the present one has missed something: its blocks may have been evicted meanwhile, and their numbers given out
again. They are deleted. Of two halves that went on without each other, the one with more changes counts, and of equal ones the
first in ``nvme.folders``.

A new tag is written into one folder after the other. Until it is in all of them nothing is served, and each has the former tags
too: a start that is cut off takes no folder for one that was away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

TAG_BYTES: Final = 16
MAX_BEFORE: Final = 64
"""Tags of starts that were cut off, one after the other, which are remembered."""


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
    before: Mapping[str, int] = field(default_factory=dict)
    """Tags that this one takes the place of, with their changes, until it is in all folders: the one under which blocks were served
    last, and those of starts that were cut off since."""

    @property
    def tags(self) -> dict[str, int]:
        """All tags that it has, with their changes."""
        return {**self.before, self.tag: self.changes}

    @property
    def in_force(self) -> tuple[int, str]:
        """Changes and tag under which blocks were served last."""
        return min((changes, tag) for tag, changes in self.tags.items())

    def was_there(self, former: Membership) -> bool:
        """True for a folder that has been with those of ``former`` for as long as they were served."""
        return former.in_force[1] in self.tags

    def knows(self, path: str) -> bool:
        """True for a folder that has been in use."""
        return path in self.members or path in self.lost

    def may_have(self, path: str) -> bool:
        """Whether a folder that says nothing of itself may have been there all along."""
        return not self.members or path in self.members

    def mount_of(self, path: str) -> str:
        """Mount point that a folder had; "" when that is not known."""
        return self.members.get(path) or self.lost.get(path, "")

    def after(
        self, present: Mapping[str, str], lost: Sequence[str], strangers: Set[str] = frozenset(), beside: Sequence[Membership] = ()
    ) -> Membership:
        """What to write down in all folders that are present. The tag is another when a member is not.

        Args:
            present: folders that can be used.
            lost: folders that cannot.
            strangers: those of ``present`` that say nothing of themselves, or were away: a member may be another device.
            beside: what all those of ``present`` say that were there all along.
        """
        away = {path: self.mount_of(path) for path in lost}
        if not self.before and self.members.keys() <= present.keys() - strangers:
            return replace(self, members=dict(present), lost=away)
        tags = self.tags | {tag: changes for other in beside for tag, changes in other.tags.items()}
        before = sorted((changes, tag) for tag, changes in tags.items() if changes >= self.in_force[0])
        kept = {tag: changes for changes, tag in [before[0], *before[1:][-MAX_BEFORE:]]}
        return Membership(os.urandom(TAG_BYTES).hex(), before[-1][0] + 1, dict(present), away, kept)

    def settled(self) -> Membership:
        """What to write down once all folders have this tag."""
        return replace(self, before={})

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        before = {"before": dict(self.before)} if self.before else {}
        return {"tag": self.tag, "changes": self.changes, "members": dict(self.members), "lost": dict(self.lost)} | before


def first_membership(pool_id: bytes) -> Membership:
    """Of a pool that has no other: equal in all its folders."""
    return Membership(pool_id.hex())


def membership_from(item: Mapping[str, Any]) -> Membership:
    """From JSON. Raises KeyError, TypeError, ValueError or AttributeError when it is none."""
    tag, changes, before = item["tag"], item["changes"], {str(tag): n for tag, n in item.get("before", {}).items()}
    if not (isinstance(tag, str) and tag and all(isinstance(n, int) for n in (changes, *before.values()))):
        raise ValueError("its list of folders is none")
    paths = {name: {str(p): str(m) for p, m in item[name].items()} for name in ("members", "lost")}
    return Membership(tag, changes, paths["members"], paths["lost"], before)


def latest(found: Sequence[Membership]) -> Membership:
    """The one that counts, of at least one."""
    return max(found, key=lambda membership: membership.in_force[0])  # the first of equal ones
