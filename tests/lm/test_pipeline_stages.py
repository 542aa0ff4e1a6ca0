"""Each stage on texts that it must drop, change or leave alone."""

import json
from pathlib import Path

import pytest

from lm.data.files import DataError
from lm.data.pipeline.kinds import KINDS, stage_kind, stage_specs
from lm.data.pipeline.pii import RULES, scrub
from lm.data.pipeline.stage import Dropped, Kept, Outcome, StageSpec
from lm.data.pipeline.store import Documents, Item, StoreWriter
from lm.data.words import lookup_ngrams, words


@pytest.fixture
def outcomes(tmp_path):
    def run(kind: str, items: list[str | Item], **options) -> list[Outcome]:
        writer = StoreWriter(tmp_path)
        for item in items:
            writer.add(item if isinstance(item, Item) else Item(item.encode()))
        writer.close()
        found, filled = stage_kind(StageSpec(kind, options), "here")
        return list(found.run(Documents(tmp_path), filled))

    return run


def reasons(found: list[Outcome]) -> list[str | None]:
    return [outcome.reason if isinstance(outcome, Dropped) else None for outcome in found]


THINGS = ("ships", "storms", "gold", "bread", "ropes", "gulls", "tides", "lamps", "nets", "maps")
PROSE = " ".join(
    f"In the year {1800 + i} the harbour was quiet, and people who lived there would talk of {thing} with some pride."
    for i, thing in enumerate(THINGS)
)


def test_gopher_quality(outcomes) -> None:
    texts = [
        PROSE,
        "Too short.",
        "# " * 60 + PROSE[:300],
        "\n".join(f"- item {i} of the list that have" for i in range(40)),
    ]
    assert reasons(outcomes("gopher_quality", texts)) == [
        None, "gopher_short_doc", "gopher_too_many_hashes", "gopher_too_many_bullets",
    ]  # fmt: skip
    assert reasons(outcomes("gopher_quality", ["Too short to have the words."], min_doc_words=3)) == [None]


def test_gopher_repetition(outcomes) -> None:
    plain = " ".join(f"word{i}" for i in range(200))
    texts = [plain, "\n".join(["The same line again."] * 9 + [plain]), "the very same words " * 50]
    assert reasons(outcomes("gopher_repetition", texts)) == [None, "dup_line_frac", "top_2_gram"]


def test_c4_keeps_lines_without_a_full_stop_and_cuts_others(outcomes) -> None:
    sentences = PROSE.replace(". ", ".\n")
    page = f"A heading of four words\n{sentences}\nPlease enable Javascript to go on.\nok\nWe use cookies on our site."
    kept, code, lorem = outcomes("c4", [page, sentences + "\nint main() { return 0; }", "Lorem ipsum dolor sit amet."])
    assert isinstance(kept, Kept) and kept.text == f"A heading of four words\n{sentences}".encode()
    assert kept.notes == {"lines cut": 3}
    assert reasons([code, lorem]) == ["curly_bracket", "lorem_ipsum"]


def test_fineweb(outcomes) -> None:
    lines = "\n".join(f"a short line {i}" for i in range(30))
    marks = "\n".join(f"a line that never ends with any mark whatever number {i}" for i in range(30))
    found = reasons(outcomes("fineweb", [PROSE, lines + ".", marks, "...\n!!!"]))
    assert found == [None, "line_punct_ratio", "line_punct_ratio", "short_line_ratio"]
    assert reasons(outcomes("fineweb", [lines + "."], line_punct_thr=0)) == ["short_line_ratio"]


GERMAN = "Der alte Hafen war still, und die Leute erzählten sich Geschichten von Schiffen, Stürmen und Gold."
TELUGU = "తెలుగు భాష దక్షిణ భారతదేశంలోని ఆంధ్రప్రదేశ్ మరియు తెలంగాణ రాష్ట్రాల అధికార భాష."


