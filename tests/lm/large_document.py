"""Run by test_pipeline_large.py: a source of one document of some MB and an empty file through a stage, as JSON."""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lm.data.pipeline.run import Pipeline
from lm.data.pipeline.stage import StageSpec
from lm.data.sources import SourceSpec


def prose(size: int) -> str:
    """English-like text with an address now and then, a line feed after some sentences, and no long repeat."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(
        [f"{a}{b}{c}" for a in "bcdfghklmnprst" for b in "aeiou" for c in ("n", "rd", "stle", "ming")]
    )
    ends = np.array([" ", " ", " ", " ", " ", ", ", ". ", ".\n", ".\n\n", " me@site.example.org ", " the ", " of "])
    parts, held = [], 0
    while held < size:
        block = "".join((vocabulary[i] + ends[j] for i, j in zip(
            rng.integers(0, len(vocabulary), 200_000), rng.integers(0, len(ends), 200_000), strict=True)))  # fmt: skip
        parts.append(block)
        held += len(block)
    return "".join(parts)[:size]


def main() -> None:
    """Arguments: the stage as JSON, the text (prose, or a string that is repeated), its bytes."""
    stage, kind, size = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    text = prose(size) if kind == "prose" else (kind * (size // len(kind) + 1))[:size]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "a.jsonl").open("w") as file:
            json.dump({"text": text}, file)
        (folder / "zero.jsonl").write_bytes(b"")
        del text
        spec = SourceSpec("large", "jsonl", options={"data_files": str(folder / "*.jsonl")})
        Pipeline(spec, folder / "cache").run()  # what reading takes is not the stage's
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stages = (StageSpec(stage.pop("kind"), stage),)
        start = time.process_time()
        _, reports = Pipeline(
            SourceSpec(spec.name, spec.kind, options=spec.options, stages=stages), folder / "cache"
        ).run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = time.process_time() - start
        print(json.dumps({"before": before * 1024, "peak": peak * 1024, "seconds": seconds, "report": reports[-1]}))


if __name__ == "__main__":
    main()
