"""`zero_jax.from_deepspeed`: twenty public configs become options that make a step, and each of their keys is named.

Keys and values are those of files in public repositories; numbers that their scripts compute are chosen here.
"""

import json

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax import Communication
from zero_jax.interop.deepspeed import _flat

HOST = {"device": "cpu", "pin_memory": True}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1}
STAGE_2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
           "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}
STAGE_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
           "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
           "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
           "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto"}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
CHAT = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False}

CONFIGS = {
    # name: (config, stage, precision and options expected, unknown keys)
    "simple_adam": ({"train_batch_size": 256, "steps_per_print": 1,
                     "optimizer": {"type": "Adam", "params": {"lr": 15e-5}},
                     "fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {
                         "stage": 0, "reduce_bucket_size": 20, "zero_hpz_partition_size": 1, "reduce_scatter": True,
                         "zero_quantized_weights": False, "zero_quantized_gradients": False}}, 0, "fp16", ()),
    "small_zero1": ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4,
                     "train_micro_batch_size_per_gpu": 2, "steps_per_print": 50, "wall_clock_breakdown": False,
                     "distributed_backend": "nccl"}, 1, "bf16 accumulate", ("distributed_backend",)),
    "hybrid_state": ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 1,
                      "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
                      "fp16": {"enabled": True, "initial_scale_power": 8}}, 1, "fp16 accumulate", ()),
    "megatron_zero2": ({"fp16": {**FP16, "initial_scale_power": 8}, "optimizer": {"type": "Adam"},
                        "zero_optimization": {**STAGE_2, "allgather_bucket_size": 1e8, "reduce_bucket_size": 1e8},
                        "gradient_accumulation_steps": 1, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                        "zero_allow_untested_optimizer": True}, 2, "fp16", ()),
    "megatron_gpt": ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1,
                      "zero_optimization": {"stage": 1}, "bf16": {"enabled": False},
                      "fp16": {**FP16, "loss_scale_window": 50, "initial_scale_power": 12},
                      "wall_clock_breakdown": False}, 1, "fp16", ()),
    "xpu": ({"fp16": {**FP16, "auto_cast": True, "initial_scale_power": 12}, "zero_optimization": STAGE_2,
             "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95],
                                                       "eps": 1e-8}},
             "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4,
                                                               "warmup_num_steps": 2000, "total_num_steps": 100000}}},
            2, "fp16", ()),
    "trainer_zero2": ({"fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, "zero_optimization": STAGE_2,
                       "gradient_accumulation_steps": 8, "gradient_clipping": 1.0, "steps_per_print": 10,
                       "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "wall_clock_breakdown": False},
                      2, "fp16 accumulate", ()),
    "trainer_zero2_offload": ({**AUTO, "zero_optimization": {**STAGE_2, "offload_optimizer": HOST},
                               "optimizer": {"type": "AdamW", "params": {
                                   "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
                               "scheduler": {"type": "WarmupLR", "params": {
                                   "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
                               "steps_per_print": 1e5, "fp16": {**FP16, "enabled": "auto"}}, 2, "offload", ()),
    "lora_zero2": ({**AUTO, "bf16": {"enabled": "auto"}, "zero_optimization": {
        "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
        "allgather_partitions": True}}, 2, "", ()),
    "chat_zero2": ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 10,
                    "zero_optimization": {"stage": 2, **CHAT}, "fp16": {"enabled": True, "loss_scale_window": 100},
                    "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
                    "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1}}, 2, "fp16", ()),
    "chat_zero_plus_plus": ({"bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, **CHAT, "allgather_partitions": True, "allgather_bucket_size": 500000000, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 500000000, "contiguous_gradients": True,
        "zero_quantized_weights": True, "zero_hpz_partition_size": 4, "zero_quantized_gradients": True}}, 3,
        "bf16 weights gradients hpz_axes", ()),
    "rlhf": ({"steps_per_print": 100, "zero_optimization": {
        "stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": HOST, "sub_group_size": "auto",
        "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto", "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": "auto",
        "zero_hpz_partition_size": 4, "zero_quantized_weights": False, "zero_quantized_gradients": False},
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "wall_clock_breakdown": False, "data_types": {"grad_accum_dtype": "fp32"}}, 3, "bf16 offload hpz_axes", ()),
    "trainer_zero3": ({**AUTO, "fp16": {**FP16, "enabled": "auto"}, "bf16": {"enabled": "auto"},
                       "zero_optimization": {**STAGE_3, "round_robin_gradients": True},
                       "scheduler": {"type": "WarmupDecayLR", "params": {
                           "total_num_steps": "auto", "warmup_min_lr": 1e-8, "warmup_max_lr": "auto",
                           "warmup_num_steps": "auto", "warmup_type": "log"}}}, 3, "", ()),
    "trainer_zero3_offload": ({"zero_optimization": {**STAGE_3, "offload_optimizer": HOST, "offload_param": HOST},
                               "gradient_accumulation_steps": 32, "gradient_clipping": 1.0,
                               "train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": False, "bf16": {
                                   "enabled": True}, "communication_data_type": "bf16"}, 3,
                              "bf16 accumulate offload", ()),
    "accelerate_zero3": ({**AUTO, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "steps_per_print": 100,
                          "wall_clock_breakdown": False, "zero_optimization": {
                              **STAGE_3, "offload_optimizer": HOST, "offload_param": HOST}}, 3, "bf16 offload", ()),
    "slurm_zero3": ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps":
                     "auto", "steps_per_print": 10, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
                     "prescale_gradients": False, "wall_clock_breakdown": False, "zero_optimization": {
                         "stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
                         "overlap_comm": True, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
                         "stage3_prefetch_bucket_size": 5e8, "gather_16bit_weights_on_model_save": True}}, 3, "bf16",
                    ("zero_optimization.gather_16bit_weights_on_model_save",)),
    "checkpointed_zero3": ({"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 2,
                            "zero_optimization": {"stage": 3, "offload_param": HOST, "offload_optimizer": HOST,
                                                  "overlap_comm": True, "reduce_bucket_size": 6e8},
                            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8,
                                                                      "weight_decay": 0.1}},
                            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False,
                                                         "contiguous_memory_optimization": True}}, 3,
                           "bf16 accumulate offload remat", ()),
    "nemo_zero3": ({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True},
                    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
                    "pipeline": {"enable": True, "stages": 8}}, 3, "fp16 offload", ()),
    "cube_zero3": ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "mp_size": 1,
                    "wall_clock_breakdown": True,
                    "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {
                        "device": "none"}, "contiguous_gradients": False, "overlap_comm": False},
                    "optimizer": {"type": "Adam", "params": {"lr": 15e-5, "betas": [0.9, 0.95]}},
                    "fp16": {"enabled": True, "autocast": False}}, 3, "fp16 overlap",
                   ("mp_size", "fp16.autocast")),
    "decay_zero3": ({"fp16": {"enabled": False}, "bf16": {"enabled": True}, "scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.1, "warmup_num_steps": 1,
                                            "total_num_steps": 100}},
        "zero_optimization": {**STAGE_3, "overlap_comm": False, "sub_group_size": 1e5, "reduce_scatter": True},
        "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2, "train_batch_size": 1},
        3, "bf16 overlap", ()),
    "compiled_nvme": ({"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1, "optimizer": {
        "type": "Adam", "params": {"lr": 15e-5}}, "compile": {"enabled": True, "backend": "inductor"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}}, 3,
        "offload", ()),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_config_becomes_a_step(name, tmp_path):
    config, stage, given, unknown = CONFIGS[name]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config).replace("FOLDER", str(tmp_path / "states")))
    converted = zero_jax.from_deepspeed(file)
    options = converted.options
    assert options["stage"] == stage and converted.unknown == unknown
    assert set(converted.became) == {key for key, _ in _flat(config)}
    assert all(f"{key} " in str(converted) for key in converted.became)
    assert _precision(options) == next((each for each in ("bf16", "fp16") if each in given.split()), None)
    sent, plain = options.get("communication", Communication()), Communication()
    for option in ("accumulate", "offload", "remat"):
        assert (option in given.split()) == (option in options), (option, options)
    for option in ("weights", "gradients", "hpz_axes", "overlap"):
        assert (option in given.split()) == (getattr(sent, option) != getattr(plain, option)), (option, options)
    assert ("optimizer" in options) == ("optimizer" in config)
    mesh = zero_jax.make_mesh((2, 4)) if sent.hpz_axes else zero_jax.make_mesh()
    zero_jax.make_zero_train_step(nn.Sequential([nn.Embed(32, 8), nn.Dense(32)]), mesh=mesh, **options)


