# %% [markdown]
# # Why is it slow?
#
# Four questions, in the order in which to ask them: does the step wait for data, what do its operations do, what would
# the target wait for, and what do microbatches send again and again. It runs on eight simulated CPU devices and asks
# the H100 compiler; on your machine leave `simulate_devices` out.

# %%
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import zero_jax
from models import gpt2
from zero_jax.data.batches import Batches
from zero_jax.data.prefetch import Prefetched

zero_jax.simulate_devices(8)
config = gpt2.PRESETS["tiny"]
step = zero_jax.make_zero_train_step(gpt2.build(config), 3)
tokens = np.random.default_rng(0).integers(0, 256, 100_000)

# %% [markdown]
# ## Does it wait for data?
#
# A loader that takes 50 ms for a batch, as a slow disk or a tokenizer does. `Prefetched` reads in a thread, and
# `waited` says how long the step had to wait. In a run of `zero-jax train` it is `data_wait` in every line of the log,
# and a run that waits more than a tenth of its time says so.

# %%


class SlowDisk(Batches):
    def __getitem__(self, number):
        time.sleep(0.05)
        return super().__getitem__(number)


def seconds_waited(depth):
    batches = SlowDisk(tokens, batch_size=8, length=32, sharding=step.batch_sharding)
    with Prefetched(batches, depth=depth) as feed:
        state = step.init(jax.random.key(0), next(feed))
        state, _ = step(state, next(feed))  # compiles
        waited = 0.0
        for _ in range(8):
            state, metrics = step(state, next(feed))
            waited += feed.waited
            jax.block_until_ready(metrics)
            time.sleep(0.06)  # a step of a larger model
        return waited / 8


waits = {depth: seconds_waited(depth) for depth in (0, 2)}
print("without reading ahead every step waits for 50 milliseconds or more:", waits[0] >= 0.05)
print("two batches ahead it waits for less than half of that:", waits[2] < waits[0] / 2)

# %% [markdown]
# ## What do the operations do?
#
# `train --profile steps=10:15` traces five steps for xprof and sums them up in words; here is the summary alone, of a
# trace made by hand. On simulated devices waiting inside of a collective counts to it, since eight devices share the
# cores: look at such shares on the real machine.

# %%
from zero_jax.cli.training.profile import Profile, summarize, traced_operations  # what --profile uses
from zero_jax.xla.schedule import schedule

batches = Batches(tokens, batch_size=8, length=32, sharding=step.batch_sharding)
batch = batches[0]
state = step.init(jax.random.key(0), batch)
state, _ = step(state, batch)
profile = Profile(Path(tempfile.mkdtemp()), 1, 3)
profile.start()
for _ in range(3):
    state, metrics = step(state, batch)
jax.block_until_ready(metrics)
profile.stop()
text = step.compile(batch).as_text()
summary = summarize(traced_operations(profile.folder, "jit"), schedule(text))
figure, axes = plt.subplots(figsize=(6, 2.2))
total = sum(summary.kinds.values())
axes.barh([*summary.kinds], [100 * seconds / total for seconds in summary.kinds.values()])
axes.set(xlabel="% of the time of all operations")
plt.show()
print("kinds of operations:", ", ".join(sorted(summary.kinds)))

# %% [markdown]
# ## What would the target wait for?
#
# The compiled program of the target is a schedule: where a collective starts, what runs beside it, and where something
# waits for it. `exposed_seconds` are those in which nothing else runs. A batch that is too small is the usual reason:
# what is sent does not shrink with it, and compute does.

# %%
import dataclasses

wide = dataclasses.replace(gpt2.PRESETS["124m"], num_layers=2, remat=True, vocab_size=8192)


def planned(rows, **options):
    abstract = {name: jax.ShapeDtypeStruct((rows, 512), jnp.int32) for name in ("inputs", "targets")}
    return zero_jax.plan(gpt2.build(wide), 3, "h100:8", abstract, precision="bf16", **options)


plans = {rows: planned(rows) for rows in (8, 64)}
for rows, answer in plans.items():
    exposed = sum(answer.timing.exposed_seconds.values()) / answer.timing.seconds
    print(f"{rows // 8} on each GPU: MFU {answer.timing.mfu:.0%}, waits for links {exposed:.0%}")

# %% [markdown]
# ## What do microbatches send?
#
# At stage 3 every microbatch gathers the parameters twice and reduces its gradients. `Communication(gather="step",
# reduce="once")` sends what a single batch would, and pays with memory. Count it in the compiled program, in units of
# one copy of the parameters:

# %%
once = zero_jax.Communication(gather="step", reduce="once")
rows = {}
for name, answer in (("one batch", plans[64]), ("4 microbatches", planned(64, accumulate=4)),
                     ("gathered and reduced once", planned(64, accumulate=4, communication=once))):
    rows[name] = (sum(answer.links.values()) / answer.layout.num_params, answer.needed_bytes / 2**20)
    print(f"{name}: {rows[name][0]:.1f} bytes sent per parameter, {rows[name][1]:.0f} MiB on each GPU")

# %%
figure, axes = plt.subplots(figsize=(6, 2.6))
for name, (sent, needed) in rows.items():
    axes.plot(sent, needed, "o")
    axes.annotate(f" {name}", (sent, needed))
axes.set(xlabel="bytes sent per parameter and step", ylabel="MiB on each GPU", xlim=(0, 30))
plt.show()

# %% [markdown]
# **Next:** [what a run logs](../command_line.md#what-a-run-prints-and-logs), [microbatches](../guide/precision.md),
# [meshes and remat](../guide/parallelism.md), and on TPUs [overlap](tpu_slice.ipynb).
