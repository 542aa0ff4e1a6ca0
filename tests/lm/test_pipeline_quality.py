"""A classifier trained on texts of one's own: it tells them apart, the same model each time, kept by its inputs."""

import json
import random
import subprocess
import sys

import pytest

from lm.data.files import DataError, sha256_file
from lm.data.pipeline import quality
from lm.data.pipeline.kinds import KINDS, prune_built
from lm.data.pipeline.quality import labelled_texts, model_name, plain_line, train_model
from lm.data.pipeline.run import Pipeline
from lm.data.pipeline.shared import after_all_stages
from lm.data.pipeline.stage import StageSpec
from lm.data.sources import SourceSpec

GOOD = ("the theorem follows from lemma {}", "we measure {} samples of water", "in chapter {} the proof is given")
BAD = ("buy {} cheap pills now", "click here to win {} coins !!!", "hot deals: {} percent off today")
SHARED = ("it is what it is", "number {} on the list", "see page {} for more")


def texts(kind: tuple[str, ...], count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [". ".join(rng.choice(kind + SHARED).format(rng.randrange(50)) for _ in range(12)) for _ in range(count)]


@pytest.fixture
def labelled(tmp_path) -> dict:
    rows = [json.dumps({"text": text}) for text in texts(GOOD, 150, 1)]
    (tmp_path / "good.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "bad.txt").write_text("\n".join(texts(BAD, 150, 2)) + "\n")
    return {
        "positives": str(tmp_path / "good.jsonl"),
        "negatives": [str(tmp_path / "bad.txt")],
        "epochs": 20,
        "dim": 16,
        "buckets": 1000,
    }


def options(**changes) -> dict:
    return {**KINDS["quality"].options, **changes}


def web(folder, stage: StageSpec) -> tuple[list[str], dict, list[str]]:
    """(texts that stay, the stage's report, lines of the log) of 60 good and 60 bad texts."""
    found = texts(GOOD, 60, 3) + texts(BAD, 60, 4)
    (folder / "web.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in found))
    lines: list[str] = []
    spec = SourceSpec("web", "jsonl", options={"data_files": str(folder / "web.jsonl")}, stages=(stage,))
    documents, reports = Pipeline(spec, folder / "cache", lines.append).run()
    return [item.string for item in documents], reports[-1], lines


def test_good_texts_stay_and_the_funnel_counts_scores(labelled, tmp_path) -> None:
    kept, report, lines = web(tmp_path, StageSpec("quality", labelled))
    assert set(kept) == set(texts(GOOD, 60, 3))
    scores = {**{name: count["documents"] for name, count in report["dropped"].items()}}
    for name, count in report["notes"].items():
        scores[name] = scores.get(name, 0) + count
    assert sum(scores.values()) == 120 and all(name.startswith("quality 0.") for name in scores)
    assert scores["quality 0.9 to 1.0"] > 30 and scores["quality 0.0 to 0.1"] > 30
    (folder,) = (tmp_path / "cache" / ".built").iterdir()
    about = json.loads((folder / "report.json").read_text())
    assert about["positives"] + about["negatives"] + about["held_out"] == 300 and about["held_out"] > 10
    assert about["auc"] > 0.99
    assert about["kept_of_held_out_positives_and_negatives_by_threshold"]["0.5"] == pytest.approx([1, 0], abs=0.1)
    assert sum("trained on" in line for line in lines) == 1
    # another threshold: the stage again, with the same model
    kept, _, lines = web(tmp_path, StageSpec("quality", {**labelled, "threshold": 0.0}))
    assert len(kept) == 120 and not any("trained on" in line for line in lines)


def test_the_same_inputs_give_the_same_model_and_others_another(labelled, tmp_path) -> None:
    filled = options(**labelled)
    train_model(filled, tmp_path / "one", print)
    code = (
        "import sys, json; from pathlib import Path; from lm.data.pipeline.quality import train_model;"
        f"train_model(json.loads(sys.argv[1]), Path({str(tmp_path / 'two')!r}), print)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(filled)], check=True, stdout=subprocess.DEVNULL)
    for name in ("model.bin", "report.json"):
        assert sha256_file(tmp_path / "one" / name) == sha256_file(tmp_path / "two" / name)
    name = model_name(filled)
    assert model_name({**filled, "threshold": 0.7}) == name
    assert model_name({**filled, "seed": 1}) != name
    with (tmp_path / "bad.txt").open("a") as file:
        file.write("one more\n")
    assert model_name(filled) != name
    train_model({**filled, "seed": 1}, tmp_path / "three", print)
    assert sha256_file(tmp_path / "three" / "model.bin") != sha256_file(tmp_path / "one" / "model.bin")
    with pytest.raises(DataError, match="set a lower learning_rate"):
        train_model({**filled, "learning_rate": 100}, tmp_path / "four", print)
    assert not list((tmp_path / "four").iterdir())


def test_a_training_that_was_cut_off_is_done_again(labelled, tmp_path) -> None:
    filled = options(**labelled)
    train_model(filled, tmp_path / "model", print)
    whole = sha256_file(tmp_path / "model" / "model.bin")
    (tmp_path / "model" / "report.json").unlink()
    (tmp_path / "model" / "model.bin").write_bytes(b"torn")
    train_model(filled, tmp_path / "model", print)
    assert sha256_file(tmp_path / "model" / "model.bin") == whole
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.bin", "report.json"]


def test_a_given_model_and_what_is_not_used_is_removed(labelled, tmp_path, monkeypatch) -> None:
    filled = options(**labelled)
    folder = tmp_path / "cache" / ".built" / model_name(filled)
    train_model(filled, folder, print)
    (tmp_path / "given.bin").write_bytes((folder / "model.bin").read_bytes())
    both = filled, options(model=str(tmp_path / "given.bin"))
    trained, scored = map(KINDS["quality"].key, both)
    with monkeypatch.context() as patched:  # other lines to train on are none of a given model's
        patched.setattr(quality, "VERSION", quality.VERSION + 1)
        assert KINDS["quality"].key(both[0]) != trained and KINDS["quality"].key(both[1]) == scored
    prune_built(tmp_path / "cache", [StageSpec("quality", labelled)])
    assert folder.is_dir()
    given = StageSpec("quality", {"model": str(tmp_path / "given.bin"), "label": "negative"})
    kept, _, _ = web(tmp_path, given)
    assert set(kept) == set(texts(BAD, 60, 4))
    prune_built(tmp_path / "cache", [given])
    assert not folder.exists()
    spec = SourceSpec("web", "jsonl", options={"data_files": str(tmp_path / "web.jsonl")})
    after = after_all_stages((spec,), (StageSpec("quality", labelled),), tmp_path / "cache", print)
    assert {item.string for item in after["web"][0]} == set(texts(GOOD, 60, 3)) and folder.is_dir()
    with pytest.raises(DataError, match="the model has no label hq; set label to one of "):
        web(tmp_path, StageSpec("quality", {**given.options, "label": "hq"}))


def test_lines_as_the_classifier_sees_them() -> None:
    assert plain_line("Hello,\u2028World!\n__label__positive తెలుగు") == "hello , world ! positive తెలుగు"
    assert plain_line("東京は大きい。B&B ไทยนี่") == "東 京 は 大 き い 。 b & b ไ ท ย นี่"
    assert len(plain_line("a" * 100_000_000)) == 20_000


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"negatives": None}, "needs either positives and negatives"),
        ({"model": "x.bin"}, "needs either positives and negatives"),
        ({"positives": "none*.jsonl"}, "no file of positives matches none"),
        ({"text": "body"}, "line 1 is no JSON row with the column 'body'"),
        ({"learning_rate": -1}, "learning_rate must be a number"),
        ({"threshold": 2}, "threshold must be a number"),
    ],
)
def test_wrong_options(labelled, tmp_path, change: dict, line: str) -> None:
    with pytest.raises(DataError, match=line):
        web(tmp_path, StageSpec("quality", {**labelled, **change}))


def test_wrong_files(labelled, tmp_path) -> None:
    with pytest.raises(DataError, match=r"the model nowhere\.bin does not exist"):
        web(tmp_path, StageSpec("quality", {"model": "nowhere.bin"}))
    (tmp_path / "bad.txt").write_bytes(b"")
    with pytest.raises(DataError, match="negatives has no text to train on"):
        web(tmp_path, StageSpec("quality", labelled))
    for content, line in ((b"caf\xe9", "line 1 is not UTF-8"), (b'{"text": 3}', "column 'text' must hold text")):
        (tmp_path / "x.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=line):
            list(labelled_texts(tmp_path / "x.jsonl", "text"))
