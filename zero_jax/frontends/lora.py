"""LoRA (arXiv 2106.09685) around any Linen or NNX module: adapters of chosen kernels, trained beside a frozen base.

`lora` says what is wanted; `Lora` is the model as pure functions, with leaves `kernel_lora_a` and `kernel_lora_b`
beside each `kernel` that is adapted. The module itself stays as it is: it reads the composed kernel, and
`transforms.low_rank` splits the products that use it.
"""

import copy
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from zero_jax.arguments import is_number, patterns, shown, whole
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import UsageError
from zero_jax.frontends.composition import Composed, Composition, name_of, refuse_derived
from zero_jax.gather.quantized.messages import BlockFormat
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.precision import Precision
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.transforms.low_rank import LowRank, adapted, split_low_rank_products
from zero_jax.tree import named_leaves
from zero_jax.typing import DType, Pattern, Shape

LORA_A, LORA_B, CODES = "_lora_a", "_lora_b", "_codes"
"""What the names of an adapter's two matrices, and of a quantised kernel, have in addition to that of the kernel."""
BLOCK = 64
"""Values of a quantised kernel that share a scale, as in QLoRA: 0.53 bytes for each value of nf4, 1.03 of int8."""
FORMATS = ("int8", "nf4")
"""Of a quantised base."""
_KEY = "_lora_key"
ALL_LINEAR = "all-linear"
"""As targets: every kernel that is used in matrix products alone, but for an output layer's table (as in PEFT)."""
_ADAPTERS = 0x10AA
"""Folded into a key for the adapters: at the start for their values, at each step for their dropout."""


@dataclasses.dataclass(frozen=True)
class LoraModel:
    """A model and the adapters that it is to have, as `lora` returns it. Attributes: its arguments."""

    model: Any
    rank: int
    targets: tuple[str, ...]
    alpha: float
    dropout: float = 0.0
    trainable: tuple[str, ...] = ()
    base: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, LoraModel):
            raise UsageError("lora(model): this model has adapters already: name all targets in one call.")
        whole("lora: rank", self.rank, 1)
        if not is_number(self.alpha) or self.alpha <= 0:
            raise UsageError(f"lora: alpha={shown(self.alpha)}: give a number above 0, as 2 * rank.")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise UsageError(f"lora: dropout={shown(self.dropout)}: give a share from 0 to below 1.")
        if self.base not in (None, *FORMATS):
            raise UsageError(f"lora: base={shown(self.base)}: give None (as the model reads it), "
                             f"{' or '.join(map(repr, FORMATS))}.")
        if not self.targets:
            raise UsageError(f"lora: targets=(): name the kernels to adapt, as (\"qkv\", \"proj\"), or {ALL_LINEAR!r}.")

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank

    @property
    def frozen(self) -> str:
        """A pattern of the names of all parameters but the adapters and what is `trainable`."""
        trained = [f"{LORA_A}$", f"{LORA_B}$", *self.trainable]
        return "^" + "".join(f"(?!.*(?:{pattern}))" for pattern in trained)


def lora(model: Any, rank: int, targets: Pattern | Sequence[Pattern], *, alpha: float | None = None,
         dropout: float = 0.0, trainable: Pattern | Sequence[Pattern] = (), base: str | None = None) -> LoraModel:
    """`model` with low-rank adapters: what `make_zero_train_step` trains are they alone.

    A kernel W of shape (in, out) is used as W + alpha / rank * A B, with A (in, rank) drawn at the start and B (rank,
    out) zero. W is not trained: it has no gradient and no optimizer state, and it is stored in the dtype in which the
    model reads it, sharded at stage 3. A and B are stored as float32. The module is not edited: whatever uses a target
    in matrix products can have an adapter, in scanned layers too. In a state the leaves are `kernel_lora_a` and
    `kernel_lora_b` beside `kernel`.

    Args:
      model: whatever `make_zero_train_step` takes.
      rank: of each adapter, at most the smaller side of the kernel.
      targets: patterns (`re.search` in a parameter's name, as `blocks/attention/kernel`), or "all-linear": every kernel
        that is used in matrix products alone, but for an output layer's table. What a pattern matches beside such
        kernels (biases) is passed over.
      alpha: the adapter is multiplied by alpha / rank; default: the rank.
      dropout: share of A's inputs that is set to zero in training. Evaluators have none.
      trainable: patterns of parameters that are trained as a whole beside the adapters, as a new head.
      base: "int8" or "nf4" (QLoRA, arXiv 2305.14314): every kernel that is used in matrix products alone, but for what
        is `trainable`, is stored as codes of blocks of 64 values (1.03 and 0.53 bytes for each), as `kernel_codes`. The
        codes are what is sharded and gathered; the model decodes them where it reads the kernel. Embeddings, biases and
        norms stay as they are.

    Raises ValueError for values that make no sense; `step.init` and `step.layout` do for targets that match no kernel
    and for a rank that is too large, before anything compiles.
    """
    return LoraModel(model, rank, patterns("lora: targets", targets, "(\"qkv\", \"proj\")"),
                     rank if alpha is None else alpha, dropout,
                     patterns("lora: trainable", trainable, "(\"head\",)"), base)


