"""Objectives of a run: which one a model has, batches, what evaluations measure, what is refused, and whole runs."""

import dataclasses
import itertools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from support import run_log
from support.command_line import refused
from support.oracle import slow
from support.plain_training import plain_training

from zero_jax.cli.model_lookup import ModelChoice, find_model
from zero_jax.cli.objectives.choose import DEFAULTS, kind_of, objective_of
from zero_jax.cli.objectives.objective import with_perplexity
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import marked_text
from zero_jax.cli.training.train import train
from zero_jax.data.images import augmented, warped
from zero_jax.data.tokenizer import SpecialByteTokenizer
from zero_jax.errors import UsageError
from zero_jax.optim.presets import make_schedule

pytest.importorskip("grain"), pytest.importorskip("sklearn")

LINES = [{"text": f"line {k}: " + "the quick brown fox " * (k % 4 + 1)} for k in range(200)]
OF = {"bert:bytes": "masked", "t5:bytes": "span", "vit:digits": "classify", "vit_nnx:digits": "classify",
      "resnet:digits": "classify", "gpt2:tiny": "causal", "llama_nnx:tiny": "causal"}
SPECIALS = SpecialByteTokenizer.specials


@pytest.fixture(autouse=True)
def lines(tmp_path, monkeypatch):
    """lines.jsonl in the current folder, where no run has left its checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))


def config(model, **options):
    images = {"data": ("digits",)} if OF[model] == "classify" else {"data": ("lines.jsonl",), "seq_len": 32}
    return TrainConfig(**{"model": model, "batch_size": 8, "devices": 8, **images, **options})


def batches(options):
    return objective_of(options).load_data().batches(None)


def same(batch, other):
    return batch.keys() == other.keys() and all((batch[name] == other[name]).all() for name in batch)


def test_a_model_has_the_objective_that_its_loss_is_for():
    for model, objective in OF.items():
        assert DEFAULTS[kind_of(find_model(model))] == objective
    graph = ModelChoice("graphs:a", None, lambda _: None, loss=lambda model, batch: 0.0,
                        batch_shapes=lambda *_: {"nodes": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
    with pytest.raises(ValueError, match="takes batches of nodes, which train does not make"):
        kind_of(graph)
    with pytest.raises(ValueError, match="no batch_shapes"):
        kind_of(dataclasses.replace(graph, batch_shapes=None))


@pytest.mark.parametrize(("model", "options"), [
    ("bert:bytes", {"documents": "pack"}), ("bert:bytes", {"documents": "pad"}), ("t5:bytes", {}),
    ("vit:digits", {"image_shift": 1, "image_flip": True, "image_warp": 0.1})])
def test_batches_are_functions_of_their_number(model, options):
    found, again, other = (batches(config(model, seed=seed, **options))[0] for seed in (0, 0, 1))
    found[0]  # which changes nothing
    assert same(found[3], again[3]) and not same(found[3], other[3]) and not same(found[3], found[4])
    mesh = jax.make_mesh((8,), ("data",))
    sharded, _ = objective_of(config(model, **options)).load_data().batches(NamedSharding(mesh, P("data")))
    assert same(found[3], {name: np.asarray(array) for name, array in sharded[3].items()})
    shapes = objective_of(config(model, **options)).batch_shapes()
    assert {name: (each.shape, each.dtype) for name, each in shapes.items()} == {
        name: (array.shape, array.dtype) for name, array in found[0].items()}
    # Another objective, or another option of it, is not taken for the same one when a run goes on.
    changed = {"masked": {"mask_fraction": 0.3}, "span": {"span_length": 2.0}, "classify": {"image_shift": 2}}
    with pytest.raises(ValueError, match="belongs to other batches"):
        batches(config(model, **options | changed[OF[model]]))[0].restore(found.state())


@pytest.mark.parametrize("documents", ["concatenate", "pack", "pad"])
def test_masks_are_on_text_alone(documents):
    train_set, held_out = batches(config("bert:bytes", documents=documents, mask_fraction=0.4))
    rows = [train_set[k] for k in range(8)]
    predicted = sum(row["weights"].sum() for row in rows)
    text = sum((~np.isin(row["targets"], SPECIALS.ids)).sum() for row in rows)
    assert abs(predicted / text - 0.4) < 0.01
    rows += list(held_out.once())  # whose last batch is filled up with rows of weight 0
    for row in rows:
        chosen = row["weights"] > 0
        is_filled_up = ~chosen.any(-1, keepdims=True)
        assert not np.isin(row["targets"][chosen], SPECIALS.ids).any()
        assert (row["inputs"] == row["targets"])[~(chosen | is_filled_up)].all()
        assert ("segment_ids" in row) == (documents != "concatenate")
    assert sum((row["inputs"] == SPECIALS.mask).sum() for row in rows) > 0.7 * predicted
    # The control: padding and ends of documents are there, and would be masked if they were not left out.
    assert any((row["targets"] == SPECIALS.eos).any() for row in rows)
    assert any((row["targets"] == SPECIALS.pad).any() for row in rows) == (documents != "concatenate")


def test_spans_that_are_put_back_make_the_text():
    objective = objective_of(config("t5:bytes"))
    batch = objective.load_data().batches(None)[0][0]
    text = "".join(line["text"] for line in LINES)
    for given, wanted, before in zip(batch["inputs"], batch["targets"], batch["decoder_inputs"], strict=True):
        spans = {int(mark): wanted[at + 1:-1] for at, mark in enumerate(wanted) if mark in SPECIALS.sentinels}
        whole = []
        for token in given[:-1]:
            span = spans.get(int(token))
            whole += [int(token)] if span is None else itertools.takewhile(
                lambda each: each not in SPECIALS.sentinels, span.tolist())
        # Documents come one after another, each with its end.
        assert len(whole) == objective.lengths.tokens
        assert all(bytes(part).decode() in text for part in "".join(
            "|" if token == SPECIALS.eos else chr(token) for token in whole).encode().split(b"|"))
        assert before[0] == SPECIALS.pad and (before[1:] == wanted[:-1]).all() and wanted[-1] == SPECIALS.eos
    assert objective.items_per_step == 8 * objective.lengths.tokens


def test_an_evaluation_counts_each_image_once():
    objective = objective_of(config("vit:digits", batch_size=64, eval_fraction=0.1))  # 180 images in 3 batches
    data = objective.load_data()
    held_out = list(data.batches(None)[1].once())
    pixels, weights = (np.concatenate([batch[name] for batch in held_out]) for name in ("inputs", "weights"))
    assert len(weights) == 192 and weights.sum() == 180
    seen = {image.tobytes() for image, weight in zip(pixels, weights, strict=True) if weight}
    assert seen == {data.held_out.row(k)["inputs"].tobytes() for k in range(180)} and len(seen) == 180
    trained_on = {image.tobytes() for k in range(25) for image in data.batches(None)[0][k]["inputs"]}
    assert not seen & trained_on
    labels = np.concatenate([batch["targets"] for batch in held_out])
    right = {name: value for name, value in _measured(objective, held_out, lambda batch: batch["targets"]).items()}
    assert right["accuracy"] == 1.0
    always_zero = _measured(objective, held_out, lambda batch: 0 * batch["targets"])["accuracy"]
    assert always_zero == pytest.approx((labels[weights > 0] == 0).mean())
    assert abs(always_zero - (labels == 0).mean()) > 1e-4  # the control: those that fill the last batch count, too


def _measured(objective, held_out, classes_of):
    """An evaluation of a model that is certain of `classes_of(batch)`."""
    from zero_jax.cli.training.evaluation import evaluate

    def sums(batch):
        class Model:
            def __call__(self, inputs):
                return 50.0 * jax.nn.one_hot(classes_of(batch), 10)

        return objective.sums(Model(), batch)

    return objective.metrics(evaluate(sums, held_out))


def test_an_evaluation_has_running_statistics():
    objective = objective_of(config("resnet:digits"))
    batch = objective.load_data().batches(None)[0][0]
    assert batch["inputs"].shape == (8, 8, 8, 3) and (batch["inputs"][..., 0] == batch["inputs"][..., 2]).all()
    model = Normed()
    variables = model.init(jax.random.key(0), batch["inputs"])
    moved = {**variables, "batch_stats": jax.tree.map(lambda leaf: leaf + 1, variables["batch_stats"])}
    losses = [float(objective.sums(model.bind(each), batch)["loss"]) for each in (variables, moved)]
    assert abs(losses[0] - losses[1]) > 1e-3
    # The control: with the statistics of the batch, running ones change nothing.
    logits = [model.apply(each, batch["inputs"], mutable=["batch_stats"])[0] for each in (variables, moved)]
    np.testing.assert_array_equal(*logits)


class Normed(nn.Module):
    """A batch norm and a layer."""

    @nn.compact
    def __call__(self, images, *, train=True):
        images = nn.BatchNorm(use_running_average=not train)(images)
        return nn.Dense(10)(images.reshape(len(images), -1))


def test_images_move_by_whole_pixels():
    image = np.zeros((6, 6, 1), np.float32)
    image[2, 2] = 1
    places = {tuple(int(i) for i in np.argwhere(augmented(image, (0, k), shift=2, flip=False))[0, :2])
              for k in range(400)}
    assert places == {(row, column) for row in range(5) for column in range(5)}
    mirrored = sum(augmented(image, (0, k), shift=0, flip=True)[2, 3, 0] for k in range(400))
    assert 160 < mirrored < 240 and (augmented(image, (0, 1), shift=0, flip=False) == image).all()


def test_images_are_warped_by_an_affine_map():
    """Against the sum over all pixels with hats as weights, which is linear interpolation."""
    image = np.asarray(np.random.default_rng(0).random((6, 8, 2)), np.float32)
    amounts = np.array([0.1, -0.2, 0.15, 0.05, 0.1, -0.2])

    def expected(amounts):
        places = np.stack(np.meshgrid((np.arange(6) - 2.5) / 3, (np.arange(8) - 3.5) / 4, indexing="ij"), -1)
        moved = (places + places @ amounts[:4].reshape(2, 2).T + amounts[4:]) * (3, 4) + (2.5, 3.5)
        rows, columns = (np.maximum(0, 1 - np.abs(moved[..., axis, None] - np.arange(size)))
                         for axis, size in ((0, 6), (1, 8)))
        return np.einsum("ijy,ijx,yxc->ijc", rows, columns, image)

    found = warped(image, amounts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(amounts), atol=1e-6)
    assert np.abs(found - expected(amounts * [1, 1, 1, 1, -1, 1])).max() > 0.1  # the control
    drawn = [augmented(image, (0, k), warp=0.2) for k in range(50)]
    assert len({each.tobytes() for each in drawn}) == 50 and (augmented(image, (0, 7), warp=0.2) == drawn[7]).all()
    spot = np.zeros((9, 9, 1), np.float32)
    spot[4, 4] = 1  # which goes to -t, and to all sides alike
    places = np.stack([np.tensordot(each[..., 0] / each.sum(), np.indices((9, 9)) - 4, ([0, 1], [1, 2]))
                       for each in (augmented(spot, (0, k), warp=0.2) for k in range(400))])
    assert (np.abs(places.mean(0)) < 0.1).all() and (places.min(0) < -0.5).all() and (places.max(0) > 0.5).all()
    means = np.mean([np.abs(augmented(image, (0, k), warp=0.02) - image).mean() for k in range(50)])
    assert 0 < means < 0.2 * np.mean([np.abs(each - image).mean() for each in drawn])


def test_ids_that_are_no_text_are_shown_by_their_marks():
    decode = SpecialByteTokenizer().decode
    assert marked_text(np.array([258, 72, 105, 258, 258, 33]), decode=decode, marks={258: "[?]"}) == "[?]Hi[?][?]!"
    assert marked_text(np.array([72, 105]), decode=decode, marks={258: "[?]", None: "x"}) == "Hi"


def _arrays(shape=(40, 8, 8), classes=10, name="images.npz"):
    np.savez(name, images=np.zeros(shape, np.uint8), labels=np.arange(shape[0]) % classes)


BAD_INPUT = {
    "size": ("vit:tiny", {"data": "digits"}, "its images have 8 x 8 pixels, and vit:tiny takes 16 x 16"),
    "classes": ("vit:digits", {"data": "images.npz"}, "labels go up to 11, and vit:digits has the classes 0 to 9"),
    "classes of the evaluation": ("vit:digits", {"data": "digits", "eval_data": "images.npz"},
                                  "eval_data: labels go up to 11"),
    "channels": ("resnet:digits", {"data": "two.npz"}, "its images have 2 channels, and resnet:digits takes 3"),
    "no labels": ("vit:digits", {"data": "none.npz"}, "none.npz lacks labels"),
    "no such images": ("vit:digits", {"data": "nowhere.npz"}, "nowhere.npz: no such file"),
    "images and more": ("vit:digits", {"data": ("digits", "images.npz")}, "images come from one file or folder"),
    "images and text": ("vit:digits", {"data": "digits", "eval_data": "lines.jsonl"}, "give two of a kind"),
    "the same images": ("vit:digits", {"data": "digits", "eval_data": "digits"}, "digits is in data, too"),
    "length of images": ("vit:digits", {"data": "digits", "seq_len": 64}, "images have no tokens"),
    "tokenizer of images": ("vit:digits", {"data": "digits", "tokenizer": "t.json"}, "which have none"),
    "warp": ("vit:digits", {"data": "digits", "image_warp": 0.6}, "image_warp=0.6 is not within 0 to 0.5"),
    "warped text": ("bert:bytes", {"image_warp": 0.1}, "image_warp=0.1: it is of objective=classify"),
    "crop": ("vit:digits", {"data": "digits", "image_crop": 2.0}, "image_crop=2.0 is not within 0.0001 to 1"),
    "out of sight": ("vit:digits", {"data": "digits", "image_shift": 8}, "out of sight"),
    "many images": ("vit:digits", {"data": "ten.npz", "batch_size": 64}, "fewer than batch_size=64"),
    "vocabulary": ("bert:tiny", {"seq_len": 32}, "The data's vocabulary of 384 is larger than vocab_size=256"),
    "objective of images": ("vit:digits", {"data": "digits", "objective": "masked"}, "is a model of images"),
    "masks of ids": ("bert:bytes", {"data": "ids.npy"}, "give the tokenizer that wrote them"),
    "no mask": ("bert:base", {"tokenizer": "plain.json"}, "the tokenizer has no mask"),
    "no sentinels": ("t5:small", {"tokenizer": "plain.json"}, "and the tokenizer 0 sentinels"),
    "fraction": ("bert:bytes", {"mask_fraction": 1.0}, "mask_fraction=1.0: give a fraction"),
    "span": ("t5:bytes", {"span_length": 0.5}, "span_length=0.5 is not within 1 to 1000"),
    "short windows": ("t5:bytes", {"seq_len": 3}, "Span corruption of rows of 3 tokens"),
    "windows of documents": ("t5:bytes", {"documents": "pack"}, "documents=pack: objective=span cuts windows"),
    "parts of sequences": ("t5:bytes", {"seq_len": 24, "context": 4}, "makes 6 targets, which do not divide over it"),
    "no text": ("bert:base", {"data": "specials", "seq_len": 4}, "Masks leave no token"),
    "no text at all": ("bert:bytes", {"data": "empty.jsonl"}, "The data have no text"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_message_before_a_device_is_used(name, tmp_path):
    _arrays(classes=12)
    _arrays((40, 8, 8, 2), name="two.npz")
    _arrays(name="ten.npz")
    np.savez("none.npz", images=np.zeros((4, 8, 8)))
    np.save("ids.npy", np.arange(5000, dtype=np.uint16) % 200)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    model, options, expected = BAD_INPUT[name]
    if "tokenizer" in options:
        tokenizers = pytest.importorskip("tokenizers")
        tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|endoftext|>": 1}, [])).save("plain.json")
    if name == "no text":
        _specials_alone(tmp_path / "specials")
    with pytest.raises(UsageError) as raised:
        objective_of(TrainConfig(**{"model": model, "data": "lines.jsonl", **options})).load_data()
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_the_command_line_says_it():
    assert "vit:tiny takes 16 x 16: resize them" in refused("train", "--model", "vit:tiny", "--data", "digits")


def _specials_alone(folder):
    """A folder of tokens, as `tokenize` writes it, in which all tokens are ends of documents."""
    from zero_jax.data.documents import write_tokenized
    from zero_jax.data.tokenizer import train_bpe

    tokenizer = train_bpe(["text"], vocab_size=270)
    write_tokenized(folder, ["x"] * 400, tokenizer)
    tokens = folder / "tokens.uint16.bin"
    ends = np.zeros_like(np.fromfile(tokens, np.uint16))
    ends.tofile(tokens)


def test_a_model_that_fits_takes_the_same_data():
    """The control of the above: without what is wrong, each of these is a run."""
    _arrays(classes=10)
    for model, options in (("vit:digits", {"data": ("images.npz",)}), ("resnet:digits", {}), ("bert:bytes", {}),
                           ("t5:bytes", {"seq_len": 64}), ("vit:digits", {"eval_data": ("images.npz",)})):
        assert objective_of(config(model, **options)).name == OF[model]


RUNS = {"bert:bytes": {"stage": 2, "documents": "pack"}, "t5:bytes": {"stage": 1},
        "vit:digits": {"stage": 3, "image_warp": 0.15, "eval_fraction": 0.01},
        # Gradients before a norm whose scale is 0 are rounding, which Adam makes as large as its rate.
        "resnet:digits": {"stage": 0, "learning_rate": 1e-3}}


@pytest.mark.grid
@pytest.mark.parametrize("model", [slow(model) for model in RUNS])
def test_a_run_has_the_losses_of_a_plain_loop_and_goes_on_bit_for_bit(model, tmp_path):
    options = config(model, steps=4, save_every=2, eval_every=4, eval_batches=2, samples=1, out=tmp_path / "run",
                     **{"learning_rate": 1e-2} | RUNS[model])
    summary = train(options, console=Console(quiet=True))
    losses = [*run_log.losses(tmp_path / "run").values()]
    choice, data = find_model(model), objective_of(dataclasses.replace(options, resume=True)).load_data()
    train_set, held_out = data.batches(None)
    schedule = make_schedule(options.schedule, **options.schedule_arguments(options.steps))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    plain = plain_training(choice.build(choice.config), optimizer, choice.loss, [train_set[k] for k in range(4)])
    np.testing.assert_allclose(losses, plain.losses, rtol=2e-4)
    # The control: batches of another seed, or moved by one, have other losses.
    assert abs(losses[1] - losses[0]) > 2e-3 and abs(losses[2] - float(plain.losses[1])) > 2e-3

    bound = choice.build(choice.config).bind({"params": plain.params, **plain.variables})
    objective = objective_of(dataclasses.replace(options, resume=True))
    totals = [objective.sums(bound, batch) for _, batch in zip(range(2), held_out.once(), strict=False)]
    means = {name: sum(float(each[name]) for each in totals) for name in totals[0]}
    means = {name: value / means["weight"] for name, value in means.items() if name != "weight"}
    expected = means if OF[model] == "classify" else with_perplexity(means)
    assert {f"validation_{name}": pytest.approx(value, rel=2e-3) for name, value in expected.items()
            } == summary.evaluation
    assert len(summary.samples) == 1 and summary.samples[0].startswith("--- held-out")
    page = (tmp_path / "run/report.html").read_text()
    assert f"validation loss, {objective.measures.unit}" in page and f"{objective.measures.items} per second" in page

    if model == "resnet:digits":
        return  # its batches are those of vit, which goes on below
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    train(dataclasses.replace(options, resume=True, samples=0), console=Console(quiet=True))
    again = [row["loss"] for row in run_log.rows(tmp_path / "run") if "loss" in row][4:]
    assert len(again) == 2 and again == losses[2:]
    with pytest.raises(ValueError, match="belongs to another run"):
        changed = {"image_flip": True} if OF[model] == "classify" else {"seed": 3}
        train(dataclasses.replace(options, resume=True, **changed), console=Console(quiet=True))
