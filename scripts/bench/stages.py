"""Step time of stages 0 to 3 beside a hand-written data-parallel step and plain annotation, in one run.

    python scripts/bench/stages.py            # 8 simulated devices, about three minutes on 2 cores

Machines are noisy, so the variants take turns, and the results are ratios of medians. It also prints the Python
overhead of a call over calling the compiled function, and writes a row per variant as JSON with --json FILE.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from models import gpt2
from zero_jax.sharding.layout import choose_spec


def hand_written(model, optimizer, mesh, batch, *, annotated):
    """A step with jit alone; `annotated`: every array is sharded as at stage 3, with nothing else specified."""
    params = jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])["params"]
    place = lambda leaf: NamedSharding(mesh, choose_spec(leaf.shape, dict(mesh.shape)) if annotated else P())  # noqa: E731
    shardings = jax.tree.map(place, (params, jax.eval_shape(optimizer.init, params)))

    def init():
        params = model.init(jax.random.key(0), batch["inputs"])["params"]
        return params, optimizer.init(params)

    def step(state, batch):
        params, opt_state = state

        def loss_of(params):
            logits = model.apply({"params": params}, batch["inputs"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    jitted = jax.jit(step, donate_argnums=0, in_shardings=(shardings, NamedSharding(mesh, P("data"))),
                     out_shardings=(shardings, NamedSharding(mesh, P())))
    return jitted, jax.jit(init, out_shardings=shardings)()


def timed(step, state, batch, num_steps):
    """(seconds of each step, the last state)."""
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return seconds, state


def call_overhead(step, state, batch, num_calls=200):
    """Median microseconds of a call of the step over calling its compiled function, dispatch only."""
    compiled = step._jit(batch)
    spent = {"step": [], "compiled": []}
    calls = [("step", step), ("compiled", compiled)]
    for i in range(num_calls):
        for name, call in calls if i % 2 else reversed(calls):
            start = time.perf_counter()
            state, metrics = call(state, batch)
            spent[name].append(time.perf_counter() - start)
            jax.block_until_ready((state, metrics))
    return 1e6 * (statistics.median(spent["step"]) - statistics.median(spent["compiled"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant in a round")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()

    zero_jax.simulate_devices(args.devices)
    mesh = zero_jax.make_mesh()
    model = gpt2.build(gpt2.Config(args.layers, args.width, 4, vocab_size=256, max_length=args.seq_len))
    optimizer = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (args.batch, args.seq_len + 1)).astype(np.int32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, NamedSharding(mesh, P("data")))

    variants = {
        "hand-written data parallel": hand_written(model, optimizer, mesh, batch, annotated=False),
        "parameters annotated": hand_written(model, optimizer, mesh, batch, annotated=True),
    }
    for stage in range(4):
        step = zero_jax.make_zero_train_step(model, stage, optimizer=optimizer, mesh=mesh)
        variants[f"stage {stage}"] = (step, step.init(jax.random.key(0), batch))
    seconds = {name: [] for name in variants}
    for name, (step, state) in variants.items():
        _, state = timed(step, state, batch, 2)  # compile, warm up
        variants[name] = (step, state)
    for _ in range(args.rounds):
        for name, (step, state) in variants.items():
            spent, state = timed(step, state, batch, args.steps)
            seconds[name] += spent
            variants[name] = (step, state)

    base = statistics.median(seconds["hand-written data parallel"])
    per_round = lambda name: np.array(seconds[name]).reshape(args.rounds, -1).min(axis=1)  # noqa: E731
    rows = [{
        "variant": name, "median_ms": round(1e3 * statistics.median(spent), 1),
        "of_hand_written": round(statistics.median(spent) / base, 3),
        "of_hand_written_paired": round(
            float(np.median(per_round(name) / per_round("hand-written data parallel"))), 3),
    } for name, spent in seconds.items()]
    print(f"jax {jax.__version__}, {args.devices} simulated devices, GPT-2 {args.layers} x {args.width}, "
          f"batch {args.batch} x {args.seq_len}, fp32")
    print(f"{'variant':30s}{'median ms':>10s}{'ratio':>8s}{'paired':>8s}")
    for row in rows:
        print(f"{row['variant']:30s}{row['median_ms']:10.1f}{row['of_hand_written']:8.3f}{row['of_hand_written_paired']:8.3f}")

    tiny = gpt2.build(dataclasses.replace(gpt2.PRESETS["tiny"], max_length=8))
    step = zero_jax.make_zero_train_step(tiny, 3, mesh=zero_jax.make_mesh(1))
    small = {name: np.zeros((1, 8), np.int32) for name in ("inputs", "targets")}
    overhead = call_overhead(step, step.init(jax.random.key(0), small), small)
    print(f"Python overhead of a call over calling the compiled function: {overhead:.1f} microseconds")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": rows, "overhead_us": overhead, "jax": jax.__version__}, file, indent=1)


if __name__ == "__main__":
    main()
