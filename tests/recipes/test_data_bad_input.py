"""What recipes.data says to wrong options, damaged folders and odd lines: one line, exit status 2."""

import json

import numpy as np
import pytest
import yaml

from lm.data.files import DataError
from lm.data.mix import rule_of
from lm.data.packing import packed_counts
from lm.data.pipeline.decontaminate import evaluation_ngrams
from lm.data.pipeline.filters import _arguments
from lm.data.pipeline.kinds import KINDS, stage_kind, stage_specs
from lm.data.pipeline.option_types import checked_options
from lm.data.pipeline.quality import _require_whole
from lm.data.pipeline.stage import REQUIRED, Range
from lm.data.plan import DataPlan, Stage
from lm.data.preparation import _nothing_left
from lm.data.prepare_config import PrepareConfig
from lm.data.shards import load_manifest
from lm.data.sources import SourceSpec, _jsonl_row, kind_of
from lm.data.synthetic import write_folder
from lm.errors import ConfigError
from recipes.data import load_config, main
from recipes.data_table import print_table


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"kind": "language", "model": 5}, "model must be text"),
        ({"kind": "language", "languages": [False]}, "languages must be a string or a list of strings"),
        ({"kind": "gopher_quality", "min_doc_words": "x"}, "min_doc_words must be a number of at least 0"),
        ({"kind": "gopher_quality", "stop_words": 5}, "stop_words must be a string or a list"),
        ({"kind": "gopher_repetition", "top_n_grams": [1]}, "top_n_grams must be a list of [n, fraction]"),
        ({"kind": "gopher_repetition", "dup_n_grams": [[0, 0.1]]}, "dup_n_grams must be a list of [n, fraction]"),
        ({"kind": "c4", "min_num_sentences": None}, "min_num_sentences must be a number of at least -1"),
        ({"kind": "fineweb", "line_punct_thr": float("nan")}, "line_punct_thr must be a number"),
        ({"kind": "near_duplicates", "seed": -1}, "seed must be a whole number"),
        ({"kind": "pii", "kinds": []}, "kinds must be a string or a list of strings, at least one"),
        ({"kind": "decontaminate", "files": []}, "files must be a string or a list of strings, at least one"),
        ({"kind": "extract", "favor_precision": "x"}, "favor_precision must be true or false"),
        ({"kind": "extract", "max_bytes": 0}, "max_bytes must be a number from 1 to 1e+12, got 0"),
        ({"kind": "language", "threshold": 65}, "threshold must be a number from 0 to 1, got 65"),
        ({"kind": "quality", "learning_rate": -1}, "learning_rate must be a number from 1e-06 to 100"),
        ({"kind": "quality", "dim": 2.5}, "dim must be a whole number from 1 to 1000"),
        ({"kind": "near_duplicates", "bands": 0}, "bands must be a whole number from 1 to 10000"),
        ({"kind": "near_duplicates", "keep": "last"}, "keep must be one of first, longest"),
        ({"kind": "repeated_substrings", "action": "keep"}, "action must be one of cut, drop"),
        ({"kind": "repeated_substrings", "min_tokens": float("inf")}, "min_tokens must be a whole number from 2"),
        ({"kind": "exact_paragraphs", "min_kept_fraction": 30}, "min_kept_fraction must be a number from 0 to 1"),
        ({"kind": "blocked_words", "files": "x", "max_fraction": -0.1}, "max_fraction must be a number from 0 to 1"),
        ({"kind": "blocked_urls", "files": "x", "missing": "ignore"}, "missing must be one of keep, drop"),
        ({"kind": "decontaminate", "files": "x", "ngram": 2}, "ngram must be a whole number from 5 to 1000"),
        ({"kind": "pii", "kinds": ["email", "shoe_size"]}, "kinds must be some of email, iban"),
        ({"kind": "gopher_quality", "max_symbol_word_ratio": 10}, "max_symbol_word_ratio must be a number from 0 to 1"),
        ({"kind": "fineweb", "short_line_thr": 67}, "short_line_thr must be a number from 0 to 1"),
        ({"kind": "gopher_repetition", "dup_n_grams": [[5, 15]]}, "dup_n_grams must be a list of [n, fraction]"),
    ],
)
def test_stage_options_of_another_type(stage, message) -> None:
    with pytest.raises(DataError, match="here: stage") as error:
        stage_specs([stage], "here")
    assert message in str(error.value)


