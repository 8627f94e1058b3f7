"""Adapters after training: merged into the model's parameters, or as an adapter of PEFT (Hugging Face), in and out.

An adapter of PEFT is a folder with `adapter_config.json` and `adapter_model.safetensors`, in which each adapted module
has `base_model.model.<module>.lora_A.weight` (rank, in) and `lora_B.weight` (out, rank).
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.arguments import check_path, is_number, shown
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import UsageError, few
from zero_jax.files import read_regular, writing
from zero_jax.frontends.composition import Composed, group_parts
from zero_jax.frontends.lora import Lora
from zero_jax.frontends.model_functions import as_given
from zero_jax.interop.model_config import task_of
from zero_jax.interop.naming import OWN, Names, Parts
from zero_jax.interop.params_io import MAX_FILE_BYTES, LogicalLeaf, export_leaves, floating_dtype, model_leaves
from zero_jax.interop.safetensors_file import Output, Tensor, find_tensors, write_tensors
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import check_is_state, check_step
from zero_jax.step.start import place, with_new_params
from zero_jax.transforms.low_rank import LowRank
from zero_jax.tree import map_named, named_leaves
from zero_jax.typing import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: those after which the base is what it was, and W + alpha / rank * A B the adapted kernel."""
_HARMLESS = frozenset("""
    auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern
    layers_to_transform lora_dropout megatron_core peft_type peft_version qalora_group_size revision runtime_config
    target_modules task_type""".split())
"""Fields that change no value, or that the names of tensors show, too. Others are refused where they are set."""
_MAX_BYTES = 1 << 62


@in_any_context
def merge_lora(step: Any, state: ZeroState, *, dtype: Any = None) -> Params:
    """The model's own parameters, each adapted kernel W as W + alpha / rank * A B, as the model would have them.

    state: of `step`, a step of a `zero_jax.lora` model; it stays. dtype: of the merged kernels, whose sum is of
    float32; None: that in which the base is stored, where bfloat16 rounds small changes away;
    a quantised one is decoded to that of the model. Leaves that have no
    adapter are those of the state, not copies. Raises ValueError for a step without adapters.
    """
    lora = _lora_of(step, state)
    merged = group_parts(step.params(state), lora.composition,
                         lambda composed, leaves: _merged(lora, composed, leaves, dtype))
    return as_given(lora.base, merged)


