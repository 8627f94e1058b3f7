"""Published training throughput beside what `zero_jax.plan` predicts: each run compiled for its chips, at its sizes.

    python scripts/tables/published.py                        # the table, from published.json; no compiler
    python scripts/tables/published.py --compile FOLDER       # plans the rows anew: 10 to 100 CPU seconds each
    python scripts/tables/published.py --rates FOLDER         # the same programs, kept in FOLDER, at today's rates
    python scripts/tables/published.py --formula              # every row by the formula of plan --search mesh

`published.tsv` holds the rows: figures as published, which of them calibrated the rates of a chip file, and sources.
The runs are of other frameworks: what is compared is the step that this library would run at the same sizes. Medians
and the band that `zero-jax plan` prints are of rows that did not calibrate.
"""

import argparse
import csv
import dataclasses
import functools
import gzip
import itertools
import json
import os
import statistics
import time
from pathlib import Path

HERE = Path(__file__).parent
PREDICTED = HERE / "published.json"
MPT = {  # layers, width, heads of llm-foundry's yamls
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}
LLAMA = {  # layers, width, heads, key-value heads, hidden, vocabulary; head dim 128
    "2-7b": (32, 4096, 32, 32, 11008, 32000), "2-13b": (40, 5120, 40, 40, 13824, 32000),
    "2-34b": (48, 8192, 64, 8, 22016, 32000), "2-70b": (80, 8192, 64, 8, 28672, 32000),
    "3-8b": (32, 4096, 32, 8, 14336, 128256), "3-70b": (80, 8192, 64, 8, 28672, 128256),
    "nemotron-15b": (32, 6144, 48, 8, 16384, 256000),  # squared ReLU of 24,576: as many FLOPs as a gate of 16,384
    # MaxText's global_parameter_scale of its base model
    "scale-16": (32, 4096, 64, 64, 28672, 32000), "scale-32": (32, 8192, 64, 64, 28672, 32000),
    "scale-64": (64, 8192, 64, 64, 28672, 32000), "scale-128": (64, 8192, 128, 128, 57344, 32000)}

ATTENTION = {("llm-foundry", "h100"): 0.18, ("llm-foundry", "a100-80gb"): 0.32, ("fms-fsdp", "h100"): 0.35,
             ("prime-rl", "h200"): 0.33, ("prime-rl", "b200"): 0.15}
"""Shares of the peak of a framework's own kernel of attention, where it is not cuDNN's: llm-foundry's fitted to rows
used; FlashAttention 2 on H100 by the paper of FlashAttention 3, on H200 and GB200 by Azure/AI-benchmarking-guide."""

FEWEST = 5
"""Rows of a chip that calibrated nothing, from which it has a band."""


def rows():
    """The rows of published.tsv, numbers as such; `key` names what is compiled."""
    with open(HERE / "published.tsv") as file:
        found = list(csv.DictReader((line for line in file if not line.startswith("#")), delimiter="\t"))
    sizes = ("seq", "batch", "accumulate", "stage", "tensor", "replica")
    for row in found:
        row |= {name: int(row[name]) for name in sizes} | {"figure": float(row["figure"])}
        row["key"] = " ".join(str(row[name]) for name in ("target", "model", *sizes[:-1], "remat"))
        row["key"] += f" {row['replica']}" * (row["replica"] > 1)
    return found


def config_of(row):
    """The model's module and configuration; MPT is GPT-2 with ALiBi and without biases, which cost nothing here."""
    from models import gpt2, llama

    family, _, name = row["model"].partition(":")
    if family == "mpt":
        return gpt2, gpt2.Config(*MPT[name], vocab_size=50368, max_length=row["seq"])
    if family == "gpt2":
        config = gpt2.PRESETS.get(name) or gpt2.Config(48, 6144, 24, vocab_size=32000, max_length=row["seq"])
        return gpt2, dataclasses.replace(config, remat=False)
    if name.startswith("qwen3"):
        return llama, dataclasses.replace(llama.PRESETS[name], max_length=row["seq"], remat=False)
    *sizes, vocabulary = LLAMA[name]
    return llama, llama.Config(*sizes, vocab_size=vocabulary, max_length=row["seq"])


def tokens_per_second(row):
    """Per device, as published; from TFLOP/s by PaLM's formula, attention counted whole, where the source has those."""
    if row["unit"] == "tokens":
        return row["figure"]
    config = config_of(row)[1]
    width = config.num_heads * getattr(config, "head_dim", 0) or config.width
    flops = 6 * (config.num_params - config.vocab_size * config.width) + 12 * config.num_layers * width * row["seq"]
    return row["figure"] * 1e12 / flops


def all_products_but(dim, prim, *avals, **params):
    """A checkpoint policy: "dots" without the products that have an array with `dim`, those of the feed-forward."""
    from zero_jax.transforms.remat import POLICIES

    return dim not in itertools.chain(*(aval.shape for aval in avals)) and POLICIES["dots"](prim, *avals, **params)


