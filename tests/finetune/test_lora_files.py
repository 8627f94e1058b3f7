"""Merged parameters, and adapters of PEFT: round trips, refusals, and what PEFT itself makes of them."""

import dataclasses
import json
import os
import subprocess

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy as safetensors_numpy
from support import reference_models as ours
from support.oracle import by_name, next_token
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.interop.safetensors_file import find_tensors

CONFIG = gpt2.Config(2, 36, 2, vocab_size=64, max_length=16)
NAMES = zero_jax.Names(**gpt2.huggingface(CONFIG))
BATCH = token_batches(1)[0]

PEFT = """
import sys, numpy, torch, transformers
from peft import PeftModel
kind = getattr(transformers, transformers.AutoConfig.from_pretrained(sys.argv[1]).architectures[0])
model = PeftModel.from_pretrained(kind.from_pretrained(sys.argv[1]), sys.argv[2]).eval()
names = ["input_ids", "decoder_input_ids"][:1 + model.config.is_encoder_decoder]
tokens = {name: torch.arange(16).reshape(2, 8) % 24 for name in names}
with torch.no_grad():
    adapted = model(**tokens).logits.numpy()
    merged = model.merge_and_unload()(**tokens).logits.numpy()
numpy.save(sys.argv[3], numpy.stack([adapted, merged]))
"""
"""Run by the Python of an environment with torch, transformers and peft: logits with an adapter."""

PEFT_INITS = """
import json, sys, torch, transformers
from peft import LoraConfig, get_peft_model
found = {}
for init in json.loads(sys.argv[2]):
    base, plain = (transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval() for _ in range(2))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, init_lora_weights=init, target_modules=["attn.c_proj"],
                                            fan_in_fan_out=True)).eval()
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data += 0.05 * torch.randn_like(value)
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    for number, block in enumerate(plain.transformer.h):
        a, b = (next(value for name, value in adapters.items() if f".{number}.attn" in name and f"lora_{of}" in name)
                for of in "AB")
        block.attn.c_proj.weight.data += 6 / 4 * (b @ a).T
    tokens = torch.arange(16).reshape(2, 8) % 24
    with torch.no_grad():
        found[str(init)] = float((model(tokens).logits - plain(tokens).logits).abs().max())
json.dump(found, open(sys.argv[3], "w"))
"""
"""How far the logits of adapters of each `init_lora_weights` are from W + alpha / rank * A B of the base as it was."""

INITS = {True: True, False: True, "gaussian": True, "orthogonal": True, "pissa": False, "pissa_niter_4": False,
         "olora": False}
"""Which are plain, as PEFT computes them."""
SET = {"use_rslora": True, "use_dora": True, "use_qalora": True, "lora_bias": True, "bias": "all",
       "rank_pattern": {"c_attn": 2}, "alpha_pattern": {"c_attn": 2}, "modules_to_save": ["lm_head"],
       "layer_replication": [[0, 2]], "trainable_token_indices": [1], "target_parameters": ["w"],
       "alora_invocation_tokens": [1], "loftq_config": {"loftq_bits": 4}, "corda_config": {"a": 1}, "megatron_config": {
           "a": 1}, "arrow_config": {"a": 1}, "a_field_of_tomorrow": 0.5}
AS_PEFT_WRITES = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "inference_mode": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.21.2", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "target_parameters": None, "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None}


def run_peft(script, folder, *args):
    """The file that `script` writes, whose path is its last argument; skips where there is no PEFT."""
    python = os.environ.get("ZERO_JAX_PEFT_PYTHON")
    if python is None:
        pytest.skip("ZERO_JAX_PEFT_PYTHON is not set")
    (folder / "run.py").write_text(script)
    subprocess.run([python, str(folder / "run.py"), *map(str, args), str(folder / "out.npy")], check=True, timeout=300,
                   env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(folder)})
    return folder / "out.npy"


@pytest.fixture(scope="module")
def run():
    """Adapters after two steps of a large learning rate: far from zero."""
    step = zero_jax.make_zero_train_step(
        zero_jax.lora(gpt2.build(CONFIG), 3, ("qkv", "proj", "up"), alpha=6.0), 3, mesh=zero_jax.make_mesh(2),
        optimizer=optax.adam(0.05))
    state = step.init(jax.random.key(0), BATCH)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return step, state


