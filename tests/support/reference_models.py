"""Tiny models of `models/` with random weights by Hugging Face's names, and their logits and gradients.

`scripts/tables/model_parity.py` computes the same with the library transformers, and writes a few of its numbers into
`tests/models/transformers.json`, which the tests compare with where transformers is not installed.
"""

import dataclasses
import functools
import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx, traverse_util

from models import bert, gpt2, llama, resnet, t5, vit
from models.layers.huggingface import model_config
from support.decoder_families import FAMILIES
from zero_jax.interop.naming import Names, Parts

FILE = Path(__file__).parents[1] / "models" / "transformers.json"
ROWS, LENGTH, VOCAB = 2, 10, 24
NNX = {"gpt2": "gpt2_nnx", "llama": "llama_nnx", "vit": "vit_nnx"}
_TOKENS: dict[str, Any] = {"vocab_size": VOCAB}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a wrong variant of it with the same parameters, which a comparison must tell apart."""

    module: str
    config: Any
    wrong: dict[str, Any]
    file: dict[str, Any] | None = None
    """config.json that the config was read from."""


ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "roberta": ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 16, "pad_token_id": 2,
                 "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "type_vocab_size": 1,
                 "max_position_embeddings": 20, "layer_norm_eps": 1e-5, "vocab_size": VOCAB,
                 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, {"epsilon": 1e-2}),
    "distilbert": ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "dim": 16, "n_layers": 2,
                    "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 16, "vocab_size": VOCAB,
                    "dropout": 0.0, "attention_dropout": 0.0}, {"num_heads": 2})}
"""config.json, and what changes numbers and no shape."""


def _read(file: dict[str, Any]) -> Any:
    return model_config(file, lambda name: importlib.import_module(f"models.{name}"))[1]


CASES = {
    "gpt2": Case("gpt2", gpt2.Config(2, 16, 4, max_length=16, **_TOKENS), {"num_heads": 2}),
    "llama": Case("llama", llama.Config(
        2, 16, 4, 2, 24, head_dim=8, rope_theta=100.0, max_length=64,
        rope_scaling=llama.RopeScaling(4.0, 1.0, 4.0, 16), **_TOKENS), {"rope_scaling": None}),
    "llama tied": Case("llama", llama.Config(2, 16, 4, 1, 24, head_dim=4, tied=True, **_TOKENS), {"rope_theta": 10.0}),
    "qwen3": Case("llama", llama.Config(
        2, 16, 4, 2, 24, head_dim=8, rope_theta=1e6, qk_norm=True, epsilon=1e-6, **_TOKENS), {"epsilon": 1e-2}),
    "bert": Case("bert", bert.Config(2, 16, 4, 24, max_length=16, **_TOKENS), {"num_heads": 2}),
    **{name: Case("bert", _read(file), wrong, file) for name, (file, wrong) in ENCODERS.items()},
    "t5": Case("t5", t5.Config(2, 16, 4, 24, head_dim=8, buckets=8, max_distance=9, **_TOKENS), {"max_distance": 6}),
    "t5 1.1": Case("t5", t5.Config(2, 16, 4, 24, head_dim=4, gated=True, buckets=8, max_distance=9, **_TOKENS),
                   {"max_distance": 6}),
    "vit": Case("vit", vit.Config(2, 16, 4, 24, image_size=8, patch_size=4, num_classes=12), {"num_heads": 2}),
    "resnet": Case("resnet", resnet.Config((1, 2), width=4, num_classes=12), {}),
} | {name: Case("llama", _read(file), wrong, file) for name, (file, wrong) in FAMILIES.items()}


def batch_of(name: str) -> dict[str, np.ndarray]:
    """Inputs and targets of a case."""
    draw = np.random.default_rng(5)
    if name in ("vit", "resnet"):
        side = 8 if name == "vit" else 32
        return {"inputs": draw.normal(size=(ROWS, side, side, 3)).astype(np.float32),
                "targets": draw.integers(0, 12, ROWS)}
    names = ("inputs", "decoder_inputs", "targets") if name.startswith("t5") else ("inputs", "targets")
    return {name: draw.integers(0, VOCAB, (ROWS, LENGTH)) for name in names}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by their joined names."""
    return {prefix + "/".join(map(str, path)): leaf for path, leaf in traverse_util.flatten_dict(tree).items()}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of ours as functions of tensors by Hugging Face's names.

    parts: the tensors of each leaf, without the prefix of their names; leaves of variables are variables/....
    """

    name: str
    config: Any
    nnx: bool
    names: Names
    parts: dict[str, Parts]

    def tensors(self) -> dict[str, np.ndarray]:
        """Random tensors, each drawn from its name, so that nothing is as at initialisation."""
        return {self.names.written(name): _draw(name, parts.tensor_shape)
                for parts in self.parts.values() for name in parts.names}

    def leaves(self, tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The leaves that `tensors` are."""
        stored = {self.names.known_as(name): _Array(value) for name, value in tensors.items()}
        whole = {leaf: tuple(slice(0, size) for size in parts.shape) for leaf, parts in self.parts.items()}
        return {leaf: jnp.asarray(parts.read(stored, whole[leaf])) for leaf, parts in self.parts.items()}

    def run(self, leaves: dict[str, jax.Array], batch: Any) -> jax.Array:
        """Logits in float32."""
        module, given = _module(self.name, self.nnx).build(self.config), inputs(batch)
        params = {name: leaf for name, leaf in leaves.items() if not name.startswith("variables/")}
        if self.nnx:
            model = module(nnx.Rngs(0))
            paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
            nnx.update(model, nnx.from_flat_state([(path, nnx.Param(params["/".join(map(str, path))]))
                                                   for path in paths]))
            return model(*given)
        variables = {name.removeprefix("variables/"): leaf for name, leaf in leaves.items() if name not in params}
        collections = traverse_util.unflatten_dict(variables, sep="/")
        out = module.apply({"params": traverse_util.unflatten_dict(params, sep="/"), **collections}, *given,
                           mutable=[*collections])
        return out[0]

    def logits_and_gradients(self, tensors: dict[str, np.ndarray], batch: Any
                             ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits, and the gradients of the mean cross entropy by Hugging Face's names."""
        def loss(params: dict[str, jax.Array], others: dict[str, jax.Array]) -> Any:
            logits = self.run(params | others, batch)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(), logits

        leaves = self.leaves(tensors)
        params = {name: leaf for name, leaf in leaves.items() if not name.startswith("variables/")}
        others = {name: leaf for name, leaf in leaves.items() if name not in params}
        grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params, others)
        split = {leaf: self.parts[leaf].split(np.asarray(grad)) for leaf, grad in grads.items()}
        named = [(self.names.written(name), value) for leaf, values in split.items()
                 for name, value in zip(self.parts[leaf].names, values, strict=True)]
        return np.asarray(logits), dict(named)


