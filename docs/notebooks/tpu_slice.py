# %% [markdown]
# # A TPU slice
#
# What the TPU compiler makes of a ZeRO step on v5p, and how to make it overlap communication with compute. The target
# is described, no TPU is needed: `pip install -e '.[tpu-compiler]'`. A small decoder on a small slice keeps the compile
# times short; the same lines take `v5p:4x4x8` and a large model.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import zero_jax
from models import gpt2
from zero_jax.xla.devices import target_devices

TARGET = "v5p:2x2x1"
mesh = zero_jax.make_mesh(devices=target_devices(TARGET))
print(dict(mesh.shape))

# %% [markdown]
# The mesh follows the torus: large slices have no reduce-scatter over all chips at once, so that gathers and reductions
# go one axis after another. `make_mesh()` does it by itself on TPUs.
#
# ## The attention kernel of the devices
#
# `zero_jax.attention(mesh)` is a function for the model's config. On TPUs it is Pallas's splash attention, where its
# tiles fit; it says which kernel a shape gets, and why.

# %%
kernel = zero_jax.attention(mesh)
for length in (2048, 100):
    q = k = jax.ShapeDtypeStruct((8, length, 16, 128), jnp.bfloat16)
    print(length, *kernel.kernel_for(q, k))

# %%
config = gpt2.Config(2, 512, 4, vocab_size=4096, max_length=1024, remat=True)  # attention=kernel for the real run
batch = {name: jax.ShapeDtypeStruct((4, 1024), jnp.int32) for name in ("inputs", "targets")}
answer = zero_jax.plan(gpt2.build(config), 3, TARGET, batch, precision="bf16",
                       communication=zero_jax.Communication(overlap=True))
print("fits:", answer.fits)

# %% [markdown]
# ## Overlap
#
# By XLA's own defaults nearly every collective of a v5p program blocks. A step gives XLA options by which the
# SparseCores send while the TensorCores compute: the bytes stay the same, and in larger models memory pays. Since
# `overlap=True` was given, `plan` compiled both programs; `answer.overlap` has pairs of (without, with). This model is
# so small that there is little compute to hide behind; look at the same numbers of yours.

# %%
effect = answer.overlap
waits = [wait / seconds for wait, seconds in zip(effect.exposed_seconds, effect.seconds, strict=True)]
print(f"waiting for links: {waits[0]:.0%} -> {waits[1]:.0%} of the predicted step")
print("temporaries:", " -> ".join(f"{size / 2**20:.0f} MiB" for size in effect.temporaries))

figure, axes = plt.subplots(figsize=(6, 1.8))
for pair, label in ((effect.seconds, "the step"), (effect.exposed_seconds, "waiting for links")):
    axes.barh(["without", "with overlap"], [1e6 * seconds for seconds in pair], label=label)
axes.set(xlabel="predicted microseconds of a step")
axes.legend()
plt.show()

# %% [markdown]
# ## What is sent asynchronously
#
# The claim is in the compiled program: which collectives have a start and a done, with work between them.

# %%
for result in answer.communication.results:
    sizes = {True: 0, False: 0}
    for collective in result.collectives:
        sizes[collective.asynchronous] += collective.payload_bytes * collective.count
    if total := sum(sizes.values()):
        print(f"{result.budget.purpose}: {sizes[True] / total:.1%} of {total:,} bytes are asynchronous")

# %% [markdown]
# On v5e `overlap=True` sends reductions within products; on v4 it is refused; on TPU7x XLA's own defaults overlap.
#
# **Next:** [start a slice](../start/tpu.md), [meshes](../guide/parallelism.md), [what was
# measured](../results.md).
