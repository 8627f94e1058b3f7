# %% [markdown]
# # Fine-tune a LLaMA-class model with LoRA
#
# From a checkpoint in Hugging Face's format to adapters in PEFT's: import, low-rank adapters, training at stage 3,
# before and after, merge, export. The weights are tiny and random, since no hub is reached from here; the steps are
# real, and the same lines fine-tune `llama:3.2-1b` or `llama:3.1-8b` from a folder that you have downloaded.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import zero_jax
from models import llama  # from a wheel: from zero_jax.models import llama

zero_jax.simulate_devices(8)  # leave this line out on real accelerators
config = llama.PRESETS["tiny"]  # the architecture of LLaMA 3, two layers of width 64
names = zero_jax.Names(**llama.huggingface(config))  # our names to those of Hugging Face's files
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A base model
#
# Here the base is pretrained for a moment on one text; yours is on disk. `export_params` and `import_params` write and
# read `model.safetensors` with the names that `transformers` uses, sharded on the way in and leaf by leaf on the way
# out.

# %%
def batch_of(text, number, rows=16, length=48):
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(number).integers(0, len(codes) - length - 1, rows)
    windows = np.stack([codes[start : start + length + 1] for start in starts])
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


PRETRAIN = "the cat sat on the mat and the dog lay on the rug; " * 20
pretrain = zero_jax.make_zero_train_step(llama.build(config), 3, optimizer=optax.adamw(3e-3))
state = pretrain.init(jax.random.key(0), batch_of(PRETRAIN, 0))
for number in range(40):
    state, metrics = pretrain(state, batch_of(PRETRAIN, number))
print(f"the base has learned its text: {metrics['loss'] < 1}")
zero_jax.export_params(folder / "model.safetensors", state, pretrain.layout(), names=names)

fresh = pretrain.init(jax.random.key(1), batch_of(PRETRAIN, 0))
loaded = zero_jax.import_params(folder, pretrain, fresh, batch_of(PRETRAIN, 0), names=names)
base = pretrain.params(loaded)
print("tensors as they were:", all(jax.tree.leaves(jax.tree.map(
    lambda new, old: bool((new == old).all()), base, pretrain.params(state)))))

# %% [markdown]
# ## Adapters from outside of the model
#
# `zero_jax.lora` wraps the unedited model. The base is frozen: stored in bfloat16 and sharded, without gradients,
# moments or reductions. Only the adapters train.

# %%
adapted = zero_jax.lora(llama.build(config), rank=8, targets=("attn", "mlp"), alpha=16)
step = zero_jax.make_zero_train_step(adapted, 3, optimizer=optax.adamw(1e-2), precision="bf16")
TASK = "Q: where is the cat? A: under the old oak table. " * 20
state = step.init(jax.random.key(0), batch_of(TASK, 0), params=base)
evaluate = step.evaluator()
before = float(evaluate(state, batch_of(TASK, 1000)))
trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
frozen = sum(leaf.size for leaf in jax.tree.leaves(state.frozen))
print(f"{trained:,} parameters are trained, {frozen:,} are frozen")

# %%
losses = []
for number in range(100):
    state, metrics = step(state, batch_of(TASK, number))
    losses.append(float(metrics["loss"]))
after = float(evaluate(state, batch_of(TASK, 1000)))
print(f"loss on other windows of the task: above 3 before: {before > 3}, below 1.5 after: {after < 1.5}")

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(losses)
axes.set(xlabel="step of fine-tuning", ylabel="loss", ylim=(0, None))
plt.show()

# %% [markdown]
# ## Text, before and after
#
# `merge_lora` adds the adapters to the kernels, so that the model's own `apply` has them.

# %%
apply = jax.jit(lambda params, window: llama.build(config).apply({"params": params}, window))


def continued(params, prompt, number=24):
    tokens = [*prompt.encode()]
    for _ in range(number):
        window = np.zeros((1, 64), np.int32)
        window[0, : len(tokens)] = tokens
        tokens.append(int(apply(params, window)[0, len(tokens) - 1].argmax()))
    return bytes(tokens).decode(errors="replace")


merged = zero_jax.merge_lora(step, state, dtype="float32")
merged, base = (jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float32), tree)
                for tree in (merged, base))
prompt = "Q: where is the cat? A:"
print("the base knows the answer:", "under the old" in continued(base, prompt))
print("fine-tuned:", continued(merged, prompt))

# %% [markdown]
# ## Out again
#
# As an adapter that PEFT loads beside the base, or as programs that a server runs with JAX alone.

# %%
zero_jax.export_lora(folder / "adapter", step, state, names=names)
print(sorted(path.name for path in (folder / "adapter").iterdir()))

sizes = jax.export.symbolic_shape("batch, length", constraints=["length <= 64"])
tokens = jax.ShapeDtypeStruct(sizes, jnp.int32)
zero_jax.export_programs(folder / "served", {"forward": (
    lambda params, tokens: llama.build(config).apply({"params": params}, tokens), (tokens,))}, merged)
print(sorted(path.name for path in (folder / "served").iterdir()))

# %% [markdown]
# **Next:** [quantised bases (QLoRA), instructions and preferences](../guide/fine_tuning.md), [what fits one
# GPU](../guide/fine_tuning.md#a-quantised-base), [import and export of weights](../guide/weights.md).