def test_language(outcomes) -> None:
    texts = [PROSE, GERMAN, TELUGU, "§ 17 ||| ++ 4711"]
    found = outcomes("language", texts)
    assert reasons(found)[:3] == [None, "language de", "language te"] and isinstance(found[3], Dropped)
    assert reasons(outcomes("language", texts, languages=["de", "te"]))[:3] == ["language en", None, None]
    assert reasons(outcomes("language", [PROSE, "the a"], threshold=1.0))[1] is not None
    with pytest.raises(DataError, match="the model does not know klingon"):
        outcomes("language", texts, languages="klingon")


def test_words_keep_their_marks() -> None:
    assert words("తెలుగు భాష, हिन्दी।") == ["తెలుగు", "భాష", "हिन्दी"]
    assert words("It's a_b 7!") == words("It's a_b 7!\u00bf") == ["it", "s", "a", "b", "7"]
    assert words("Don't_stop: cafe\u0301 Ünï 42") == ["don", "t", "stop", "cafe\u0301", "ünï", "42"]


def test_a_letter_is_a_word_where_words_have_no_spaces() -> None:
    assert words("iPhone手机，2台。カ・ナ 한국어") == ["iphone", "手", "机", "2", "台", "カ", "ナ", "한국어"]
    assert words("ที่นี่ ၏၊ ភាសា។") == ["ที่", "นี่", "ភា", "សា"]
    text = "天地玄黄宇宙洪荒日月盈昃辰宿列张"
    assert lookup_ngrams(text, 13) == (13, [" ".join(text[i : i + 13]) for i in range(4)])
    assert lookup_ngrams(text[:10], 13) == (10, [" ".join(text[:10])])
    assert lookup_ngrams(text[:9], 13) == (9, [])
    assert lookup_ngrams("five words are long enough", 13) == (5, ["five words are long enough"])


def test_texts_without_spaces_are_compared_letter_by_letter(outcomes, tmp_path) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(120))
    assert reasons(outcomes("near_duplicates", [text, f"{text[:60]}变{text[61:]}", text[::-1]]))[1:] == [
        "near-duplicate", None,
    ]  # fmt: skip
    (tmp_path / "words.txt").write_text("赌博\n")
    (tmp_path / "exam.txt").write_text(text[40:60] + "\n")
    found = outcomes("blocked_words", ["在线赌博网站", "赌场博物"], files=str(tmp_path / "words.txt"))
    assert reasons(found) == ["words of the list", None]
    found = outcomes("decontaminate", [text, text[50:]], files=str(tmp_path / "exam.txt"))
    assert reasons(found) == ["overlap with exam.txt", None]


def test_exact_documents_and_paragraphs(outcomes) -> None:
    assert reasons(outcomes("exact_documents", ["a  b\n", "a b", "a c"])) == [
        None, "same text as an earlier document", None,
    ]  # fmt: skip
    notice = "This notice stands under every page of the site and says the same thing each time, at some length. " * 2
    texts = [f"{PROSE}\n\n{notice}", f"{GERMAN * 3}\n\n{notice}\n\nok\n\nok", f"Hi.\n\n{notice}"]
    first, second, third = outcomes("exact_paragraphs", texts)
    assert first == Kept()
    assert isinstance(second, Kept) and second.text == f"{GERMAN * 3}\n\nok\n\nok".encode()  # short ones stay
    assert reasons([third]) == ["little left without repeated paragraphs"]
    for line in ("\r\n", "\r", " \n"):  # of other systems, or empty to the eye alone
        second = outcomes("exact_paragraphs", [text.replace("\n", line) for text in texts])[1]
        assert isinstance(second, Kept) and second.text == f"{GERMAN * 3}\n\nok\n\nok".replace("\n", line).encode()


