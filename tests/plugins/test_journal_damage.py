"""A journal or a roll-back record that a disk has damaged stops nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugins.callbacks import roll_backs
from plugins.loggers.journal import FILE, Journal
from plugins.loggers.mlflow import MLflowLogger

DAMAGED = [
    b"\xff\xfe junk",
    b"[1, 2]",
    b"null",
    b'{"step": "x", "time": 1, "metrics": {}}',
    b'{"step": 1, "time": 1, "metrics": 5}',
    b'{"step": 1, "time": 1, "metrics": {"loss": [1]}}',
    b'{"step": null, "time": 1, "metrics": {"loss": 1}}',
    b'{"step": 1, "metrics": {"loss": 1}}',
    b'{"do": "params", "time": 1}',
    b'{"do": "tags", "time": 1, "tags": 7}',
    b'{"do": [], "time": 1}',
]


def test_of_a_journal_the_sound_lines_are_read(tmp_path: Path) -> None:
    sound = [
        {"step": 1, "time": 1, "metrics": {"loss": 2.5, "grad_norm": "NaN"}},
        {"do": "rewind", "time": 2, "step": 1},
        {"do": "of a newer version", "time": 3},
    ]
    first, *others = [json.dumps(record).encode() for record in sound]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in [first, *DAMAGED, *others]) + b'{"step": 2, "ti')
    assert [record for record, _ in Journal(path).read()] == sound


@pytest.mark.parametrize("text", ["", "[]", "7", '{"skipped": [[0, 1e400]], "roll_backs": []}', '{"skipped": 1}'])
def test_of_roll_backs_nothing_is_known(tmp_path: Path, text: str) -> None:
    (tmp_path / roll_backs.FILE).write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert roll_backs.read(tmp_path) is None


def test_a_journal_without_room_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full takes nothing, as a disk that is full from the beginning to the end of a run."""
    (tmp_path / FILE).symlink_to("/dev/full")
    logger = MLflowLogger(finish_seconds=0.0)
    with pytest.warns(UserWarning, match="no room for metrics") as told:
        logger.open(tmp_path, resume=True)
        for step in range(3):
            logger.log_metrics({"loss": 1.0}, step)
    assert sum("no room" in str(warning.message) for warning in told) == 1
    logger.finalize("success")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: 6 records found no room") and "are lost" in line
