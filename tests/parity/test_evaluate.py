"""recipes.evaluate against an independent computation from the exported model in transformers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from lm.data.shards import load_manifest
from lm.data.tokenizer import load_tokenizer
from lm.evaluation.contamination import documents
from recipes.benchmarks import measured
from recipes.evaluate import main
from tests.parity.conftest import VOCAB, WORDS
from tests.parity.helpers import load_transformers

TEXT = "the model reads naïve café — 12 times\n" * 40
WINDOW = 64


def scores(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    out = tmp_path / "scores.json"
    assert main([*arguments, "--json", str(out)]) == 0, capsys.readouterr().err
    return json.loads(out.read_text()), capsys.readouterr().out


@torch.no_grad()
def nats_of(reference, ids: list[int]) -> torch.Tensor:
    """-ln P of each token but the first, from the logits of the whole sequence at once."""
    tokens = torch.tensor([ids])
    logits = reference(tokens).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def test_a_text_file_as_transformers_scores_it(run_folder: Path, exported: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    options = ["--text", str(path), "--window", str(WINDOW), "--context", "32"]
    found, printed = scores(["--ckpt_path", str(run_folder), *options], tmp_path, capsys)
    ours = found["text"][str(path)]
    reference = load_transformers(exported)
    ids = AutoTokenizer.from_pretrained(exported, local_files_only=True)(TEXT)["input_ids"]
    nats, step = nats_of(reference, ids[: WINDOW + 1]).sum(), WINDOW - 32
    for start in range(step, len(ids) - 1 - 32, step):
        nats += nats_of(reference, ids[start : start + WINDOW + 1])[32:].sum()
    first = len(load_tokenizer(exported).decode(ids[:1]).encode())
    assert ours["tokens"] == len(ids) - 1 and ours["bytes"] == len(TEXT.encode()) - first
    assert ours["loss"] == pytest.approx(float(nats) / (len(ids) - 1), abs=5e-5)
    assert ours["bits_per_byte"] == pytest.approx(float(nats) / ours["bytes"] / math.log(2), abs=5e-5)
    assert ours["perplexity"] == pytest.approx(math.exp(ours["loss"]))
    assert printed.index("bits/byte") < printed.index("perplexity")
    from_hf, _ = scores(["--ckpt_path", str(exported), *options], tmp_path, capsys)
    assert from_hf["text"][str(path)] == pytest.approx(ours, rel=1e-5)


def test_held_out_windows_as_transformers_scores_them(run_folder, exported, corpus, tmp_path, capsys) -> None:
    found, _ = scores(["--ckpt_path", str(run_folder), "--data", str(corpus)], tmp_path, capsys)
    manifest, reference = load_manifest(corpus), load_transformers(exported)
    tokenizer = load_tokenizer(corpus)
    ids = [i for text in documents(manifest, "a", tokenizer, "validation") for i in [*tokenizer.encode(text).ids, 0]]
    nats = tokens = 0.0
    for start in range(0, (len(ids) - 1) // WINDOW * WINDOW, WINDOW):
        part = ids[start : start + WINDOW + 1]
        ends = [-1, *(i for i, token in enumerate(part[:-1]) if token == 0), WINDOW]
        for before, end in pairwise(ends):
            piece = part[before + 1 : end + 1]
            if len(piece) > 1:
                nats += float(nats_of(reference, piece).sum())
                tokens += len(piece) - 1
    assert found["text"]["a"]["tokens"] == tokens
    assert found["text"]["a"]["loss"] == pytest.approx(nats / tokens, abs=5e-5)


def test_questions(run_folder: Path, exported: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    """What the model itself writes counts as right, and the probability of an answer is that of transformers."""
    questions = tmp_path / "q.jsonl"
    prompts = [*WORDS[:2], "line 12"]
    settings = ["--ckpt_path", str(run_folder), "--max-new-tokens", "6"]
    found, _ = scores([*settings, "--prompt", *prompts], tmp_path, capsys)
    written = [row["text"].lstrip("\n").split("\n")[0].strip() for row in found["prompts"]]
    assert all(written)
    rows = [{"prompt": p, "answer": ["no such thing", w.upper() + "!"]} for p, w in zip(prompts, written, strict=True)]
    rows.append({"prompt": "the model", "answer": "reads"})
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found, printed = scores([*settings, "--questions", str(questions)], tmp_path, capsys)
    score = found["questions"][str(questions)]
    assert [row["exact"] for row in score["answers"]][:3] == [True, True, True]
    assert score["interval"][0] < score["exact_match"] < score["interval"][1] or score["exact_match"] == 1
    tokenizer = load_tokenizer(corpus)
    prompt, answer = tokenizer.encode("the model").ids, tokenizer.encode(" reads").ids
    want = -float(nats_of(load_transformers(exported), [*prompt, *answer])[len(prompt) - 1 :].sum())
    assert score["answers"][3]["log_probability"] == pytest.approx(want, abs=1e-4)
    assert "exact match" in printed and "ln P(answer)" in printed


def test_contamination_finds_what_was_planted(run_folder: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    manifest = load_manifest(corpus)
    seen = next(documents(manifest, "a", load_tokenizer(corpus)))
    rows = [seen, "words that nobody wrote down in this corpus before today, not even one of them twice", "short"]
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    options = ["--ckpt_path", str(run_folder), "--data", str(corpus), "--text", str(path), "--contamination"]
    found, printed = scores(options, tmp_path, capsys)
    report = found["contamination"][str(path)]
    assert (report["texts"], report["too_short"], [row["index"] for row in report["found"]]) == (3, 1, [0])
    assert report["found"][0]["share"] == 1.0 and report["found"][0]["source"] == "a"
    assert "1 of 2 texts" in printed


def test_long_context_figures(run_folder: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    options = ["--ckpt_path", str(run_folder), "--data", str(corpus), "--window", "512", "--plots", str(tmp_path / "p")]
    probes = ["--probes", "needle", "variables", "--lengths", "512", "256", "512", "--samples", "1"]
    found, printed = scores([*options, *probes], tmp_path, capsys)
    cells = found["probes"]["cells"]
    assert {(c["task"], c["length"], c["depth"]) for c in cells} == {
        (task, length, depth)
        for task in ("needle", "variables")
        for length in (256, 512)
        for depth in (0, 0.25, 0.5, 0.75, 1)
    }
    assert (tmp_path / "p" / "long_context.png").stat().st_size > 10_000
    assert "needle" in printed and "holds 85% up to" in printed


def test_the_harness_on_a_local_task(exported: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    """Offline; it counts a question as right where transformers gives the right choice the larger probability."""
    rows = [(WORDS[0][:20], [WORDS[0][20:], "zzz"]), ("the model", [" qqq", " reads"]), ("line", [" 7", " seven"])]
    reference, tokenizer = load_transformers(exported), load_tokenizer(corpus)
    gold = []
    for question, choices in rows:
        ids = [tokenizer.encode(question + choice).ids for choice in choices]
        start = len(tokenizer.encode(question).ids) - 1
        nats = [float(nats_of(reference, row)[start:].sum()) for row in ids]
        gold.append(nats.index(min(nats)))
    gold[2] = 1 - gold[2]  # one is wrong
    data = [{"q": q, "choices": c, "gold": g} for (q, c), g in zip(rows, gold, strict=True)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(
        f"""task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "q.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    found, printed = scores(["--ckpt_path", str(exported), "--tasks", str(tmp_path / "own.yaml")], tmp_path, capsys)
    assert found["tasks"]["own"]["acc,none"] == pytest.approx(2 / 3) and found["tasks"]["own"]["questions"] == 3
    assert "standard error" in printed
    own = (tmp_path / "own.yaml").read_text()
    silent = tmp_path / "silent.yaml"
    silent.write_text(yaml.safe_dump({**yaml.safe_load(own), "task": "silent", "metric_list": []}))
    files = [str(tmp_path / "own.yaml"), str(silent)]
    found, printed = scores(["--ckpt_path", str(exported), "--tasks", *files], tmp_path, capsys)
    assert found["tasks"]["own"]["acc,none"] == pytest.approx(2 / 3) and found["tasks"]["silent"] == {"questions": 0}
    assert "nothing: metric_list names none" in printed
    (tmp_path / "empty.jsonl").write_text("")
    for text, message in (
        ("", "must have task, dataset_path"),
        ("a: [1", "is not YAML"),
        (own.replace("{q}", "{q"), "--tasks own: TemplateSyntaxError"),
        (own.replace("q.jsonl", "empty.jsonl"), "--tasks own: "),
        (silent.read_text(), "--tasks silent: nothing was measured"),
    ):
        (tmp_path / "odd.yaml").write_text(text)
        assert main(["--ckpt_path", str(exported), "--tasks", str(tmp_path / "odd.yaml")]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in errors[0], errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate"),
        (["--text", "absent.txt"], "absent.txt cannot be read"),
        (["--questions", "bad.jsonl"], "line 2: 'answer' must be"),
        (["--probes", "needle"], "--probes needs --data"),
        (["--prompt", "x", "--window", "0"], "--window must be at least 1"),
        (["--tasks", "own.yaml"], "runs on an exported model"),
        (["--prompt", ""], "a prompt has no tokens"),
        (["--prompt", "x", "--top-p", "2"], "top_p must be"),
        (["--prompt", "x", "--device", "tpu"], "--device 'tpu' is not on this machine"),
        (["--prompt", "x", "--device", "meta"], "--device 'meta' is not on this machine"),
        (["--prompt", "\ud800"], "--prompt, text 1 holds a lone surrogate"),
        (["--prompt", "x", "--max-new-tokens", "10000000000"], "ask for fewer new tokens"),
        (["--prompt", "x", "--json", "."], ". is a folder; name a file"),
        (["--prompt", "x", "--json", "bad.jsonl/scores.json"], "bad.jsonl is a file"),
        (["--prompt", "x", "--plots", "bad.jsonl"], "bad.jsonl cannot be written: bad.jsonl is a file"),
        (["--prompt", "x", "--share", "nan"], "--share must be above 0"),
        (["--questions", "half.jsonl"], "line 1 holds a lone surrogate"),
        (["--questions", "deep.jsonl"], "line 1: not JSON"),
        (["--text", "deep.jsonl"], "line 1: not JSON"),
        (["--text", "bad.jsonl"], "line 1: no text in field 'text'"),
        (["--data", "DATA", "--window", "1000000"], "no source has 1,000,001 held-out tokens"),
        (["--data", "DATA", "--text", "marked.txt", "--context", "64"], "context must be from 0 to window - 1 = 63"),
        (["--data", "DATA", "--probes", "haystack"], "long-context task 'haystack' is unknown"),
        (["--data", "DATA", "--text", "marked.txt", "--contamination", "--ngram", "2"], "need 5 words or more, got 2"),
    ],
)
def test_mistakes_are_one_line(run_folder, corpus, tmp_path: Path, capsys, monkeypatch, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    Path("half.jsonl").write_text('{"prompt": "a", "answer": "\\ud800"}\n')
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("marked.txt").write_bytes("\ufeffwords".encode())
    arguments = [str(corpus) if argument == "DATA" else argument for argument in arguments]
    Path("bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": []}\n')
    assert main(["--ckpt_path", str(run_folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings must be a whole number above 0, got None"),
        ({"eos_token_id": VOCAB}, f"has no eos_token_id below the vocabulary's {VOCAB}"),
        ({"hidden_size": "x"}, "config.json: invalid literal for int()"),
        (None, "config.json holds no settings"),
    ],
)
def test_a_damaged_export_is_one_line(exported: Path, tmp_path: Path, capsys, changes, message) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).symlink_to(path)
    values = json.loads((exported / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[]" if changes is None else json.dumps({**values, **changes}))
    assert main(["--ckpt_path", str(tmp_path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_no_model_there(tmp_path: Path, capsys) -> None:
    assert main(["--ckpt_path", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_questions_of_a_group_are_those_of_its_tasks(exported: Path, tmp_path: Path) -> None:
    """Groups are named (mmlu), their tasks counted apart."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    (tmp_path / "q.jsonl").write_text('{"q": "the", "choices": [" model", " reads"], "gold": 0}\n' * 3)
    task = {
        "task": "one", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    group = {"group": "both", "task": [task, {**task, "task": "two"}], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    (tmp_path / "loose.yaml").write_text(yaml.safe_dump({"group": "loose", "task": [{**task, "task": "three"}]}))
    found = simple_evaluate(
        model="hf", model_args={"pretrained": str(exported), "dtype": "float32"}, tasks=["both", "loose"],
        device="cpu", log_samples=False, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    rows = measured(found)
    assert {name: row["questions"] for name, row in rows.items()} == {
        "both": 6, "both::one": 3, "both::two": 3, "loose::three": 3
    }  # fmt: skip
    assert rows["both"]["acc,none"] in (0.0, 1.0)