def compiled(row, path):
    """Compiles the step of `row`; keeps its program and what `timing.predict` needs beside it."""
    import jax
    import jax.numpy as jnp
    import optax

    import zero_jax
    from zero_jax.planning.flops import model_flops
    from zero_jax.xla.devices import target_devices

    devices = target_devices(row["target"])
    mesh = zero_jax.make_mesh(tensor=row["tensor"], replica=row["replica"], devices=devices)
    module, config = config_of(row)
    attention = zero_jax.attention(mesh, kernel="splash" if row["target"][0] == "v" else "cudnn")
    model = module.build(dataclasses.replace(config, attention=attention, remat=row["remat"] == "full"))
    extra = {}
    if row["tensor"] > 1:
        extra["parallelism"] = zero_jax.Parallelism(tensor_rules=module.tensor_rules(config))
    if row["remat"] == "mlp":
        extra["remat"] = functools.partial(all_products_but, config.hidden)
    elif row["remat"] not in ("none", "full"):
        extra["remat"] = row["remat"]
    if row["target"][0] == "v":  # a TPU's memory has no room for whole logits beside what these runs hold
        extra["loss"] = zero_jax.chunked_next_token_loss(mesh, 8)
    step = zero_jax.make_zero_train_step(model, row["stage"], mesh=mesh, precision="bf16", optimizer=optax.adamw(1e-4),
                                         accumulate=row["accumulate"], **extra)
    count = row["batch"] * row["accumulate"] * len(devices)
    batch = {name: jax.ShapeDtypeStruct((count, row["seq"]), jnp.int32) for name in ("inputs", "targets")}
    began, program = time.process_time(), step.compiled_step(batch)
    flops = model_flops(step, batch)
    with gzip.open(path, "wt") as file:
        file.write(program.text)
    path.with_suffix(".json").write_text(json.dumps({
        "tokens": count * row["seq"], "model_flops": flops, "cpu_seconds": time.process_time() - began}))


def predicted(row, path):
    """What is predicted of a program that `compiled` kept."""
    import zero_jax
    from zero_jax.xla import devices as xla_devices
    from zero_jax.xla import timing
    from zero_jax.xla.schedule import schedule
    from zero_jax.xla.targets import target_of

    mesh = zero_jax.make_mesh(tensor=row["tensor"], replica=row["replica"],
                              devices=xla_devices.target_devices(row["target"]))
    target = target_of(row["target"])
    about = json.loads(path.with_suffix(".json").read_text())
    with gzip.open(path, "rt") as file:
        events = schedule(file.read())
    timed, typical = (timing.predict(
        events, target, [xla_devices.coords(each) for each in mesh.devices.flat], tokens=about["tokens"],
        model_flops=about["model_flops"], rates=each) for each in (rates_for(row), timing.Rates()))
    return {"tokens": timed.tokens_per_second / mesh.size, "typical_tokens": typical.tokens_per_second / mesh.size,
            "seconds": timed.seconds, "spent": dict(timed.spent),
            "uncounted": timed.uncounted, "mfu": timed.mfu, "hfu": timed.hfu, "cpu_seconds": about["cpu_seconds"]}


def rates_for(row):
    """The rates of the row's chip, with the framework's own attention."""
    from zero_jax.xla.targets import target_of

    share = ATTENTION.get((row["software"], row["target"].partition(":")[0]))
    rates = target_of(row["target"]).chip.rates
    return rates if share is None else dataclasses.replace(
        rates, attention={f"128 {way}": (share, 1.0) for way in ("forward", "backward")})


def by_formula(row, rates=None, **changes):
    """The `Estimate` of a row's step by the formula of `zero-jax plan --search mesh`; changes: of its `Division`."""
    import zero_jax
    from zero_jax.cli.planning.ranking import decoder_of
    from zero_jax.planning.division import Division, estimate
    from zero_jax.xla import devices as xla_devices
    from zero_jax.xla.targets import target_of
    from zero_jax.xla.timing import collective_seconds

    target, config = target_of(row["target"]), config_of(row)[1]
    mesh = zero_jax.make_mesh(tensor=row["tensor"], replica=row["replica"],
                              devices=xla_devices.target_devices(row["target"]))

    @functools.cache
    def links(kind, axis):
        others = {"data": ("tensor", "replica")}.get(axis, set(mesh.axis_names) - {axis})
        group = mesh.devices[tuple(0 if name in others else slice(None) for name in mesh.axis_names)]
        return collective_seconds(target, [xla_devices.coords(each) for each in group.flat], kind)

    tensor, replica = row["tensor"], row["replica"]
    division = Division(
        stage=row["stage"], data=mesh.size // tensor // replica, tensor=tensor, replica=replica,
        remat=row["remat"].replace("none", "no"), accumulate=row["accumulate"],
        loss_chunks=8 if target.chip.tpu else 1)
    return estimate(
        decoder_of(config, config.num_params), dataclasses.replace(division, **changes), length=row["seq"],
        batch=row["batch"] * row["accumulate"] * mesh.size, collective=links,
        chip=dataclasses.replace(target.chip, rates=rates or rates_for(row)))