# Numbers from the standards' and offices' own examples, or made to pass their check digits.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jane.doe+x@mail.example.co.uk.", "write to <EMAIL>."),
        ("card 4111 1111 1111 1111 or 378282246310005", "card <CARD> or <CARD>"),
        ("card 4111 1111 1111 1112", "card 4111 1111 1111 1112"),
        ("IBAN DE89 3704 0044 0532 0130 00, GB82WEST12345698765432", "IBAN <IBAN>, <IBAN>"),
        ("DE88 3704 0044 0532 0130 00", "DE88 3704 0044 0532 0130 00"),
        ("from 8.8.8.8 and 2001:4860:4860::8888, not 192.168.0.1", "from <IP> and <IP>, not 192.168.0.1"),
        ("release 1.2.3 at 12:30:45 on 2024-01-31, std::map", "release 1.2.3 at 12:30:45 on 2024-01-31, std::map"),
        ("web.example/20160324185626/x", "web.example/20160324185626/x"),  # a time that passes as a card's number
        ("Oracle 19.0.0.0.ru-2025", "Oracle 19.0.0.0.ru-2025"),
        ("call +49 30 901820 or (415) 555-2671 or 415-555-2671", "call <PHONE> or <PHONE> or <PHONE>"),
        ("1939-1945, pp. 123-456, 1,234,567.89", "1939-1945, pp. 123-456, 1,234,567.89"),
        ("CPF 390.533.447-05, not 390.533.447-06", "CPF <NATIONAL_ID>, not 390.533.447-06"),
        ("DNI 54362315K, not 54362315A", "DNI <NATIONAL_ID>, not 54362315A"),
        ("RCCMNL83S18D969H and 131052-308T", "<NATIONAL_ID> and <NATIONAL_ID>"),
        ("PESEL 44051401359, tax id 36 574 261 809", "PESEL <NATIONAL_ID>, tax id <NATIONAL_ID>"),
        ("SSN 536-90-4399 but not 000-12-3456", "SSN <NATIONAL_ID> but not 000-12-3456"),
    ],
)  # fmt: skip
def test_personal_data(text: str, expected: str) -> None:
    assert scrub(text, list(RULES))[0] == expected


def test_pii_counts_and_takes_only_the_kinds_asked_for(outcomes) -> None:
    text = "a@b.org and c@d.org, 8.8.8.8"
    (found,) = outcomes("pii", [text])
    assert isinstance(found, Kept) and found.text == b"<EMAIL> and <EMAIL>, <IP>"
    assert found.notes == {"email": 2, "ip": 1}
    (found,) = outcomes("pii", [text], kinds=["ip"])
    assert isinstance(found, Kept) and found.text == b"a@b.org and c@d.org, <IP>"
    with pytest.raises(DataError, match="kinds must be some of email, iban"):
        outcomes("pii", [text], kinds=["shoe_size"])


def test_blocklists(outcomes, tmp_path) -> None:
    (tmp_path / "words.txt").write_text("# a comment\nbad\nvery rude thing\n")
    files = [str(tmp_path / "words.txt")]
    texts = ["A BAD day.", "badminton and a bad-ly set table", "a very, rude\nthing", "fine"]
    assert reasons(outcomes("blocked_words", texts, files=files)) == [*["words of the list"] * 3, None]
    assert reasons(outcomes("blocked_words", ["bad " + "word " * 99], files=files, max_fraction=0.02)) == [None]
    texts = ["bad", "bad bad bad", "bad bad " + "word " * 99]
    assert reasons(outcomes("blocked_words", texts, files=files, max_count=2)) == [None, "words of the list", None]
    both = outcomes("blocked_words", texts, files=files, max_count=2, max_fraction=0.02)
    assert reasons(both) == [*["words of the list"] * 2, None]
    (tmp_path / "urls.txt").write_text("Spam.example\nhttps://www.mixed.org/adult/\nhttps://www.whole.net\nroot.net/\n")
    urls = [
        "https://a.spam.example/x",
        "http://notspam.example",
        "https://mixed.org/adult/1",
        "https://mixed.org/",
        None,
        "https://whole.net/x",
        "https://a.whole.net",
        "https://whole.network",
        "http://root.net",
    ]
    items = [Item(b"x", url) for url in urls]
    found = reasons(outcomes("blocked_urls", items, files=[str(tmp_path / "urls.txt")]))
    assert found == [
        "domain of the list",
        None,
        "address of the list",
        *[None] * 2,
        *["domain of the list"] * 2,
        None,
        "address of the list",
    ]
    with pytest.raises(DataError, match=r"stage blocked_words: cannot read .*absent\.txt"):
        outcomes("blocked_words", ["x"], files=str(tmp_path / "absent.txt"))


