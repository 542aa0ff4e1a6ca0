"""Stages over all sources and per snapshot: who keeps what, resuming, and a config without them is as ever."""

import json

import pytest

from lm.data.files import DataError, sha256_json
from lm.data.pipeline import run as pipeline_run
from lm.data.pipeline.kinds import KINDS, stage_specs
from lm.data.pipeline.run import Pipeline
from lm.data.pipeline.scope import outcomes
from lm.data.pipeline.shared import after_all_stages
from lm.data.pipeline.stage import Dropped, StageSpec
from lm.data.prepare import PrepareConfig, prepare
from lm.data.sources import SourceSpec
from recipes.data import load_config
from tests.lm.test_pipeline_near import store
from tests.lm.test_pipeline_run import sentences

PARAGRAPH = (
    "This site keeps small files on your machine so that it knows you when you come again; read more about it here."
)


def write(path, texts: list[str], **columns: list[str]) -> None:
    rows = [{"text": text, **{name: values[i] for name, values in columns.items()}} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def source(name: str, folder, *stages: StageSpec, **options) -> SourceSpec:
    return SourceSpec(name, "jsonl", options={"data_files": str(folder / f"{name}.jsonl"), **options}, stages=stages)


@pytest.fixture
def sources(tmp_path) -> tuple[SourceSpec, ...]:
    """Three sources; the second and the third hold texts of earlier ones, and a paragraph of the first."""
    own = {name: [sentences(seed, 40) for seed in range(start, start + 20)] for name, start in
           {"books": 0, "web": 100, "notes": 200}.items()}  # fmt: skip
    edited = [text.replace("captain", "colonel", 1) for text in own["books"][:5]]
    write(tmp_path / "books.jsonl", [own["books"][0] + "\n\n" + PARAGRAPH, *own["books"][1:]])
    write(tmp_path / "web.jsonl", [*own["web"], *edited, own["web"][3] + " More."])
    write(tmp_path / "notes.jsonl", [*own["notes"], own["web"][7], sentences(300, 40) + "\n\n" + PARAGRAPH])
    stages = (StageSpec("exact_documents"),)
    return (source("books", tmp_path), source("web", tmp_path, *stages), source("notes", tmp_path))


SHARED = (StageSpec("near_duplicates", {"bands": 20, "rows": 5}), StageSpec("exact_paragraphs"))


def config(sources: tuple[SourceSpec, ...], stages=SHARED) -> PrepareConfig:
    return PrepareConfig(sources=sources, vocab_size=300, validation_fraction=0.2, stages=stages)


def test_a_stage_over_all_sources_is_the_stage_on_one_source_with_all_texts(sources, tmp_path) -> None:
    after = after_all_stages(sources, SHARED, tmp_path / "cache", lambda line: None)
    found = [item.string for documents, _ in after.values() for item in documents]
    rows = "".join((tmp_path / f"{spec.name}.jsonl").read_text() for spec in sources)
    (tmp_path / "one.jsonl").write_text(rows)
    assert found == [item.string for item in Pipeline(source("one", tmp_path, *SHARED), tmp_path / "cache").run()[0]]


def test_the_first_source_keeps_and_the_funnel_says_what_each_lost(sources, tmp_path) -> None:
    prepare(config(sources), tmp_path / "out")
    funnel = json.loads((tmp_path / "out" / "funnel.json").read_text())
    rows = {name: {row["stage"]: row for row in stages} for name, stages in funnel.items()}
    assert list(rows["books"]) == [
        "read", "near_duplicates (all)", "exact_paragraphs (all)", "exact dedup over sources",
    ]  # fmt: skip
    lost = {name: [row["documents_in"] - row["documents_out"] for row in funnel[name]] for name in funnel}
    assert lost == {"books": [0, 0, 0, 0], "web": [0, 0, 6, 0, 0], "notes": [0, 1, 0, 0]}
    assert {name: rows[name]["exact_paragraphs (all)"]["notes"] for name in rows} == {
        "books": {}, "web": {}, "notes": {"paragraphs cut": 1},
    }  # fmt: skip


def test_a_kill_within_a_shared_stage_and_a_changed_one(sources, tmp_path, monkeypatch) -> None:
    original = pipeline_run.StageReport.count
    calls = {"left": 20 + 26 + 26 + 22 + 30}  # within the second source of the first shared stage

    def count(self, item, outcome) -> None:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        original(self, item, outcome)

    def run(cache: str, stages=SHARED) -> tuple[list, list[str]]:
        lines: list[str] = []
        after = after_all_stages(sources, stages, tmp_path / cache, lines.append)
        state = [[[item.text for item in documents], reports] for documents, reports in after.values()]
        return state, [line.split(": ")[0] + " " + line.split(": ")[1] for line in lines]

    monkeypatch.setattr(pipeline_run.StageReport, "count", count)
    with pytest.raises(KeyboardInterrupt):
        run("cache")
    monkeypatch.setattr(pipeline_run.StageReport, "count", original)
    names = ("books", "web", "notes")
    both = [f"{name} {kind} (all)" for kind in ("near_duplicates", "exact_paragraphs") for name in names]
    state, done = run("cache")
    assert done == both and state == run("elsewhere")[0]
    assert run("cache") == (state, [])
    changed, done = run("cache", (SHARED[0], StageSpec("exact_paragraphs", {"min_characters": 500})))
    assert done == both[3:] and changed != state
    # the old outcome is gone: read, exact_documents of `web`, two shared ones
    assert [len(list((tmp_path / "cache" / name).iterdir())) for name in names] == [3, 4, 3]


def test_per_snapshot_by_column(tmp_path) -> None:
    text, other = sentences(1, 40), sentences(2, 40)
    write(tmp_path / "web.jsonl", [text, text, other, text, other + " End."], dump=["a", "b", "a", "a", "b"])

    def left(*stages: StageSpec) -> list[tuple[str, str | None]]:
        spec = source("web", tmp_path, *stages, snapshot="dump")
        return [(item.string, item.snapshot) for item in Pipeline(spec, tmp_path / "cache").run()[0]]

    kinds = ("exact_documents", "near_duplicates")
    kept = [(text, "a"), (text, "b"), (other, "a"), (other + " End.", "b")]
    assert left(*(StageSpec(kind, scope="snapshot") for kind in kinds)) == kept
    assert left(*(StageSpec(kind) for kind in kinds)) == [(text, "a"), (other, "a")]
    # a stage that changes texts hands the snapshot on
    assert left(StageSpec("exact_paragraphs"), StageSpec("near_duplicates", scope="snapshot")) == [
        kept[0], kept[2], kept[3],
    ]  # fmt: skip


def test_per_snapshot_over_sources_by_path(tmp_path) -> None:
    text = sentences(1, 40)
    for name in ("one", "two"):
        for week in ("CC-MAIN-2024-10", "CC-MAIN-2024-18"):
            (tmp_path / name / week).mkdir(parents=True)
            write(tmp_path / name / week / "part.jsonl", [text, sentences(3 if name == "one" else 4, 40)])
    specs = tuple(
        SourceSpec(name, "jsonl", options={
            "data_files": str(tmp_path / name / "*" / "part.jsonl"), "snapshot_path": r"CC-MAIN-(\d{4}-\d{2})",
        })
        for name in ("one", "two")
    )  # fmt: skip

    def left(scope: str | None) -> list[list[tuple[bool, str | None]]]:
        after = after_all_stages(specs, (StageSpec("exact_documents", scope=scope),), tmp_path / "cache", print)
        return [[(item.string == text, item.snapshot) for item in documents] for documents, _ in after.values()]

    first = [(True, "2024-10"), (False, "2024-10"), (True, "2024-18"), (False, "2024-18")]
    assert left("snapshot") == [first, [(False, "2024-10"), (False, "2024-18")]]
    assert left(None) == [first[:2], [(False, "2024-10")]]


def test_a_config_without_scopes_has_the_keys_it_had(tmp_path, monkeypatch) -> None:
    """Values of the code before there were scopes (but for versions of stages): kept stages and folders stay good."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "g": "x"}\n')
    stages = stage_specs(["exact_documents", {"kind": "exact_paragraphs", "min_characters": 50, "scope": "source"}], "")
    spec = SourceSpec("web", "jsonl", options={"data_files": "a.jsonl"}, stages=stages)
    assert Pipeline(spec, tmp_path).names == [
        "00-read-9217b78894091a8f", "01-exact_documents-45cb27a5ba19c1ea", "02-exact_paragraphs-4ddb79222cd7f917",
    ]  # fmt: skip
    identity = PrepareConfig(sources=(spec,), vocab_size=300).identity()
    assert sha256_json(identity["sources"]) == "96144ef3dfa524d0b00ce380efbd0a5a11cdd35c61d87bdb09d3fa880ca28098"
    assert "stages" not in identity


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("stages: [extract]", "extract reads pages as they were served"),
        ("stages: [{kind: pii, scope: all}]", "stage pii looks at one document at a time and has no scope"),
        ("stages: [{kind: exact_documents, scope: source}]", "must be all or snapshot here, got 'source'"),
        ("stages: [{kind: near_duplicates, scope: snapshot}]", "no option of the source says what the snapshot"),
        ("stages: [{kind: near_duplicates, bands: 3, size: 2}]", "stage near_duplicates has no option 'size'"),
    ],
)
def test_wrong_configs(tmp_path, change: str, line: str) -> None:
    base = "sources: {a: {kind: jsonl, data_files: x.jsonl}}\ntokenizer: {vocab_size: 300}\n"
    (tmp_path / "c.yaml").write_text(base + change + "\n")
    with pytest.raises(DataError, match=line):
        load_config(tmp_path / "c.yaml")


def test_wrong_snapshots(tmp_path) -> None:
    write(tmp_path / "web.jsonl", ["a", "b"])
    scoped = StageSpec("exact_documents", scope="snapshot")
    for options, line in (
        ({"snapshot": "dump"}, "no row has the column 'dump'; mend or remove the option snapshot"),
        ({"snapshot_path": "CC-MAIN"}, "snapshot_path CC-MAIN matches nothing in"),
        ({"snapshot_path": "("}, "is no regular expression"),
    ):
        with pytest.raises(DataError, match=line):
            Pipeline(source("web", tmp_path, scoped, **options), tmp_path / "cache").run()
    write(tmp_path / "many.jsonl", ["a"] * 300, dump=[str(i) for i in range(300)])
    with pytest.raises(DataError, match="300 snapshots are more than the 256"):
        Pipeline(source("many", tmp_path, scoped, snapshot="dump"), tmp_path / "cache").run()


def test_no_document_and_one_part_without_any(tmp_path) -> None:
    parts = [store(tmp_path / "a", []), store(tmp_path / "b", ["x y", "x y"]), store(tmp_path / "c", [])]
    for name in ("exact_documents", "exact_paragraphs", "near_duplicates"):
        kind = KINDS[name]
        for scope in (None, "snapshot"):
            found = list(outcomes(name, dict(kind.options), scope, parts))
            assert [isinstance(outcome, Dropped) for outcome in found] == [False, name != "exact_paragraphs"]
            assert list(outcomes(name, dict(kind.options), scope, parts[:1])) == []
