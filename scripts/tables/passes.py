"""Each jaxpr pass of the train step left out: temporaries and bytes sent of the compiled step, as a Markdown table.

    python scripts/tables/passes.py                                    # a quarter of an hour on 2 idle cores
    python scripts/tables/passes.py --passes isolate_inner_remat

A step of GPT-2 124M (vocabulary 50304, stage 3, bf16, 4 x 1024 tokens on each device) is compiled for 8 H100, without
an accelerator, then once more with one pass replaced by the identity. Each pass is shown on a step that needs it.
Temporaries are per device; sent is what each device sends in a step, in bytes per parameter. These are the costs in the
docstrings of zero_jax.transforms.
"""

import argparse
import contextlib
import dataclasses
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import zero_jax
from models import gpt2
from zero_jax.step import gradients
from zero_jax.xla import hlo
from zero_jax.xla.devices import target_devices

LENGTH = 1024
BATCH_PER_DEVICE = 4
GPT2 = gpt2.PRESETS["124m"]
RULES = gpt2.tensor_rules(GPT2)
SLICE = {"num_layers": 4, "width": 1024, "num_heads": 16}
REDUCED_IN_FLOAT32 = zero_jax.Precision(params=jnp.float32, compute=jnp.bfloat16, reduce=jnp.float32)


class Mlp(nn.Module):
    """Of two large products."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(2048, 8192)(tokens)
        return nn.Dense(2048)(nn.Dense(8192, name="down")(nn.gelu(nn.Dense(4 * 8192, name="up")(x))))


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that needs the pass `name`. config: changes of GPT-2's, or another `model`; options: of the step.

    without: those that switch the pass off; default: the identity in its place.
    """

    name: str
    step: str = ""
    target: str = "h100:8"
    tensor: int = 1
    length: int = LENGTH
    model: nn.Module | None = None
    config: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    without: dict | None = None


CASES = (
    Case("checkpoint_blocks", "remat=\"full\"", options={"remat": "full"}, without={"remat": None}),
    Case("tile_products", "an MLP of width 8192, 16 tiles each", model=Mlp(), length=64,
         options={"tiling": {"up/kernel": 16, "down/kernel": 16}}, without={"tiling": None}),
    Case("split_sequence", "6 layers, tensor=2, remat=\"full\"", tensor=2, config={"num_layers": 6},
         options={"remat": "full", "parallelism": zero_jax.Parallelism(tensor_rules=RULES, sequence_parallel=True)},
         without={"parallelism": zero_jax.Parallelism(tensor_rules=RULES)}),
    Case("isolate_inner_remat", "the model checkpoints its blocks", config={"remat": True}),
    Case("gather_again_in_loops"),
    Case("gather_again_in_loops", "modules in bf16, parameters in fp32", config={"dtype": jnp.bfloat16},
         options={"precision": None}),
    Case("gather_again", "6 layers, not scanned", config={"scan_layers": False, "num_layers": 6}),
)


def measure(case):
    """(MiB of temporaries, bytes sent per parameter) of a device."""
    devices = target_devices(case.target)
    config = dataclasses.replace(GPT2, **{"vocab_size": 50304, **case.config})
    step = zero_jax.make_zero_train_step(
        case.model or gpt2.build(config), 3, mesh=zero_jax.make_mesh(devices=devices, tensor=case.tensor),
        optimizer=optax.adamw(1e-3), **{"precision": "bf16", **case.options})
    shape = (BATCH_PER_DEVICE * len(devices), case.length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    compiled = step.compile(batch)
    sent = sum(each.communication_bytes * each.count for each in hlo.collectives(compiled.as_text()))
    return compiled.memory_analysis().temp_size_in_bytes / 2**20, sent / step.layout(batch).num_params


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--passes", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    print(f"jax {jax.__version__}\n")
    print("| pass | step | temporaries MiB | without it | sent | without it |")
    print("| --- | --- | --- | --- | --- | --- |")
    measured = {}
    for case in (each for each in CASES if each.name in args.passes):
        key = (case.target, case.step)
        temporaries, sent = measured[key] = measured.get(key) or measure(case)
        with contextlib.ExitStack() as patches:
            if case.without is None:
                patches.enter_context(mock.patch.object(gradients, case.name, lambda jaxpr, **_: jaxpr))
            temporaries_without, sent_without = measure(
                dataclasses.replace(case, options={**case.options, **(case.without or {})}))
        print(f"| `{case.name}` | {case.step} | {temporaries:,.0f} | {temporaries_without:,.0f} | {sent:.2f} | "
              f"{sent_without:.2f} |", flush=True)


if __name__ == "__main__":
    main()