def test_ways_to_switch_a_filter_off_stay() -> None:
    c4 = {"kind": "c4", "max_word_length": -1, "min_num_sentences": -1}
    assert (
        len(stage_specs([c4, {"kind": "gopher_quality", "min_doc_words": None, "max_doc_words": float("inf")}], ""))
        == 2
    )
    (spec,) = stage_specs([{"kind": "repeated_substrings", "shard_bytes": 1e6}], "")
    assert str(stage_kind(spec, "")[1]["shard_bytes"]) == "1000000"


def test_every_number_of_a_stage_has_a_range_that_holds_its_default() -> None:
    for name, kind in KINDS.items():
        numbers = {option for option, value in kind.options.items() if type(value) in (int, float)}
        ranges = {option: limit for option, limit in kind.allowed.items() if isinstance(limit, Range)}
        off = {option for option, limit in ranges.items() if limit.off and kind.options[option] is None}
        assert numbers | off == ranges.keys(), name
        words = {option: value for option, value in kind.options.items() if value is not REQUIRED}
        assert checked_options(name, kind.options, kind.allowed, words, name) == words


def test_one_stop_word_is_a_word_and_not_its_letters() -> None:
    assert _arguments({"stop_words": "der"}) == {"stop_words": ["der"]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jsonl", {"data_files": 5}),
        ("jsonl", {"data_files": [None]}),
        ("jsonl", {"data_files": {"train": "x"}}),
        ("jsonl", {"data_files": "x", "snapshot_path": ["a"]}),
        ("dataset", {"path": "json", "args": 5}),
        ("dataset", {"path": "json", "revision": 5}),
        ("python", {"packages": 5}),
    ],
)
def test_source_options_of_another_type(kind, options) -> None:
    with pytest.raises(DataError, match=r"source 'a': option .* must be .*, got"):
        kind_of(SourceSpec("a", kind, options=options))


def test_one_package_is_a_name_and_not_its_letters() -> None:
    spec = SourceSpec("a", "python", options={"packages": "no-such-package"})
    with pytest.raises(DataError, match="needs package no-such-package"):
        kind_of(spec).identity(spec)


def config(tmp_path, **changes):
    source = {"kind": "jsonl", "data_files": "x.jsonl", **changes.pop("source", {})}
    settings = {"out": "o", "sources": {"a": source}, "tokenizer": {"vocab_size": 280, "sample_bytes": 64e6}, **changes}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_float_that_is_whole_is_a_whole_number(tmp_path) -> None:
    assert load_config(config(tmp_path))[0].tokenizer_sample_bytes == 64_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": 5}, "out in .* must be a folder"),
        ({"stages": False}, "stages must be a list, got False"),
        ({"source": {"stages": 0}}, "stages must be a list, got 0"),
        ({"source": {"language": False}}, 'language must be a code .*as "no"'),
        ({"workers": 10**6}, "workers must be 1 to 1,024"),
        ({"tokenizer": False}, "tokenizer in .* must be a mapping"),
    ],
)
def test_configs(tmp_path, changes, message) -> None:
    with pytest.raises(DataError, match=message):
        load_config(config(tmp_path, **changes))


@pytest.mark.parametrize("out", ["file", "file/x", "a\0b"])
def test_out_that_can_be_no_folder(tmp_path, capsys, monkeypatch, out) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "x.jsonl").write_text('{"text": "t"}\n')
    assert main(["prepare", "--config", str(config(tmp_path)), "--out", out]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "file", "x.jsonl"]


def test_a_source_may_be_called_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recipes.data.print_table", lambda folder: None)
    rows = [{"text": f"document {i} about subject {i % 7}"} for i in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "data_files": str(tmp_path / "x.jsonl")}
    path = config(tmp_path, sources={"work": source}, tokenizer={"vocab_size": 257}, validation_fraction=0.2)
    assert main(["prepare", "--config", str(path), "--out", str(tmp_path / "o")]) == 0
    assert load_manifest(tmp_path / "o").tokens("train")["work"] > 0
    assert not (tmp_path / "o" / ".work").exists()


def test_numbers_of_thousands_of_digits_are_a_malformed_line_not_the_end(tmp_path) -> None:
    row, problem = _jsonl_row('{"text": "x", "n": ' + "9" * 5000 + "}", "text", "f line 1")
    assert not row and problem.startswith("f line 1 cannot be read") and "\n" not in problem


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, "{"])
def test_evaluation_rows_that_cannot_be_read(tmp_path, text) -> None:
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"e\.jsonl line 1 is not JSON that can be read"):
        evaluation_ngrams([tmp_path / "e.jsonl"], 13)


