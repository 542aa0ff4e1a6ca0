"""The peer's side of recipes.bench_peers: transformers' LlamaForCausalLM under transformers' Trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def train(turns: Any, options: argparse.Namespace, folder: Path, bf16: bool) -> None:
    """Train until the process is ended, handing the turn over after each few steps.

    Args:
        turns: recipes.bench_peers.Turns.
        options: of the benchmark.
        folder: the Trainer's output folder; nothing is saved.
        bf16: the Trainer's own bf16 (autocast over fp32 weights).
    """
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from recipes.bench_peers import _FOREVER

    class Hand(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **others: Any) -> None:
            turns.before_training()

        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            turns.after_step()

    class Windows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(1, options.vocab_size, (options.sequence_length,))
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=options.sequences,
        max_steps=_FOREVER,
        max_grad_norm=1.0,
        adam_beta2=0.95,
        weight_decay=0.1,
        save_strategy="no",
        report_to=[],
        logging_steps=10,
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(llama_config(options))
    Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[Hand()]).train()


def llama_config(options: argparse.Namespace) -> Any:
    """transformers' config of the shape that the recipe trains."""
    from transformers import LlamaConfig

    from lm.config import ModelConfig

    heads = max(1, options.d_model // 64)
    shape = ModelConfig(options.vocab_size, options.d_model, options.n_layers, heads)
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=options.sequence_length,
        tie_word_embeddings=False,
        use_cache=False,
    )