@functools.cache
def model_of(case: str, *, nnx: bool = False, wrong: bool = False, scan: bool = True) -> Model:
    """The model of a case, or its wrong variant."""
    config = dataclasses.replace(CASES[case].config, **CASES[case].wrong if wrong else {})
    if hasattr(config, "scan_layers"):
        config = dataclasses.replace(config, scan_layers=scan)
    ours = _module(CASES[case].module, nnx)
    names = Names(**ours.huggingface(config))
    shapes = _shapes(ours.build(config), inputs(batch_of(case)), nnx)
    parts = {leaf: names.parts(leaf, shape) for leaf, shape in shapes.items()}
    return Model(CASES[case].module, config, nnx, names, parts)


def inputs(batch: Any) -> tuple[Any, ...]:
    """The arguments of a model's call."""
    return tuple(batch[name] for name in ("inputs", "decoder_inputs") if name in batch)


def digest(logits: np.ndarray, gradients: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Of the last example its last logits, 96 at most, and of each tensor's gradient the norm and a random projection.

    In the order of their names, with seven digits.
    """
    rows = [(float(np.linalg.norm(value)), float((value * _draw(f"{name} again", value.shape)).sum()))
            for name, value in sorted(gradients.items())]
    return {"logits": [float(f"{value:.7g}") for value in logits[-1].reshape(-1)[-96:]],
            "gradients": [float(f"{value:.7g}") for row in rows for value in row]}


def flax_model(model: Model) -> Any:
    """The module, or the function of `rngs` that makes it."""
    return _module(model.name, model.nnx).build(model.config)


def huggingface_config(model: Model) -> dict[str, Any]:
    """The config.json of the model."""
    return _module(model.name, model.nnx).huggingface_config(model.config)


def differences(model: Model, case: str, logits: np.ndarray, gradients: dict[str, np.ndarray]) -> tuple[float, float]:
    """The largest difference of a logit, and of a gradient relative to its tensor's largest element.

    Where that is below a thousandth of the model's largest gradient, relative to this: softmax does not see a key's
    bias, for one, whose gradient is rounding.
    """
    found, mine = model.logits_and_gradients(model.tensors(), batch_of(case))
    assert mine.keys() == gradients.keys(), mine.keys() ^ gradients.keys()
    least = 1e-3 * max(np.abs(value).max() for value in gradients.values())
    return float(np.abs(found - logits).max()), max(float(
        np.abs(mine[name] - value).max() / max(np.abs(value).max(), least)) for name, value in gradients.items())


def written() -> dict[str, dict[str, list[float]]]:
    """What the library transformers gave, by case."""
    return json.loads(FILE.read_text())["cases"]


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array that is read as a tensor in a file is."""

    value: np.ndarray

    def read(self, index: tuple[Any, ...] = ()) -> np.ndarray:
        return self.value[index]


def _module(name: str, is_nnx: bool) -> Any:
    return importlib.import_module(f"models.{NNX[name] if is_nnx else name}")


def _shapes(model: Any, given: tuple[Any, ...], is_nnx: bool) -> dict[str, tuple[int, ...]]:
    if is_nnx:
        state = nnx.state(nnx.eval_shape(lambda: model(nnx.Rngs(0))), nnx.Param)
        return {name: leaf.shape for name, leaf in flat(nnx.to_pure_dict(state)).items()}
    assert isinstance(model, nn.Module)
    trees = jax.eval_shape(lambda: model.init(jax.random.key(0), *given))
    shapes = {name: leaf.shape for name, leaf in flat(trees.pop("params")).items()}
    return shapes | {name: leaf.shape for name, leaf in flat(trees, "variables/").items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.3, shape)
    if "norm" in name.lower() and name.endswith("weight"):
        values += 1
    return (1 + np.abs(values) if name.endswith("running_var") else values).astype(np.float32)
