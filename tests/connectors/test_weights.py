"""Goal: weights have one name exactly as long as they are the same, whether they come from a folder or from a hub.

Method: folders, and a cache laid out as Hugging Face's library does it, whose branch moves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="vLLM brings it: run make test-vllm")

from huggingface_hub import constants

from kvtierd.connectors.weights import local_weights, name_weights, snapshot, stamp

OLD, NEW = "a" * 40, "b" * 40
NAME = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual cache, with two commits of one repository; its main branch is at the old one."""
    repository = tmp_path / "hub" / "models--org--model"
    for commit in (OLD, NEW):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "model.safetensors").write_bytes(commit.encode())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


def test_a_repository_goes_by_its_commit(hub: Path) -> None:
    assert name_weights(NAME) == f"commit:{OLD}"
    (hub / "refs" / "main").write_text(NEW + "\n")
    assert name_weights(NAME) == f"commit:{NEW}"
    assert snapshot(NAME) == hub / "snapshots" / NEW


def test_branches_tags_and_commits(hub: Path) -> None:
    (hub / "refs" / "v1").write_text(NEW)
    assert name_weights(NAME, "v1") == name_weights(NAME, NEW) == f"commit:{NEW}"
    assert name_weights("org/never-loaded", NEW) == f"commit:{NEW}"
    assert name_weights(NAME, "v2") == name_weights("org/never-loaded") == name_weights("s3://bucket/model") == ""


def test_another_cache(hub: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert name_weights(NAME, cache=str(other)) == ""
    (tmp_path / "hub").rename(other)
    assert name_weights(NAME, cache=str(other)) == f"commit:{OLD}"
    assert name_weights(NAME) == ""


def test_a_branch_that_moves_between_configuration_and_weights(hub: Path) -> None:
    """Nobody knows which of the two was loaded, so it is taken for neither."""
    assert name_weights(NAME, commit=OLD) == name_weights(NAME)
    (hub / "refs" / "main").write_text(NEW)
    assert name_weights(NAME, commit=OLD) not in ("", f"commit:{OLD}", f"commit:{NEW}")
    assert name_weights("org/never-loaded", commit=OLD) == f"commit:{OLD}"


def test_a_snapshot_that_is_not_named_by_a_commit(hub: Path) -> None:
    (hub / "snapshots" / "mirror").mkdir()
    (hub / "snapshots" / "mirror" / "model.safetensors").write_bytes(b"1")
    (hub / "refs" / "main").write_text("mirror")
    first = name_weights(NAME)
    assert first.startswith("local:")
    (hub / "snapshots" / "mirror" / "model.safetensors").write_bytes(b"2")
    assert name_weights(NAME) not in ("", first)


def test_models_of_another_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert name_weights(NAME) == ""


def test_a_folder_without_weights_names_none(tmp_path: Path) -> None:
    """An engine that streams them from elsewhere has the configuration alone there."""
    (tmp_path / "config.json").write_text("{}")
    assert local_weights(str(tmp_path)) == name_weights(str(tmp_path)) == ""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert name_weights(str(tmp_path)) == "local:" + local_weights(str(tmp_path))


def test_a_stamp_changes_with_files_and_commits(hub: Path, tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"1")
    (tmp_path / "README.md").touch()
    stamps = [stamp(str(tmp_path)), stamp(NAME)]
    (tmp_path / "README.md").write_text("other")
    assert stamps == [stamp(str(tmp_path)), stamp(NAME)]
    file.write_bytes(b"12")
    (hub / "refs" / "main").write_text(NEW)
    assert stamps[0] != stamp(str(tmp_path))
    assert stamps[1] != stamp(NAME)