class Lora:
    """A `LoraModel` as pure functions (`model_functions.ModelFunctions`), around those of the model itself."""

    def __init__(self, base: Any, config: LoraModel, precision: Precision):
        self.base, self.config, self._precision = base, config, precision
        self.set_by_gradient, self.metadata = base.set_by_gradient, base.metadata
        self.specs: dict[str, LowRank] = {}
        self.codes: dict[str, StoredCodes] = {}
        self.composition: Composition = ()

    @property
    def given(self) -> Any:
        """The values of the model itself."""
        return self.base.given

    @given.setter
    def given(self, values: Any) -> None:
        self.base.given = values

    def init(self, fun: Callable[..., Any], rng: jax.Array, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params with adapters, variables); traceable."""
        if not self.composition:
            self._find_adapters(fun, rng, batch, given)
        params, variables = self.base.init(fun, rng, batch, given)
        self.metadata = self.base.metadata
        flat = dict[Any, Any](traverse_util.flatten_dict(params))
        for composed in self.composition:
            paths = composed.part_paths
            if composed.name in self.codes:
                flat[paths[0]] = self.codes[composed.name].encode(flat.pop(composed.path))
            if composed.name in self.specs:
                flat |= dict(zip(paths[1:], self._new_adapter(composed.name, rng), strict=True))
        return traverse_util.unflatten_dict(flat), variables

    def lasting(self, variables: Any) -> Any:
        """As the model itself."""
        return self.base.lasting(variables)

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any
              ) -> dict[str, ParamAccess]:
        """How `fun` reads each stored leaf."""
        self.base = copy.copy(self.base)  # so that `other_reads` can restore the one before
        reads = self.base.reads(fun, params, variables, rng, batch, composition=self.composition)
        return refuse_derived(reads, self.composition)

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None
            ) -> tuple[Any, Any, dict[str, Any]]:
        """As the model itself, with the adapters in its products; in training with their dropout."""
        composition = self.composition
        if train and rng is not None and self.config.dropout:
            composition = [dataclasses.replace(each, parts=(*each.parts, _KEY), dims=(*each.dims, ()))
                           if each.name in self.specs else each for each in composition]
            params, uses = self._with_keys(params, uses, rng)

        def run(params: Any, variables: Any, rng: Any, batch: Any) -> Any:
            return self.base.run(fun, params, variables, rng, batch, uses, train=train, reads=reads,
                                  composition=composition)

        split = functools.partial(split_low_rank_products, specs=self.specs)
        return with_jaxpr_passes(run, split)(params, variables, rng, batch)

    def stored_values(self, given: Mapping[str, Any], rng: jax.Array) -> dict[str, Any]:
        """Values for every stored leaf, from those of the model's parameters; adapters that it lacks are new ones."""
        values = dict(given)
        for composed in self.composition:
            names, name = composed.part_names, composed.name
            if name in self.codes and name in values:
                value, codes = values.pop(name), self.codes[name]
                values[names[0]] = (codes.encode_unread(value) if isinstance(value, UnreadLeaf)
                                    else on_host(jax.jit(codes.encode)(value)))
            if name in self.specs:
                new = dict(zip(names[1:], self._new_adapter(name, rng), strict=True))
                values |= {name: value for name, value in new.items() if name not in values}
        return values

    def weight(self, composed: Composed, stored: jax.Array, dtype: Any) -> jax.Array:
        """A kernel without its adapter, from the first of its stored leaves."""
        codes = self.codes.get(composed.name)
        return stored.astype(dtype) if codes is None else codes.decode(stored, dtype)

    def _new_adapter(self, name: str, rng: jax.Array) -> list[jax.Array]:
        """A and B at the start: A as PyTorch draws a linear layer (and PEFT an A), B zero."""
        spec, number = self.specs[name], [*self.specs].index(name)
        bound = 1 / math.sqrt(spec.fan_in)
        key = jax.random.fold_in(jax.random.fold_in(rng, _ADAPTERS), number)
        return [jax.random.uniform(key, spec.a_shape, jnp.float32, -bound, bound), jnp.zeros(spec.b_shape, jnp.float32)]

    def _with_keys(self, params: Any, uses: Any, rng: jax.Array) -> tuple[Any, Any]:
        """`params` with the data of a key beside each adapter, one for each of its layers, and `uses` likewise."""
        flat, flat_uses = (dict[Any, Any](traverse_util.flatten_dict(tree)) for tree in (params, uses))
        adapted_ones = [composed for composed in self.composition if composed.name in self.specs]
        for number, composed in enumerate(adapted_ones):
            shape = self.specs[composed.name].key_shape
            keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(rng, _ADAPTERS), number), math.prod(shape))
            path = (*composed.path[:-1], f"{composed.path[-1]}{_KEY}")
            data = jax.random.key_data(keys)
            flat[path], flat_uses[path] = data.reshape(*shape, data.shape[-1]), None
        return traverse_util.unflatten_dict(flat), traverse_util.unflatten_dict(flat_uses)

    def _find_adapters(self, fun: Callable[..., Any], *args: Any) -> None:
        """Settles which parameters are adapted, from a trace of the model without adapters."""
        rng, batch, given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), args)
        params, variables = jax.eval_shape(lambda *args: self.base.init(fun, *args), rng, batch, given)
        reads = copy.copy(self.base).reads(fun, params, variables, rng, batch)
        leaves = dict(named_leaves(params))
        kernels = {name: access for name, access in reads.items() if _is_kernel(leaves[name], access)}
        config, specs = self.config, {}
        for name in _matched(config, leaves, kernels):
            access = kernels[name]
            specs[name] = spec = LowRank(leaves[name].shape, access.stacked, access.contracted or (), config.rank,
                                         config.scale, config.dropout)
            sides = [math.prod(spec.shape[dim] for dim in dims) for dims in (spec.rows, spec.columns)]
            if config.rank > min(sides):
                raise UsageError(f"lora: rank={config.rank} is more than {name} has, a matrix of {sides[0]} x "
                                 f"{sides[1]}: give at most {min(sides)}, or leave it out of the targets.")
        if config.base is not None:
            self.codes = {name: StoredCodes(config.base, leaves[name].shape, access.stacked, access.contracted[-1])
                          for name, access in kernels.items() if access.contracted and not _is_table(name)
                          and not any(re.search(pattern, name) for pattern in config.trainable)}
        self.specs = specs
        paths = {name_of(path): path for path in traverse_util.flatten_dict(params)}
        self.composition = [self._composed(name, paths[name], leaves[name]) for name in {**specs, **self.codes}]

    def _composed(self, name: str, path: tuple[Any, ...], leaf: Any) -> Composed:
        spec, codes = self.specs.get(name), self.codes.get(name)
        dtype, number = self._precision.read_dtype(name, leaf.dtype), [*self.specs, name].index(name)
        shared = tuple(dim for dim in range(len(leaf.shape)) if codes is None or dim != codes.dim)
        parts: list[tuple[str, tuple[int, ...]]] = [("" if codes is None else CODES, shared)]
        if spec is not None:
            parts += [(LORA_A, (*spec.stacked, *spec.rows)), (LORA_B, (*spec.stacked, *spec.columns))]

        def build(stored: jax.Array, *adapter: jax.Array) -> jax.Array:
            weight = stored if codes is None else codes.decode(stored, dtype)
            return weight if spec is None else adapted(number, spec, weight, *adapter)

        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return Composed(path, like, tuple(part for part, _ in parts), tuple(dims for _, dims in parts), build)


