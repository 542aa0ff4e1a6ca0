"""Sources and cleaning: JSONL traps, load_dataset, installed packages, dedup, split, counted reports."""

import gzip
import json

import pytest

from lm.data.documents import Report, TextFile, collect, split_of
from lm.data.files import DataError
from lm.data.packaged import html_to_text
from lm.data.sources import Document, SourceSpec, kind_of


def documents(kind: str, **options) -> list[Document]:
    spec = SourceSpec("s", kind, options=options)
    return list(kind_of(spec).documents(spec))


def texts(kind: str, **options) -> list:
    return [document.text for document in documents(kind, **options)]


def jsonl(path, rows) -> None:
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))


# -- JSONL ------------------------------------------------------------------------------------------------------

ODD = "one\u2028two\u2029three\x85four\x0cfive\rsix"


def test_jsonl_lines_end_at_newlines_only(tmp_path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": ODD}, {"text": "plain"}])
    assert texts("jsonl", data_files=str(tmp_path / "*.jsonl")) == [ODD, "plain"]
    assert texts("dataset", path="json", data_files=str(tmp_path / "*.jsonl")) == [ODD, "plain"]


def test_jsonl_takes_globs_columns_groups_and_gzip(tmp_path) -> None:
    jsonl(tmp_path / "b.jsonl", [{"body": "2", "book": 7}])
    jsonl(tmp_path / "a.jsonl", [{"body": "1", "book": None}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"body": "3"}\n\n'))
    found = documents("jsonl", data_files=[str(tmp_path / "*.jsonl"), str(tmp_path / "c*")], text="body", group="book")
    assert [(d.text, d.group) for d in found] == [("1", None), ("2", "7"), ("3", None)]


def test_bad_text_is_counted_and_dropped(tmp_path) -> None:
    lines = [b'{"text": "good"}', b'{"text": "caf\xe9"}', b'{"text": "\\ud800"}', b'{"text": null}', b'{"text": 5}']
    lines += [b'{"text": " \\n\\t"}', b'{"text": ""}', b'{"text": "\\u3000"}', b'{"text": "good"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    report, _ = collect(documents("jsonl", data_files=str(tmp_path / "a.jsonl")), tmp_path / "work", 1e-9, set())
    expected = Report(read=9, not_text=2, invalid_unicode=2, empty=3, duplicate=1)
    expected.kept["train"], expected.kept_bytes["train"] = 1, 4
    assert report == expected
    assert report.line() == (
        "1 train and 0 validation documents, 0.0 MB; dropped: 1 duplicate, 3 empty, 2 not UTF-8, 2 not text"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\n{"text": ', r"line 2 is not JSON"),
        (b'{"body": "x"}\n', r"line 1 has no column 'text' \(it has: body\); set the option text"),
        (b"[1, 2]\n", r"line 1 has no column 'text' \(it has: list\)"),
    ],
)
def test_jsonl_without_one_good_line_names_file_and_line(tmp_path, content, message) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts("jsonl", data_files=str(tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value) and "a.jsonl" in str(caught.value)


def test_bad_lines_among_good_ones_are_counted(tmp_path) -> None:
    lines = [b'{"text": "good"}', b'{"text": ', b"[1]", b'{"body": "x"}', b"[" * 100_000, b'{"text": "better"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    report, _ = collect(documents("jsonl", data_files=str(tmp_path / "a.jsonl")), tmp_path / "work", 1e-9, set())
    assert (report.read, report.malformed, report.kept["train"]) == (6, 4, 2)
    assert report.line().endswith("dropped: 4 malformed")


@pytest.mark.parametrize("content", [gzip.compress(b'{"text": "a"}\n' * 5000)[:-20], b'{"text": "plain"}\n'])
def test_a_gzip_file_that_is_torn_or_none_is_one_line(tmp_path, content) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is no whole gzip file"):
        texts("jsonl", data_files=str(tmp_path / "a.jsonl.gz"))


def test_utf_16_is_refused_and_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "wide.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("utf-16"))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"wide\.jsonl line 2 is not JSON"):
        texts("jsonl", data_files=str(tmp_path / "wide.jsonl"))
    assert texts("jsonl", data_files=str(tmp_path / "marked.jsonl")) == ["a", "b"]


@pytest.mark.parametrize("options", [{"kind": "jsonl"}, {"kind": "dataset", "path": "json"}])
def test_a_group_column_that_nobody_has_is_refused(tmp_path, options) -> None:
    """With a typo there, documents of one group would land in both splits."""
    jsonl(tmp_path / "a.jsonl", [{"text": "1", "book": 7}, {"text": "2", "book": 7}])
    with pytest.raises(DataError, match="no row has the column 'boook'"):
        documents(**options, data_files=str(tmp_path / "a.jsonl"), group="boook")
    with pytest.raises(DataError, match="option group must be the name of a column, got 5"):
        documents(**options, data_files=str(tmp_path / "a.jsonl"), group=5)


def test_jsonl_is_read_lazily(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\nbroken')
    spec = SourceSpec("s", "jsonl", options={"data_files": str(tmp_path / "a.jsonl")})
    assert next(iter(kind_of(spec).documents(spec))).text == "first"


# -- load_dataset -----------------------------------------------------------------------------------------------


def test_parquet_and_text_files(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["x", ODD], "n": [1, 2]}), tmp_path / "a.parquet")
    assert texts("dataset", path="parquet", data_files=str(tmp_path / "*.parquet"), text="body") == ["x", ODD]
    (tmp_path / "a.txt").write_text("line 1\nline 2\n")
    options = {"path": "text", "data_files": str(tmp_path / "*.txt")}
    assert texts("dataset", **options) == ["line 1", "line 2"]
    assert texts("dataset", args={"sample_by": "document"}, **options) == ["line 1\nline 2\n"]
    with pytest.raises(DataError, match=r"no column 'text' \(it has: body, n\)"):
        texts("dataset", path="parquet", data_files=str(tmp_path / "*.parquet"))


def test_unreadable_dataset_is_one_line(tmp_path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="source 's': datasets could not read parquet") as caught:
        texts("dataset", path="parquet", data_files=str(tmp_path / "a.parquet"))
    assert "\n" not in str(caught.value)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match="kind: jsonl reads on past text that is not UTF-8"):
        texts("dataset", path="json", data_files=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SourceSpec("s", "nope"), "unknown kind 'nope'; kinds: dataset, jsonl, warc, bible, botocore, python"),
        (SourceSpec("s", "jsonl", options={"data_fils": "x"}), "has no option 'data_fils'; options: data_files, text"),
        (SourceSpec("s", "jsonl"), "needs option 'data_files'"),
    ],
)
def test_bad_specs(spec, message) -> None:
    with pytest.raises(DataError, match=message):
        kind_of(spec)


def test_missing_files_and_packages() -> None:
    with pytest.raises(DataError, match="no file matches /nowhere/"):
        texts("jsonl", data_files="/nowhere/*.jsonl")
    with pytest.raises(DataError, match="needs package no-such-thing==1; run: pip install"):
        texts("python", packages=["no-such-thing==1"])
    with pytest.raises(DataError, match=r"pinned to pytest==0\.1 but .* is installed"):
        texts("python", packages=["pytest==0.1"])
    with pytest.raises(DataError, match="botocore has no service 'nope'"):
        texts("botocore", services=["nope"])
    with pytest.raises(DataError, match="source name 'A b'"):
        SourceSpec("A b", "jsonl")


# -- installed packages -----------------------------------------------------------------------------------------


def test_python_files() -> None:
    found = texts("python", packages=["networkx"], exclude=["*/tests/*"])
    assert len(found) > 200 and all(isinstance(text, bytes) for text in found)
    assert len(texts("python", packages=["networkx"])) > len(found)


def test_botocore_documents_are_clean_text() -> None:
    found = documents("botocore", services=["sqs", "s3"])
    sizes = [len(d.text) for d in found]
    assert min(sizes) >= 200 and sorted(sizes)[len(sizes) // 2] < 5000
    joined = "".join(d.text for d in found)
    for leftover in ("<p>", "</p>", "<code>", "</a>", "&lt;", "&amp;", "  "):
        assert leftover not in joined
    groups = {d.group for d in found if d.text.split("\n")[0].endswith((": CreateBucket", ": ListBuckets"))}
    assert groups == {"s3:Bucket"}


def test_html_to_text() -> None:
    markup = "<p>Use <code>x &lt; y</code>  &amp;\n z.</p> <ul> <li> <p>One</p> </li> <li>Two</li></ul><!-- no -->"
    assert html_to_text(markup) == "Use x < y & z.\n- One\n- Two"


def test_bible_chapters_share_groups() -> None:
    kjv, web = (documents("bible", packages=[f"pythonbible-{name}"]) for name in ("kjv", "web"))
    assert len(kjv) == len(web) == 1189  # chapters of the 66 books
    assert [d.group for d in kjv] == [d.group for d in web]
    assert kjv[0].text.startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth. And the earth")
    assert "`" not in web[0].text and "[" not in kjv[0].text


# -- dedup and split --------------------------------------------------------------------------------------------


def test_dedup_reaches_across_sources(tmp_path) -> None:
    first, own = collect([Document("x"), Document("y"), Document("x")], tmp_path / "a", 1e-9, set())
    second, _ = collect([Document("y"), Document("z"), Document(b"x")], tmp_path / "b", 1e-9, own)
    assert (first.duplicate, second.duplicate) == (1, 2)
    assert list(TextFile(tmp_path / "b", "train").texts()) == ["z"]


def test_split_follows_the_text_or_its_group() -> None:
    import hashlib

    def split(text: str, group: str | None = None) -> str:
        return split_of(hashlib.sha256(text.encode()).digest(), group, 0.1)

    held = [split(str(i)) == "validation" for i in range(5000)]
    assert 0.085 < sum(held) / 5000 < 0.115
    assert [split(str(i)) == "validation" for i in range(5000)] == held
    for group in ("1:1", "1:2", "x"):
        assert len({split(str(i), group) for i in range(50)}) == 1
    assert len({split("same", str(i)) for i in range(100)}) == 2


def test_text_file_can_be_entered_anywhere(tmp_path) -> None:
    rows = ["a", "日本語", "c" * 1000, "d"]
    collect([Document(row) for row in rows], tmp_path, 1e-9, set())
    for first in range(5):
        assert list(TextFile(tmp_path, "train").texts(first)) == rows[first:]
