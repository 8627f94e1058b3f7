"""Each model against the library transformers: logits within 1e-4 and the gradients of one step within 1e-3.

Its numbers are in transformers.json, written by `scripts/tables/model_parity.py --write`; where it and PyTorch are
installed, they are computed again, for every element.
"""

import importlib.util

import numpy as np
import pytest
from support import reference_models as ours
from support.oracle import slow

LOGITS, GRADIENTS = 1e-4, 1e-3
FLAVOURS = [(case, nnx) for case, each in ours.CASES.items() for nnx in (False, True)[:1 + (each.module in ours.NNX)]]
FAST = {("qwen3", False)}


def difference(model, case):
    """How far a model is from what is written, in tolerances."""
    digest = ours.digest(*model.logits_and_gradients(model.tensors(), ours.batch_of(case)))
    expected = ours.written()[case]
    logits, gradients = (np.abs(np.array(digest[name]) - expected[name]) for name in ("logits", "gradients"))
    scale = np.abs(expected["gradients"])
    relative = gradients / np.maximum(scale, 1e-3 * scale.max())
    return max(logits.max() / LOGITS, relative.max() / GRADIENTS)


@pytest.mark.grid
@pytest.mark.parametrize(("case", "nnx"), [row if row in FAST else slow(*row) for row in FLAVOURS])
def test_numbers_are_those_of_transformers(case, nnx):
    assert difference(ours.model_of(case, nnx=nnx), case) < 1


@pytest.mark.parametrize("case", [name if name == "qwen3" else slow(name)
                                  for name, each in ours.CASES.items() if each.wrong])
def test_a_wrong_model_is_caught(case):
    """Negative control: one field of the config that changes no shape."""
    assert difference(ours.model_of(case, wrong=True), case) > 10


@pytest.mark.slow
def test_unrolled_layers_have_the_same_names():
    for case, nnx in (("llama", False), ("llama", True), ("t5", False)):
        assert difference(ours.model_of(case, nnx=nnx, scan=False), case) < 1


@pytest.mark.slow
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="the extra third-party")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ours.CASES)
def test_transformers_itself(tmp_path, case):
    from support import transformers_models as theirs

    model = ours.model_of(case)
    reference = theirs.loaded(theirs.as_folder(model, ours.huggingface_config(model), tmp_path / "model"))
    logits, gradients = theirs.logits_and_gradients(reference, case)
    found = ours.differences(model, case, logits, gradients)
    assert found[0] < LOGITS and found[1] < GRADIENTS
    digest = ours.digest(logits, gradients)
    for name, values in ours.written()[case].items():
        np.testing.assert_allclose(digest[name], values, 1e-4, 1e-6, err_msg=f"{ours.FILE}: written by another version")
