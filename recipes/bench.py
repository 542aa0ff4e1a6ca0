"""Benchmarks: ratios inside one process, medians of interleaved rounds, printed as JSON.

Examples:
    python -m recipes.bench step      tokens/s of the recipe over a bare PyTorch loop
    python -m recipes.bench loader    tokens/s of the data loader on one core
    python -m recipes.bench loss      peak memory of the chunked loss, and of the plain one
    python -m recipes.bench attention seconds of a window of many documents against one document
    python -m recipes.bench peers     tokens/s of the recipe over transformers' Llama under its Trainer
    python -m recipes.bench gpu       tokens/s and MFU at 160M and 1B on one GPU
    python -m recipes.bench coordinates activation scales over widths: muP, AdamW and Muon
    python -m recipes.bench memory    bytes a rank holds under each strategy, beside the prediction
    python -m recipes.bench traffic   bytes a rank sends in a step under each strategy, beside the prediction
    python -m recipes.bench activations bytes kept for backward, beside the prediction
    python -m recipes.bench guard     seconds of a step with the spike guard over seconds without it
    python -m recipes.bench dashboard what the dashboard adds to the time of a step
    python -m recipes.bench fit       seconds of Epoch's scaling fit and 4,000 refits, beside the reference procedure
    python -m recipes.bench dedup     near-duplicates: documents/s on one core, recall and precision
    python -m recipes.bench duplicates validation loss with 15% near-duplicates, beside the deduplicated corpus
    python -m recipes.bench tokenize  tokens/s of prepare's tokenizing on one process and on two
    python -m recipes.bench prepare   peak memory of preparing synthetic corpora of two sizes
    python -m recipes.bench step --help
"""

from __future__ import annotations

import importlib
import sys

from recipes.command import exit_status

_NAMES = (
    *("step", "loader", "loss", "attention", "coordinates", "memory", "peers", "gpu"),
    *("guard", "dashboard", "traffic", "activations", "dedup", "duplicates", "tokenize", "prepare"),
)
BENCHMARKS = {name: f"recipes.bench_{name}" for name in _NAMES}
# Named, not imported: sweeps imports recipes, not the other way round.
BENCHMARKS["fit"] = "sweeps.bench_fit"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark named first; the rest of the arguments are its own."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        print(f"error: no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2

    def command() -> None:
        importlib.import_module(BENCHMARKS[name]).run(rest)

    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
