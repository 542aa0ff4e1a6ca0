"""QK-clip holds the largest attention score at the threshold, under every kind of strategy."""

from __future__ import annotations

import pytest
import torch

from lm.attention import pack
from lm.config import ModelConfig
from lm.init import materialize
from lm.model import GQA, Llama
from lm.scores import largest_scores
from plugins.callbacks.qk_clip import QKClip, group_factors, row_factors, scale_rows
from tests.distributed import harness
from tests.distributed.qk_clip_jobs import THRESHOLD, train
from tests.distributed.scenario import LAYOUTS, SINGLE, TENSOR_LAYOUTS, Layout

CONFIG = ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, init_std=0.5)
BY_NAME = {layout.name: layout for layout in [*LAYOUTS, *TENSOR_LAYOUTS]}


@pytest.mark.parametrize("backend", ["sdpa", "documents", "flex"])
@pytest.mark.parametrize("packed", [False, True])
def test_largest_scores_are_those_that_attention_sees(backend: str, packed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(3, 19, 6, 8, generator=generator), torch.randn(3, 19, 2, 8, generator=generator)
    ids = torch.randint(0, 4, (3, 19), generator=generator).sort(dim=1).values if packed else None
    wanted = torch.full((6,), -torch.inf)
    for b in range(3):
        for h in range(6):
            for i in range(19):
                for j in range(i + 1):
                    if ids is None or ids[b, i] == ids[b, j]:
                        wanted[h] = max(wanted[h], 0.3 * q[b, i, h] @ k[b, j, h // 3])
    with torch.no_grad():
        packing = pack(ids, (3, 19), q.device, backend)
    torch.testing.assert_close(largest_scores(q, k, packing, 0.3), wanted)


def test_a_clip_brings_the_same_input_to_the_threshold() -> None:
    """The head that passed it gives exactly the threshold; its group shrinks with it, another group does not."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    materialize(model, CONFIG, 5, "cpu")
    layer: GQA = model.blocks[0].attention
    seen: list[torch.Tensor] = []
    layer.watch_scores.append(lambda layer, q, k, packing: seen.append(largest_scores(q, k, packing, layer.scale)))
    tokens = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(2))
    model(tokens)
    first, second = seen[0].view(2, 2).amax(dim=1).tolist()
    threshold = (first + second) / 2  # one group passes it
    shrink = group_factors(seen[0][None], threshold, 2)
    assert (shrink < 1).sum() == 1
    scale_rows(row_factors(layer, shrink[0]))
    model(tokens)
    torch.testing.assert_close(seen[1], seen[0] * shrink[0].repeat_interleave(2))
    assert seen[1].max().item() == pytest.approx(threshold, rel=1e-5)


def test_a_skipped_step_with_infinite_scores_changes_nothing() -> None:
    largest = torch.tensor([[torch.inf, 1.0], [torch.nan, 300.0]])
    assert group_factors(largest, 100.0, 2).tolist() == [[1, 1], [1, pytest.approx(1 / 3)]]


@pytest.fixture(scope="module")
def single() -> dict:
    return harness.run(train, 1, SINGLE)[0]


def test_training_is_held_at_the_threshold(single: dict) -> None:
    """At a rate that drives scores up, they pass the threshold many times over without the callback."""
    assert max(single["free"]) > 3 * THRESHOLD
    assert single["clipped_steps"] > 5
    assert max(single["scores"][1:]) < 1.7 * THRESHOLD  # by one step's growth
    assert min(single["scores"][-5:]) > 0.7 * THRESHOLD  # and it is the threshold that holds them
    assert single["losses"][-1] < 0.9 * single["losses"][0]


@pytest.mark.parametrize(
    "name", ["ddp-2", "fsdp-2", "zero1-2", "zero3-2", pytest.param("fsdp2_tp2", marks=pytest.mark.slow)]
)
def test_every_strategy_clips_the_same(single: dict, name: str) -> None:
    layout: Layout = BY_NAME[name]
    for rank in harness.run(train, layout.world_size, layout, free=False):
        assert abs(rank["clipped_steps"] - single["clipped_steps"]) <= 1  # a score may lie at the threshold itself
        assert rank["scores"] == pytest.approx(single["scores"], rel=1e-3)
        assert rank["losses"] == pytest.approx(single["losses"], rel=1e-4)


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="qk_clip: threshold"):
        QKClip(0)