@in_any_context
def export_merged(path: Path | str, step: Any, state: ZeroState, *, names: Names = OWN, dtype: Any = "float32",
                  max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """`export_params` of the model with the adapters added (`merge_lora`), a kernel after another; returns the paths.

    step: of a `zero_jax.lora` model. state: of that step; it stays. The other arguments and errors are those of
    `export_params`; dtype None: as the base is stored.
    """
    check_path("export_merged: path", path)
    lora = _lora_of(step, state)
    stored = dict(model_leaves(step.layout().load(state)))
    own = stored.keys() - {name for composed in lora.composition for name in composed.part_names}
    leaves = {name: LogicalLeaf.stored(leaf, identity_shape(leaf.shape)) for name, leaf in stored.items()
              if name in own}
    for composed in lora.composition:
        parts = [stored[name] for name in composed.part_names]
        kind = _merged_dtype(lora, composed, parts, dtype)
        leaves[composed.name] = LogicalLeaf(composed.like.shape, kind, functools.partial(
            lambda composed, parts: on_host(_merged(lora, composed, parts, dtype)), composed, parts))
    return export_leaves(Path(path), leaves, names, dtype, max_file_bytes)


def _merged(lora: Lora, composed: Composed, leaves: list[jax.Array], dtype: Any) -> jax.Array:
    """A parameter of the model from its stored leaves: decoded, with its adapter added."""
    is_coded, spec = composed.name in lora.codes, lora.specs.get(composed.name)

    def add(stored: jax.Array, *adapter: jax.Array) -> jax.Array:
        total = lora.weight(composed, stored, jnp.float32)
        total = total if spec is None else total + spec.delta(*adapter)
        return total.astype(_merged_dtype(lora, composed, leaves, dtype))

    return jax.jit(add, out_shardings=None if is_coded else leaves[0].sharding)(*leaves)


def _merged_dtype(lora: Lora, composed: Composed, leaves: list[jax.Array], dtype: Any) -> Any:
    own = composed.like.dtype if composed.name in lora.codes else leaves[0].dtype
    return own if dtype is None else floating_dtype(dtype)


@in_any_context
def export_lora(path: Path | str, step: Any, state: ZeroState, *, names: Names, base: str | None = None) -> list[Path]:
    """Writes the adapters as one of PEFT into the folder `path`; returns the paths of its two files.

    Every process must call this; the first one writes, and the others return an empty list.

    Args:
      path: of the folder, which is made where there is none.
      step: of a `zero_jax.lora` model.
      state: of that step; it stays.
      names: rules of the model's names in Hugging Face's model, as for `export_params`.
      base: for `base_model_name_or_path`, the name or folder of the model that the adapters belong to.

    Raises ValueError for a step without adapters, for parameters that are trained beside them, and for kernels that
    are no weights of two dims in Hugging Face's model.
    """
    check_path("export_lora: path", path)
    lora = _lora_of(step, state)
    modules = _modules(lora, names)
    if lora.config.trainable:
        raise UsageError(f"export_lora: this step trains {', '.join(lora.config.trainable)} as a whole, which an "
                         "adapter of PEFT would name otherwise: export the merged parameters (merge_lora).")
    leaves, shapes = dict(named_leaves(state.params)), dict(named_leaves(step.layout().stored_shapes.params))

    def true_values(name: str) -> np.ndarray:
        return np.asarray(shapes[name].load(on_host(leaves[name])), np.float32)

    outputs = []
    for module in modules:
        values = [true_values(name) for name in module.leaves]  # a collective: every process takes part
        outputs += [Output(name, np.dtype(np.float32), value.shape, lambda value=value: value)
                   for name, value in module.tensors(*values).items()]

    def write() -> list[Path]:
        folder = Path(path).expanduser()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            written = write_tensors(folder / WEIGHTS, outputs, max_file_bytes=_MAX_BYTES, metadata={"format": "pt"})
            written_config = _config(lora, modules, base, names.config or {})
            (folder / CONFIG).write_text(json.dumps(written_config, indent=2, sort_keys=True) + "\n")
        return [folder / CONFIG, *written]

    return all_or_none(write if is_first() else lambda: [])


@in_any_context
def import_lora(path: Path | str, step: Any, state: ZeroState, *, names: Names) -> ZeroState:
    """`state` with the adapters of the PEFT folder `path` and a freshly initialised optimizer state; donates `state`.

    Rank, alpha and targets of the folder must be those of `step`. names: as for `export_lora`. Raises ValueError for
    files that are none of PEFT's or of another model, with `state` unchanged.
    """
    check_path("import_lora: path", path)
    lora, folder = _lora_of(step, state), Path(path).expanduser()
    modules = _modules(lora, names)

    def read() -> dict[str, np.ndarray]:
        _check_config(folder, lora)
        return _values(folder, find_tensors(folder / WEIGHTS), modules)

    values, layout = all_or_none(read), step.layout()
    params = map_named(lambda name, leaf, shape, like: place(values[name], shape, like) if name in values else leaf,
                       state.params, layout.stored_shapes.params, layout.state.params)
    return with_new_params(state, params, optimizer=step.optimizer, layout=layout)


@dataclasses.dataclass(frozen=True)
class _Module:
    """An adapted kernel as modules of PyTorch. names: of the modules, one for each layer where it is stacked."""

    leaf: str
    spec: LowRank
    parts: Parts
    names: tuple[str, ...]

    @property
    def leaves(self) -> tuple[str, str]:
        """The names of A and B."""
        return f"{self.leaf}_lora_a", f"{self.leaf}_lora_b"

    @property
    def tensor_names(self) -> list[tuple[str, str]]:
        """The names of each layer's two tensors."""
        return [(f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight") for name in self.names]

    @property
    def tensor_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a layer's two tensors."""
        rows, columns = (self.spec.shape[dim] for dim in (*self.spec.rows, *self.spec.columns))
        return (self.spec.rank, rows), (columns, self.spec.rank)

    def tensors(self, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        """A and B in their true shapes as PEFT's tensors."""
        left, right = self._stacks(a, b)
        order = slice(None) if self.parts.rule.columns is None else np.argsort(self.parts.rule.columns)
        return {name: np.ascontiguousarray(value) for names, x, y in zip(self.tensor_names, left, right, strict=True)
                for name, value in zip(names, (x.T, y[:, order].T), strict=True)}

    def values(self, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `tensors`."""
        order = slice(None) if self.parts.rule.columns is None else np.asarray(self.parts.rule.columns)
        left = np.stack([tensors[a].T for a, _ in self.tensor_names])
        right = np.stack([tensors[b].T[:, order] for _, b in self.tensor_names])
        dims = (*self.spec.stacked, *self.spec.rows, *self.spec.columns)
        shapes = [tuple(shape[dim] for dim in dims) for shape in (self.spec.a_shape, self.spec.b_shape)]
        back = np.argsort(dims)
        a, b = (value.reshape(shape).transpose(back) for value, shape in zip((left, right), shapes, strict=True))
        return a, b

    def _stacks(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A and B as (layers, in, rank) and (layers, rank, out)."""
        dims = (*self.spec.stacked, *self.spec.rows, *self.spec.columns)
        a, b = a.transpose(dims), b.transpose(dims)
        return a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])


def _modules(lora: Lora, names: Names) -> list[_Module]:
    """The adapted kernels as modules of PyTorch."""
    if not isinstance(names, Names):
        raise UsageError("names: give the rules of Hugging Face's names, as "
                         "zero_jax.Names(**gpt2.huggingface(config)).")
    modules = []
    for leaf, spec in lora.specs.items():
        parts = names.parts(leaf, spec.shape)
        written = tuple(names.written(name) for name in parts.names)
        fits = len(spec.rows) == len(spec.columns) == 1 and spec.rows < spec.columns and (
            spec.stacked == ((0,) if parts.stacked else ()))
        if not fits or not all(name.endswith(".weight") for name in written):
            raise UsageError(f"{leaf} of shape {spec.shape} is {written[0]} in the file: only kernels (in, out), or "
                             "stacks of such, that are a `.weight` of two dims there have an adapter of PEFT.")
        modules.append(_Module(leaf, spec, parts, tuple(name.removesuffix(".weight") for name in written)))
    return modules


def _config(lora: Lora, modules: Sequence[_Module], base: str | None, model: Mapping[str, Any]) -> dict[str, Any]:
    """`adapter_config.json`. model: config.json of the model, where it is known."""
    transposed = {module.parts.rule.transpose for module in modules}
    return {
        "peft_type": "LORA", "task_type": task_of(model), "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.config.rank, "lora_alpha": lora.config.alpha, "lora_dropout": lora.config.dropout, "bias": "none",
        "target_modules": sorted(name for module in modules for name in module.names), "modules_to_save": None,
        "fan_in_fan_out": transposed == {False}, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {}}


def _check_config(folder: Path, lora: Lora) -> None:
    """Raises ValueError unless the folder's adapters have the rank and alpha of the step's, and no more than those."""
    path = folder / CONFIG
    try:
        config = json.loads(read_regular(path, 1 << 24))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}): give the folder of an adapter of PEFT.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UsageError(f"{path} is no LoRA adapter of PEFT: its peft_type must be \"LORA\".")
    init = config.get("init_lora_weights")
    if not any(init is plain or isinstance(init, str) and init == plain for plain in _PLAIN_INITS):
        raise UsageError(f"{path}: init_lora_weights is {shown(init)}, which may change the base: convert it to plain "
                         "LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion).")
    compared = {"r": lora.config.rank, "lora_alpha": lora.config.alpha}
    for key, value in config.items():
        if value and (key, value) != ("bias", "none") and key not in (*_HARMLESS, "init_lora_weights", *compared):
            raise UsageError(f"{path}: {key} is set, which zero_jax.lora has not: only plain LoRA is imported.")
    for key, value in compared.items():
        given = config.get(key, 8)  # PEFT's default
        if not is_number(given) or given != value:
            raise UsageError(f"{path}: {key} is {given!r}, and this step's is {value}: make the step with "
                             "zero_jax.lora(model, rank, targets, alpha=...) of these adapters.")


def _values(folder: Path, tensors: Mapping[str, Tensor], modules: Sequence[_Module]) -> dict[str, np.ndarray]:
    """A and B of each kernel by name, from tensors that are all there and none more."""
    wanted = {name: shape for module in modules for names in module.tensor_names
              for name, shape in zip(names, module.tensor_shapes, strict=True)}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        parts = [f"{how} {len(some)} ({few(some, 2)})" for how, some in (("lacks", missing), ("has in addition", extra))
                 if some]
        raise UsageError(f"{folder / WEIGHTS} {' and '.join(parts)} of the {len(wanted)} tensors of this step's "
                         "adapters: give those of this model, with the same targets.")
    for name, shape in wanted.items():
        if tensors[name].shape != shape or not jnp.issubdtype(tensors[name].dtype, jnp.floating):
            raise UsageError(f"{folder / WEIGHTS}: {name} is {tensors[name].dtype} {tensors[name].shape}, and this "
                             f"step takes floats {shape}: give the adapters of a model of these sizes.")
    values: dict[str, np.ndarray] = {}
    for module in modules:
        read = {name: tensors[name].read().astype(np.float32) for names in module.tensor_names for name in names}
        values |= dict(zip(module.leaves, module.values(read), strict=True))
    return values


def _lora_of(step: Any, state: ZeroState) -> Lora:
    check_step(step)
    check_is_state(state)
    step.layout()
    if step.lora is None:
        raise UsageError("This step has no adapters: make it of zero_jax.lora(model, rank, targets).")
    return step.lora
