"""The models of `models/` against the library transformers, in PyTorch: logits, gradients, and checkpoints both ways.

    pip install -e '.[third-party]' torch
    python scripts/tables/model_parity.py           # the table, as Markdown
    python scripts/tables/model_parity.py --write   # also the numbers that tests/models/test_reference.py compares with
    python scripts/tables/model_parity.py --configs # those of tests/interop/test_model_config.py; needs transformers 5

Each model is tiny, with random float32 weights drawn from the names of its tensors. Columns: parameters; the largest
difference of a logit, and of a gradient of the mean cross entropy relative to the largest element of its tensor, the
worse of Linen and NNX where there are both; whether transformers loads our config.json and tensors with none missing or
left over; whether a checkpoint that it saves becomes the parameters of a step at stage 3 on eight simulated devices,
and what is exported from there is that checkpoint bit for bit.
Exits 1 beyond 1e-4 for logits or 1e-3 for gradients, or if a checkpoint fails.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from safetensors import numpy as safetensors_numpy  # noqa: E402
from support import config_variants as variants  # noqa: E402
from support import reference_models as ours  # noqa: E402
from support import transformers_models as theirs  # noqa: E402

import zero_jax  # noqa: E402

LOGITS, GRADIENTS = 1e-4, 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {ours.FILE.name}")
    parser.add_argument("--configs", action="store_true", help=f"write {variants.FILE.name}, and nothing else")
    options = parser.parse_args()
    if options.configs:
        return write_variants()
    write = options.write
    zero_jax.simulate_devices(8)
    print("| model | parameters | logits | gradients | loaded by transformers | read back bit for bit |")
    print("| --- | --- | --- | --- | --- | --- |")
    cases, failed = {}, False
    for case in ours.CASES:
        with tempfile.TemporaryDirectory() as folder:
            row, cases[case] = parity(case, Path(folder))
        failed |= row[0] > LOGITS or row[1] > GRADIENTS or not row[2]
        num_params = sum(np.prod(parts.shape, dtype=int) for name, parts in ours.model_of(case).parts.items()
                         if not name.startswith("variables/"))
        print(f"| {case} | {num_params:,} | {row[0]:.1e} | {row[1]:.1e} | yes | {'yes' if row[2] else 'NO'} |",
              flush=True)
    if write and not failed:
        import torch
        import transformers

        made = {"made by": "python scripts/tables/model_parity.py --write",
                "with": f"transformers {transformers.__version__}, torch {torch.__version__}", "cases": cases}
        # A line for each case
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in made.pop("cases").items()]
        head = json.dumps(made, indent=1)[:-2]
        ours.FILE.write_text(f"{head},\n \"cases\": {{\n" + ",\n".join(lines) + "}\n}\n")
    return int(failed)


def write_variants() -> int:
    """Writes what transformers computes with each config.json of `config_variants`."""
    import transformers

    lines = [f'"with": "transformers {transformers.__version__}",', '"logits": {']
    for case, rows in variants.VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [variants.theirs(case, number, Path(folder) / str(number)) for number in range(len(rows))]
        lines.append(f"{json.dumps(case)}: [\n " + ",\n ".join(map(json.dumps, found)) + "],")
    variants.FILE.write_text("{\n" + "\n".join([*lines[:-1], lines[-1][:-1]]) + "\n}}\n")
    return 0


def parity(case: str, folder: Path) -> tuple[tuple[float, float, bool], dict[str, list[float]]]:
    """((difference of logits, of gradients, whether the round trip is exact), the digest of transformers' numbers)."""
    model = ours.model_of(case)
    config = ours.huggingface_config(model)
    reference = theirs.loaded(theirs.as_folder(model, config, folder / "ours"))
    logits, gradients = theirs.logits_and_gradients(reference, case)
    differences = [ours.differences(ours.model_of(case, nnx=nnx), case, logits, gradients)
                   for nnx in (False, True)[:1 + (model.name in ours.NNX)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.save_pretrained(folder / "theirs")
    return (*map(max, zip(*differences, strict=True)), round_trip(case, folder)), ours.digest(logits, gradients)


def round_trip(case: str, folder: Path) -> bool:
    """Whether the checkpoint in folder / "theirs" goes through a step at stage 3 without a changed bit."""
    model, batch = ours.model_of(case), ours.batch_of(case)
    module, names = ours.flax_model(model), model.names
    batch = {name: np.repeat(value, 4, 0) for name, value in batch.items()}
    step = zero_jax.make_zero_train_step(module, 3, loss=lambda model, batch: model(*ours.inputs(batch)).mean())
    state = zero_jax.import_params(folder / "theirs", step, step.init(jax.random.key(0), batch), batch, names=names)
    (path,) = zero_jax.export_params(folder / "again.safetensors", state, step.layout(batch), names=names)
    expected, found = (safetensors_numpy.load_file(file) for file in (folder / "theirs/model.safetensors", path))
    expected = {name: value for name, value in expected.items() if "num_batches_tracked" not in name}
    expected = {name: value for name, value in expected.items() if name in found or name not in names.tied}
    return found.keys() == expected.keys() and all(
        found[name].tobytes() == value.tobytes() for name, value in expected.items())


if __name__ == "__main__":
    sys.exit(main())
