"""Attention by the kernel of a mesh's devices: the numbers of XLA's, and which kernel a call gets."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.covering import weekly
from support.oracle import next_token, oracle, slow, train
from support.targets import mesh_of, simulated

import zero_jax
from models import gpt2
from zero_jax.errors import UsageError
from zero_jax.step import attention as module
from zero_jax.step.attention import attention
from zero_jax.xla.events import opaque_calls, totals
from zero_jax.xla.schedule import schedule


def interpreted(mesh):
    """Splash kernels on simulated devices."""
    with simulated("v5p:2x2x2"):
        return attention(mesh)


def arrays(batch=4, queries=128, keys=128, heads=4, kv_heads=4, head_dim=8):
    random = np.random.default_rng(0)
    shapes = ((batch, queries, heads, head_dim), *[(batch, keys, kv_heads, head_dim)] * 2)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def documents(batch, length):
    return jnp.sort(jnp.asarray(np.random.default_rng(1).integers(0, 3, (batch, length)), jnp.int32))


def off(one, other):
    return max(float(abs(a - b).max() / abs(b).max())
               for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.grid
@weekly("sizes, changes, packed, causal", [
    ({"data": 8}, {"batch": 8, "kv_heads": 2}, False, True),
    ({"data": 4, "context": 2}, {"kv_heads": 2}, False, True),
    slow({"data": 2, "tensor": 2, "context": 2}, {"kv_heads": 2}, True, True),
    slow({"data": 4, "tensor": 2}, {"kv_heads": 2, "queries": 256, "keys": 256}, True, True),
    slow({"replica": 2, "data": 2, "tensor": 2}, {"keys": 256}, False, False)])
def test_splash_has_the_numbers_of_plain_attention(sizes, changes, packed, causal):
    qkv = arrays(**changes)
    fun = interpreted(zero_jax.make_mesh(**sizes))
    ids = (documents(*qkv[0].shape[:2]),) * 2 if packed else None
    mask = None if ids is None else (ids[0][:, :, None] == ids[1][:, None])[:, None]
    plain = functools.partial(jax.nn.dot_product_attention, mask=mask, implementation="xla")

    def with_gradients(fun):
        return jax.jit(jax.value_and_grad(lambda q, k, v: (fun(q, k, v) ** 2).sum(), (0, 1, 2)))(*qkv)

    expected = with_gradients(functools.partial(plain, is_causal=causal))
    assert fun.kernel_for(*qkv[:2]) == ("splash", "")
    assert off(with_gradients(functools.partial(fun, causal=causal, segment_ids=ids)), expected) < 1e-5
    if causal:  # negative control: what the mask hides matters
        assert off(with_gradients(functools.partial(fun, causal=False, segment_ids=ids)), expected) > 1e-2
    if packed:
        assert off(with_gradients(functools.partial(fun, causal=causal)), expected) > 1e-2


class Decoder(nn.Module):
    """A layer whose attention is `mix`; None: JAX's own."""

    mix: object = None
    head_dim: int = 8

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(67, 24, name="embed")(tokens)
        q, k, v = (nn.DenseGeneral((heads, self.head_dim), name=name)(x)
                   for name, heads in (("q", 4), ("k", 2), ("v", 2)))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True) if self.mix is None else self.mix(q, k, v)
        return nn.Dense(67, name="out")(x + nn.DenseGeneral(24, axis=(-2, -1), name="proj")(mixed))


@pytest.mark.slow
def test_a_step_with_splash_is_one_device():
    tokens = np.random.default_rng(0).integers(0, 67, (2, 8, 129), np.int32)
    batches = [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]
    expected = oracle(Decoder(), batches=batches)
    found = train(Decoder(interpreted(zero_jax.make_mesh(8))), 3, 8, batches=batches, loss=next_token)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=2e-5)

    # Negative control: without the causal mask
    def blind(q, k, v):
        return jax.nn.dot_product_attention(q, k, v)

    wrong = train(Decoder(blind), 3, 8, batches=batches[:1], loss=next_token)
    assert abs(wrong.losses[0] - expected.losses[0]) > 1e-4


