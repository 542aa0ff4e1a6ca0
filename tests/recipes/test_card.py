"""A model card says what the run's folder and the other commands' files say, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lm.data.synthetic import write_folder
from plugins.loggers.journal import FILE, Journal
from recipes import card as card_module
from recipes.card import main
from recipes.card_facts import RunFacts

HOUR_MS = 3_600_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two hours that was away for a day between them, and was rolled back once."""
    ids = np.array([5, 6, 7, 0])
    write_folder(tmp_path / "data", {"books": {"train": [ids] * 50, "validation": [ids]}}, 300)
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"data:\n  dir: {tmp_path / 'data'}\n")
    (folder / "data.txt").write_text("stage  step\n0         0\n")
    (folder / "spike_guard.json").write_text(
        json.dumps(
            {"skipped": [[8, 40]], "roll_backs": [
                {"first_strike": 20, "last_strike": 24, "at_step": 26, "to_step": 16, "dropped": [[8, 40]]}
            ]}
        )
    )  # fmt: skip
    journal = Journal(folder / FILE)
    params = {"n_params_total": 1234567, "d_tokens": 10000, "global_batch_tokens": 100, "lr": 0.01, "d_model": 64}
    journal.append({"do": "params", "time": 0, "params": params})
    journal.append({"do": "tags", "time": 0, "tags": {"scalewright.forecast_id": "f00d"}})
    for minute in range(0, 61, 5):
        journal.append({"step": minute, "time": minute * 60_000, "metrics": {"loss": 3.0, "mfu": 0.31}})
    later = 24 * HOUR_MS
    for minute in range(0, 51, 5):
        metrics = {"loss": 2.5, "val_loss": 2.625, "bpb": 1.0, "tokens_per_second": 1234.0}
        journal.append({"step": 50 + minute, "time": later + minute * 60_000, "metrics": metrics})
    return folder


def card(run: Path, *arguments: str) -> str:
    assert main(["--run", str(run), *arguments]) == 0
    return (run / "model_card.md").read_text(encoding="utf-8")


def test_from_the_folder_alone(run: Path) -> None:
    text = card(run)
    assert text.startswith("# small\n") and "| parameters | 1,234,567 |" in text
    assert "| books | 50 | 200 | 150 | none |" in text and "stage  step" in text
    assert "| training loss, nats per token | 2.5 (step 100) |" in text and "| validation loss | 2.625" in text
    assert "Rolled back from step 26 to 16" in text and "32 samples around them were dropped" in text
    # an hour, fifty minutes, and ten minutes for the day that it was away
    assert "| tokens | 10,000 | 10,000 |" in text and "| hours | not planned | 2 |" in text
    assert "Forecast f00d; its figures were not given" in text and "None were given to this card" in text


def test_with_what_other_commands_wrote(run: Path, tmp_path: Path) -> None:
    scores = {
        "model": {},
        "text": {
            "data/x.txt": {"bits_per_byte": 1.25, "loss": 2.0, "tokens": 1000},
            "few": {"bits_per_byte": None, "loss": None, "tokens": 0},  # a source without a whole window
        },
        "questions": {"q.jsonl": {"exact_match": 0.5, "interval": [0.4, 0.6], "log_probability_per_byte": -0.7}},
        "tasks": {"own": {"acc,none": 0.75, "acc_stderr,none": 0.1, "questions": 4}},
        "probes": {
            "effective_length": {
                "needle": {"holds_to": 512, "falls_at": 1024},
                "needles": {"holds_to": 2048, "falls_at": None},
                "variables": {"holds_to": None, "falls_at": None},
            }
        },
        "contamination": {"q.jsonl": {"share": 0.25, "texts": 5, "too_short": 1}},
    }
    row = {"forecast_id": "f00d", "approach": "isoflop", "loss": 2.6, "low": 2.5, "high": 2.7, "measured": 2.625}
    plan = {
        "parameters": {"total": 1234567},
        "time_and_cost": {"seconds": 5400},
        "step": {"tokens_per_s": 1500.0, "mfu": 0.4},
    }
    files = {"scores": scores, "forecasts": {"rows": [{**row, "status": "inside"}]}, "plan": plan}
    arguments = []
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
        arguments += [f"--{name}", str(tmp_path / f"{name}.json")]
    text = card(run, *arguments)
    assert "| few | no number | no number | 0 |" in text
    assert "| x.txt | 1.2500 | 2.0000 | 1,000 |" in text and "| q.jsonl | 0.500 (0.400 to 0.600) | -0.7000 |" in text
    assert "| own | acc | 0.7500 | 4 |" in text and "acc_stderr" not in text
    assert "| needle | 512 | 1,024 |" in text and "| needles | 2,048 | none tried |" in text
    assert "| variables | answers nothing | answers nothing |" in text and "25.0% of the texts" in text
    assert "| 2.6000 | 2.5000 to 2.7000 | 2.6250 | inside |" in text
    assert "| hours | 1.5 | 2 |" in text and "| MFU | 40.0% | 31.0% |" in text
    assert "| tokens per second | 1,500 | 1,234 |" in text


def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.json").write_text("[]")
    for arguments, message in (
        (["--run", str(tmp_path)], "has no config.yaml"),
        (["--run", str(run), "--scores", str(tmp_path / "none.json")], "cannot be read"),
        (["--run", str(run), "--scores", str(run / "data.txt")], "is not JSON"),
        (["--run", str(run), "--plan", str(tmp_path / "list.json")], "has no parameters"),
        (["--run", str(run), "--out", str(run / "data.txt" / "card.md")], "data.txt is a file"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    whole, nothing = {"parameters": {}, "time_and_cost": {"seconds": None}, "step": {}}, {"text": {"x": {"tokens": 1}}}
    for option, values in (
        ("scores", nothing), ("scores", {"text": 3}), ("scores", {"probes": {}}), ("plan", whole),
        ("forecasts", {"rows": [{"forecast_id": "f00d"}]}), ("forecasts", {"rows": [3]}),
    ):  # fmt: skip
        (tmp_path / "odd.json").write_text(json.dumps({"model": {}, **values}))
        assert main(["--run", str(run), f"--{option}", str(tmp_path / "odd.json")]) == 2
        error = capsys.readouterr().err
        assert f"--{option} is not as it was written" in error and error.count("\n") == 1
    for name, content in (
        ("spike_guard.json", "[]"),
        ("spike_guard.json", '{"roll_backs": [{}]}'),
        ("data.txt", "\xff"),
    ):
        before = (run / name).read_bytes()
        (run / name).write_bytes(content.encode("latin-1"))
        assert main(["--run", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and name.split(".")[0] in error and error.count("\n") == 1
        (run / name).write_bytes(before)
    assert not (run / "model_card.md").exists()

    def own_mistake(facts: RunFacts) -> str:
        return "lr " + facts.params["lr"]

    with monkeypatch.context() as patched, pytest.raises(TypeError):  # is no fault of the files
        patched.setattr(card_module, "_model", own_mistake)
        main(["--run", str(run)])
    (run / FILE).unlink()
    assert main(["--run", str(run)]) == 2 and "kept no record" in capsys.readouterr().err
