"""What does not go together: each row of the tables, through the constructors and on the command line, and its page."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.pages import ROOT
from support.scripts import script

import zero_jax
from models import gpt2
from zero_jax import combinations
from zero_jax.cli.options.combinations import RUN, Flags, values_of
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.combinations import DEFAULTS, TABLE, Arguments, told
from zero_jax.errors import UsageError

CONFIG = gpt2.Config(1, 16, 2, vocab_size=32, max_length=8)
GIVEN = {
    "gather": "step", "reduce": "once", "accumulate": 2, "hpz_axes": ("data_1",), "prefetch": True, "shards": 4,
    "context": 2, "tensor": 2, "replica": 2, "tensor_rules": (("up/kernel", P(None, "tensor")),),
    "partition_activations": "cpu", "sequence_parallel": True, "communication.weights": "int8",
    "communication.gradients": "int8", "one_hop": True, "copy": True, "tiling": {"up/kernel": 2}, "lora": True,
    "diloco.every": 4, "diloco.mix": 0.5, "diloco.overlap": True, "offload": "optimizer", "offload.fraction": 0.5,
    "offload.disk": "states", "guard": zero_jax.Guard(skip=2), "ema": 0.5, "float16": "fp16", "view": "global",
    "fp8": "bf16-fp8"}
"""A value of each option that is given."""
OTHERS = {"stage": 3, "platform": "another", "overlap": "auto", "view": "auto", "offload.optimizer": "host",
          "offload.master": None, "attention.kernel": "xla", "offload.gradients": "device"}
"""A value of each option that is none of those that a row refuses."""
BASE = {**{name: DEFAULTS.get(name) for name in [*GIVEN, *OTHERS, *DEFAULTS]}, **OTHERS,
        "accumulate": 2, "shards": 4, "replica": 2, "copy": True, "platform": "cpu"}


def examples(rows, given, others):
    """(row, {option: value} that it refuses, [the same with one of its terms that does not hold]) by a name."""
    def value_of(term, name, holds):
        if term.values:
            return term.values[0] if holds != term.negated else others.get(name, DEFAULTS.get(name))
        return given[name] if holds != term.negated else DEFAULTS.get(name)

    found = {}
    for row in rows:
        for names in itertools.product(*(term.names for term in row.terms)):
            def made(wrong, row=row, names=names):
                return ({"tensor": 2} if "sequence_parallel" in names else {}) | {
                    name: value_of(term, name, number != wrong)
                    for number, (term, name) in enumerate(zip(row.terms, names, strict=True))}

            name = ", ".join(f"{name} {value}" for name, value in made(None).items())
            found[name] = row, made(None), [made(number) for number in range(len(row.terms))]
    return found


STEPS = examples(TABLE, GIVEN, OTHERS)


@pytest.mark.parametrize("name", STEPS)
def test_a_row_refuses_all_of_its_terms_and_nothing_refuses_fewer(name):
    row, wrong, right = STEPS[name]
    with pytest.raises(UsageError) as error:
        combinations.check({**BASE, **wrong})
    assert told(row.reason, Arguments()) in str(error.value) and "{" not in str(error.value).replace("{'", "")
    for values in right:
        combinations.check({**BASE, **values})


def make(values):
    """What is constructed with such values."""
    values = {**{"stage": 3, "accumulate": 2}, **values}
    if "attention.kernel" in values:
        return zero_jax.attention(zero_jax.make_mesh(), kernel=values["attention.kernel"])
    sizes = {name: values[name] for name in combinations.AXES if values.get(name, 1) != 1}
    if any(name.startswith("diloco.") for name in values):
        sizes["replica"] = values.get("replica", 2)
    rest = jax.device_count() // functools.reduce(lambda size, more: size * more, sizes.values(), 1)
    data = 1 if values.get("shards") == 1 else (2, rest // 2) if values.get("hpz_axes") else rest
    number = jax.device_count() if data != 1 else jax.device_count() // rest
    codes = {name: values.get(f"communication.{name}") for name in ("weights", "gradients")}
    if values.get("one_hop") and codes["gradients"]:
        codes["gradients"] = ("int8", "int4")
    options = {name: values[name] for name in (
        "accumulate", "gather", "reduce", "prefetch", "overlap", "tensor_rules", "sequence_parallel", "hpz_axes",
        "partition_activations", "tiling", "view", "guard", "ema", "offload") if values.get(name) is not None}
    if any(codes.values()):
        options["communication"] = zero_jax.Communication(**codes, block=16)
    if places := {name.partition(".")[2]: value for name, value in values.items() if name.startswith("offload.")}:
        options["offload"] = zero_jax.Offload(**places)
    model = gpt2.build(CONFIG)
    step = flat_step(
        zero_jax.lora(model, 2, "up/kernel") if values.get("lora") else model, values["stage"],
        precision=values.get("fp8") or ("bf16" if values.get("copy", True) else None),
        mesh=zero_jax.make_mesh(data, **sizes, devices=jax.devices()[:number]), **options)
    if "copy" in values:
        step.layout({name: jax.ShapeDtypeStruct((16, 8), jnp.int32) for name in ("inputs", "targets")})
    outer = {name.partition(".")[2]: value for name, value in values.items()
             if name.startswith("diloco.") and value is not None}
    return zero_jax.make_diloco_step(step, **{"every": 4, **outer}) if any(outer.values()) else step


@pytest.mark.parametrize("name", [
    name for name, (row, *_) in STEPS.items() if "float16" not in row.names and row.names != {
        "partition_activations", "platform"}])  # those of other platforms than the tests have
def test_the_constructors_refuse_each_row_and_take_its_controls(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row, wrong, right = STEPS[name]
    with pytest.raises(UsageError) as error:
        make(wrong)
    assert told(row.reason, Arguments()) in str(error.value)
    for values in right:
        if values.get("prefetch") or values.get("attention.kernel") not in (None, "xla"):
            with pytest.raises(UsageError, match="nothing on 'cpu'|is a kernel of"):  # whatever they are beside
                make(values)
        else:
            make(values)


def test_float16_on_a_tpu_is_refused_by_the_policy():
    from zero_jax.precision import precision_of

    with pytest.raises(UsageError, match="precision=\"fp16\" on platform tpu: a TPU has no float16"):
        precision_of("fp16", platform="tpu")
    assert precision_of("fp16", platform="cpu") != precision_of("bf16", platform="tpu")


def test_the_page_is_made_of_the_tables():
    with script("tables/combinations") as module:
        assert (ROOT / "docs" / "combinations.md").read_text() == module.page()


# The command line, before JAX starts.

FIELDS = {
    "prefetch": ("prefetch_weights", {}), "communication.weights": ("quantize_weights", {None: "no"}),
    "communication.gradients": ("quantize_gradients", {None: (), "int8": ("int8",)}),
    "copy": ("precision", {True: "bf16", None: "fp32"}), "float16": ("precision", {None: "bf16"}),
    "fp8": ("precision", {None: "bf16"}),
    "partition_activations": ("partition_activations", {None: "no", True: "yes"}),
    "overlap": ("overlap", {False: "no"}), "tiling": ("tiling", {None: ()}), "lora": ("lora_rank", {True: 4}),
    "offload": ("offload", {None: "no"}), "offload.parameters": ("offload", {"host": "parameters", "device": "no"}),
    "offload.gradients": ("offload", {"host": "gradients", "device": "no"}), "guard": ("max_bad_steps", {}),
    "hpz_axes": ("hpz", {("data_1",): 4, None: 1}), "one_hop": ("replica", {True: 1, None: 2})}
"""Of what a config names otherwise: the field, and its values."""
RUNS = {
    "offload_disk": "states", "local_checkpoints": "copies", "local_every": 2, "check_replicas": 5, "offload_gib": 2.0,
    "offload_fraction": 0.5, "target": "h100:8", "float16": "fp16", "lora": 4, "diloco.every": 4, "resume": True,
    "replica": 2, "hang_exit": True, "hang_after": 9.0, "max_to_keep": 3, "save_to": "saved", "dry_run": True,
    "decay": 0.3, "final_rate": 0.2, "eval_fraction": 0.1, "eval_data": ("a.txt",), "tiling": ("up/kernel=2",),
    "communication.weights": "int8", "communication.gradients": "int8", "gather": "forward", "diloco_fragments": 2,
    "diloco_overlap": True, "diloco_learning_rate": 0.5, "diloco_momentum": 0.5, "diloco_nesterov": False,
    "diloco_mix": 0.5, "diloco_dtype": "bf16", "lora_targets": ("up",), "lora_alpha": 2.0, "lora_dropout": 0.5,
    "lora_base": "nf4", "lora_trainable": ("ln_f",), "simulated": True, "every_stage": True, "other_steps": True,
    "betas": (0.9, 0.95), "eps": 1e-6, "moments": 8, "ema": 0.5, "offload": "optimizer"}
"""As `GIVEN`, of the rows of a run."""
DEFAULT = {name: field.default for config in (PlanConfig, TrainConfig) for name, field in (
    config.__dataclass_fields__.items())}
CLI = {"tiling": ("up/kernel=2",), "guard": 2}
STEP_FLAGS = {name: each for name, each in examples(
    [row for row in TABLE if row.names <= {*values_of(TrainConfig())}], {**GIVEN, **CLI},
    OTHERS).items() if not ("view" in each[1] or "offload.disk" in each[1])}
RUN_FLAGS = examples(RUN, RUNS, {"offload": "no", "schedule": "cosine", "stage": 2, "save_every": 200,
                                "optimizer": "adamw", "precision": "fp32"})


def made_from(values):
    """The config that a command makes of such values."""
    fields = {}
    for name, value in values.items():
        field, to = FIELDS.get(name, (name.replace(".", "_"), {}))
        if name not in ("simulated", "every_stage", "other_steps", "view"):
            value = to.get(value, value) if not isinstance(value, tuple) or value in to else value
            fields[field] = DEFAULT[field] if value is None else value
    if "one_hop" in values and fields["quantize_gradients"]:
        fields["quantize_gradients"] = ("int8", "int4")
    fields |= {"diloco_every": 4} if "diloco.mix" in values else {}
    if "diloco_every" in fields or "check_replicas" in fields and "stage" not in fields:
        fields = {"replica": 2, **fields}
    fields |= {"schedule": "constant"} if fields.get("optimizer") == "schedule-free" else {}
    if fields.get("target") and "dry_run" not in values:
        fields["dry_run"] = True
    if fields.get("local_checkpoints"):
        fields = {"local_every": 2, **fields}
    if fields.get("offload") in ("disk", "auto") and "offload_disk" not in values:
        fields["offload_disk"] = "states"
    if values.get("reduce") or values.get("gather") == "step":
        fields = {"accumulate": 2, **fields}
    if plans := values.keys() & {"every_stage", "other_steps"}:
        return PlanConfig(**fields, search="fit" if any(map(values.get, plans)) else "no")
    return TrainConfig(**fields)


@pytest.mark.parametrize("name", [*STEP_FLAGS, *RUN_FLAGS])
def test_the_command_line_refuses_each_row_and_takes_its_controls(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row, wrong, right = STEP_FLAGS.get(name) or RUN_FLAGS[name]
    with pytest.raises(UsageError) as error:
        made_from(wrong)
    assert str(error.value).startswith("--") and told(row.reason, Flags(None)) in str(error.value)
    for values in right:
        if values.get("simulated", True):  # as here
            made_from(values)


def test_every_row_of_a_step_that_has_flags_is_known_to_the_command_line():
    """What it does not know before JAX starts is checked by the constructor alone."""
    unknown = {name for row in TABLE for name in row.names} - {*values_of(TrainConfig())}
    assert unknown == {"shards", "platform", "tensor_rules", "offload.fraction", "offload.master", "offload.optimizer"}