def _is_kernel(leaf: Any, access: ParamAccess) -> bool:
    """Whether a parameter is a matrix, or a stack of such, that products alone use."""
    if not access.contracted or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return False
    return len(leaf.shape) > len(access.contracted) + len(access.stacked)


def _is_table(name: str) -> bool:
    """Whether it is the table of a module of embeddings, which an output layer that is not tied is, too."""
    return name.rpartition("/")[2] == "embedding"


def _matched(config: LoraModel, leaves: Mapping[str, Any], kernels: Mapping[str, Any]) -> list[str]:
    """The names of the kernels to adapt. Raises ValueError for a target without any, with the nearest names."""
    what = type(config.model).__name__
    if not kernels:
        raise UsageError(f"lora: {what} has no kernel that matrix products alone use, and so none to adapt.")
    for pattern in config.trainable:
        if not any(re.search(pattern, name) for name in leaves):
            raise UsageError(f"lora: trainable: {pattern!r} matches no parameter of {what}; "
                             f"{_nearest(pattern, leaves)}.")
    if config.targets == (ALL_LINEAR,):
        return [name for name in kernels if not _is_table(name) and not any(
            re.search(pattern, name) for pattern in config.trainable)]
    for pattern in config.targets:
        if any(re.search(pattern, name) for name in kernels):
            continue
        other = [name for name in leaves if re.search(pattern, name)]
        if other:
            raise UsageError(f"lora: the target {pattern!r} matches {', '.join(other[:3])}, which is not used in "
                             f"matrix products alone; {_nearest(pattern, kernels)}.")
        raise UsageError(f"lora: the target {pattern!r} matches no parameter of {what}; {_nearest(pattern, kernels)}.")
    chosen = [name for name in kernels if any(re.search(pattern, name) for pattern in config.targets)]
    for name in chosen:
        if any(re.search(pattern, name) for pattern in config.trainable):
            raise UsageError(f"lora: {name} is both a target and trainable: it is trained whole, or has an adapter.")
    return chosen


