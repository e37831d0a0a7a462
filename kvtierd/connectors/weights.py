"""What names weights, so that KV of other weights is not taken for theirs: the files themselves, or the commit of a hub's snapshot.

Names of models and adapters do not: what they stand for changes.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGS: Final = ("config.json", "adapter_config.json")
MAX_WEIGHT_FILES: Final = 4096
HEAD_BYTES: Final = 1 << 16
SAMPLES: Final = 32
SAMPLE_BYTES: Final = 4096
COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def name_weights(place: str, revision: str = "", cache: str = "", commit: str = "") -> str:
    """A name for weights that other weights do not have; empty when there is none.

    Args:
        place: local folder or file, or the name of a repository in Hugging Face's hub.
        revision: of the repository: a commit, a branch or a tag. Empty for its main branch.
        cache: folder that the hub's files are in. Empty for the usual one.
        commit: the one that the model's configuration came from, where that is known.

    Raises:
        OSError: a file is there and cannot be read.
    """
    found = local_weights(place)
    folder = None if found else snapshot(place, revision, cache)
    known = {commit, revision, folder.name if folder is not None else ""}
    commits = sorted(name for name in known if COMMIT.fullmatch(name))
    if not found and commits:
        return "commit:" + "+".join(commits)  # two where the branch has moved between the configuration and the weights
    if not found and folder is not None:
        found = local_weights(str(folder))
    return "local:" + found if found else ""


def local_weights(place: str) -> str:
    """For weights in a local folder or file: a digest of names, sizes and samples of the content, so that other weights in the same
    place are told apart. Not of times, which differ from host to host. Empty where there are none.

    Raises:
        OSError: a file is there and cannot be read.
    """
    files = _files(place)
    if not any(p.suffix in WEIGHTS for p in files):
        return ""
    return _digest("\n".join(f"{p.name}:{p.stat().st_size}:{_samples(p)}" for p in files))


def stamp(place: str) -> object:
    """What changes when the weights in a place do: of local ones sizes, times and inodes, else the snapshot. Reads no content.

    Raises:
        OSError: a file is there and cannot be looked at.
    """
    found = [(p.name, s.st_size, s.st_mtime_ns, s.st_ino) for p in _files(place) for s in [p.stat()]]
    return found or str(snapshot(place))


def snapshot(name: str, revision: str = "", cache: str = "") -> Path | None:
    """The folder with the files of a repository of the hub: of the commit that its revision was when it was last asked for. Its
    name is the commit. None when there is none. Asks nobody."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # another hub, with other models under the same names
    from huggingface_hub import constants

    repository = Path(cache or constants.HF_HUB_CACHE).expanduser() / ("models--" + name.replace("/", "--"))
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _files(place: str) -> list[Path]:
    """The weights in a place, and what says how they are meant."""
    path = Path(place).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.is_file() and (p.suffix in WEIGHTS or p.name in CONFIGS))[:MAX_WEIGHT_FILES]


def _samples(path: Path) -> str:
    """Digest of a file's head (for safetensors the table of tensors) and of pieces all over it: tuning a model leaves many tensors
    as they were, often the first ones, and all sizes."""
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for number in range(1, SAMPLES + 1):
            file.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