def test_evaluation_files_without_text(tmp_path) -> None:
    (tmp_path / "e.txt").write_text("two words\n")
    with pytest.raises(DataError, match="hold no text of at least 5 words"):
        evaluation_ngrams([tmp_path / "e.txt"], 13)


def test_the_stage_that_took_the_last_document_is_named() -> None:
    rows = [
        {"stage": "read", "documents_in": 3, "documents_out": 3},
        {"stage": "c4", "documents_in": 3, "documents_out": 0,
         "dropped": {"curly_bracket": {"documents": 3}}, "samples": {}},
    ]  # fmt: skip
    assert "no document is left after c4 (3 of 3: curly_bracket)" in str(_nothing_left("a", rows))


@pytest.mark.parametrize(
    "weights", [{1: 2}, {None: 1}, {"unimax": 4, 3: 4}, {"unimax": 4, "sources": [["a"]]}, {"temperature": 1e-320}]
)
def test_weights_that_are_no_mix(weights) -> None:
    with pytest.raises(ConfigError, match="weights: "):
        rule_of(weights)


def test_weights_that_do_not_add_up() -> None:
    with pytest.raises(ConfigError, match="too large to add up"):
        DataPlan(0, 8, (Stage(0, 8, {"a": 1e308, "b": 1e308}),))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    documents = [np.array([*range(1, 30), 0])] * 3
    write_folder(path, {"a": {"train": documents, "validation": documents}}, 257)
    return path


def test_a_source_too_small_to_be_drawn_does_not_spoil_what_was_prepared(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("lm.data.blocks.MAX_BLOCK_SAMPLES", 1024)  # a million: a corpus of gigabytes beside a sentence
    large, small = ([np.array([*[1] * n, 0])] for n in (5000, 1))
    write_folder(tmp_path / "d", {n: {"train": d, "validation": large} for n, d in (("a", large), ("b", small))}, 257)
    print_table(tmp_path / "d")
    assert "warning: in proportion to tokens, the weight of 'b' is below 1 in 1024" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0.5", "1e16", "1e300", "nan"])
def test_lengths_of_a_run_that_cannot_be(folder, capsys, tokens) -> None:
    assert main(["table", "--dir", str(folder), "--tokens", tokens]) == 2
    assert "--tokens must be 1 to 1e+15" in capsys.readouterr().err


def test_packing_for_a_length_beyond_all_text_is_refused_and_not_tried(folder) -> None:
    plan = DataPlan(0, 10**10, (Stage(0, 10**10, {"a": 1}),), packing="best_fit")
    with pytest.raises(DataError, match="longer than all 90 tokens of source 'a'"):
        packed_counts(load_manifest(folder), plan)


@pytest.mark.parametrize("key", ["sources", "dtype", "vocab_size", "tokenizer_sha256"])
def test_manifests_that_lack_something(folder, capsys, key) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    for damaged in ({**content, key: []}, {name: value for name, value in content.items() if name != key}):
        (folder / "manifest.json").write_text(json.dumps(damaged))
        for command in ("table", "verify", "lengths", "tokenizer"):
            assert main([command, "--dir", str(folder)]) == 2
            assert "manifest.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "null", '{"a": 5}', '{"a": [{}]}', "9" * 5000, "["])
def test_funnels_that_are_none(folder, capsys, text) -> None:
    (folder / "funnel.json").write_text(text)
    assert main(["funnel", "--dir", str(folder)]) == 2
    assert "funnel.json is damaged" in capsys.readouterr().err


def test_workers_have_an_end() -> None:
    with pytest.raises(DataError, match="workers must be 1 to"):
        PrepareConfig((SourceSpec("a", "jsonl"),), 280, workers=10**9)


def test_a_model_that_a_full_disk_cut_off_is_not_kept(tmp_path) -> None:
    fasttext = pytest.importorskip("fasttext")
    lines = [f"{'good' if i % 2 else 'bad'} {i % 5}" for i in range(40)]
    text = "".join(f"__label__{'positive' if i % 2 else 'negative'} {line}\n" for i, line in enumerate(lines))
    (tmp_path / "t.txt").write_text(text)
    model = fasttext.train_supervised(
        input=str(tmp_path / "t.txt"), thread=1, verbose=0, dim=8, bucket=10, minCount=1, lr=1.0, epoch=20
    )
    path = tmp_path / "model.bin"
    model.save_model(str(path))
    _require_whole(path, model, lines)
    path.write_bytes(path.read_bytes()[:-80])
    with pytest.raises(OSError, match="not written whole"):
        _require_whole(path, model, lines)
    assert not path.exists()
