"""config.json: of the model, by transformers' own logits, or refused by the name of a field; it goes with the weights.

The logits are in config_variants.json, which `scripts/tables/model_parity.py --configs` writes.
"""

import functools
import importlib.util
import json
import re

import jax
import numpy as np
import pytest
from support import config_variants as variants
from support import reference_models as ours
from support.oracle import slow

from models import bert, gpt2, llama, resnet, t5, vit
from zero_jax.errors import UsageError
from zero_jax.interop.model_config import check_config

FAST = ("llama", "qwen3", "gpt2")
NAMES = {"gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet}


def verdict(check, folder, config, expected):
    """None for a config that is accepted, else why it is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check(folder, expected, "this model")
    except UsageError as error:
        return str(error)
    return None


@functools.cache
def our_logits(case):
    model = ours.model_of(case)
    batch = ours.batch_of(case)
    return np.array(variants.digest(np.asarray(
        jax.jit(lambda leaves: model.run(leaves, batch))(model.leaves(model.tensors())))))


def wrong(check, case, folder):
    """The variants of which `check` says something that transformers' logits contradict, or names another field."""
    expected, found, theirs = ours.huggingface_config(ours.model_of(case)), [], variants.written()[case]
    for number, (changes, field) in enumerate(variants.VARIANTS[case]):
        said, logits = verdict(check, folder, variants.config_of(case, number), expected), theirs[number]
        same = logits is not None and np.abs(np.array(logits) - our_logits(case)).max() < 1e-4
        if field is None:
            right = said is None and same
        else:
            differs = logits is not None and not same
            named = said is not None and field.strip(variants.SAME) in said
            right = named and differs != field.startswith(variants.SAME)
        if not right:
            found.append((changes, said))
    return found


@pytest.mark.parametrize("case", [case if case in FAST else slow(case) for case in variants.VARIANTS])
def test_each_config_is_right_or_refused_by_name(tmp_path, case):
    assert wrong(check_config, case, tmp_path) == []
    # Negative controls: nothing refused, everything refused.
    fields = [field for _, field in variants.VARIANTS[case]]
    assert len(wrong(lambda *args: None, case, tmp_path)) == sum(field is not None for field in fields)

    def refuse(*args):
        raise UsageError(" ".join(filter(None, fields)))

    assert len(wrong(refuse, case, tmp_path)) == fields.count(None)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="the extra third-party")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", variants.VARIANTS)
def test_transformers_itself(tmp_path, case):
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 does not read what 5 writes")
    for number, expected in enumerate(variants.written()[case]):
        found = variants.theirs(case, number, tmp_path / str(number))
        assert (found is None) == (expected is None)
        np.testing.assert_allclose(found or 0, expected or 0, 1e-4, 1e-5, err_msg=str(variants.VARIANTS[case][number]))


LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256}


def test_a_published_file_and_what_transformers_5_makes_of_it(tmp_path):
    expected = llama.huggingface_config(llama.PRESETS["3.1-8b"])
    five = {name: value for name, value in LLAMA_31.items() if not name.startswith("rope")} | {
        "rope_parameters": LLAMA_31["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16", "head_dim": 128}
    for config in (LLAMA_31, five):
        assert verdict(check_config, tmp_path, config, expected) is None
        said = verdict(check_config, tmp_path, config, llama.huggingface_config(llama.PRESETS["3-8b"])) or ""
        assert "rope_type='llama3', and this model has 'default'" in said


def test_a_field_of_no_table_is_refused_and_null_is_not(tmp_path):
    """Of every family, and of a model of one's own, of which only what its module says is known."""
    own = {"model_type": "mine", "width": 4, "eos_token_id": 1}
    configs = [module.huggingface_config(preset) for module in NAMES.values() for preset in module.PRESETS.values()]
    for expected in [*configs, *map(llama.huggingface_config, llama.PRESETS.values()), own]:
        assert verdict(check_config, tmp_path, expected, expected) is None
        assert verdict(check_config, tmp_path, expected | {"some_field": None, "eos_token_id": 7}, expected) is None
        for value in (0, False, 1.5, "x", [1], {"a": 1}):
            said = verdict(check_config, tmp_path, expected | {"some_field": value}, expected) or ""
            assert "says some_field=" in said
    assert "means width=None, and this model has 4" in (
        verdict(check_config, tmp_path, {"model_type": "mine"}, own) or "")


@pytest.mark.parametrize("text", [
    "[1]", "{", '{"rope_scaling": [1]}', '{"rope_scaling": "llama3"}', '{"rope_parameters": 7}',
    '{"num_attention_heads": 0}', '{"num_attention_heads": 1' + 999 * "0" + "}", '{"layer_types": 3}',
    '{"hidden_size": {}}'])
def test_what_is_no_config_is_one_clear_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "config.json"))):
        check_config(tmp_path, ours.huggingface_config(ours.model_of("qwen3")), "this model")
