"""What runs on a GPU, on fake CUDA tensors: nothing is left on the CPU, dtypes fit, no value is read in a step."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import jobs

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a CUDA device of its own"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the jobs print; in a process of their own, since the device has to be there before torch."""
    library, package = tmp_path_factory.mktemp("fake_cuda") / "device.so", Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{package}/include", f"-L{package}/lib", f"-Wl,-rpath,{package}/lib"]
    source = ROOT / "tests" / "fake_cuda" / "device.cpp"
    subprocess.run([COMPILER, *flags, source, "-o", library, "-lc10", "-ltorch_cpu"], check=True, timeout=300)
    line = [sys.executable, "-m", "tests.fake_cuda.jobs", library]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("job", [job.__name__ for job in jobs.JOBS])
def test_on_fake_cuda_tensors(job: str, report: str) -> None:
    assert f"passed {job}\n" in report, report
