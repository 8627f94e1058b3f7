"""On one device, which may be a real GPU: every placement and option has the numbers of a plain loop on that device.

    make test-gpu     # on the GPU of this host
    make test-slow    # among the others, on one simulated device

Each row also holds the contract of the program as this device's own compiler made it (`step.verify`).
"""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.oracle import oracle, train

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.optim.presets import OPTIMIZERS
from zero_jax.planning.host_link import measured_link
from zero_jax.tree import named_leaves
from zero_jax.xla.platform import Platform

ON_GPU = jax.default_backend() == "gpu"
DETERMINISTIC = not ON_GPU or "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
"""GPUs add up the gradients of an embedding in an order that varies, unless told otherwise."""
pytestmark = [pytest.mark.slow, pytest.mark.grid]

CONFIG = gpt2.Config(num_layers=4, width=128, num_heads=4, vocab_size=509, max_length=64)
RNG = np.random.default_rng(0)
BATCHES = [{"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
           for tokens in RNG.integers(0, CONFIG.vocab_size, (3, 8, 65)).astype(np.int32)]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-4, eps=1e-6))
SMALL = zero_jax.Offload(buffer_bytes=2**16)
FP32, BF16 = 0.005, 0.3
"""Largest difference of the parameters to those of a plain loop in that dtype, as a share of what that moved them."""


def offload(**changes):
    return dataclasses.replace(SMALL, **changes)


def difference(run, expected):
    """How far apart the parameters of two runs are, over how far the second has moved them (norms)."""
    def norm(one, other):
        parts = (without_keys(name, np.float64(one[name]) - other[name]) for name in one)
        return np.sqrt(sum(np.sum(part**2) for part in parts))

    assert run.params.keys() == expected.params.keys()
    return norm(run.params, expected.params) / norm(expected.params, expected.start)


def without_keys(name, param):
    """The parameter; of the biases those of queries and values: softmax does not see a bias of keys."""
    if "qkv/bias" not in name:
        return param
    return param.reshape(*param.shape[:-1], CONFIG.num_heads, 3, -1)[..., [0, 2], :]


ROWS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "nnx": {"model": "nnx"},
    "unrolled": {"scan_layers": False},
    "microbatches": {"accumulate": 4},
    "reduced once": {"stage": 2, "accumulate": 4, "reduce": "once"},
    "remat": {"remat": "full"},
    "remat dots": {"remat": "dots"},
    "guard and average": {"guard": zero_jax.Guard(), "ema": 0.9},
    "P_a+cpu": {"remat": "full", "partition_activations": "cpu"},
    "P_a+cpu, microbatches": {"remat": "full", "partition_activations": "cpu", "accumulate": 2},
    "P_a+cpu, nnx": {"remat": "full", "partition_activations": "cpu", "model": "nnx"},
    "optimizer on the host": {"offload": SMALL},
    "optimizer on the host, stage 1": {"stage": 1, "offload": SMALL},
    "optimizer on the host, nnx": {"model": "nnx", "offload": SMALL},
    "a share on the host": {"offload": offload(fraction=0.5)},
    "parameters on the host": {"offload": offload(parameters="host")},
    "parameters on the host, unrolled": {"offload": offload(parameters="host"), "scan_layers": False},
    "parameters on the host, nnx": {"offload": offload(parameters="host"), "model": "nnx"},
    "parameters on the host, microbatches": {"offload": offload(parameters="host"), "accumulate": 2},
    "gradients on the host": {"offload": offload(parameters="host", gradients="host")},
    "parameters and activations on the host": {"offload": offload(parameters="host"), "remat": "full",
                                               "partition_activations": "cpu"},
    "optimizer in files": {"offload": lambda folder: offload(disk=folder)},
    "clipped": {"optimizer": CLIPPED},
    "clipped, on the host": {"optimizer": CLIPPED, "offload": offload(parameters="host")},
    "adafactor": {"optimizer": OPTIMIZERS["adafactor"](1e-3, 0.1)},
    "lion": {"optimizer": OPTIMIZERS["lion"](1e-4, weight_decay=0.1)},
    "muon": {"optimizer": optax.contrib.muon(1e-3)},
    "bf16": {"precision": "bf16"},
    "bf16, optimizer on the host": {"precision": "bf16", "offload": SMALL},
    "bf16, parameters on the host": {"precision": "bf16", "offload": offload(parameters="host")},
    "bf16, P_a+cpu": {"precision": "bf16", "remat": "full", "partition_activations": "cpu"},
    "bf16, cuDNN": {"precision": "bf16", "kernel": True},
    "bf16, cuDNN, nnx": {"precision": "bf16", "kernel": True, "model": "nnx"},
    "P_a+cpu, kernels": {"remat": "full", "partition_activations": "cpu", "engines": False},
    "optimizer on the host, kernels": {"offload": SMALL, "engines": False},
    "parameters on the host, kernels": {"offload": offload(parameters="host"), "engines": False},
    "bf16, cuDNN, P_a+cpu": {"precision": "bf16", "kernel": True, "remat": "full", "partition_activations": "cpu"},
}