def test_merged_parameters_are_the_models(run):
    step, state = run
    merged, params = zero_jax.merge_lora(step, state), by_name(step.params(state))
    expected = params["blocks/qkv/kernel"] + 2 * np.einsum(
        "lir,lro->lio", params["blocks/qkv/kernel_lora_a"], params["blocks/qkv/kernel_lora_b"])
    np.testing.assert_allclose(merged["blocks"]["qkv"]["kernel"], expected, atol=1e-6)
    assert np.abs(expected - params["blocks/qkv/kernel"]).max() > 1e-5  # negative control: without the adapters
    loss = jax.jit(lambda params: next_token(gpt2.build(CONFIG).bind({"params": params}), BATCH))(
        jax.tree.map(np.asarray, merged))
    np.testing.assert_allclose(step.evaluator()(state, BATCH), loss, rtol=1e-6)


def test_an_adapter_of_peft_there_and_back(run, tmp_path):
    step, state = run
    config, weights = zero_jax.export_lora(tmp_path / "adapter", step, state, names=NAMES)
    tensors = find_tensors(weights)
    assert tensors["base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"].shape == (3, 36)
    assert tensors["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"].shape == (108, 3)
    assert len(tensors) == 2 * 2 * 3
    said = json.loads(config.read_text())
    assert (said["r"], said["lora_alpha"], said["fan_in_fan_out"]) == (3, 6.0, True)
    before = by_name(step.params(state))
    other = step.init(jax.random.key(9), BATCH)
    found = by_name(step.params(zero_jax.import_lora(tmp_path / "adapter", step, other, names=NAMES)))
    for name in before:
        if "_lora_" in name:
            assert found[name].tobytes() == before[name].tobytes(), name
    assert found["blocks/qkv/kernel"].tobytes() != before["blocks/qkv/kernel"].tobytes()  # the base is another's


