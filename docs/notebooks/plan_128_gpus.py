# %% [markdown]
# # Plan a 128-GPU run before renting it
#
# LLaMA 70B on 128 H100s: does it fit, at which stage, with which mesh, what crosses the network, and how long would a
# step take? XLA's compiler for H100 runs on a laptop without a GPU (`pip install -e '.[gpu-compiler]'`), so the answers
# come from the program that would run. Predicted times are a model of the chip and no measurement.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import zero_jax
from models import llama
from zero_jax.stages import STAGES

config = llama.PRESETS["3-70b"]
model = llama.build(config)
print(f"{config.num_params / 1e9:.1f}e9 parameters")

# %% [markdown]
# ## Arithmetic first
#
# State alone, Adam with bf16 weights and fp32 master weights, by the stage table. It takes no compiler, and rules out
# most of the choices.

# %%
gpus = np.array([8, 16, 32, 64, 128, 256])
figure, axes = plt.subplots(figsize=(6, 3.2))
for row in STAGES:
    if row.number != 2:  # its state is that of stage 1
        sizes = [row.state_bytes(config.num_params, int(number), low_precision=True) for number in gpus]
        axes.plot(gpus, np.array(sizes) / 2**30, "o-", label=f"stage {row.number}")
axes.axhline(80e9 / 2**30, color="black", linestyle=":", label="one H100")
axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GiB of state on each")
axes.set_xticks(gpus, gpus)
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# Only stage 3 comes below the line, from 16 GPUs on. At 128 it leaves most of the memory to activations.
#
# ## Then the real step
#
# `plan` compiles it for the target. A state that cannot fit is refused without compiling.

# %%
rows, length = 128, 4096  # one sequence on each GPU
batch = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ("inputs", "targets")}


def shown(name, answer):
    if answer.timing is None:
        return f"{name}: {answer.needed_bytes / 2**30:.1f} GiB on each; {answer.refused}"
    waits = sum(answer.timing.exposed_seconds.values()) / answer.timing.seconds
    return (f"{name}: {'fits' if answer.fits else 'does not fit'}, {answer.needed_bytes / 2**30:.1f} of "
            f"{answer.memory_bytes / 2**30:.1f} GiB; MFU {answer.timing.mfu:.0%}, waits for links {waits:.0%}")


plans = {}
for name, stage in (("stage 2", 2), ("stage 3", 3)):
    plans[name] = zero_jax.plan(model, stage, "h100:16x8", batch, precision="bf16")
    print(shown(name, plans[name]))

# %% [markdown]
# ## What holds the memory, and what is sent
#
# The largest arrays that are alive at the peak, with their purpose, and the bytes that each GPU sends over each link in
# a step.

# %%
best = plans["stage 3"]
for size, *about in best.memory.largest(4):
    print(f"{size / 2**30:6.2f} GiB", " ".join(str(each) for each in about)[:84])
for (link, over), size in best.links.items():
    elements = size / 2 / config.num_params  # of two bytes
    print(f"{size / 2**30:.1f} GiB over {link}, mesh axes {over}: {elements:.2f} elements per parameter")

# %% [markdown]
# Stage 3 promises three elements per parameter and step: two gathers and a reduction.
#
# ## The mesh is a choice as well
#
# Tensor parallelism inside a host divides what a layer needs and the gathers, and pays with all-reduces of activations
# over NVLink. Sharding inside of groups of hosts and replicating across them (`replica`) trades memory for shorter
# rings. Ask for the ones that you would consider; each takes seconds of a laptop.

# %%
split = zero_jax.Parallelism(tensor_rules=llama.tensor_rules(config), sequence_parallel=True)
for name, options in (("tensor=8", {"tensor": 8, "parallelism": split}), ("replica=4", {"replica": 4})):
    plans[name] = zero_jax.plan(model, 3, "h100:16x8", batch, precision="bf16", **options)
    print(shown(name, plans[name]))

# %%
compiled = {name: answer for name, answer in plans.items() if answer.timing}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
names = [name.replace(", ", ",\n") for name in compiled]
left.barh(names, [answer.needed_bytes / 2**30 for answer in compiled.values()])
left.set(xlabel="GiB needed on each GPU")
start = np.zeros(len(compiled))
waits = {name: sum(answer.timing.exposed_seconds.values()) for name, answer in compiled.items()}
for kind in ("compute", "memory", "waiting for links"):
    spent = np.array([answer.timing.spent.get(kind, waits[name]) for name, answer in compiled.items()])
    right.barh(names, spent, left=start, label=kind)
    start += spent
right.set(xlabel="predicted seconds of a step")
right.legend()
plt.show()

# %% [markdown]
# For one sequence on each GPU neither pays: plain stage 3 needs the least memory and waits the least, and its memory
# has place for more sequences, which is what to try next.
#
# ## How far to trust it
#
# Memory and bytes are those of the compiled program. Times are FLOPs over a rate and bytes over a bandwidth, overlapped
# as scheduled, with one rate for all matrix products and no kernel launches: good to compare meshes, and no promise.
# No step time of zero_jax on real GPUs has been published. Attention here is XLA's; cuDNN's (`--attention`, with the
# extra `cudnn`) is another program. Rent a small slice and measure before you rent the large one.
#
# The same on the command line, with a search for the largest batch:
#
# ```console
# $ zero-jax plan --model llama:3-70b --target h100:16x8 --stage 3 --seq-len 4096 --precision bf16
# $ zero-jax plan --model llama:3-70b --target h100:16x8 --search fit --seq-len 4096 --precision bf16
# ```