def model_of(flavour, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return gpt2.build(config) if flavour == "linen" else (lambda rngs: gpt2_nnx.GPT2(config, rngs=rngs))


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs multiply float32 as TF32 otherwise, in the plain loop and here alike, but not in the same order."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", ROWS)
def test_the_numbers_of_a_plain_loop(tmp_path, name, monkeypatch):
    """What is on the host is copied by copy engines, where jax has them right, or by kernels."""
    row = {"stage": 3, "model": "linen", "precision": "fp32", "scan_layers": True, "kernel": False} | ROWS[name]
    stage, flavour, precision = row.pop("stage"), row.pop("model"), row.pop("precision")
    scan, kernel, optimizer = row.pop("scan_layers"), row.pop("kernel"), row.pop("optimizer", None)
    if not row.pop("engines", True):
        monkeypatch.setattr(Platform, "has_copy_engines", False)
    if callable(row.get("offload")):
        row["offload"] = row["offload"](tmp_path / "files")
    mesh = zero_jax.make_mesh(1)
    attention = zero_jax.attention(mesh, kernel="cudnn" if ON_GPU else None) if kernel else None
    expected = oracle(model_of(flavour, scan_layers=scan), batches=BATCHES, optimizer=optimizer, precision=precision)
    run = train(model_of(flavour, scan_layers=scan, attention=attention), stage, mesh, batches=BATCHES,
                optimizer=optimizer, precision=precision, **row)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=2e-5 if precision == "fp32" else 2e-3)
    assert difference(run, expected) < (FP32 if precision == "fp32" else BF16)
    run.step.verify(BATCHES[0])
    engines = run.step.options.uses_copy_engines(run.step.axes)
    assert any(each.walk for each in run.step.compiled_step(BATCHES[0]).host_slices) == engines
    if "on the host" in name:
        assert {"pinned_host"} <= {leaf.sharding.memory_kind for _, leaf in named_leaves(run.state)}


@pytest.mark.parametrize("precision, change", [("fp32", "learning rate"), ("fp32", "token"), ("bf16", "example")])
def test_what_the_comparison_finds(precision, change):
    """The control: 2 % more of a learning rate, one token of one batch, one of eight examples of each."""
    expected = oracle(model_of("linen"), batches=BATCHES, precision=precision)
    batches = [{name: leaf.copy() for name, leaf in batch.items()} for batch in BATCHES]
    if change == "token":
        batches[0]["inputs"][0, 0] += 1
    if change == "example":
        for leaf in (leaf for batch in batches for leaf in batch.values()):
            leaf[7] = leaf[0]
    rate = 3e-4 * (1.02 if change == "learning rate" else 1)
    run = train(model_of("linen"), 3, zero_jax.make_mesh(1), batches=batches, optimizer=optax.adamw(rate, eps=1e-6),
                precision=precision)
    assert difference(run, expected) > (FP32 if precision == "fp32" else BF16)


@pytest.mark.skipif(not ON_GPU, reason="cuDNN computes on a GPU")
@pytest.mark.parametrize("heads, kv_heads, head_dim, length", [
    (4, 4, 64, 512), (25, 25, 64, 1024), (8, 2, 128, 1024), (4, 4, 80, 256), (4, 4, 100, 256), (6, 3, 36, 130)])
