"""lm/planner against published figures: ZeRO's table, collectives, bubbles, activations, Young, real models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lm.config import ModelConfig
from lm.plan import count_parameters, training_flops
from lm.planner import communication as comm
from lm.planner.activations import Numerics, activation_bytes, gpt_layer_bytes, logits_bytes
from lm.planner.devices import DEVICES, find_device, peak_tflops
from lm.planner.job import Cluster
from lm.planner.memory import adam_state_bytes, gathered_bytes
from lm.planner.plan import peak_lr
from lm.planner.reliability import LLAMA_3_FAILURES_PER_DEVICE_DAY, young_interval_seconds, young_lost_share
from lm.planner.shapes import SHAPES, shape_for
from lm.planner.sizes import HOFFMANN
from lm.planner.timing import attention_share

PLAN_7B = ModelConfig(vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=11_008)
N_7B = 6_721_372_160
CLUSTER = Cluster("H100", 256)
GB = 1e9


def rounded(value: float, digits: int) -> float:
    """To significant digits."""
    return float(f"{value:.{digits}g}")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama_2_7b", 6_738_415_616),
        ("llama_2_13b", 13_015_864_320),
        ("llama_2_70b", 68_976_648_192),
        ("llama_3_8b", 8_030_261_248),
        ("llama_3_70b", 70_553_706_496),
        ("llama_3.2_1b", 1_235_814_400),
        ("tinyllama_1.1b", 1_100_048_384),
        ("smollm2_135m", 134_515_008),
        ("smollm2_360m", 361_821_120),
        ("smollm2_1.7b", 1_711_376_384),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, published: int) -> None:
    """Numbers of parameters that the models' weight files state."""
    assert count_parameters(SHAPES[name]).total == published


def test_zero_table() -> None:
    """ZeRO, fig. 1: 7.5B on 64 devices; then 7B on 8, Llama-2-7B and a 70B."""
    assert [rounded(adam_state_bytes(7.5 * GB, 64, stage) / GB, 3) for stage in range(4)] == [120, 31.4, 16.6, 1.88]
    assert [adam_state_bytes(7 * GB, 8, stage) / GB for stage in range(4)] == [112, 38.5, 26.25, 14]
    assert rounded(adam_state_bytes(6_738_415_616, 64, 1) / GB, 3) == 28.2
    assert rounded(adam_state_bytes(70 * GB, 512, 3) / GB, 3) == 2.19


def test_bytes_and_seconds_of_the_7b() -> None:
    """Micro-batch 1, T 4096, 16 bit, H100 at 40%."""
    network, link = CLUSTER.bytes_per_s(256), CLUSTER.bytes_per_s(8)
    assert (network, link) == (50e9, 450e9)
    data = comm.data_parallel_bytes(N_7B, 256)
    assert (rounded(data / GB, 3), rounded(data / network, 2)) == (26.8, 0.54)
    full = comm.full_shard_bytes(N_7B, 256)
    assert (rounded(full / GB, 3), rounded(full / network, 2)) == (40.2, 0.80)
    inside, between = comm.hybrid_shard_bytes(N_7B, 32, 8)
    assert (rounded(inside / GB, 3), rounded(inside / link, 1)) == (35.3, 0.08)
    assert (rounded(between / GB, 2), rounded(between / network, 1)) == (3.3, 0.07)
    tensor = comm.tensor_parallel_bytes(PLAN_7B, 4096, 8)
    assert (rounded(tensor / GB, 2), rounded(tensor / link, 2), rounded(tensor / network, 2)) == (7.5, 0.017, 0.15)
    compute = training_flops(PLAN_7B, 4096, 4096) / 8 / (0.4 * 989e12)
    assert rounded(compute, 2) == 0.052
    assert rounded(comm.pipeline_bytes(PLAN_7B, 4096) / 1e6, 3) == 33.6  # facts give 33.5: cut off, not rounded
    hop, layer = comm.ring_attention_bytes(PLAN_7B, 131_072, 8)
    assert (rounded(hop / 1e6, 2), rounded(layer / 1e6, 2)) == (67, 470)


def test_expert_parallelism_moves_each_token_four_times() -> None:
    """By hand: 8 ranks, top 2, 4,096 tokens of 4,096 in 16 bit: 4 x 7/8 x 2 x 4096 x 4096 x 2 bytes."""
    assert comm.expert_parallel_bytes(PLAN_7B, 4096, 8) == 4 * 7 / 8 * 2 * 4096 * 4096 * 2


def test_ring_collectives() -> None:
    assert comm.ring_bytes("all_reduce", 100, 4) == 150
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert comm.ring_bytes(kind, 100, 4) == 75


def test_pipeline_bubbles() -> None:
    shares = [comm.pipeline_bubble(p, m) for p, m in ((4, 16), (4, 32), (8, 32))]
    assert [rounded(share, 2) for share in shares] == [0.16, 0.086, 0.18]
    assert comm.pipeline_bubble(8, 64) < 0.1 < comm.pipeline_bubble(8, 62)


def test_activations_of_a_gpt_layer() -> None:
    whole, flash = (gpt_layer_bytes(4096, 1, 4096, 32, scores=scores) for scores in (True, False))
    assert (rounded(whole / GB, 3), rounded(flash / GB, 2), rounded(32 * flash / GB, 3)) == (3.25, 0.57, 18.3)
    assert rounded(4096 * 4096 * 2 / 1e6, 3) == 33.6  # only the layer's input


