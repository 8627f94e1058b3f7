"""Each model against the library transformers: logits within 1e-4 and the gradients of one step within 1e-3.

Its numbers are in transformers.json, written by `scripts/tables/model_parity.py --write`; where it and PyTorch are
installed, they are computed again, for every element.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors import numpy as safetensors_numpy
from support import reference_models as ours
from support.covering import weekly
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.workloads import token_batches

import zero_jax
from models import llama

LOGITS, GRADIENTS = 1e-4, 1e-3
FLAVOURS = [(case, nnx) for case, each in ours.CASES.items() for nnx in (False, True)[:1 + (
    each.module in ours.NNX and each.file is None)]]
FAST = {("qwen3", False), ("gemma2", False)}


def difference(model, case):
    """How far a model is from what is written, in tolerances."""
    digest = ours.digest(*model.logits_and_gradients(model.tensors(), ours.batch_of(case)))
    expected = ours.written()[case]
    logits, gradients = (np.abs(np.array(digest[name]) - expected[name]) for name in ("logits", "gradients"))
    scale = np.abs(expected["gradients"])
    relative = gradients / np.maximum(scale, 1e-3 * scale.max())
    return max(logits.max() / LOGITS, relative.max() / GRADIENTS)


@pytest.mark.grid
@weekly("case, nnx", [row if row in FAST else slow(*row) for row in FLAVOURS])
def test_numbers_are_those_of_transformers(case, nnx):
    assert difference(ours.model_of(case, nnx=nnx), case) < 1


@pytest.mark.grid
@weekly("case", [name if (name, False) in FAST else slow(name)
                                  for name, each in ours.CASES.items() if each.wrong])
def test_a_wrong_model_is_caught(case):
    """Negative control: one field of the config that changes no shape."""
    assert difference(ours.model_of(case, wrong=True), case) > 10


@pytest.mark.slow
def test_unrolled_layers_have_the_same_names():
    for case, nnx in (("llama", False), ("llama", True), ("t5", False), ("gemma3", False)):
        assert difference(ours.model_of(case, nnx=nnx, scan=False), case) < 1


@pytest.mark.slow
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="the extra third-party")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ours.CASES)
def test_transformers_itself(tmp_path, case):
    import transformers
    from support import transformers_models as theirs

    if case == "vit" and transformers.__version__ >= "5":
        pytest.skip("5 has other names of modules, by which gradients are compared")
    model = ours.model_of(case)
    reference = theirs.loaded(theirs.as_folder(model, ours.huggingface_config(model), tmp_path / "model"))
    logits, gradients = theirs.logits_and_gradients(reference, case)
    found = ours.differences(model, case, logits, gradients)
    assert found[0] < LOGITS and found[1] < GRADIENTS
    file = ours.CASES[case].file
    if file is not None and (transformers.__version__ >= "5" or "rope_parameters" not in file):  # 4 does not read it
        again = theirs.logits_and_gradients(theirs.loaded(theirs.as_folder(model, file, tmp_path / "file")), case)
        np.testing.assert_array_equal(again[0], logits)
    digest = ours.digest(logits, gradients)
    for name, values in ours.written()[case].items():
        np.testing.assert_allclose(digest[name], values, 1e-4, 1e-6, err_msg=f"{ours.FILE}: written by another version")


@pytest.mark.grid
@pytest.mark.parametrize("case", [slow(case) for case in ("gemma3", "phi3 longrope", "smollm3 windows")])
def test_a_cache_gives_the_logits_of_the_whole_text(case):
    """A token after another: windows, layers without positions and frequencies by length are those of the text."""
    model = ours.model_of(case)
    params = traverse_util.unflatten_dict(model.leaves(model.tensors()), sep="/")
    tokens = jnp.asarray(ours.batch_of(case)["inputs"])
    whole, found, variables = llama.build(model.config).apply({"params": params}, tokens), [], {"params": params}
    decoder = llama.decoder(model.config, ours.LENGTH)
    for at in range(ours.LENGTH):
        logits, new = decoder.apply(variables, tokens[:, at:at + 1], mutable=["cache"])
        found.append(logits)
        variables = {"params": params, **new}
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-4)
    # Negative control: a cache of a model without the windows or the scaling.
    other = llama.decoder(ours.model_of(case, wrong=True).config, ours.LENGTH)
    assert np.abs(other.apply({"params": params}, tokens, mutable=["cache"])[0] - whole).max() > 0.01


@pytest.mark.grid
@pytest.mark.parametrize(("case", "stage", "mesh"), [slow(*row) for row in (
    ("gemma3", 3, {"data": 8}), ("phi3", 3, {"data": 2, "tensor": 2}), ("qwen2 windows", 2, {"data": 4, "tensor": 2}),
    ("smollm3", 1, {"data": 8}), ("gemma2", 3, {"data": 8}))])
def test_families_train_as_on_one_device(case, stage, mesh):
    config = ours.CASES[case].config
    module, batches = llama.build(config), token_batches(2, length=ours.LENGTH, vocab=ours.VOCAB)
    rules = {"tensor_rules": llama.tensor_rules(config)} if "tensor" in mesh else {}
    devices = zero_jax.make_mesh(**mesh)
    kernel = None if config.attention_softcap else zero_jax.attention(devices)  # as the command line
    with_kernel = llama.build(dataclasses.replace(config, attention=kernel))
    many = train(with_kernel, stage, devices, batches=batches, precision="fp32", **rules)
    one = oracle(module, batches=batches, precision="fp32")
    assert loss_difference(many, one) < 1e-5 and param_difference(many, one) < 1e-4
    # Negative control: another batch.
    assert loss_difference(many, oracle(module, batches=batches[::-1], precision="fp32")) > 1e-4


@pytest.mark.grid
@pytest.mark.parametrize("case", [slow(case) for case in ("phi3 partial", "gemma2", "olmo2")])
def test_a_checkpoint_goes_through_a_step_bit_for_bit(tmp_path, case):
    """Fused rows, too: transformers' tensors in, sharded, and out."""
    model, batch = ours.model_of(case), {name: np.repeat(value, 4, 0) for name, value in ours.batch_of(case).items()}
    file = tmp_path / "model.safetensors"
    safetensors_numpy.save_file(model.tensors(), file)
    step = zero_jax.make_zero_train_step(ours.flax_model(model), 3)
    state = zero_jax.import_params(file, step, step.init(jax.random.key(0), batch), batch, names=model.names)
    (path,) = zero_jax.export_params(tmp_path / "again.safetensors", state, step.layout(batch), names=model.names)
    found = safetensors_numpy.load_file(path)
    assert found.keys() == model.tensors().keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in model.tensors().items())
    # Negative control: another order of rows.
    if model.config.fused:
        name = "model.layers.0.self_attn.qkv_proj.weight"
        assert found[name].tobytes() != found[name][::-1].tobytes()
