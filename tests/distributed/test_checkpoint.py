"""The folder protocol: complete or absent."""

from __future__ import annotations

import json
import os

import pytest

from plugins.strategies import checkpoint
from plugins.strategies.checkpoint import CheckpointError


def write(path, step: int, content: bytes = b"weights") -> None:
    temporary = checkpoint.begin(path)
    (temporary / "a.distcp").write_bytes(content)
    (temporary / ".metadata").write_bytes(b"keys")
    checkpoint.finish(temporary, path, checkpoint.describe(temporary, checkpoint.file_names(temporary)), step)


def test_manifest_lists_every_file_with_size_and_hash(tmp_path) -> None:
    write(tmp_path / "step-1", 1)
    manifest = checkpoint.read_manifest(tmp_path / "step-1")
    assert manifest["step"] == 1
    assert manifest["files"][".metadata"]["bytes"] == 4
    assert set(manifest["files"]) == {"a.distcp", ".metadata"}
    checkpoint.verify(tmp_path / "step-1", manifest["files"], manifest["files"])
    assert os.listdir(tmp_path) == ["step-1"]


def test_replacing_keeps_the_old_one_until_the_new_is_complete(tmp_path, monkeypatch) -> None:
    path = tmp_path / "step-1"
    write(path, 1, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write(path, 1, b"new")
    assert (path / "a.distcp").read_bytes() == b"old"
    checkpoint.read_manifest(path)
    write(path, 1, b"new")  # also clears what the failed save left
    assert (path / "a.distcp").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "a.distcp").write_bytes(b"w"), "a.distcp has 1 bytes instead of 7"),
        (lambda path: (path / "a.distcp").unlink(), "a.distcp is missing"),
        (lambda path: (path / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"files":'), "no readable manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"files":{},"format":9}'), "checkpoint format 9"),
    ],
)
def test_latest_skips_torn_checkpoints_with_a_warning(tmp_path, damage, message) -> None:
    write(tmp_path / "step-00000005", 5)
    write(tmp_path / "step-00000010", 10)
    assert checkpoint.latest(tmp_path).name == "step-00000010"
    damage(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_manifest(tmp_path / "step-00000010")
    with pytest.warns(UserWarning, match="skipped"):
        assert checkpoint.latest(tmp_path).name == "step-00000005"


def test_latest_orders_by_steps_and_skips_unfinished_saves(tmp_path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    write(tmp_path / "zzz", 3)
    write(tmp_path / "aaa", 20)
    checkpoint.begin(tmp_path / "step-30")
    with pytest.warns(UserWarning, match="did not finish"):
        assert checkpoint.latest(tmp_path).name == "aaa"


def test_same_size_damage_is_found_by_hash(tmp_path) -> None:
    write(tmp_path / "step-1", 1)
    (tmp_path / "step-1" / "a.distcp").write_bytes(b"weighty")
    files = checkpoint.read_manifest(tmp_path / "step-1")["files"]
    with pytest.raises(CheckpointError, match="differs from its sha256"):
        checkpoint.verify(tmp_path / "step-1", files, files)


def test_remove_leaves_nothing(tmp_path) -> None:
    write(tmp_path / "step-1", 1)
    checkpoint.remove(tmp_path / "step-1")
    assert os.listdir(tmp_path) == []