@pytest.mark.parametrize("edit, told", [
    (lambda folder, config: config.update(r=4), "r is 4, and this step's is 3"),
    (lambda folder, config: config.update(lora_alpha="6"), "lora_alpha is '6'"),
    *((lambda folder, config, key=key, value=value: config.update({key: value}), f"{key} is set")
      for key, value in SET.items()),
    *((lambda folder, config, init=init: config.update(init_lora_weights=init), f"init_lora_weights is '?{init}")
      for init in (*(init for init, plain in INITS.items() if not plain), "corda", "loftq", "lora_ga", "mica", "x", 1)),
    (lambda folder, config: config.update(peft_type="IA3"), "no LoRA adapter"),
    (lambda folder, config: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors")])
def test_other_adapters_are_refused(run, tmp_path, edit, told):
    step, state = run
    path, _ = zero_jax.export_lora(tmp_path, step, state, names=NAMES)
    config = json.loads(path.read_text())
    edit(tmp_path, config)
    path.write_text(json.dumps(config))
    with pytest.raises(zero_jax.UsageError, match=told):
        zero_jax.import_lora(tmp_path, step, state, names=NAMES)


@pytest.mark.parametrize("changes", [*({"init_lora_weights": init} for init, plain in INITS.items() if plain),
                                     {"init_lora_weights": "eva"}, {"task_type": "SEQ_CLS"}, AS_PEFT_WRITES])
def test_plain_adapters_are_taken(run, tmp_path, changes):
    step, state = run
    path, _ = zero_jax.export_lora(tmp_path, step, state, names=NAMES)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    zero_jax.import_lora(tmp_path, step, step.init(jax.random.key(1), BATCH), names=NAMES)


@pytest.mark.slow
def test_which_inits_are_plain_is_what_peft_computes(run, tmp_path):
    step, state = run
    (tmp_path / "base").mkdir()
    write_base(tmp_path / "base", step, state)
    found = json.loads(run_peft(PEFT_INITS, tmp_path, tmp_path / "base", json.dumps([*INITS])).read_text())
    assert {init: found[str(init)] < 1e-4 for init in INITS} == INITS, found
    assert min(found[str(init)] for init, plain in INITS.items() if not plain) > 1e-2


def test_the_task_is_that_of_the_model(run, tmp_path):
    step, state = run
    for architecture, task in (("GPT2LMHeadModel", "CAUSAL_LM"), ("LlamaForCausalLM", "CAUSAL_LM"),
                               ("T5ForConditionalGeneration", "SEQ_2_SEQ_LM"), ("BertForMaskedLM", None)):
        names = dataclasses.replace(NAMES, config={"architectures": [architecture]})
        path, _ = zero_jax.export_lora(tmp_path / architecture, step, state, names=names)
        assert json.loads(path.read_text())["task_type"] == task
    path, _ = zero_jax.export_lora(tmp_path / "own", step, state, names=dataclasses.replace(NAMES, config=None))
    assert json.loads(path.read_text())["task_type"] is None


def write_base(folder, step, state):
    """The model without adapters, as a folder of transformers; returns its parameters."""
    plain = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(2))
    own = {name: leaf for name, leaf in by_name(step.params(state)).items() if "_lora_" not in name}
    start = plain.init(jax.random.key(0), BATCH)
    start = plain.init(jax.random.key(0), BATCH, params=nested_like(start.params, own))
    zero_jax.export_params(folder / "model.safetensors", start, plain.layout(BATCH), names=NAMES)
    (folder / "config.json").write_text(json.dumps(gpt2.huggingface_config(CONFIG)))
    return nested_like(start.params, own)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bert", "t5"])
def test_peft_itself_loads_those_of_other_tasks(tmp_path, case):
    model, batch = ours.model_of(case), ours.batch_of(case)
    batch = {name: np.tile(value[:, :8], (4, 1)) for name, value in batch.items()}
    (tmp_path / "base").mkdir()
    safetensors_numpy.save_file(model.tensors(), tmp_path / "base/model.safetensors", {"format": "pt"})
    (tmp_path / "base/config.json").write_text(json.dumps(ours.huggingface_config(model)))
    step = zero_jax.make_zero_train_step(
        zero_jax.lora(ours.flax_model(model), 2, ("/q/", "/v/"), alpha=6.0), 3, optimizer=optax.adam(0.05),
        loss=lambda model, batch: -jax.nn.log_softmax(model(*ours.inputs(batch))).mean())
    state = zero_jax.init_from_file(tmp_path / "base", step, jax.random.key(0), batch, names=model.names)
    for _ in range(2):
        state, _ = step(state, batch)
    zero_jax.export_lora(tmp_path / "adapter", step, state, names=model.names)
    adapted, merged = np.load(run_peft(PEFT, tmp_path, tmp_path / "base", tmp_path / "adapter"))
    tokens = np.arange(16).reshape(2, 8) % 24
    given = (tokens,) * (1 + ("decoder_inputs" in batch))
    found = ours.flax_model(model).apply(
        {"params": jax.tree.map(np.asarray, zero_jax.merge_lora(step, state))}, *given)
    np.testing.assert_allclose(adapted, found, atol=1e-4)
    np.testing.assert_allclose(merged, found, atol=1e-4)
    alone = model.run(model.leaves(model.tensors()), dict(zip(("inputs", "decoder_inputs"), given, strict=False)))
    assert np.abs(np.asarray(alone) - adapted).max() > 1e-3  # negative control: the base alone


def test_those_of_other_targets_and_steps_are_refused(run, tmp_path):
    step, state = run
    zero_jax.export_lora(tmp_path, step, state, names=NAMES)
    fewer = zero_jax.make_zero_train_step(zero_jax.lora(gpt2.build(CONFIG), 3, "qkv", alpha=6.0), 3,
                                          mesh=zero_jax.make_mesh(2))
    fewer.layout(BATCH)
    with pytest.raises(zero_jax.UsageError, match="has in addition 8 .*c_proj"):
        zero_jax.import_lora(tmp_path, fewer, state, names=NAMES)
    plain = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(2))
    plain.layout(BATCH)
    with pytest.raises(zero_jax.UsageError, match="has no adapters"):
        zero_jax.merge_lora(plain, state)
    with pytest.raises(zero_jax.UsageError, match="names: give the rules"):
        zero_jax.export_lora(tmp_path, step, state, names=None)


@pytest.mark.slow
def test_peft_itself_has_the_same_logits(run, tmp_path):
    """With ZERO_JAX_PEFT_PYTHON, the Python of an environment that has torch, transformers and peft."""
    step, state = run
    (tmp_path / "base").mkdir()
    base = write_base(tmp_path / "base", step, state)
    zero_jax.export_lora(tmp_path / "adapter", step, state, names=NAMES)
    adapted, merged = np.load(run_peft(PEFT, tmp_path, tmp_path / "base", tmp_path / "adapter"))
    tokens = np.arange(16).reshape(2, 8) % 24
    model = gpt2.build(CONFIG)
    ours = model.apply({"params": jax.tree.map(np.asarray, zero_jax.merge_lora(step, state))}, tokens)
    without = model.apply({"params": base}, tokens)
    np.testing.assert_allclose(adapted, ours, atol=1e-4)
    np.testing.assert_allclose(merged, ours, atol=1e-4)
    assert np.abs(np.asarray(without) - adapted).max() > 1e-3  # negative control: the base alone


def nested_like(tree, flat):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: flat[jax.tree_util.keystr(path, simple=True, separator="/")], tree)