def test_decontamination_drops_or_flags(outcomes, tmp_path) -> None:
    question = "Which of the following birds, all of them native to the island of Tierra del Fuego, cannot fly at all?"
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"q": question, "choices": ["the steamer duck"]}) + "\n")
    (tmp_path / "short.txt").write_text("one two three four five\ntoo short\n")
    leaked = f"Notes. {question.upper().replace(',', ' -')} Answer: duck."
    near = question.replace("native", "known").replace("birds", "ducks")  # no run of 13 words is left
    texts = [leaked, near, "count: one, two, three; four five!", "too short", PROSE]
    files = [str(tmp_path / "quiz.jsonl"), str(tmp_path / "short.txt")]
    found = outcomes("decontaminate", texts, files=files)
    assert reasons(found) == ["overlap with quiz.jsonl", None, "overlap with short.txt", None, None]
    assert "which of the following birds" in found[0].detail
    flagged = outcomes("decontaminate", texts, files=files, action="flag")
    assert reasons(flagged) == [None] * 5 and flagged[0].notes == {"overlap with quiz.jsonl": 1}


def test_extract_takes_the_article_of_a_page(outcomes) -> None:
    body = "".join(f"<p>{sentence}.</p>" for sentence in PROSE.split(". "))
    page = (
        f"<html><head><script>var x=1</script></head><body><nav>Home About</nav><article>{body}</article></body></html>"
    )
    latin = f"<html><head><meta charset='iso-8859-1'></head><body><article><p>{GERMAN * 5}</p></article></body></html>"
    found = outcomes("extract", [page, Item(latin.encode("latin-1")), Item(b"\x00\xff\xfe"), "<html></html>"])
    assert isinstance(found[0], Kept) and found[0].text is not None and isinstance(found[1], Kept)
    text = found[0].text.decode()
    assert "harbour was quiet" in text and "Home About" not in text and "var x" not in text and "<p>" not in text
    assert GERMAN in (found[1].text or b"").decode()
    assert reasons(found[2:]) == ["no main text", "no main text"]
    served = "RFC 1\n\n  #include <stdio.h>\n  if a < b: mail <a@b.org>\n"  # as text/plain
    wide = Item("<html><body><p>x</p></body></html>".encode("utf-16"))
    found = outcomes("extract", [served, "<!DOCTYPE html><br>", "a<br/>b", wide])
    assert found[0] == Kept() and not any(isinstance(one, Kept) and one.text is None for one in found[1:])
    assert reasons(outcomes("extract", [page], max_bytes=100)) == ["page too large"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pii", "stages must be a list"),
        (["nope"], "unknown stage 'nope'; stages: extract, language"),
        ([{"kind": "pii", "kindz": []}], "stage pii has no option 'kindz'; options: kinds"),
        (["decontaminate"], "stage decontaminate needs option 'files'"),
        (["pii", "extract"], "it must be the first stage"),
        ([3], "a stage is a name or a mapping"),
    ],
)
def test_wrong_stages_are_one_line(value, message) -> None:
    with pytest.raises(DataError, match=message):
        stage_specs(value, "source 'web'")


def test_every_kind_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    for name, kind in KINDS.items():
        assert f"`{name}`" in page
        for option in kind.options:
            assert f"`{option}`" in page, (name, option)
