"""Sources with stages, end to end: the funnel, the same bytes twice, resuming by stage, kills, odd input."""

import io
import json
from itertools import pairwise

import pytest

from lm.data.files import DataError, sha256_file
from lm.data.pipeline import run as pipeline_run
from lm.data.pipeline.run import Pipeline
from lm.data.pipeline.stage import StageSpec
from lm.data.prepare import PrepareConfig, prepare
from lm.data.sources import SourceSpec
from recipes.data import main
from tests.lm.test_pipeline_stages import GERMAN, TELUGU


def sentences(seed: int, n: int = 8) -> str:
    names = ("harbour", "lantern", "captain", "market", "river", "garden", "winter", "letter", "window", "bridge")
    parts = [
        f"The {names[(seed * 7 + i * 3) % 10]} number {seed * 100 + i} was seen by {names[i % 10]} {seed}."
        for i in range(n)
    ]
    return " ".join(parts)


def rows() -> list[dict]:
    texts = [sentences(seed) for seed in range(60)]
    texts += [sentences(3), sentences(4) + " ", "Mail me: jo@example.org. " + sentences(70), GERMAN]
    return [{"text": text, "url": f"https://site{i % 3}.example/{i}"} for i, text in enumerate(texts)]


@pytest.fixture
def source(tmp_path):
    lines = [json.dumps(row).encode() for row in rows()] + [b'{"text": ', b'{"text": "caf\xe9"}', b'{"text": " "}']
    (tmp_path / "web.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    def make(*stages, **options) -> SourceSpec:
        stages = stages or (
            StageSpec("language"),
            StageSpec("exact_documents"),
            StageSpec("pii"),
            StageSpec("near_duplicates", options),
        )
        return SourceSpec(
            "web", "jsonl", options={"data_files": str(tmp_path / "web.jsonl"), "url": "url"}, stages=stages
        )

    return make


def config(spec: SourceSpec) -> PrepareConfig:
    return PrepareConfig(sources=(spec,), vocab_size=300, validation_fraction=0.2)


def contents(folder) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_funnel_adds_up_and_the_same_config_gives_the_same_bytes(source, tmp_path, capsys) -> None:
    for out in ("one", "two"):
        prepare(config(source()), tmp_path / out)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    funnel = json.loads((tmp_path / "one" / "funnel.json").read_text())["web"]
    stages = ["read", "language", "exact_documents", "pii", "near_duplicates", "exact dedup over sources"]
    assert [row["stage"] for row in funnel] == stages
    for row, after in pairwise(funnel):
        assert (row["documents_out"], row["bytes_out"]) == (after["documents_in"], after["bytes_in"])
    for row in funnel:
        gone = row["documents_in"] - row["documents_out"]
        assert gone == sum(count["documents"] for count in row["dropped"].values())
        for reason in row["dropped"]:
            if row["stage"] != stages[-1]:
                assert 1 <= len(row["samples"][reason]) <= 10
    read, language, exact, pii, *_ = funnel
    assert read["documents_in"] == 67
    assert {reason: count["documents"] for reason, count in read["dropped"].items()} == {
        "empty": 1, "malformed": 1, "not UTF-8": 1,
    }  # fmt: skip
    assert language["dropped"].keys() == {"language de"} and language["samples"]["language de"][0]["text"] == GERMAN
    assert exact["dropped"]["same text as an earlier document"]["documents"] == 2
    assert pii["notes"] == {"email": 1} and pii["changed"] == 1
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())["sources"]["web"]["splits"]
    assert funnel[-1]["documents_out"] == sum(split["documents"] for split in manifest.values())
    assert main(["funnel", "--dir", str(tmp_path / "one"), "--samples"]) == 0
    printed = capsys.readouterr().out
    assert "- language de: 1 documents" in printed and "* email: 1" in printed and GERMAN in printed
    assert (tmp_path / "one" / "funnel.png").read_bytes()[1:4] == b"PNG"


def test_only_a_changed_stage_and_what_follows_run_again(source, tmp_path, monkeypatch) -> None:
    lines: list[str] = []
    prepare(config(source()), tmp_path / "out", log=lines.append)
    assert sum("documents kept" in line for line in lines) == 5
    lines.clear()
    changed = config(source(bands=20, rows=5))
    prepare(changed, tmp_path / "out", overwrite=True, log=lines.append)
    assert [line.split(":")[1].strip() for line in lines if "documents kept" in line] == ["near_duplicates"]
    fresh = tmp_path / "elsewhere" / "out"
    fresh.parent.mkdir()
    prepare(changed, fresh)
    assert contents(tmp_path / "out") == contents(fresh)
    assert len(list((tmp_path / ".out.stages" / "web").iterdir())) == 5  # the old outcome is gone


