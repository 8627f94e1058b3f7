"""`--attention`: which kernel a model is built with, and what is refused before JAX starts."""

import dataclasses

import pytest
from support.targets import mesh_of

from zero_jax.cli import step_from_config
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.step_from_config import attention_text, step_of, with_attention
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError

TINY = {"model": "gpt2:tiny", "seq_len": 64}


@pytest.mark.parametrize("make, told", [
    (lambda: PlanConfig(target="h100:8", attention="splash", **TINY), "splash on platform cuda: .* of TPUs"),
    (lambda: PlanConfig(target="v5e:2x4", attention="cudnn", **TINY), "cudnn on platform tpu: .* of NVIDIA"),
    (lambda: TrainConfig(attention="cudnn", **TINY), "cudnn on platform cpu: it is a kernel of NVIDIA GPUs"),
    (lambda: TrainConfig(attention="cudn", **TINY), "attention='cudn' is unknown.*cudnn"),
    (lambda: PlanConfig(attention="xla", model="resnet:resnet50"), "resnet:resnet50 has no field 'attention'")])
def test_what_cannot_take_effect_is_refused(make, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is in the default folder, as `make train` leaves one
    with pytest.raises(UsageError, match=told):
        make().check()


@pytest.mark.parametrize("target, kernel, text", [
    ("cpu", "auto", "Attention: xla"),
    ("v5e:2x4", "auto", "Attention: splash"),
    ("v5e:2x4", "xla", "Attention: xla")])
def test_the_model_gets_the_kernel_and_the_report_tells_it(target, kernel, text):
    choice = find_model("gpt2:124m")
    built = with_attention(choice, mesh_of(target), kernel)
    assert attention_text(built, batch=8, length=1024, precision="bf16") == text
    assert attention_text(choice, batch=8, length=1024, precision="bf16") == ""  # built by nobody
    if kernel == "auto" and target != "cpu":
        told = attention_text(built, batch=8, length=1000, precision="bf16")
        assert told.startswith("Attention: xla (1000 queries")


def test_a_model_without_the_option_is_left_as_it_is():
    choice = find_model("resnet:resnet50")
    assert with_attention(choice, mesh_of("cpu"), "auto") == choice
    assert not hasattr(dataclasses.replace(choice).config, "attention")


def test_slices_that_train_by_themselves_attend_within_themselves(tmp_path, monkeypatch):
    """What a run's model is built with. Control: together the devices split the batch over the slices, too."""
    seen = []
    monkeypatch.setattr(step_from_config, "make_zero_train_step", lambda model, *_, **__: seen.append(model))
    for options in ({"diloco_every": 4}, {}):
        config = TrainConfig(batch_size=16, steps=8, replica=2, out=tmp_path, target="v5e:2x4", dry_run=True, **TINY,
                             **options)
        step_of(config, find_model("gpt2:tiny"), list(mesh_of("v5e:2x4").devices.flat))
    assert ["replica" in model.config.attention.axes.batch for model in seen] == [False, True]