def shape(batch=16, length=1024, heads=8, head_dim=64, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((batch, length, heads, head_dim), dtype)


@pytest.mark.parametrize("target, sizes, q, options, kernel, reason", [
    ("cpu", {}, shape(), {}, "xla", ""),
    ("v5e:2x4", {}, shape(), {}, "splash", ""),
    ("v5e:2x4", {}, shape(length=1000), {}, "xla", "1000 queries and 1000 keys"),
    ("v5e:2x4", {}, shape(batch=4), {}, "xla", "4 examples with 8 heads"),
    ("v5e:2x4", {"context": 2}, shape(), {}, "splash", ""),
    ("v5e:2x4", {"context": 8}, shape(heads=12), {}, "xla", "12 heads (12 of keys), which 1 x 8 devices do not divide"),
    ("v5e:2x4", {"tensor": 8}, shape(heads=12), {}, "xla", "12 heads"),
    ("v5e:2x4", {}, shape(), {"bias": 0.0}, "xla", "a bias"),
    ("h100:8", {}, shape(), {}, "cudnn", ""),
    ("h100:8", {"context": 2}, shape(), {}, "cudnn", ""),
    ("h100:8", {"context": 8}, shape(heads=12), {}, "xla", "writes the scores of a layer, 96 MiB on each device"),
    ("h100:8", {}, shape(dtype=jnp.float32), {}, "xla", "float32 queries"),
    ("h100:8", {}, shape(head_dim=100), {}, "cudnn", ""),
    ("h100:8", {}, shape(head_dim=136), {}, "xla", "heads of 136"),
    ("h100:8", {}, shape(length=1023), {}, "xla", "an odd length")])
def test_the_kernel_of_a_call(monkeypatch, target, sizes, q, options, kernel, reason):
    monkeypatch.setattr(module, "cudnn_is_installed", lambda: True)
    chosen = attention(mesh_of(target, **sizes)).kernel_for(q, q, **options)
    assert chosen[0] == kernel and chosen[1].startswith(reason) if not reason else reason in chosen[1]


def test_heads_that_cudnn_does_not_take_are_padded(monkeypatch):
    """With zeros, which change nothing: cuDNN stands for itself by XLA's."""
    monkeypatch.setattr(module, "cudnn_is_installed", lambda: True)
    plain, seen = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, *, implementation, **options):
        seen.append((q.shape[-1], implementation))
        return plain(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    qkv = [each.astype(jnp.bfloat16) for each in arrays(head_dim=12)]
    out = attention(mesh_of("h100:8"))(*qkv)
    assert seen == [(16, "cudnn")] and out.shape == qkv[0].shape
    np.testing.assert_allclose(out.astype(jnp.float32), plain(*qkv, is_causal=True).astype(jnp.float32), atol=0.02)
    unscaled = plain(*qkv, is_causal=True, scale=16 ** -0.5)  # negative control: the scale of the padded heads
    assert abs(out - unscaled).max() > 0.02


def test_without_cudnn_a_gpu_has_xla(monkeypatch):
    mesh = mesh_of("h100:8")
    monkeypatch.setattr(module, "cudnn_is_installed", lambda: False)
    assert attention(mesh).kernel_for(shape(), shape()) == ("xla", "cuDNN cannot be loaded")
    with pytest.raises(UsageError, match=r"pip install 'zero-jax\[cudnn\]'"):
        attention(mesh, kernel="cudnn")


def test_a_kernel_that_does_not_exist():
    with pytest.raises(UsageError, match="kernel='flash': give one of 'xla', 'cudnn', 'splash'"):
        attention(zero_jax.make_mesh(8), kernel="flash")


def test_a_given_kernel_that_cannot_is_refused():
    q = shape(length=1000)
    with pytest.raises(UsageError, match="kernel='splash': 1000 queries .*leave kernel out"):
        jax.eval_shape(attention(mesh_of("v5e:2x4"), kernel="splash"), q, q, q)


@pytest.mark.slow
def test_a_given_kernel_is_that_of_training_and_not_of_init(monkeypatch):
    """Parameters are made in float32, which cuDNN does not take, for a step that computes in bfloat16."""
    monkeypatch.setattr(module, "cudnn_is_installed", lambda: True)
    plain, seen = jax.nn.dot_product_attention, []

    def stand_in(q, *rest, implementation, **options):
        seen.append((q.dtype.name, implementation))
        return plain(q, *rest, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    mesh = mesh_of("h100:8")
    config = gpt2.Config(num_layers=1, width=64, num_heads=4, vocab_size=96, max_length=16,
                         attention=attention(mesh, kernel="cudnn"))
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16")
    step.layout(batch)
    assert ("float32", "xla") in seen and {("bfloat16", "cudnn")} == {each for each in seen if "float32" not in each}
    with pytest.raises(UsageError, match="kernel='cudnn': float32 queries"):  # the control: of training it is refused
        zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="fp32").layout(batch)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_a_compiled_step_has_the_kernel(target):
    """And keeps its contract: no scores in memory, nothing gathered for the kernel."""
    mesh = mesh_of(target)
    if target == "h100:8" and not module.cudnn_is_installed():
        pytest.skip("needs zero-jax[cudnn]")
    batch = {name: jax.ShapeDtypeStruct((16, 2048), jnp.int32) for name in ("inputs", "targets")}

    def program(kernel):
        step = zero_jax.make_zero_train_step(
            Decoder(attention(mesh, kernel=kernel), 128), 3, mesh=mesh, precision="bf16", loss=next_token)
        compiled = step.compiled_step(batch)
        assert not compiled.report.violations
        return compiled, schedule(compiled.text)

    (kernel, events), (plain, scores) = program(None), program("xla")
    assert not list(opaque_calls(events))
    assert kernel.device_bytes < plain.device_bytes
    assert 0 < totals(events).flops["bf16"] != totals(scores).flops["bf16"]
    sent = [each.report.communication_bytes for each in (kernel, plain)]
    assert sent[0] <= 1.001 * sent[1]