def test_activations_of_the_llama_block() -> None:
    """The 7B at micro-batch 1: 18 to 22 GB kept; with full checkpointing little more than 33.6 MB a layer."""
    kept = activation_bytes(PLAN_7B, 1, 4096)
    assert 18 * GB < kept < 22 * GB
    per_layer = kept / 32
    assert abs(per_layer / gpt_layer_bytes(4096, 1, 4096, 32, scores=False) - 1) < 0.25  # "differ by about 20%"
    full = activation_bytes(PLAN_7B, 1, 4096, "full")
    assert full == pytest.approx(32 * 33.6e6, rel=0.1)
    assert full < activation_bytes(PLAN_7B, 1, 4096, "selective") < kept
    assert activation_bytes(PLAN_7B, 1, 4096, tensor=8) < kept / 2
    probabilities = 4 * 512 * 128_256  # of the loss: those of an eighth of the window fit into one chunk
    assert activation_bytes(PLAN_7B, 1, 4096, context=8) - probabilities == pytest.approx(kept / 8, rel=1e-3)
    assert activation_bytes(PLAN_7B, 1, 4096, numerics=Numerics(bf16_weights=False)) > kept


def test_logits_and_gathered_weights_of_the_7b() -> None:
    assert rounded(logits_bytes(PLAN_7B, 4096) / GB, 2) == 2.1
    assert 1 * GB < gathered_bytes(PLAN_7B) < 2 * GB


def test_young() -> None:
    """delta 1 min: M 12,000 min gives 155 min, M 3 h gives 19 min; the loss is sqrt(2 delta / M)."""
    assert round(young_interval_seconds(60, 12_000 * 60) / 60) == 155
    assert round(young_interval_seconds(60, 3 * 3600) / 60) == 19
    assert young_lost_share(60, 12_000 * 60) == pytest.approx((2 / 12_000) ** 0.5)
    assert rounded(LLAMA_3_FAILURES_PER_DEVICE_DAY, 2) == 4.7e-4


def test_attention_shares() -> None:
    """8B: about 6% at 4k and 68% at 128k; the 6.72B: 8% and about 41% at 32k."""
    shape = SHAPES["llama_3_8b"]
    shares = [attention_share(shape, length, "total") for length in (4096, 131_072)]
    assert [rounded(share, 2) for share in shares] == [0.063, 0.68]
    assert [rounded(attention_share(PLAN_7B, length), 2) for length in (4096, 32_768)] == [0.08, 0.41]


def test_larger_runs() -> None:
    """13B on 3T; 2,048 H100 for 30 days at 40%; the MFU of a 70B at 1.0M tokens/s on 1,024."""
    assert rounded(6 * 13e9 * 3e12, 2) == 2.3e23
    peak = DEVICES["H100"].peak_flops("bf16")
    assert rounded(2048 * 30 * 86_400 * 0.4 * peak, 2) == 2.1e24
    assert rounded(6 * 70e9 * 1.0e6 / (1024 * peak), 2) == 0.41
    hours = training_flops(SHAPES["llama_2_7b"], 2e12, 4096, "palm") / (0.4 * peak) / 3600
    assert hours == pytest.approx(65.8e3, rel=2e-3)


@pytest.mark.parametrize(
    ("flops", "n_params", "tokens", "ratio", "loss"),
    [
        (1.2e19, 0.2475e9, 8.08e9, 32.6, 2.950),
        (1e20, 0.645e9, 25.9e9, 40.1, 2.600),
        (1e21, 1.824e9, 91.4e9, 50.1, 2.329),
        (1e22, 5.16e9, 323e9, 62.6, 2.139),
        (5.76e23, 32.2e9, 2.98e12, 92.6, 1.931),
    ],
)
def test_optimum_of_hoffmanns_surface(flops: float, n_params: float, tokens: float, ratio: float, loss: float) -> None:
    n, d = HOFFMANN.optimum(flops)
    assert n == pytest.approx(n_params, rel=2e-3)
    assert d == pytest.approx(tokens, rel=3e-3)
    assert d / n == pytest.approx(ratio, rel=2e-3)
    assert HOFFMANN.loss(n, d) == pytest.approx(loss, abs=5e-4)


@pytest.mark.parametrize(
    ("served", "n_params", "tokens"),
    [(0, 3.54e9, 204e9), (1e12, 1.73e9, 512e9), (1e13, 0.969e9, 1.80e12), (1e14, 0.645e9, 8.28e12)],
)
def test_inference_aware_sizes(served: float, n_params: float, tokens: float) -> None:
    n, d = HOFFMANN.inference_aware(2.2, served)
    assert n == pytest.approx(n_params, rel=2e-3)
    assert d == pytest.approx(tokens, rel=3e-3)
    assert HOFFMANN.loss(n, d) == pytest.approx(2.2, abs=1e-9)


def test_devices_of_the_issue_are_known_with_sources() -> None:
    for name in ("A100", "H100", "H200", "B200", "MI300X", "TPU v5p", "RTX 4090"):
        device = find_device(name)
        assert device.source
        assert device.memory_gb > 20
        assert device.tflops["bf16"] > 100
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA GeForce RTX 4090") == pytest.approx(165, abs=1)
    assert peak_tflops("a toaster") == 0


def test_shape_for_a_size_has_about_that_many_parameters() -> None:
    for wished in (2e7, 1.2e8, 1.8e9, 7e9, 7e10):
        assert count_parameters(shape_for(wished, 32_000)).total == pytest.approx(wished, rel=0.1)
    assert [peak_lr(n) for n in (6.7e9, 13e9, 34e9, 70e9, 405e9)] == [3e-4, 3e-4, 1.5e-4, 1.5e-4, 8e-5]


def test_import_brings_no_framework() -> None:
    code = "import sys, lm.planner.plan; print(sorted({'torch', 'lightning', 'ray', 'mlflow'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
