"""The GPU benchmark's code on a CPU, with nothing importable but torch and lightning, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.plan import count_parameters
from recipes.bench_gpu import SHAPES, peak_tflops

ROOT = Path(__file__).parents[2]

# Only torch, lightning and numpy may be imported from files of this project, already loaded by others or not.
_BARE = """
import builtins, sys

ours, real = sys.argv.pop(1), builtins.__import__
allowed = {"torch", "lightning", "numpy", "lm", "plugins", "recipes"} | sys.stdlib_module_names

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__file__") or ""
    if importer.startswith(ours + "/") and "site-packages" not in importer and name.split(".")[0] not in allowed:
        raise ModuleNotFoundError(f"{importer} imports {name}")
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
from recipes.bench import main
sys.exit(main(sys.argv[1:]))
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", _BARE, str(ROOT), "gpu", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_tiny_on_a_cpu_prints_rows_and_a_table(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--tiny", "--documents", "4", "--compile", "off", "--peak-tflops", "0.5")
    done = bench(*arguments, "--out", str(tmp_path / "table.md"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["attention"] for row in rows] == ["sdpa", "documents"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(2 * 64 / row["seconds_a_step"], rel=0.01)
        # 6 N_matmul + 6 L T d of the tiny shape: heads 4 x 64 x 64 and MLP 3 x 64 x 176 a layer, head 256 x 64.
        per_token = 6 * (2 * (4 * 64 * 64 + 3 * 64 * 176) + 256 * 64) + 6 * 2 * 64 * 64
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * per_token / 0.5e12, rel=0.02, abs=1e-4)
        assert row["mfu_convention"] == "matmul+causal_attention"
    text = (tmp_path / "table.md").read_text()
    assert text in done.stdout and torch.__version__ in text and text.count("\n|") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line() -> None:
    done = bench()
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: bench gpu needs a CUDA device")
    assert "Traceback" not in done.stderr


def test_shapes_are_what_their_names_say() -> None:
    assert count_parameters(SHAPES["160m"][0]).total == pytest.approx(160e6, rel=0.03)
    assert count_parameters(SHAPES["1b"][0]).total == pytest.approx(1.24e9, rel=0.01)


def test_peaks_are_found_by_name() -> None:
    assert peak_tflops("NVIDIA H200") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA L40S") == 362
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert peak_tflops("something else") == 0
