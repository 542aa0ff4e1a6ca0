"""Parts in several processes: the order, errors, workers that die; and the same data folder from any number of them."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lm.data.executor import AHEAD, Processes, Serial
from lm.data.files import DataError, sha256_file
from lm.data.pipeline import store
from lm.data.pipeline.stage import StageSpec
from lm.data.pipeline.store import Documents, Item, StoreWriter
from lm.data.prepare import PrepareConfig, prepare
from lm.data.sources import SourceSpec
from tests.lm.executor_parts import die_always, die_once, refuse, slow_square


def test_results_come_in_order_and_one_by_one(tmp_path: Path) -> None:
    with Processes(2) as executor:
        log = str(tmp_path / "log")
        taken: list[int] = []

        def calls():
            for n in range(20):
                taken.append(n)
                yield n, log

        results = executor.map(slow_square, calls())
        assert next(results) == 0 and len(taken) == 2 * AHEAD  # the rest is not asked for yet
        assert list(results) == [n * n for n in range(1, 20)]
        workers = {line.split()[0] for line in Path(log).read_text().splitlines()}
        assert len(workers) == 2 and str(os.getpid()) not in workers
        with pytest.raises(DataError, match="part 0 is refused"):
            list(executor.map(refuse, ((n,) for n in range(3))))
        assert list(executor.map(slow_square, [])) == []


def test_a_part_whose_process_died_runs_again(tmp_path: Path) -> None:
    with Processes(2) as executor:
        assert list(executor.map(die_once, ((n, str(tmp_path)) for n in range(12)))) == list(range(12))
        assert (tmp_path / "died").exists()
        with pytest.raises(DataError, match="worker processes died 4 times over the same part") as caught:
            list(executor.map(die_always, [(0,)]))
        assert "\n" not in str(caught.value)


def corpus(path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    texts = [" ".join(rng.choice(words) for _ in range(rng.randint(5, 150))) for _ in range(150)]
    texts += [f"{text} tail" for text in texts[:20]] + texts[30:35]
    texts += ["Schreib an jo@example.org oder an max@example.com, bitte. Straße, Äpfel, 東京. " * 3, "half ½ km² Ⅷ"]
    texts.insert(0, texts[-2])
    texts += [f"{texts[n]} {n}\n\n{texts[0] + texts[4]}" for n in (9, 13, 17)]
    texts += advertisements(rng, 5)
    rows = [{"text": text, "url": f"https://a{n % 4}.example/{n}"} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def advertisements(rng: random.Random, count: int) -> list[str]:
    parts = ("click here to win {} coins", "buy {} cheap pills now", "hot deals: {} percent off today")
    return [". ".join(rng.choice(parts).format(rng.randrange(99)) for _ in range(9)) for _ in range(count)]


def all_stages(folder: Path) -> PrepareConfig:
    """Per-document stages, such that change texts among them, and all that need every document."""
    corpus(folder / "text.jsonl")
    (folder / "domains.txt").write_text("a3.example\n")
    (folder / "bad.txt").write_text("\n".join(advertisements(random.Random(1), 60)))
    evaluation = json.loads((folder / "text.jsonl").read_text().split("\n")[9])
    (folder / "evaluation.jsonl").write_text(json.dumps({"question": evaluation["text"]}))
    kinds = [
        StageSpec("blocked_urls", {"files": str(folder / "domains.txt")}),
        StageSpec("language", {"languages": ["en", "de", "es", "pl"], "threshold": 0.0}),
        StageSpec("pii"),
        StageSpec("quality", {
            "positives": str(folder / "text.jsonl"), "negatives": str(folder / "bad.txt"), "threshold": 0.4,
            "dim": 8, "epochs": 20, "buckets": 1000,
        }),
        StageSpec("exact_documents"),
        StageSpec("exact_paragraphs"),
        StageSpec("near_duplicates"),
        StageSpec("gopher_quality", {"min_doc_words": 7, "min_stop_words": 0}),
        StageSpec("decontaminate", {"files": str(folder / "evaluation.jsonl")}),
    ]  # fmt: skip
    options = {"data_files": str(folder / "text.jsonl"), "url": "url"}
    plain = SourceSpec("plain", "jsonl", options={"data_files": str(folder / "text.jsonl")})
    return PrepareConfig(
        sources=(SourceSpec("web", "jsonl", options=options, stages=tuple(kinds)), plain),
        vocab_size=300,
        validation_fraction=0.2,
        shard_tokens=5000,
    )


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_workers_make_the_same_folder_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = all_stages(tmp_path)
    prepare(config, tmp_path / "one")
    monkeypatch.setattr(store, "PART_BYTES", 8000)
    with Processes(2) as executor:
        prepare(config, tmp_path / "two", executor=executor)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    funnel = {row["stage"]: row for row in json.loads((tmp_path / "one" / "funnel.json").read_text())["web"]}
    idle = [name for name, row in funnel.items() if not row["dropped"] and not row["changed"]]
    assert idle == ["read", "exact dedup over sources"]  # every stage had something to do


def test_parts_hold_every_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StoreWriter(tmp_path)
    items = [Item(f"text {n} ".encode() * (n % 7), f"u{n}", None if n % 2 else "g") for n in range(200)]
    for item in items:
        writer.add(item)
    writer.close()
    for limit in (1, 100, 1 << 20):
        monkeypatch.setattr(store, "PART_BYTES", limit)
        monkeypatch.setattr(store, "PART_DOCUMENTS", 50)
        for positions in (None, *([n for n in range(200) if n % step == 3] for step in (4, 90, 150))):
            chosen = None if positions is None else np.array(positions)
            documents = Documents(tmp_path, chosen, Serial())
            parts = list(documents.parts())
            assert max(map(len, parts)) <= 50 and sum(map(len, parts)) == len(documents)
            assert [item for part in parts for item in part] == [items[n] for n in positions or range(200)]
            assert list(documents) == [items[n] for n in positions or range(200)]


def test_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom lm.data.executor import Processes\nfrom tests.lm.executor_parts import slow_square\n"
        "if __name__ == '__main__':\n"
        "    pool = Processes(2)\n"
        "    print(list(pool.map(slow_square, ((n, sys.argv[1]) for n in range(8)))), flush=True)\n"
        "    time.sleep(60)\n"
    )
    (tmp_path / "driver.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    log = tmp_path / "log"
    driver = subprocess.Popen([sys.executable, tmp_path / "driver.py", log], env=environ, stdout=subprocess.PIPE)
    assert driver.stdout is not None and b"49" in driver.stdout.readline()
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    driver.kill()
    driver.wait()
    driver.stdout.close()
    give_up = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < give_up, workers
        time.sleep(0.05)
