"""Continuations of held-out text at the end of a run."""

from typing import Any

import jax
import numpy as np

from zero_jax.cli.generate import generate, next_logits, sample_with_cache
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.run_data import RunData
from zero_jax.cli.terminal_text import shown_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.step.step import ZeroTrainStep

PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 64, 160, 0.7


def continuations(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, data: RunData
                  ) -> tuple[str, ...]:
    """Continuations of held-out text, or of held-out ids where tokens are not bytes.

    With a cache where the model has one: prompt and new tokens together are then no longer than a training sequence,
    since learned positions beyond it were never trained. Without, a window of that length moves along.
    """
    if not config.samples:
        return ()
    devices = step.batch_sharding.num_devices
    rows = -(-config.samples // devices) * devices
    cached = choice.decoder is not None and config.seq_len > 1
    prompt = max(1, min(PROMPT_TOKENS, config.seq_len // 4)) if cached else min(PROMPT_TOKENS, config.seq_len)
    starts = np.arange(rows) * (len(data.eval_part) - prompt) // rows
    prompts = np.stack([data.eval_part[start : start + prompt] for start in starts])
    new = (_with_cache if cached else _without_cache)(config, choice, step, state, prompts)

    def text(ids: np.ndarray) -> str:
        return shown_text(data.text(ids))

    return tuple(f"--- held-out text:\n{text(prompts[i])}\n--- continued by the model:\n{text(new[i])}"
                 for i in range(config.samples))


def _with_cache(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, prompts: np.ndarray
                ) -> np.ndarray:
    assert choice.decoder is not None
    new = min(SAMPLE_TOKENS, config.seq_len - prompts.shape[1])
    sample = sample_with_cache(choice.decoder(choice.config), num_tokens=new, temperature=TEMPERATURE)
    batch = put_global({"inputs": prompts.astype(np.int32)}, step.batch_sharding)
    return on_host(step.evaluator(sample, ema=config.ema is not None)(state, batch, jax.random.key(config.seed)))


def _without_cache(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, prompts: np.ndarray
                   ) -> np.ndarray:
    evaluate = step.evaluator(next_logits, ema=config.ema is not None)

    def logits(batch: Any) -> np.ndarray:
        # Sharded like any batch: otherwise every device would compute all rows.
        return on_host(evaluate(state, put_global(batch, step.batch_sharding)))

    return generate(logits, prompts, num_tokens=SAMPLE_TOKENS, length=config.seq_len, temperature=TEMPERATURE,
                    seed=config.seed)
