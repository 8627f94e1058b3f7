"""A trainer of Tunix whose steps are ZeRO-3: the losses of its own loop on one device, with an eighth of the state.

    pip install google-tunix
    python scripts/reliability/tunix_trainer.py

Prints the losses of both, and status 1 where they differ by more than 1e-5.
"""

import sys

import zero_jax

zero_jax.simulate_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.llama3.model import Llama3, ModelConfig  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput  # noqa: E402


class ZeroTrainer(PeftTrainer):
    """Tunix's loop, metrics and evaluation around a step of zero_jax, which has the optimizer and the state."""

    def __init__(self, model, optimizer, config, **options):
        super().__init__(model, optax.set_to_zero(), config)
        self.zero_optimizer, self.options, self.state = optimizer, options, None

    def train(self, train_ds, eval_ds=None, skip_jit=True, **options):
        """Tunix's loop; it looks into a function that `nnx.jit` compiled, unless skip_jit says that there is none."""
        super().train(train_ds, eval_ds, skip_jit=True, **options)

    def jit_train_and_eval_step(self, skip_jit=False, cache_nnx_graph=False):
        """Tunix's loop calls both with a batch."""
        def loss(model, batch):
            return self.loss_fn(model, **self.gen_model_input_fn(batch))

        self.step = zero_jax.make_zero_train_step(
            self.model, 3, loss=loss, optimizer=self.zero_optimizer, **self.options)
        evaluate = self.step.evaluator()

        def train(batch):
            if self.state is None:
                self.state = self.step.init(jax.random.key(0), batch)
            self.state, metrics = self.step(self.state, batch)
            return metrics["loss"], None, metrics["grad_norm"]

        return train, lambda batch: (evaluate(self.state, batch), None)

    def updated_model(self):
        """The model with the trained values, whole."""
        nnx.update(self.model, self.step.params(self.state))
        return self.model


# The rest is the comparison.
def model():
    return Llama3(ModelConfig(num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
                              num_kv_heads=2, rope_theta=10000, norm_eps=1e-6), rngs=nnx.Rngs(0))


def inputs(batch):
    rows, length = batch.input_tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
            "attention_mask": jnp.broadcast_to(causal, (rows, length, length))}


def losses(trainer, batches):
    """What the trainer's own loop logs, by step."""
    found = []
    trainer = trainer.with_gen_model_input_fn(inputs)
    write = trainer._buffer_metrics
    trainer._buffer_metrics = lambda *args, loss, **named: found.append(loss) or write(*args, loss=loss, **named)
    trainer.train(batches)
    return [float(loss) for loss in found]


def main():
    tokens = np.random.default_rng(0).integers(0, 256, (4, 16, 32)).astype(np.int32)
    batches = [TrainingInput(input_tokens=each, input_mask=np.ones(each.shape, bool)) for each in tokens]
    config, adam = TrainingConfig(eval_every_n_steps=100, max_steps=len(batches)), optax.adamw(1e-3)
    ours = ZeroTrainer(model(), adam, config, mesh=zero_jax.make_mesh(8))
    found, wanted = losses(ours, batches), losses(PeftTrainer(model(), adam, config), batches)
    print("ZeRO-3:", *(f"{loss:.6f}" for loss in found))
    print("Tunix: ", *(f"{loss:.6f}" for loss in wanted))
    layout = ours.step.layout()
    ours.step.verify(batches[0])
    whole = 12 * layout.num_params  # parameters and Adam's moments in float32
    print(f"state of a device: {layout.device_bytes:,} bytes, of {whole:,}")
    ours.updated_model()
    return int(not np.allclose(found, wanted, rtol=1e-5) or len(found) != len(batches))


if __name__ == "__main__":
    sys.exit(main())
