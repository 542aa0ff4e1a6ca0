"""Generation with kept keys and values against the whole window computed again for each token."""

from __future__ import annotations

import pytest
import torch

from lm.config import ModelConfig, MuPConfig
from lm.errors import ConfigError
from lm.generation import KeyValueCache, Sampling, choose, generate, nucleus
from lm.init import materialize
from lm.model import Llama
from lm.rope_scaling import RopeScaling

V = 61
SHAPES = {
    "grouped": {},
    "mup_tied": {"mup": MuPConfig(base_width=16, base_d_head=8), "tie_embeddings": True},
    "qk_norm_capped": {"qk_norm": True, "attention_softcap": 3.0, "final_softcap": 5.0},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=16)},
}


def make(shape: str) -> Llama:
    config = ModelConfig(
        vocab_size=V, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, init_std=0.3, **SHAPES[shape]
    )
    model = Llama(config)
    materialize(model, config, 0, "cpu")
    return model.double()


@torch.no_grad()
def again(model: Llama, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_logits_as_the_whole_window(shape: str) -> None:
    model, lengths = make(shape), torch.tensor([40, 17, 1])
    ids = torch.randint(0, V, (3, 40), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache(model, 3, 41)
    with torch.no_grad():
        read = cache.read(ids, lengths)
        new = torch.tensor([[3], [4], [5]])
        then = model.logits(cache.states(new, lengths[:, None])[:, 0])
        for row, length in enumerate(lengths.tolist()):
            whole = torch.cat([ids[row, :length], new[row]])[None]
            want = model(whole)[0]
            torch.testing.assert_close(read[row], want[-2], atol=1e-12, rtol=0)
            torch.testing.assert_close(then[row], want[-1], atol=1e-12, rtol=0)


def test_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = make("grouped"), torch.tensor([40, 17, 12])
    ids = torch.randint(0, V, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = KeyValueCache(model, 3, 40).read(ids, lengths)
        monkeypatch.setattr("lm.generation._READ_AT_ONCE", 12)
        torch.testing.assert_close(KeyValueCache(model, 3, 40).read(ids, lengths), whole, atol=1e-12, rtol=0)


def test_greedy_rows_of_any_length_and_a_stop() -> None:
    model = make("grouped")
    prompts = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4]]
    found = generate(model, prompts, 12, ())
    assert found == [again(model, prompt, 12) for prompt in prompts]
    stop = found[0][4]
    cut = generate(model, prompts, 12, {stop})
    for row, whole in zip(cut, found, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_a_row_does_not_depend_on_its_neighbours_and_a_seed_repeats() -> None:
    model, sampling = make("grouped"), Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone = generate(model, [[1, 2, 3]], 16, (), sampling)
    assert generate(model, [[1, 2, 3], [4, 5]], 16, (), sampling)[0] == alone[0]
    assert generate(model, [[1, 2, 3]], 16, (), Sampling(1.0, 0.9, 6)) != alone


def test_the_nucleus_is_the_smallest_set_that_reaches_p() -> None:
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)
    assert nucleus(p, 0.5).tolist() == [[0.0, 0.5, 0.0, 0.0]]
    assert nucleus(p, 0.7).tolist() == [[0.0, 0.5, 0.0, 0.25]]
    assert nucleus(p, 1.0).tolist() == p.tolist()


def test_drawn_tokens_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = [choose(logits, Sampling(2.0, 0.9), [generator])[0] for _ in range(4000)]
    want = nucleus((logits.double() / 2).softmax(-1), 0.9)[0]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares.double(), want / want.sum(), atol=0.03, rtol=0)


def test_nonsense_is_one_line() -> None:
    model = make("grouped")
    for prompts, new in (([[]], 4), ([], 4), ([[1]], 0)):
        with pytest.raises(ConfigError, match=r"prompt|max_new_tokens"):
            generate(model, prompts, new, ())
    for wrong in ({"temperature": -1.0}, {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(ConfigError, match=r"keys and values of 1 x 1,000,000,000,002 positions take"):
        generate(model, [[1, 2]], 10**12, ())
    for temperature in (0.0, 1.0):
        with pytest.raises(ConfigError, match="logits are not finite"):
            choose(torch.tensor([[0.0, float("nan")]]), Sampling(temperature), [torch.Generator()])
    # Temperatures near 0 and near infinity neither overflow nor divide by 0.
    logits, drawn = torch.tensor([[-2.0, 3.0, 1.0]]), torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(5e-324), [drawn]) == [1]
    assert choose(logits, Sampling(1e308), [drawn])[0] in (0, 1, 2)
