"""The models of third_party_models.py as functions of their parameters, at stage 3, beside their steps through Flax.

    pip install -e '.[third-party]'                                    # and google-tunix, for its models
    python scripts/reliability/third_party_functions.py [--only gpt2 t5] [--page docs/start/from_functions.md]

A row: parameters, the largest relative difference of three losses to those through Flax, and bytes that a device of 8
simulated ones sends in a step, as a function and through Flax. Status 1 where a model fails, losses differ by more than
1e-5, or bytes by more than a thousandth.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT, NUM_STEPS = Path(__file__).parents[2], 3


def as_function(model, loss, batch):
    """(params, variables or None, `loss(params[, variables], batch)`) of a Flax model and its `loss(model, batch)`."""
    import flax.linen as nn
    import jax
    from flax import nnx
    from flax.core import unfreeze

    if not isinstance(model, nn.Module) and not hasattr(model, "module"):
        graphdef, params, others = nnx.split(model, nnx.Param, ...)
        return params, None, lambda params, batch: loss(nnx.merge(graphdef, params, others), batch)
    module = getattr(model, "module", model)
    own = unfreeze(model.params) if hasattr(model, "params") else unfreeze(
        nn.init(loss, module)(jax.random.key(0), batch))
    own = own if "params" in own else {"params": own}
    params, others = own["params"], {name: tree for name, tree in own.items() if name != "params"}
    if not others:
        return params, None, lambda params, batch: nn.apply(loss, module)({"params": params}, batch)
    return params, others, lambda params, variables, batch: nn.apply(loss, module, mutable=list(variables))(
        {"params": params, **variables}, batch)


def compared(model, loss, batch):
    """The figures of a row."""
    import jax
    import numpy as np
    from third_party_measures import make_optimizer

    import zero_jax

    params, variables, function = as_function(model, loss, batch)
    pure = zero_jax.make_zero_train_step(params=params, variables=variables, loss=function, stage=3,
                                         optimizer=make_optimizer(), mesh=zero_jax.make_mesh(8))
    flax = zero_jax.make_zero_train_step(model, 3, loss=loss, optimizer=make_optimizer(), mesh=zero_jax.make_mesh(8))
    losses, sent = [], []
    for step in (pure, flax):
        state, found = step.init(jax.random.key(0), batch, **({} if step is pure else {"params": params})), []
        for _ in range(NUM_STEPS):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append(found)
        sent.append(step.compiled_step(batch).report.communication_bytes)
    off = np.max(np.abs(np.subtract(*losses)) / np.abs(losses[1]))
    return {"params": pure.layout().num_params, "off": float(off), "sent": sent}


def is_right(row):
    """Whether a function has the numbers and the bytes of the model."""
    return "error" not in row and row["off"] <= 1e-5 and abs(row["sent"][0] / row["sent"][1] - 1) <= 1e-3


def run(name):
    """`compared` in a process of its own; an error is a row."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--worker", name], capture_output=True, text=True, cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error",
                 "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                 "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
                 "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no error"])[-1][:90]}
    return json.loads(done.stdout.splitlines()[-1])


def cells(name, row):
    """A row of the table."""
    if "error" in row:
        return f"| {name} | failed: {row['error']} | | | |"
    one, other = (f"{size / 2**20:,.3f}" for size in row["sent"])
    return f"| {name} | {row['params'] / 1e3:,.0f} | {row['off']:.0e} | {one} | {other} |"


def main():
    from third_party_models import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--page", type=Path, help="whose table after `<!-- third-party -->` is made anew")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        import zero_jax

        zero_jax.simulate_devices(8)
        print(json.dumps(compared(*CASES[args.worker].make())))
        return 0
    lines = ["| model | parameters, thousands | loss off by | sent, MiB | through Flax |",
             "| --- | --- | --- | --- | --- |"]
    right = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, row in zip(args.only, pool.map(run, args.only), strict=True):
            lines.append(cells(name, row))
            print(lines[-1], flush=True)
            right += is_right(row)
    print(f"{right} of {len(args.only)} are right")
    if args.page:
        before, mark, after = args.page.read_text().partition("<!-- third-party -->\n")
        rest = after.lstrip().partition("\n\n")[2] if after.lstrip().startswith("|") else after.lstrip()
        args.page.write_text(f"{before}{mark}\n" + "\n".join(lines) + f"\n\n{rest}")
    return int(right < len(args.only))


if __name__ == "__main__":
    sys.exit(main())
