"""Preparing: same bytes twice, kills, reuse, overwrite, locks, full disk; what the folder then says about itself."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm.data import preparation
from lm.data import prepare as prepare_module
from lm.data.files import DataError, sha256_file
from lm.data.prepare import PrepareConfig, prepare
from lm.data.shards import load_manifest
from lm.data.sources import SourceSpec
from lm.data.tokenizer import END_OF_TEXT, byte_lengths, load_tokenizer

WORDS = [
    start + end for start in ("th", "wh", "be", "no", "fr") for end in ("e", "at", "ing", "ore", "om", "ther", "ere")
]


def write_source(path: Path, seed: int, n_documents: int = 120) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(n_documents):
        words = " ".join(rng.choice(WORDS, int(rng.integers(5, 60))))
        rows.append(f"{number} {words} 日本語 {END_OF_TEXT} {seed}")
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for seed, name in enumerate(("a", "b")):
        write_source(folder / f"{name}.jsonl", seed)
    return folder


def config_of(files: Path, **changes) -> PrepareConfig:
    specs = tuple(SourceSpec(name, "jsonl", "CC0", {"data_files": str(files / f"{name}.jsonl")}) for name in ("b", "a"))
    settings = {"vocab_size": 320, "validation_fraction": 0.2, "shard_tokens": 1500, **changes}
    return PrepareConfig(sources=specs, **settings)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folder_describes_itself_exactly(files, tmp_path) -> None:
    manifest = prepare(config_of(files), tmp_path / "out")
    assert manifest.source_names == ("b", "a")  # in the config's order
    tokenizer = load_tokenizer(tmp_path / "out")
    lengths = byte_lengths(tokenizer)
    for name in ("a", "b"):
        rows = [json.loads(line)["text"] for line in (files / f"{name}.jsonl").read_text().split("\n") if line]
        decoded: list[str] = []
        for split in ("train", "validation"):
            entry = manifest.split(name, split)
            folder = tmp_path / "out" / name / split
            ids = np.concatenate([np.fromfile(folder / row["file"], "<u2") for row in entry["shards"]])
            assert entry["tokens"] == len(ids) and entry["documents"] == (ids == manifest.eot_id).sum()
            assert entry["utf8_bytes"] == lengths[ids].sum()
            for row in entry["shards"]:
                assert row["sha256"] == sha256_file(folder / row["file"])
                ends = np.fromfile(folder / row["file"].replace(".bin", ".ends"), "<i8")
                shard = np.fromfile(folder / row["file"], "<u2")
                assert np.array_equal(ends, np.flatnonzero(shard == manifest.eot_id)) and shard[-1] == manifest.eot_id
            parts = np.split(ids, np.flatnonzero(ids == manifest.eot_id) + 1)[:-1]
            decoded += [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]
        assert sorted(decoded) == sorted(rows)
    assert len(manifest.split("a", "train")["shards"]) > 1
    assert manifest.content["sources"]["a"]["licence"] == "CC0"


def test_twice_gives_the_same_bytes(files, tmp_path) -> None:
    for out in ("one", "two"):
        prepare(config_of(files), tmp_path / out)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(("partial", "old"))] == []


def test_tokenizer_sees_the_train_split_only(files, tmp_path, monkeypatch) -> None:
    seen: list[str] = []
    original = preparation.train_tokenizer
    monkeypatch.setattr(preparation, "train_tokenizer", lambda texts, size: original(seen.extend(texts) or seen, size))
    manifest = prepare(config_of(files), tmp_path / "all")
    assert len(seen) == sum(manifest.split(name, "train")["documents"] for name in ("a", "b"))
    seen.clear()
    prepare(config_of(files, tokenizer_sample_bytes=12_000), tmp_path / "sampled")
    assert 6_000 < sum(len(text.encode()) for text in seen) <= 12_000
    # A document larger than the sample gives parts of itself.
    book = " ".join(json.loads(line)["text"] for line in (files / "a.jsonl").read_text().splitlines())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": book}) + "\n" + (files / "b.jsonl").read_text())
    monkeypatch.setattr("lm.data.pieces.SEGMENT_CHARACTERS", 1000)
    seen.clear()
    config = config_of(tmp_path, tokenizer_sample_bytes=20_000)
    prepare(replace(config, sources=config.sources[1:]), tmp_path / "book")
    assert len(book) > 20_000 and 5_000 < sum(len(text) for text in seen if text in book) < 20_000


def test_reuse_overwrite_and_foreign_folders(files, tmp_path, monkeypatch) -> None:
    out, lines = tmp_path / "out", []
    prepare(config_of(files), out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    prepare(config_of(files), out, log=lines.append)
    assert lines == [f"{out} is up to date (same config): nothing to do"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    @contextmanager
    def read_only(path: Path, busy: str) -> Iterator[None]:  # a real one would not stop a test that root runs
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        yield

    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "exclusive", read_only)
        assert prepare(config_of(files), out, log=lines.append).vocab_size == 320 and lines[1:] == lines[:1]
        with pytest.raises(DataError, match="prepared from another config"):
            prepare(config_of(files, vocab_size=300), out)
        with pytest.raises(DataError, match=r"cannot write below .*: Read-only file system; choose another --out"):
            prepare(config_of(files, vocab_size=300), out, overwrite=True)

    with pytest.raises(DataError, match=r"prepared from another config .* pass --overwrite .* or choose another --out"):
        prepare(config_of(files, vocab_size=300), out)
    assert load_manifest(out).vocab_size == 320
    assert prepare(config_of(files, vocab_size=300), out, overwrite=True).vocab_size == 300

    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="exists and is not a prepared data folder"):
        prepare(config_of(files), other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "precious"


def test_changed_text_is_another_config(tmp_path) -> None:
    write_source(tmp_path / "a.jsonl", 0)
    write_source(tmp_path / "b.jsonl", 1)
    prepare(config_of(tmp_path), tmp_path / "out")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(DataError, match="from another config or other text"):
        prepare(config_of(tmp_path), tmp_path / "out")


def test_damaged_output_is_replaced_on_request(files, tmp_path) -> None:
    out = tmp_path / "out"
    prepare(config_of(files), out)
    whole = contents(out)
    (out / "a" / "train" / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match="prepare the data again with --overwrite"):
        prepare(config_of(files), out)
    prepare(config_of(files), out, overwrite=True)
    assert contents(out) == whole


class Killed(BaseException):
    """Stands for a kill: nothing after it runs but what the kernel would do anyway."""


def kill_after(monkeypatch, n_writes: int) -> None:
    """Raise at the n-th file that a stage finishes."""
    count = {"left": n_writes}

    def guard(function):
        def guarded(*args, **kwargs):
            count["left"] -= 1
            if count["left"] < 0:
                raise Killed
            return function(*args, **kwargs)

        return guarded

    for name in ("write_bytes", "write_json", "ShardWriter"):
        monkeypatch.setattr(preparation, name, guard(getattr(preparation, name)))


def test_resume_from_any_point_gives_the_same_bytes(files, tmp_path, monkeypatch) -> None:
    whole = contents(prepare(config_of(files), tmp_path / "whole").folder)
    out, n_kills = tmp_path / "out", 0
    while not out.exists():  # each attempt gets two files further than the last
        with monkeypatch.context() as patch:
            kill_after(patch, 3)
            try:
                prepare(config_of(files), out)
            except Killed:
                n_kills += 1
                assert not out.exists() and n_kills < 60
    assert n_kills > 5
    assert contents(out) == whole


def test_resume_does_not_repeat_finished_stages(files, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "train_tokenizer", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(config_of(files), tmp_path / "out")
    lines: list[str] = []
    prepare(config_of(files), tmp_path / "out", log=lines.append)
    assert lines[:2] == ["b: documents collected before", "a: documents collected before"]


def test_partial_work_of_another_config_is_not_used(files, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 8)
        with pytest.raises(Killed):
            prepare(config_of(files), tmp_path / "out")
    other = config_of(files, vocab_size=290, validation_fraction=0.4)
    prepare(other, tmp_path / "out")
    prepare(other, tmp_path / "clean")
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_kill_between_the_renames_of_an_overwrite(files, tmp_path) -> None:
    out = tmp_path / "out"
    prepare(config_of(files), out)
    whole = contents(out)
    out.rename(tmp_path / ".out.old")
    prepare(config_of(files), out)
    assert contents(out) == whole and not (tmp_path / ".out.old").exists()


@pytest.mark.parametrize("kills", [4, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kill_9_anywhere_leaves_nothing_half_and_nothing_over(tmp_path, kills) -> None:
    """SIGKILL just before a change of a file, while an older output is replaced, then a run to the end."""
    for seed, name in enumerate(("a", "b")):
        write_source(tmp_path / f"{name}.jsonl", seed)
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.lm.kill_points", str(tmp_path), str(tmp_path / "out"), str(kills)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, *others = map(json.loads, done.stdout.splitlines())
    assert len(others) >= 4
    assert whole[0] == 0 and whole[1] == contents(tmp_path / "imports-everything")
    for attempt in others:
        assert attempt == whole


def test_two_at_once_are_told_apart(files, tmp_path) -> None:
    import fcntl

    out = tmp_path / "out"
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242")
        lock.flush()
        with pytest.raises(DataError, match=r"another prepare is writing .*/out; .* another --out \(process 4242\)"):
            prepare(config_of(files), out)
    prepare(config_of(files), out)  # the lock goes with its holder; the file may stay


def test_full_disk_is_one_line_and_nothing_half(files, tmp_path, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "ShardWriter", full)
        with pytest.raises(DataError, match=r"no space left while writing below .* choose another --out") as caught:
            prepare(config_of(files), tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    prepare(config_of(files), tmp_path / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_really_full_disk(files, tmp_path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(DataError, match="no space left"):
            prepare(config_of(files), small / "out")
        assert not (small / "out").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_wide_vocabulary_gets_wide_ids(files) -> None:
    assert preparation.ids_dtype(config_of(files, vocab_size=200_000).vocab_size).itemsize == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be 257 to 200,000, got 256"),
        ({"validation_fraction": 0}, "validation_fraction must lie between 0 and 1"),
        ({"shard_tokens": 0}, "must be positive"),
    ],
)
def test_bad_settings(files, changes, message) -> None:
    with pytest.raises(DataError, match=message):
        config_of(files, **changes)


def test_emptied_source_is_one_line(tmp_path) -> None:
    write_source(tmp_path / "b.jsonl", 0)
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"source 'a' has no train document \(2 read, .* 1 empty, .* 1 not text\)"):
        prepare(config_of(tmp_path), tmp_path / "out")


def test_progress_is_shown(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(preparation, "PROGRESS_SECONDS", 0.0)
    lines: list[str] = []
    begin = time.monotonic()
    prepare(config_of(files), tmp_path / "out", log=lines.append)
    assert time.monotonic() - begin < 30
    assert "b: 120 documents read" in lines and any(re.fullmatch(r"a/train: \d+ documents", line) for line in lines)