def test_a_kill_within_a_stage_costs_that_stage_only(source, tmp_path, monkeypatch) -> None:
    original = pipeline_run.StageReport.count
    calls = {"left": 150}  # within the third step

    def count(self, item, outcome) -> None:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        original(self, item, outcome)

    monkeypatch.setattr(pipeline_run.StageReport, "count", count)
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source()), tmp_path / "out")
    monkeypatch.setattr(pipeline_run.StageReport, "count", original)
    lines: list[str] = []
    prepare(config(source()), tmp_path / "out", log=lines.append)
    stages = [line.split(":")[1].strip() for line in lines if "documents kept" in line]
    assert stages == ["exact_documents", "pii", "near_duplicates"]
    fresh = tmp_path / "elsewhere" / "out"
    fresh.parent.mkdir()
    prepare(config(source()), fresh)
    assert contents(tmp_path / "out") == contents(fresh)


def test_a_torn_stage_is_done_again(source, tmp_path) -> None:
    spec = source()
    pipeline = Pipeline(spec, tmp_path / "cache")
    whole = [item.text for item in pipeline.run()[0]]
    store = tmp_path / "cache" / "web" / pipeline.names[3] / "documents.text"
    store.write_bytes(store.read_bytes()[:-5])
    assert [item.text for item in Pipeline(spec, tmp_path / "cache").run()[0]] == whole


def test_changed_words_of_a_list_are_another_stage(source, tmp_path) -> None:
    listed = tmp_path / "words.txt"
    names = []
    for word in ("lantern", "captain"):
        listed.write_text(word)
        spec = source(StageSpec("exact_documents"), StageSpec("blocked_words", {"files": str(listed)}))
        names.append(Pipeline(spec, tmp_path / "cache").names)
    assert names[0][:2] == names[1][:2] and names[0][2] != names[1][2]


