"""MuonAdamW against torch's optimizers, against an SVD, and against Moonlight's rule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from lm.config import ModelConfig, MuPConfig
from lm.init import materialize
from lm.model import Llama
from lm.optim.build import make_optimizer
from lm.optim.config import MuonConfig, OptimConfig
from lm.optim.groups import parameter_rows
from lm.optim.muon import COEFFICIENTS, MuonAdamW, newton_schulz, update_scale

CONFIG = ModelConfig(vocab_size=67, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)


def model(config: ModelConfig = CONFIG) -> Llama:
    with torch.device("meta"):
        llama = Llama(config)
    materialize(llama, config, 3, "cpu")
    return llama


def train(llama: Llama, *optimizers: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 67, (4, 17), generator=generator)
    losses = []
    for _ in range(steps):
        loss = llama(tokens[:, :-1], None, tokens[:, 1:]).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def random_matrix(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (24, 130), (1, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_is_the_quintic_of_the_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape)
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    wanted = (u * s @ vt).float()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    got = newton_schulz(matrix, 5, dtype)
    assert got.dtype == torch.float32
    assert torch.linalg.matrix_norm(got - wanted, 2) < tolerance


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_an_update_of_the_model_has_singular_values_near_1(ns_dtype: str) -> None:
    """From the first real gradient: hidden matrices move by lr x scale x an orthogonal matrix, nothing else."""
    llama, lr = model(), 1e-2
    optim = OptimConfig(name="muon", muon=MuonConfig(lr=lr, weight_decay=0.0, ns_dtype=ns_dtype, ns_steps=6))
    before = {name: p.detach().clone() for name, p in llama.named_parameters()}
    train(llama, make_optimizer(llama, CONFIG, optim), steps=1)
    checked = 0
    for name, parameter in llama.named_parameters():
        if parameter.ndim == 2 and name.startswith("blocks."):
            update = (parameter.detach() - before[name]) / (lr * update_scale(parameter.shape, "match_rms_adamw"))
            values = torch.linalg.svdvals(update)
            # Random ids give gradients of low rank: of the values only those that are not lost in rounding count.
            assert values[: len(values) // 2].min() > 0.65 and values.max() < 1.25, name
            checked += 1
    assert checked == 7 * CONFIG.n_layers


def test_match_rms_gives_entries_of_root_mean_square_a_fifth() -> None:
    """Moonlight's reason for its factor: AdamW's updates have about .2 (arXiv 2502.16982, sec. 2.2)."""
    for rows, cols in ((64, 64), (64, 192), (192, 64)):
        update = newton_schulz(random_matrix(rows, cols), 5, torch.float32) * update_scale(
            (rows, cols), "match_rms_adamw"
        )
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)
    assert update_scale((192, 48), "original") == pytest.approx(2.0) and update_scale((48, 192), "original") == 1.0


@pytest.mark.parametrize("scaling", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch_bit_for_bit(scaling: str, nesterov: bool) -> None:
    muon = MuonConfig(lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.05, scaling=scaling, ns_dtype="bfloat16")
    optim = OptimConfig(name="muon", lr=1e-3, muon=muon)
    ours, theirs = model(), model()
    losses = train(ours, make_optimizer(ours, CONFIG, optim))
    hidden = [p for n, p in theirs.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    rest = [p for n, p in theirs.named_parameters() if not (p.ndim == 2 and n.startswith("blocks."))]
    reference = torch.optim.Muon(
        hidden, lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.05, adjust_lr_fn=scaling
    )
    adamw = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    assert train(theirs, reference, adamw) == losses
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_adamw_groups_equal_torch_bit_for_bit() -> None:
    """A MuonAdamW without a Muon group against the optimizer that optim.name adamw builds."""
    optim = OptimConfig(lr=3e-3, weight_decay=0.1)
    ours, theirs = model(), model()
    reference = make_optimizer(theirs, CONFIG, optim)
    assert type(reference) is torch.optim.AdamW
    groups = [
        {**{k: group[k] for k in ("lr", "weight_decay", "optimizer")}, "params": params}
        for group, params in zip(reference.param_groups, _same_groups(ours, theirs, reference), strict=True)
    ]
    assert train(ours, MuonAdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)) == train(theirs, reference)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


def _same_groups(ours: nn.Module, theirs: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    names = {id(p): name for name, p in theirs.named_parameters()}
    return [[ours.get_parameter(names[id(p)]) for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("tied", [False, True])
def test_only_hidden_matrices_go_to_muon(tied: bool) -> None:
    config = ModelConfig(vocab_size=67, d_model=32, n_layers=1, n_heads=4, tie_embeddings=tied)
    llama = model(config)
    optim = OptimConfig(name="muon", lr=1e-3, weight_decay=0.3, muon=MuonConfig(lr=0.02))
    rows = {row.name: row for row in parameter_rows(dict(llama.named_parameters()), config, optim)}
    muon = {name for name, row in rows.items() if row.optimizer == "muon"}
    assert muon == {n for n, p in llama.named_parameters() if p.ndim == 2 and n.startswith("blocks.")}
    assert ("head.weight" in rows) is not tied
    assert all(rows[name].lr == 0.02 and rows[name].weight_decay == 0.3 for name in muon)
    assert all(row.lr == 1e-3 and row.weight_decay == 0 for name, row in rows.items() if name not in muon)
    optimizer = make_optimizer(llama, config, optim)
    train(llama, optimizer, steps=2)
    assert set(optimizer.state[llama.embedding.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[llama.blocks[0].mlp.w_up.weight]) == {"momentum_buffer"}


def test_muon_learns_and_its_state_is_saved() -> None:
    optim = OptimConfig(name="muon", lr=2e-2)
    llama = model()
    optimizer = make_optimizer(llama, CONFIG, optim)
    losses = train(llama, optimizer, steps=12)
    assert losses[-1] < 0.6 * losses[0]
    again = model()
    again.load_state_dict(llama.state_dict())
    restored = make_optimizer(again, CONFIG, optim)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(again, restored) == train(llama, optimizer)


@pytest.mark.parametrize(("scaling", "factor"), [("match_rms_adamw", 0.5), ("original", 1.0)])
def test_mup_keeps_the_spectral_norm_of_an_update(scaling: str, factor: float) -> None:
    """arXiv 2310.17813, condition 1: with the table's rate it is the same at 1 and at 4 times the base width."""
    norms = []
    for width in (64, 256):
        config = ModelConfig(67, width, 1, width // 16, d_head=16, d_ff=3 * width, mup=MuPConfig(64, 16))
        optim = OptimConfig(name="muon", muon=MuonConfig(lr=0.02, scaling=scaling))
        (row,) = (r for r in parameter_rows(["blocks.0.mlp.w_up.weight"], config, optim))
        norms.append(row.lr * update_scale((3 * width, width), scaling))
    assert row.lr_multiplier == pytest.approx(factor)
    assert norms[1] == pytest.approx(norms[0]) and norms[0] > 0.02 * math.sqrt(2)


@pytest.mark.parametrize(
    "bad",
    [{"scaling": "none"}, {"scaling": "original"}, {"lr": 0.0}, {"momentum": 1.0}, {"ns_steps": 0}, {"ns_dtype": "x"}],
)
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"optim\.muon"):
        MuonConfig(**bad)
