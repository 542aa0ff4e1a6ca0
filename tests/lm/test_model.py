"""The model against an independent Llama, and the properties that a packed window must have."""

import pytest
import torch
from torch import nn

from lm.config import ModelConfig, MuPConfig
from lm.init import init_std, init_tensor, materialize
from lm.model import Llama

SMALL = {"vocab_size": 97, "d_model": 48, "n_layers": 2, "n_heads": 6}


def make(config: ModelConfig, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, seed, "cpu")
    return model


def to_transformers(model: Llama) -> nn.Module:
    """The same weights in transformers' LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            intermediate_size=c.d_ff,
            head_dim=c.d_head,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=c.tie_embeddings,
            attention_bias=False,
            max_position_embeddings=4096,
        )
    )
    names = {
        "embedding.": "model.embed_tokens.",
        "blocks.": "model.layers.",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.w": "self_attn.w",
        ".wq.": ".q_proj.",
        ".wk.": ".k_proj.",
        ".wv.": ".v_proj.",
        ".wo.": ".o_proj.",
        "w_gate": "gate_proj",
        "w_up": "up_proj",
        "w_down": "down_proj",
    }
    target = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = {"norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}.get(name, name)
            for ours, other in names.items():
                theirs = theirs.replace(ours, other) if name not in ("norm.weight", "head.weight") else theirs
            target.pop(theirs).copy_(parameter)
    assert not target
    return reference


@pytest.mark.parametrize("n_kv_heads", [6, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_transformers(n_kv_heads: int, tied: bool) -> None:
    """fp32, 512 positions: a wrong RoPE layout is invisible at length 1."""
    config = ModelConfig(**SMALL, n_kv_heads=n_kv_heads, tie_embeddings=tied, init_std=0.1, rope_theta=500_000.0)
    model = make(config)
    reference = to_transformers(model)
    ids = torch.randint(0, config.vocab_size, (2, 512), generator=torch.Generator().manual_seed(1))
    ours, theirs = model(ids), reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * weights).mean().backward()
    (theirs * weights).mean().backward()
    mine, its = model.embedding.weight.grad, reference.model.embed_tokens.weight.grad
    assert (mine - its).norm() / its.norm() < 1e-4
    mine, its = model.blocks[0].attention.wk.weight.grad, reference.model.layers[0].self_attn.k_proj.weight.grad
    assert (mine - its).norm() / its.norm() < 1e-4


def test_loss_equals_transformers() -> None:
    config = ModelConfig(**SMALL, init_std=0.1)
    model = make(config)
    reference = to_transformers(model)
    ids = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(1))
    ours = model(ids[:, :-1], None, ids[:, 1:].contiguous()).mean()
    theirs = reference(ids, labels=ids).loss
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_document_never_sees_another() -> None:
    """Other text in one document changes no logit of the other documents in the window, not by one bit."""
    model = make(ModelConfig(**SMALL, init_std=0.2))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 97, (1, 40), generator=generator)
    documents = torch.tensor([[0] * 11 + [1] * 17 + [2] * 12])
    before = model(ids, documents)
    changed = ids.clone()
    changed[0, 11:28] = torch.randint(0, 97, (17,), generator=generator)
    after = model(changed, documents)
    assert torch.equal(before[:, :11], after[:, :11])
    assert torch.equal(before[:, 28:], after[:, 28:])
    assert not torch.equal(before[:, 11:28], after[:, 11:28])


def test_packed_documents_equal_documents_alone() -> None:
    """Positions need not restart: the logits of a packed document are those it has on its own."""
    model = make(ModelConfig(**SMALL, init_std=0.2))
    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[5] * 11 + [6] * 17 + [9] * 12])
    packed = model(ids, documents)
    for start, stop in ((0, 11), (11, 28), (28, 40)):
        torch.testing.assert_close(packed[:, start:stop], model(ids[:, start:stop]), atol=2e-5, rtol=1e-4)


def test_causal() -> None:
    model = make(ModelConfig(**SMALL, init_std=0.2))
    ids = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 20] = (ids[0, 20] + 1) % 97
    assert torch.equal(model(ids)[:, :20], model(changed)[:, :20])


def test_overfits_four_sequences() -> None:
    """A small model reaches a loss below .1 on 4 repeated sequences."""
    from lm.optim.config import OptimConfig
    from lm.optim.groups import parameter_groups

    config = ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4)
    model = make(config)
    optim = OptimConfig(lr=3e-3, weight_decay=0.0)
    optimizer = torch.optim.AdamW(parameter_groups(model, config, optim), betas=optim.betas)
    ids = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(150):
        loss = model(ids[:, :-1], None, ids[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_init_is_a_function_of_seed_and_name() -> None:
    config = ModelConfig(**SMALL)
    name = "blocks.0.attention.wq.weight"
    once, again = (init_tensor(name, (48, 48), config, seed=7) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, init_tensor(name, (48, 48), config, seed=8))
    assert not torch.equal(once, init_tensor("blocks.1.attention.wq.weight", (48, 48), config, seed=7))
    state = torch.get_rng_state()
    init_tensor(name, (48, 48), config, seed=7)
    assert torch.equal(state, torch.get_rng_state())


def test_init_scale() -> None:
    config = ModelConfig(vocab_size=512, d_model=256, n_layers=8, n_heads=8, mup=MuPConfig(base_width=64))
    model = make(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            assert parameter.std().item() == pytest.approx(init_std(name, config), rel=0.05), name
    assert init_std("blocks.0.attention.wq.weight", config) == pytest.approx(0.02 / 2)
    assert init_std("blocks.0.mlp.w_down.weight", config) == pytest.approx(0.02 / 2 / 4)
    assert init_std("embedding.weight", config) == init_std("head.weight", config) == 0.02


def test_zero_head_gives_equal_logits() -> None:
    model = make(ModelConfig(**SMALL, zero_init_head=True))
    assert model(torch.tensor([[1, 2, 3]])).abs().max() == 0


def test_bf16_autocast_keeps_norms_and_rope_in_fp32() -> None:
    """Under autocast the loss stays close to fp32's at 512 positions: bf16 positions would collapse above 256."""
    model = make(ModelConfig(**SMALL, init_std=0.1))
    ids = torch.randint(0, 97, (2, 513), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].contiguous()
    exact = model(ids[:, :-1], None, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(ids[:, :-1], None, labels)
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().max() < 0.1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n_layers": 0}, "n_layers"),
        ({"d_model": 50}, "n_heads"),
        ({"n_kv_heads": 4}, "n_kv_heads"),
        ({"d_head": 7}, "even"),
        ({"tie_embeddings": True, "zero_init_head": True}, "tie_embeddings"),
    ],
)
def test_nonsense_shapes_are_refused(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        ModelConfig(**{**SMALL, **change})
    assert "\n" not in str(error.value)
