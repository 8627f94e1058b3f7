"""Merged parameters, and adapters of PEFT: round trips, refusals, and what PEFT itself makes of them."""

import json
import os
import subprocess

import jax
import numpy as np
import optax
import pytest
from support.oracle import by_name, next_token
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.interop.safetensors_file import find_tensors

CONFIG = gpt2.Config(2, 36, 2, vocab_size=64, max_length=16)
NAMES = zero_jax.Names(**gpt2.huggingface(CONFIG))
BATCH = token_batches(1)[0]

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel
base = GPT2LMHeadModel.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
tokens = torch.arange(16).reshape(2, 8) % 64
with torch.no_grad():
    adapted = model(tokens).logits.numpy()
    merged = model.merge_and_unload()(tokens).logits.numpy()
import numpy
numpy.save(sys.argv[3], numpy.stack([adapted, merged]))
"""
"""Run by the Python of an environment with torch, transformers and peft."""


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
    loss = next_token(gpt2.build(CONFIG).bind({"params": jax.tree.map(np.asarray, merged)}), BATCH)
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
    (lambda folder, config: config.update(use_dora=True), "use_dora is set"),
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
    python = os.environ.get("ZERO_JAX_PEFT_PYTHON")
    if python is None:
        pytest.skip("ZERO_JAX_PEFT_PYTHON is not set")
    step, state = run
    base = tmp_path / "base"
    base.mkdir()
    plain = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(2))
    own = {name: leaf for name, leaf in by_name(step.params(state)).items() if "_lora_" not in name}
    start = plain.init(jax.random.key(0), BATCH)
    start = plain.init(jax.random.key(0), BATCH, params=nested_like(start.params, own))
    zero_jax.export_params(base / "model.safetensors", start, plain.layout(BATCH), names=NAMES)
    (base / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 36, "n_head": 2,
        "vocab_size": 64, "n_positions": 16, "n_ctx": 16, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5}))
    zero_jax.export_lora(tmp_path / "adapter", step, state, names=NAMES)
    script = tmp_path / "run.py"
    script.write_text(PEFT)
    subprocess.run([python, str(script), str(base), str(tmp_path / "adapter"), str(tmp_path / "out.npy")], check=True,
                   env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}, timeout=300)
    adapted, merged = np.load(tmp_path / "out.npy")
    tokens = np.arange(16).reshape(2, 8) % 64
    model = gpt2.build(CONFIG)
    ours = model.apply({"params": jax.tree.map(np.asarray, zero_jax.merge_lora(step, state))}, tokens)
    without = model.apply({"params": nested_like(start.params, own)}, tokens)
    np.testing.assert_allclose(adapted, ours, atol=1e-4)
    np.testing.assert_allclose(merged, ours, atol=1e-4)
    assert np.abs(np.asarray(without) - adapted).max() > 1e-3  # negative control: the base alone


def nested_like(tree, flat):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: flat[jax.tree_util.keystr(path, simple=True, separator="/")], tree)