def _precision(options):
    policy = options.get("precision")
    return policy if isinstance(policy, str) or policy is None else "fp16"


def test_there_are_twenty():
    assert len(CONFIGS) >= 20 and {stage for _, stage, *_ in CONFIGS.values()} == {0, 1, 2, 3}


def test_values_come_over():
    converted = zero_jax.from_deepspeed({"fp16": {**FP16, "initial_scale_power": 12, "loss_scale_window": 50},
                                         "zero_optimization": {"stage": 2}})
    assert converted.options["precision"].loss_scale == zero_jax.LossScale(initial=2.0**12, interval=50)
    offload = zero_jax.from_deepspeed({"zero_optimization": {"stage": 1, "offload_optimizer": {
        "device": "cpu", "ratio": 0.3}}}).options["offload"]
    assert offload == zero_jax.Offload(fraction=0.3)


@pytest.mark.parametrize("optimizer, expected", [
    ({"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
     optax.adamw(0.01, 0.8, 0.9, 1e-6, weight_decay=0.1)),
    ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, optax.sgd(0.1, momentum=0.9)),
    ({"type": "Lamb", "params": {"lr": 0.01}}, optax.lamb(0.01, 0.9, 0.999, 1e-8)),
])
def test_an_optimizer_has_the_updates_of_optax(optimizer, expected):
    params, grads = jnp.arange(1.0, 5.0), jnp.array([0.1, -0.2, 0.3, 4.0])

    def two_steps(transform):
        state, values = transform.init(params), params
        for _ in range(2):
            updates, state = transform.update(grads, state, values)
            values = optax.apply_updates(values, updates)
        return values

    converted = zero_jax.from_deepspeed({"optimizer": optimizer}).options["optimizer"]
    assert jnp.allclose(two_steps(converted), two_steps(expected), rtol=1e-6)
    assert not jnp.allclose(two_steps(converted), two_steps(optax.adam(0.3)), rtol=1e-3)
    clipped = zero_jax.from_deepspeed({"optimizer": optimizer, "gradient_clipping": 0.5}).options["optimizer"]
    assert jnp.allclose(two_steps(clipped), two_steps(optax.chain(optax.clip_by_global_norm(0.5), expected)), rtol=1e-6)


def test_a_schedule_rises_and_falls():
    config = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "total_num_steps": 4}}}
    transform = zero_jax.from_deepspeed(config).options["optimizer"]
    state, rates = transform.init(jnp.ones(())), []
    for _ in range(5):
        update, state = transform.update(jnp.ones(()), state, jnp.ones(()))
        rates.append(float(-update))
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("config, message", [
    ([], "is a JSON object"), ({"zero_optimization": {"stage": 4}}, "give 0, 1, 2 or 3"),
    ({"gradient_clipping": "much"}, "give a number"), ("nowhere.json", "there is no file"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "give one of them"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}}, "give \"none\", \"cpu\" or"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "has no nvme_path"),
])
def test_bad_input_is_a_line(config, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        zero_jax.from_deepspeed(config)


def test_unknown_keys_are_named_with_the_nearest():
    converted = zero_jax.from_deepspeed({"zero_optimization": {"stage": 1, "overlap_com": True}, "quite_other": 1})
    assert converted.unknown == ("zero_optimization.overlap_com", "quite_other")
    assert "is it zero_optimization.overlap_comm?" in str(converted)
    assert not zero_jax.from_deepspeed({"zero_optimization": {"stage": 1, "overlap_comm": True}}).unknown
