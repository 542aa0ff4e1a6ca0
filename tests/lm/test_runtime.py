"""What is picked for which model on which machine, and one graph for all blocks."""

from __future__ import annotations

import pytest
import torch

from lm.config import ModelConfig, RuntimeConfig
from lm.errors import ConfigError
from lm.init import materialize
from lm.model import Llama
from lm.runtime import Machine, choose, machine_of

LONG = 1e18


def shape(d_model: int) -> ModelConfig:
    return ModelConfig(vocab_size=97, d_model=d_model, n_layers=2, n_heads=2)


@pytest.mark.parametrize(
    ("d_model", "flops", "machine", "expected", "because"),
    [
        (192, LONG, Machine("cpu", True, True), ("32-true", False), "d_model 192"),
        (256, LONG, Machine("cpu", True, True), ("bf16-mixed", True), "has bf16"),
        (512, LONG, Machine("cpu", True, False), ("bf16-mixed", False), "C++"),
        (512, 1e12, Machine("cpu", True, True), ("bf16-mixed", False), "too few"),
        (512, LONG, Machine("cpu", False, True), ("32-true", False), "no bf16"),
        (64, LONG, Machine("cuda", True, True), ("bf16-mixed", True), "has bf16"),
        (64, 1e14, Machine("cuda", True, True), ("bf16-mixed", False), "too few"),
        (64, LONG, Machine("cuda", False, False), ("32-true", False), "Triton"),
        (512, LONG, Machine("mps", True, True), ("32-true", False), "mps"),
    ],
)
def test_choice(d_model, flops, machine, expected, because):
    choice = choose(shape(d_model), flops, machine)
    assert (choice.precision, choice.compile) == expected
    assert because in choice.reason and "\n" not in choice.reason


def test_this_cpu_is_described_as_torch_sees_it():
    machine = machine_of("cpu")
    assert machine.device == "cpu"
    # An independent look at the same facts.
    assert not machine.bf16 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def test_compile_is_one_of_three():
    with pytest.raises(ConfigError, match="auto, true or false"):
        RuntimeConfig(compile="sometimes")  # type: ignore[arg-type]


CUTS = ([13], [5, 20, 40], [7, 30], [2, 9, 11, 33, 50], [1, 2, 3, 4, 5, 6, 60], [31, 32])  # where documents begin


def steps(attention: str, n_layers: int, compiler: str = "") -> tuple[list[torch.Tensor], torch.Tensor]:
    """Losses over batches with other document boundaries each, and the embedding's gradient."""
    config = ModelConfig(vocab_size=97, d_model=32, n_layers=n_layers, n_heads=2)
    with torch.device("meta"):
        model = Llama(config, RuntimeConfig(attention=attention))
    for block in model.blocks if compiler else ():
        block.compile(backend=compiler)
    materialize(model, config, 0, "cpu")
    generator = torch.Generator().manual_seed(0)
    losses = []
    for cuts in CUTS:
        ids = torch.randint(0, 97, (2, 64), generator=generator)
        documents = (torch.arange(64)[:, None] >= torch.tensor(cuts)).sum(1).expand(2, 64)
        loss = model(ids, documents, ids.roll(-1, 1)).mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, model.embedding.weight.grad


def compiled_graphs(attention: str, n_layers: int, compiler: str) -> tuple[int, list[torch.Tensor], torch.Tensor]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    losses, gradient = steps(attention, n_layers, compiler)
    return counters["stats"]["unique_graphs"], losses, gradient


def test_all_blocks_share_one_graph_that_computes_the_same():
    expected, gradient = steps("sdpa", 4)
    graphs, got, gradient_compiled = compiled_graphs("sdpa", 4, "inductor")
    assert graphs == 1
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, gradient_compiled, atol=1e-5, rtol=1e-4)


def test_other_document_boundaries_compile_nothing_new():
    """Attention document by document is not compiled; the pieces around it are, once."""
    one_block = compiled_graphs("documents", 1, "eager")[0]
    graphs, got, _ = compiled_graphs("documents", 3, "eager")
    assert graphs == one_block <= 5
    for a, b in zip(steps("documents", 3)[0], got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
