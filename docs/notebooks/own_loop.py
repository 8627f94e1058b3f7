# %% [markdown]
# # Your own training loop
#
# You have a Flax model, an optax optimizer and a loop, and the state has outgrown one device. This notebook shards it
# with ZeRO, looks at what is stored where, and checks what the compiled program sends. It runs on a laptop in a minute:
# eight CPU devices are simulated.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import zero_jax

zero_jax.simulate_devices(8)  # leave this line out on real accelerators

# %% [markdown]
# ## The model knows nothing of sharding
#
# A small next-character model in Linen. There is no partitioning annotation in it, and none will be added.

# %%
VOCAB, WIDTH = 128, 64


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(2):
            past = jax.lax.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[None, :, None]
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x + past))))
        return nn.Dense(VOCAB)(x)


TEXT = "the quick brown fox jumps over the lazy dog; " * 40
codes = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)


def batch_of(number, rows=16, length=32):
    starts = np.random.default_rng(number).integers(0, len(codes) - length - 1, rows)
    windows = np.stack([codes[start : start + length + 1] for start in starts])
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


# %% [markdown]
# ## The same loop at any stage
#
# `make_zero_train_step` takes the model, the stage and any optax optimizer, and returns a compiled step. The loop is
# yours. Stage 0 is plain data parallelism; the losses of stage 3 must lie on it, as those of 1 and 2 do.

# %%
losses, steps = {}, {}
for stage in (0, 3):
    step = steps[stage] = zero_jax.make_zero_train_step(Mixer(), stage, optimizer=optax.adamw(3e-3))
    state = step.init(jax.random.key(0), batch_of(0))  # sharded: no device ever holds it whole
    losses[stage] = []
    for number in range(25):
        state, metrics = step(state, batch_of(number))
        losses[stage].append(float(metrics["loss"]))
    print(f"stage {stage}: loss {losses[stage][0]:.2f} -> {losses[stage][-1]:.2f}")
print("they differ by less than 1e-3:", np.abs(np.subtract(losses[0], losses[3])).max() < 1e-3)

# %%
bytes_of = {stage: step.layout(batch_of(0)).device_bytes for stage, step in steps.items()}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for stage, style in ((0, "-"), (3, ":")):
    left.plot(losses[stage], style, label=f"stage {stage}")
left.set(xlabel="step", ylabel="loss")
left.legend()
right.bar([f"stage {stage}" for stage in bytes_of], [size / 1024 for size in bytes_of.values()])
right.set(ylabel="KiB of state on each device")
plt.show()

# %% [markdown]
# ## What is stored where
#
# `describe` names every leaf with its shape, its spec and its bytes. The last lines are the ones to read: what could
# not be sharded, and why, is listed there and never hidden.

# %%
text = steps[3].layout(batch_of(0)).describe().splitlines()
print("\n".join(text[:5] + ["..."] + text[-3:]))

# %% [markdown]
# ## What the compiled program sends
#
# Each stage has a contract: which collectives, over which axes, with how many bytes. `verify` compiles the step and
# compares. A program that sends more, or that leaves something whole that the stage shards, raises `ContractError` with
# the operation and its source line. XLA's CPU backend has no reduce-scatter, so that its all-reduces count half here;
# GPUs and TPUs have one.

# %%
report = steps[3].verify(batch_of(0))
print("\n".join(str(report).splitlines()[:8]))

# %% [markdown]
# To see more sent, sort the examples of a batch: a device then needs rows of all others, and the step sends activations
# in the place of parameters. A warning names what every device computes whole, the error what is sent.

# %%


class Sorting(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        by_length = jnp.argsort((tokens > 0).sum(1))
        return nn.Dense(VOCAB)(nn.Embed(VOCAB, WIDTH)(tokens)[by_length])


try:
    zero_jax.make_zero_train_step(Sorting(), 3, mesh=steps[3].mesh).verify(batch_of(0))
except zero_jax.ContractError as error:
    print(*(line[:110] for line in str(error).splitlines() if "BROKEN" in line), sep="\n")

# %% [markdown]
# ## NNX is the same call
#
# Give the class, or a function of `rngs`, so that the parameters are made sharded; a module that is constructed already
# works, too, but was whole on one device before.

# %%


class Tower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.gelu(self.up(self.embed(tokens))))


step = zero_jax.make_zero_train_step(Tower, 3, optimizer=optax.adamw(1e-2))
state = step.init(jax.random.key(0), batch_of(0))
for number in range(10):
    state, metrics = step(state, batch_of(number))
print(f"NNX at stage 3: loss {metrics['loss']:.2f}")
own = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params))
print(f"the first device has {own:,} of {step.layout(batch_of(0)).num_params:,} parameters")

# %% [markdown]
# **Next:** [which stage do I need?](../which_stage.md), [checkpoints](../guide/checkpoints.md), and [what changes in a
# script with a `TrainState`](../start/from_train_state.md).
