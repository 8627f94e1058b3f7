"""config.json: of the model, by transformers' own logits, or refused by the name of a field; it goes with the weights.

The logits are in config_variants.json, which `scripts/tables/model_parity.py --configs` writes.
"""

import dataclasses
import functools
import importlib.util
import json
import re

import jax
import numpy as np
import pytest
from support import config_variants as variants
from support import reference_models as ours
from support.decoder_families import FAMILIES
from support.oracle import slow

import models
from models import bert, gpt2, llama, resnet, t5, vit
from zero_jax.cli.model_lookup import find_model
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


@pytest.mark.parametrize("module", [llama, *NAMES.values()], ids=lambda module: module.__name__)
def test_a_config_json_gives_the_model_of_which_it_is(tmp_path, module):
    """Of every preset; sizes that no preset has, and a preset's own numbers."""
    for name, preset in module.PRESETS.items():
        config = module.huggingface_config(preset)
        (tmp_path / "config.json").write_text(json.dumps(config))
        found_module, found = models.from_huggingface(tmp_path)
        assert found_module is module
        assert found == dataclasses.replace(preset, **{
            field: getattr(found, field) for field in ("remat", "family", "max_length", "dropout")
            if hasattr(found, field)}), name
        assert vars(find_model(str(tmp_path)).config).keys() == vars(found).keys()
        # Negative control: another depth is another model.
        if "num_hidden_layers" in config:
            (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
            assert models.from_huggingface(tmp_path)[1].num_layers == 7 != preset.num_layers


NOT_HERE = [
    ("llama 1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama 1", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama 1", {"layer_types": ["full_attention"]}, "layer_types"), ("llama 1", {"rms_norm_eps": "x"}, "rms_norm_eps"),
    ("llama 1", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type='proportional'"),
    ("llama 1", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama 1", {"head_dim": 3}, "head_dim"),
    ("llama 1", {"num_attention_heads": 3}, "num_heads=3"), ("llama 1", {"logits_scaling": 2.0}, "logits_scaling=2.0"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"), ("gemma2", {"hidden_activation": "relu"}, "'relu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"sliding_window": None, "layer_types": 3 * ["sliding_attention"]}, "sliding_window"),
    ("gemma3", {"layer_types": 3 * ["chunked_attention"]}, "chunked_attention"),
    ("gemma3 of 5", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "rope_parameters.sliding_attention"),
    ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "embd_gate": 1}, "embd_gate=1"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"), ("granite", {"mlp_bias": "yes"}, "mlp_bias='yes'"),
    ("smollm3", {"no_rope_layers": [1]}, "not a model's"), ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("qwen2", {"model_type": "qwen2_moe"}, "model_type='qwen2_moe', of which there is no model: there are gpt2, llama"),
    ("gemma3", {"model_type": "gemma3"}, "Its text model alone is"),
    ("llama 1", {"model_type": None}, "model_type=None"),
    ("llama 1", {"model_type": [1]}, r"model_type=[1]")]


@pytest.mark.parametrize(("family", "changes", "said"), NOT_HERE, ids=lambda value: str(value)[:30])
def test_what_no_model_has_is_refused_by_name(tmp_path, family, changes, said):
    file = FAMILIES[family][0]
    (tmp_path / "config.json").write_text(json.dumps(file | changes))
    for read in (models.from_huggingface, lambda folder: find_model(str(folder))):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            read(tmp_path)
        assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert find_model(str(tmp_path)).config == find_model(str(tmp_path)).config  # negative control: it is read


def test_a_folder_without_a_config_json_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no config\.json, and tensors do not show which model they are of"):
        find_model(str(tmp_path))


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


ENCODERS = {  # as published
    "roberta": ({"architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
                 "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
                 "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
                 "max_position_embeddings": 514, "model_type": "roberta", "num_attention_heads": 12,
                 "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265},
                124_697_433, {"pad_token_id": 3, "layer_norm_eps": 1e-6, "type_vocab_size": 2},
                "position_embedding_type"),
    "distilbert": ({"activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1,
                    "dim": 768, "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02,
                    "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12, "n_layers": 6,
                    "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
                    "tie_weights_": True, "transformers_version": "4.10.0.dev0", "vocab_size": 30522},
                   66_985_530, {"n_heads": 6, "dim": 384}, "activation")}


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_are_read_as_published(kind, tmp_path):
    """Their parameters are as many as the publisher says; what a number follows from is another config, or refused."""
    published, num_params, others, refused = ENCODERS[kind]

    def read(**changes):
        (tmp_path / "config.json").write_text(json.dumps(published | changes))
        return models.from_huggingface(tmp_path)[1]

    config = read()
    assert config.num_params == num_params and config.max_length == 512
    assert bert.huggingface_config(config)["model_type"] == kind
    assert bert.huggingface_config(config)["max_position_embeddings"] == published["max_position_embeddings"]
    for name, value in others.items():
        assert read(**{name: value}) != config, name
    with pytest.raises(ValueError, match=refused):  # negative control
        read(**{refused: "relu"})