def test_odd_documents_come_through_unharmed(tmp_path) -> None:
    odd = ["one\u2028two\u2029three\x85four\x0cfive\rsix", TELUGU, GERMAN, "def f():\n\treturn {1: '\u00e9'}\n"]
    odd.append("== Heading ==\n* [[Link|text]] ''it'' {{template|a=b}}\n{| class=wikitable\n| cell\n|}")
    odd.append(" ".join(f"n{i}" for i in range(300_000)))  # 2 MB in one line
    lines = [json.dumps({"text": text}).encode() for text in odd] + [
        b'{"text": "\\ud800 alone"}',
        b'{"text": 7}',
        b"[]",
    ]
    (tmp_path / "odd.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    stages = ("exact_documents", "exact_paragraphs", "near_duplicates", "pii", "gopher_quality")
    spec = SourceSpec(
        "odd", "jsonl", options={"data_files": str(tmp_path / "*.jsonl")}, stages=tuple(map(StageSpec, stages[:4]))
    )
    documents, reports = Pipeline(spec, tmp_path / "cache").run()
    assert [item.string for item in documents] == odd
    assert {reason: count["documents"] for reason, count in reports[0]["dropped"].items()} == {
        "malformed": 1, "not UTF-8": 1, "not text": 1,
    }  # fmt: skip
    spec = SourceSpec("odd", "jsonl", options=spec.options, stages=tuple(map(StageSpec, stages)))
    _, reports = Pipeline(spec, tmp_path / "cache").run()
    assert "gopher_long_doc" in reports[-1]["dropped"]


def test_warc_to_text(tmp_path) -> None:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with (tmp_path / "crawl.warc.gz").open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        page = f"<html><body><nav>Menu</nav><article><p>{sentences(0)}</p></article></body></html>".encode()
        russian = "Погода была хорошей, и ветер стих. Рыбак не верил тишине. " * 4
        quoted = "It’s a “quoted” piece — of text, about naïve cafés. " * 9
        meta = f"<html><head><meta charset='windows-1251'></head><body><p>{russian}</p></body></html>"
        pages = [
            ("text/html; charset=utf-8", "200 OK", page),
            ("image/png", "200 OK", page),
            ("text/html", "404 Not Found", page),
            ('text/plain; charset="Windows-1251"', "200 OK", russian.encode("cp1251")),
            ("text/html", "200 OK", meta.encode("cp1251")),
            ("text/plain; charset=ISO-8859-1", "200 OK", quoted.encode("cp1252")),  # as servers say and browsers read
            ("text/plain", "200 OK", (GERMAN * 5).encode("latin-1")),  # nothing says so
            ("text/plain; charset=idna", "200 OK", russian.encode() + b"\xd0"),  # cut off inside a letter
            ("text/plain; charset=utf-8", "200 OK", bytes(range(256)) * 4),
        ]
        for number, (kind, status, body) in enumerate(pages):
            http = StatusAndHeaders(status, [("Content-Type", kind)], protocol="HTTP/1.1")
            record = writer.create_warc_record(
                f"https://site.example/{number}", "response", payload=io.BytesIO(body), http_headers=http
            )
            writer.write_record(record)
    whole = (tmp_path / "crawl.warc.gz").read_bytes()
    (tmp_path / "torn.warc.gz").write_bytes(whole[: len(whole) // 5])
    (tmp_path / "zero.warc.gz").write_bytes(b"")
    spec = SourceSpec(
        "crawl", "warc", options={"data_files": str(tmp_path / "*.warc.gz")}, stages=(StageSpec("extract"),)
    )
    documents, reports = Pipeline(spec, tmp_path / "cache").run()
    texts = {0: sentences(0), 3: russian, 4: russian.strip(), 5: quoted, 6: GERMAN * 5, 7: russian + "\ufffd"}
    assert {item.url: item.string for item in documents} == {f"https://site.example/{n}": t for n, t in texts.items()}
    assert reports[1]["dropped"].keys() == {"no main text"}
    assert reports[0]["documents_out"] >= 1


def test_stages_of_a_config_file(source, tmp_path, capsys) -> None:
    source()
    text = f"""
out: {tmp_path}/out
sources:
  web:
    kind: jsonl
    data_files: {tmp_path}/web.jsonl
    stages: [exact_documents, {{kind: pii, kinds: [email]}}]
tokenizer: {{vocab_size: 300}}
validation_fraction: 0.2
"""
    (tmp_path / "c.yaml").write_text(text)
    assert main(["prepare", "--config", str(tmp_path / "c.yaml")]) == 0
    (tmp_path / "c.yaml").write_text(text.replace("email", "emil"))
    capsys.readouterr()
    assert main(["prepare", "--config", str(tmp_path / "c.yaml"), "--overwrite"]) == 2
    assert "stage pii: kinds must be some of email" in capsys.readouterr().err


def test_a_folder_without_stages_has_no_funnel(source, tmp_path) -> None:
    spec = SourceSpec("web", "jsonl", options={"data_files": str(tmp_path / "web.jsonl")})
    source()
    prepare(config(spec), tmp_path / "out")
    assert not (tmp_path / "out" / "funnel.json").exists() and not (tmp_path / ".out.stages").exists()
    with pytest.raises(DataError, match="it is written by `prepare` when a source"):
        from recipes.data import print_funnel

        print_funnel(tmp_path / "out", False, False)


def test_a_given_tokenizer_is_taken_as_it_is(source, tmp_path, capsys) -> None:
    source()
    text = f"""
sources: {{web: {{kind: jsonl, data_files: {tmp_path}/web.jsonl}}}}
tokenizer: {{vocab_size: 300}}
validation_fraction: 0.2
"""
    (tmp_path / "a.yaml").write_text(text)
    assert main(["prepare", "--config", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "first")]) == 0
    given = tmp_path / "first" / "tokenizer.json"
    (tmp_path / "b.yaml").write_text(text.replace("vocab_size: 300", f"file: {given}"))
    assert main(["prepare", "--config", str(tmp_path / "b.yaml"), "--out", str(tmp_path / "second")]) == 0
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("first", "second"))
    assert sha256_file(tmp_path / "second" / "tokenizer.json") == sha256_file(given)
    assert first["shards_sha256"] == second["shards_sha256"] and second["vocab_size"] == 300
    # one that loses the spaces, and one without an end
    content = json.loads(given.read_text())
    for name, change in {
        "lossy": {"normalizer": {"type": "Lowercase"}},
        "endless": {"added_tokens": [], "model": {**content["model"], "vocab": {"a": 0}, "merges": []}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**content, **change}))
        (tmp_path / "c.yaml").write_text(text.replace("vocab_size: 300", f"file: {tmp_path}/{name}.json"))
        capsys.readouterr()
        assert main(["prepare", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "third")]) == 2
        error = capsys.readouterr().err
        assert ("does not give back every text" if name == "lossy" else "has no <|endoftext|>") in error