def _nearest(pattern: str, names: Mapping[str, Any]) -> str:
    """What to say of the names that are like `pattern`, else of all."""
    parts = {part: name for name in names for part in (*name.split("/"), name)}
    near = list(dict.fromkeys(parts[part] for part in difflib.get_close_matches(pattern, parts, 3, 0.5)))
    if near:
        return f"the nearest are {', '.join(near)}"
    shortened = list(names)[:8]
    return f"there are {', '.join(shortened)}{', ...' * (len(names) > len(shortened))}"


@dataclasses.dataclass(frozen=True)
class StoredCodes:
    """How one weight is stored as bytes: blocks of codes along `dim`, and after them their scales.

    shape: of the weight. stacked: its dims that loops run over. dim: one that products sum over.
    """

    name: str
    shape: Shape
    stacked: tuple[int, ...]
    dim: int

    def encode(self, weight: jax.Array) -> jax.Array:
        """A weight as uint8, with as many dims, of which `dim` has another size."""
        message = self._format.encode(jnp.moveaxis(weight, self.dim, -1))
        return jnp.moveaxis(message, -1, self.dim)

    def decode(self, codes: jax.Array, dtype: DType) -> jax.Array:
        """The weight, or inside of the loops over its stacked dims a layer of it."""
        inside = codes.ndim < len(self.shape)
        dim = self.dim - sum(each < self.dim for each in self.stacked) if inside else self.dim
        values = self._format.decode(jnp.moveaxis(codes, dim, -1), self.shape[self.dim], dtype)
        return jnp.moveaxis(values, -1, dim)

    def encode_unread(self, weight: UnreadLeaf) -> UnreadLeaf:
        """The codes of a weight that is not read yet: each part of them is encoded from what it needs, by layers.

        One layer of a part is in float32 at a time. A part along `dim` needs the whole of that dim, whose codes are
        kept on the host for the other parts.
        """
        shape = jax.eval_shape(self.encode, jax.ShapeDtypeStruct(self.shape, jnp.float32)).shape
        return UnreadLeaf(weight.name, shape, np.dtype(np.uint8), lambda: self._encoding(weight.open(), shape))

    def _encoding(self, read: Callable[[tuple[slice, ...]], np.ndarray], shape: Shape
                  ) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """From a function that reads parts of the weight, one that reads parts of its codes."""
        encode, kept = jax.jit(self.encode), dict[Any, np.ndarray]()

        def codes_of(index: tuple[slice, ...]) -> np.ndarray:
            needed = tuple(slice(0, size) if dim == self.dim else way
                           for dim, (way, size) in enumerate(zip(index, self.shape, strict=True)))
            key, part = str(needed), index[self.dim]
            codes = kept[key] if key in kept else np.asarray(encode(read(needed).astype(np.float32)))
            if (part.start, part.stop) == (0, shape[self.dim]):
                return codes
            kept[key] = codes
            return codes[(*[slice(None)] * self.dim, part)]

        def layers_of(index: tuple[slice, ...]) -> np.ndarray:
            if not self.stacked:
                return codes_of(index)
            first = self.stacked[0]
            return np.concatenate([codes_of((*index[:first], slice(at, at + 1), *index[first + 1:]))
                                   for at in range(index[first].start, index[first].stop)], axis=first)

        return layers_of

    @property
    def _format(self) -> BlockFormat:
        return BlockFormat(self.name, BLOCK)