@pytest.mark.parametrize("causal, packed", [(True, False), (True, True), (False, False)])
def test_cudnn_has_the_numbers_of_plain_attention(heads, kv_heads, head_dim, length, causal, packed):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, (2, length, number, head_dim), jnp.bfloat16)
                       for key, number in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True))
    ids = jnp.cumsum(jax.random.bernoulli(jax.random.key(5), 0.02, (2, length)), 1, dtype=jnp.int32)
    segments = (ids, ids) if packed else None
    mesh = zero_jax.make_mesh(1)

    def value_and_grads(function, dtype, causal):
        def total(q, k, v):
            out = function(q, k, v, causal=causal, segment_ids=segments)
            return (out.astype(jnp.float32) * weight.astype(jnp.float32)).sum(), out

        arrays = [each.astype(dtype) for each in (q, k, v)]
        (_, out), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
        return [np.asarray(leaf, np.float32) for leaf in (out, *grads)]

    def errors(left, right):
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(left, right, strict=True)]

    plain = value_and_grads(zero_jax.attention(mesh, kernel="xla"), jnp.float32, causal)
    kernel = zero_jax.attention(mesh, kernel="cudnn")
    assert max(errors(value_and_grads(kernel, jnp.bfloat16, causal), plain)) < 2e-2
    assert min(errors(value_and_grads(kernel, jnp.bfloat16, not causal), plain)) > 0.1  # the control


@pytest.mark.parametrize("placement", ["device", "optimizer", "parameters"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not(tmp_path, placement):
    placed = {"device": None, "optimizer": SMALL, "parameters": offload(parameters="host")}[placement]

    def made():
        return zero_jax.make_zero_train_step(
            model_of("linen"), 3, mesh=zero_jax.make_mesh(1), optimizer=CLIPPED, offload=placed, ema=0.9)

    step = made()
    state = step.init(jax.random.key(0), BATCHES[0])
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    with zero_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, state, wait=True)
    before = {name: np.array(leaf) for name, leaf in named_leaves(state.params)}  # copies: a step donates
    state, wanted = step(state, BATCHES[2])
    other = made()
    with zero_jax.Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(other, BATCHES[0]).state
    restored, found = other(restored, BATCHES[2])
    assert float(found["loss"]) == float(wanted["loss"])
    after = dict(named_leaves(restored.params))
    for name, leaf in named_leaves(state.params):
        np.testing.assert_allclose(
            np.asarray(leaf), np.asarray(after[name]), rtol=0, atol=0 if DETERMINISTIC else 1e-7, err_msg=name)
    assert any((np.asarray(after[name]) != leaf).any() for name, leaf in before.items())  # the control: a step changes


def test_several_steps_in_one_program():
    step = zero_jax.make_zero_train_step(model_of("linen"), 3, mesh=zero_jax.make_mesh(1), optimizer=CLIPPED)
    state, losses = step.init(jax.random.key(0), BATCHES[0]), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    several = jax.tree.map(lambda *leaves: np.stack(leaves), *BATCHES)
    _, metrics = step.multi(step.init(jax.random.key(0), BATCHES[0]), several)
    np.testing.assert_allclose(np.asarray(metrics["loss"]), losses, rtol=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3  # the control: other batches have other losses


def test_copies_to_and_from_host_memory():
    """Bytes per second of each direction; a GPU's host link carries at least 5 GB/s."""
    rate = measured_link(jax.devices()[:1], 2**26)
    assert rate > (5e9 if ON_GPU else 1e7)


def test_the_command_line_trains_and_generates(tmp_path):
    """In processes of their own, with the tests' environment: JAX_PLATFORMS names the devices."""
    def run(*words):
        done = subprocess.run([sys.executable, "-m", "zero_jax", *words], capture_output=True, text=True, timeout=600,
                              env=dict(os.environ))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    out = str(tmp_path / "run")
    run("train", "--steps", "20", "--out", out, "--batch-size", "16", *([] if ON_GPU else ["--devices", "1"]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) > 1 and losses[-1] < losses[0] - 0.3
    assert "Before we proceed" in run("generate", "--checkpoint", out, "--prompt", "Before we proceed", "--tokens", "8")