def formula_table(found):
    """Markdown: by chip, the errors of the formula against what was published, and against compiled programs."""
    from zero_jax.xla.chip import Rates

    against = {}
    for row in rows():
        if row["remat"] == "mlp":  # which the formula does not know
            continue
        seconds, chip = by_formula(row).seconds, row["target"].partition(":")[0]
        published = row["batch"] * row["accumulate"] * row["seq"] / tokens_per_second(row)
        against.setdefault((chip, "published"), []).append(published / seconds - 1)
        typical = by_formula(row, Rates()).seconds
        against.setdefault((chip, "published, typical rates"), []).append(published / typical - 1)
        if row["key"] in found:
            against.setdefault((chip, "compiled"), []).append(seconds / found[row["key"]]["seconds"] - 1)
    print("| chip | against | rows | median error | median of its size | within 20 % | largest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (chip, what), each in sorted(against.items()):
        print(f"| {chip} | {what} | {len(each)} | {statistics.median(each):+.1%} | "
              f"{statistics.median(map(abs, each)):.1%} | {sum(abs(error) <= 0.2 for error in each) / len(each):.0%} | "
              f"{max(each, key=abs):+.0%} |")


def errors_by_chip(found, what="tokens"):
    """Predicted over published tokens/s less 1, by (chip, whether the row calibrated); what: of `predicted`."""
    errors = {}
    for row in rows():
        if row["key"] in found:
            errors.setdefault((row["target"].partition(":")[0], row["used"]), []).append(
                found[row["key"]][what] / tokens_per_second(row) - 1)
    return errors


def band(errors):
    """Seconds over those predicted, least and most of nine in ten: tokens/s predicted over those published.

    (): of fewer than `FEWEST` rows.
    """
    if len(errors) < FEWEST:
        return ()
    low, *_, high = statistics.quantiles(errors * 2, n=20, method="inclusive")
    return round(1 + low, 2), round(1 + high, 2)


def rates_of(chips):
    """Of each chip the rates by which its rows are predicted."""
    from zero_jax.xla.chip import built_in

    return {chip: {**dataclasses.asdict(built_in(chip).rates), "band": None} for chip in chips}


def table(found):
    """Markdown: each row that was planned, and by chip the errors of those that did not calibrate."""
    print("| software | target | model | sequences | ZeRO | recomputed | published | predicted | error | used |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows():
        if row["key"] not in found:
            continue
        published, ours = tokens_per_second(row), found[row["key"]]["tokens"]
        sequences = f"{row['batch']}{f' x {times}' if (times := row['accumulate']) > 1 else ''} of {row['seq']:,}"
        print(f"| {row['software']} | {row['target']} | {row['model']} | {sequences} | {row['stage']} | {row['remat']} "
              f"| {published:,.0f} | {ours:,.0f} | {ours / published - 1:+.0%} | {row['used']} |")
    print("\n| rows | number | median error | median of its size | within 20 % | seconds over predicted, nine in ten |")
    print("| --- | --- | --- | --- | --- | --- |")
    groups = {}
    for what, rates in (("tokens", ""), ("typical_tokens", ", typical rates")):
        errors = errors_by_chip(found, what)
        groups |= {f"{chip}, {'used' if used == 'yes' else 'not used'}{rates}": each
                   for (chip, used), each in errors.items()}
        unused = [each for (_, used), each in errors.items() if used == "no"]
        groups[f"all, not used{rates}"] = [error for each in unused for error in each]
    for name, each in sorted(groups.items()):
        seconds = " to ".join(f"{limit:.2f}" for limit in band(each))
        print(f"| {name} | {len(each)} | {statistics.median(each):+.1%} | {statistics.median(map(abs, each)):.1%} "
              f"| {sum(abs(error) <= 0.2 for error in each) / len(each):.0%} "
              f"| {seconds} |")


def main():
    parser = argparse.ArgumentParser(description="Published training throughput beside what plan predicts.")
    parser.add_argument("--compile", metavar="FOLDER", type=Path)
    parser.add_argument("--rates", metavar="FOLDER", type=Path)
    parser.add_argument("--formula", action="store_true")
    parser.add_argument("--only", default="", help="rows of which the key has this text")
    args = parser.parse_args()
    found = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
    folder = args.compile or args.rates
    for row in rows() if folder else ():
        path = folder / f"{row['key'].replace(':', '-').replace(' ', '_')}.gz"
        if args.only not in row["key"]:
            continue
        if args.compile and not path.exists():
            try:
                compiled(row, path)
                print(row["key"], "compiled", flush=True)
            except Exception as error:
                print(row["key"], "not compiled:", type(error).__name__, str(error)[:300], flush=True)
        if args.rates and path.exists():
            found[row["key"]] = predicted(row, path)
    if args.rates:
        found["rates"] = rates_of(sorted({row["target"].partition(":")[0] for row in rows() if row["key"] in found}))
        PREDICTED.write_text(json.dumps(found, indent=1) + "\n")
    (formula_table if args.formula else table)(found)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The runs had room for what they saved; where this step saves more than theirs, XLA:GPU would recompute some of it.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=1000")
    main()
