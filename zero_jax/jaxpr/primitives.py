"""The primitives that zero_jax knows, and their parameters under names that do not change with JAX."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind_eqn,
    closed_jaxpr,
    eqn_of,
    is_literal,
    shape_of,
    trace,
    type_of,
    variable_like,
)

SCAN, COND, JIT = primitives.scan_p.name, primitives.cond_p.name, primitives.jit_p.name
REMAT, CUSTOM_VJP = primitives.remat_p.name, primitives.custom_vjp_call_p.name
NAME, CONVERT, DOT, CONV = "name", "convert_element_type", "dot_general", "conv_general_dilated"
RAGGED_DOT = "ragged_dot_general"
CUDNN_ATTENTION, PALLAS = "dot_product_attention_fwd_wrapper", "pallas_call"
GATHER_ROWS, SCATTER_ADD, SHARD_MAP, CONSTRAINT = "gather", "scatter-add", "shard_map", "sharding_constraint"
BARRIER, OWN = "optimization_barrier", "zero_"
"""Names of primitives, as `primitive_of` returns them; `OWN` begins those of `named_call`."""

_INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)  # a class from JAX 0.12 on

CALLS = (JIT, REMAT, CUSTOM_VJP, "custom_jvp_call", "closed_call", "eval_jaxpr")
"""Primitives that evaluate `call_jaxpr` of their operands, and nothing else (the last from JAX 0.12 on)."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square sub tan tanh xor".split())
"""Primitives whose result has in each place what follows from the operands in that place; operands may be scalars."""

SUM = "reduce_sum"

BROADCAST, IOTA = "broadcast_in_dim", "iota"
"""Primitives whose results have in each place what follows from a scalar and from the place."""

RESHAPE, SQUEEZE, TRANSPOSE = "reshape", "squeeze", "transpose"
RANDOM_BITS, RANDOM_WRAP = "random_bits", "random_wrap"


def call_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """What one of `CALLS` evaluates, or the body of a scan or of a shard_map."""
    return closed_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def with_call_jaxpr(eqn: JaxprEqn, jaxpr: Jaxpr) -> JaxprEqn:
    """A jit or scan with `jaxpr` in the place of its own, whose constants it keeps."""
    return eqn.replace(params={**eqn.params, "jaxpr": eqn.params["jaxpr"].replace(jaxpr=jaxpr)})


def inlined(jit: JaxprEqn, jaxpr: Jaxpr) -> JaxprEqn:
    """A jit of `jaxpr`, whose equations take its place where it is traced again."""
    return with_call_jaxpr(jit.replace(params={**jit.params, "inline": _INLINE}), jaxpr)


def inlined_eqns(call: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the jit that `call` is, and a copy of each result that none of them computes."""
    inner = call_jaxpr(call).jaxpr
    outer: dict[Any, Any] = dict(zip(inner.invars, call.invars, strict=True))
    own = {var for eqn in inner.eqns for var in eqn.outvars}
    results = {atom: out for atom, out in zip(inner.outvars, call.outvars, strict=True)
               if not is_literal(atom) and atom in own}

    def outside(atom: Any) -> Any:
        return atom if is_literal(atom) else outer[atom]

    for eqn in inner.eqns:
        invars = [outside(atom) for atom in eqn.invars]
        outer.update((var, results[var] if var in results else variable_like(var)) for var in eqn.outvars)
        yield eqn.replace(invars=invars, outvars=[outer[var] for var in eqn.outvars])
    for atom, out in zip(inner.outvars, call.outvars, strict=True):
        if outside(atom) is not out:
            yield eqn_of(jax.lax.copy_p.bind, [outside(atom)], [out])


def with_body(eqn: JaxprEqn, fun: Callable[..., Any]) -> JaxprEqn:
    """A scan whose body is the function `fun` of the body's flat arguments."""
    avals = map(type_of, call_jaxpr(eqn).jaxpr.invars)
    return eqn.replace(params={**eqn.params, "jaxpr": trace(fun, *avals)})


def branches(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    """The branches of a cond or switch, by the value of its first operand."""
    return eqn.params["branches"]


def iota_dim(iota: JaxprEqn) -> int:
    """The dim along which an iota counts."""
    return iota.params["dimension"]


def jit_name(eqn: JaxprEqn) -> str | None:
    """The name of the function that a jit calls; None for other equations."""
    return eqn.params["name"] if eqn.primitive.name == JIT else None


def donated_inputs(eqn: JaxprEqn) -> list[Any]:
    """The operands that a `jit` of the trace donates; none of other equations."""
    marks = eqn.params.get("donated_invars", ())
    return [atom for atom, is_donated in zip(eqn.invars, marks, strict=False) if is_donated]


def out_shardings(jit: JaxprEqn) -> tuple[Any, ...]:
    """The shardings that a jit was given for its results."""
    return tuple(jit.params["out_shardings"])


def in_specs(shard_map: JaxprEqn) -> tuple[Any, ...]:
    """The specs of the operands of a shard_map."""
    return tuple(shard_map.params["in_specs"])


def mapped_beside(shard_map: JaxprEqn, fun: Any, spec: Any) -> Any:
    """A `jax.shard_map` of `fun`, as `shard_map` is one of its body, with another operand first and result last."""
    return jax.shard_map(
        fun, mesh=shard_map.params["mesh"], in_specs=(spec, *in_specs(shard_map)), axis_names=newly_manual(shard_map),
        out_specs=([*shard_map.params["out_specs"]], spec), check_vma=False)


def mapped_mesh(shard_map: JaxprEqn) -> Any:
    """The mesh of a shard_map."""
    return shard_map.params["mesh"]


def newly_manual(shard_map: JaxprEqn) -> frozenset[str]:
    """The mesh axes along which a shard_map maps."""
    return frozenset(shard_map.params["newly_manual_axes"])


def checkpoint_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """What `jax.ad_checkpoint.checkpoint_name` calls the result, or values directly within a custom_vjp_call.

    Of a primitive of `named_call`, the names that it was given.
    """
    return policy_names(eqn.primitive, eqn.params)


def policy_names(primitive: Any, params: Mapping[str, Any]) -> tuple[str, ...]:
    """As `checkpoint_names`, of what a checkpoint policy is called with: `policy(primitive, *avals, **params)`."""
    if primitive.name == NAME:
        return (params["name"],)
    if primitive.name.startswith(OWN):
        return params["names"]
    if primitive.name == CUSTOM_VJP:
        return tuple(eqn.params["name"] for eqn in params["call_jaxpr"].jaxpr.eqns if eqn.primitive.name == NAME)
    return ()


def own_use(eqn: JaxprEqn) -> Any:
    """What a primitive of `named_call` was given as `use`; None for others."""
    return eqn.params["use"] if eqn.primitive.name.startswith(OWN) else None


def is_attention_kernel(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether what a checkpoint policy is called with is a kernel of cuDNN's or Pallas's, or a custom_vjp of one."""
    inner = params["call_jaxpr"].jaxpr.eqns if primitive.name == CUSTOM_VJP else ()
    return any(name in (CUDNN_ATTENTION, PALLAS) for name in (primitive.name, *(eqn.primitive.name for eqn in inner)))


def head_dims(attention: JaxprEqn) -> dict[int, int] | None:
    """Of a kernel of cuDNN's, the dim that counts heads in its arrays, by their rank; none where a bias has others too.

    None: it is no such kernel.
    """
    if not attention.primitive.name.startswith("dot_product_attention"):
        return None
    layout = attention.params["layout"]  # 0: (batch, length, heads, width); 1: (batch, heads, length, width)
    return {4: 2 - getattr(layout, "value", layout), 3: 1} if shape_of(attention.invars[3]).size == 0 else {}


def is_causal_kernel(attention: JaxprEqn) -> bool:
    """Whether a kernel of cuDNN's has a causal mask."""
    return "CAUSAL" in str(attention.params.get("mask_type"))


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parameters of a scan. Its operands are constants, then the carry, then arrays that are scanned over."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Scan":
        """Of a scan equation. The operands are counted by shape, since JAX 0.12 renamed num_consts and num_carry."""
        body = call_jaxpr(eqn).jaxpr
        carried = sum(shape_of(outer).ndim == shape_of(inner).ndim
                      for outer, inner in zip(eqn.outvars, body.outvars, strict=True))
        scanned = sum(shape_of(outer).ndim > shape_of(inner).ndim
                      for outer, inner in zip(eqn.invars, body.invars, strict=True))
        params = eqn.params
        return cls(len(eqn.invars) - scanned - carried, carried, params["length"], params["reverse"], params["unroll"])

    def parts(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """(Constants, carry, what is scanned over)."""
        end = self.num_consts + self.num_carry
        return operands[:self.num_consts], operands[self.num_consts:end], operands[end:]

    def run(self, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
        """The results of the scan with another body, a function of flat arguments to flat results."""
        consts, carry, scanned = self.parts(operands)

        def step(carry: Any, scanned: Any) -> Any:
            outs = body(*consts, *carry, *scanned)
            return list(outs[:self.num_carry]), list(outs[self.num_carry:])

        carry, stacked = jax.lax.scan(step, list(carry), list(scanned), length=self.length, reverse=self.reverse,
                                      unroll=self.unroll)
        return [*carry, *stacked]


def num_iterations(eqn: JaxprEqn) -> int:
    """How often `eqn` evaluates its inner jaxprs: the length of a scan, the grid of a Pallas kernel, else 1.

    A while loop's is unknown, and a dim of a grid that is computed counts once.
    """
    if eqn.primitive.name == PALLAS:
        return math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return eqn.params["length"] if eqn.primitive.name == SCAN else 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The parameters of a `jax.checkpoint`. differentiated: it is what backward computes again."""

    policy: Any
    prevent_cse: Any
    differentiated: bool

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Checkpoint":
        """Of a checkpoint equation."""
        return cls(*(eqn.params[field.name] for field in dataclasses.fields(cls)))


def with_policy(remat: JaxprEqn, policy: Any) -> JaxprEqn:
    """A checkpoint with another policy."""
    return remat.replace(params={**remat.params, "policy": policy})


class DotDims(NamedTuple):
    """Dims of a dot_general, each a pair for its two operands: summed over, and common to both and kept."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batched: tuple[tuple[int, ...], tuple[int, ...]]


def dot_dims(dot: JaxprEqn) -> DotDims:
    """The dims of a dot_general."""
    return DotDims(*dot.params["dimension_numbers"])


class ConvDims(NamedTuple):
    """Dims of a convolution: (batch, features, space...) and (out features, in features, space...); its groups."""

    lhs: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int


def conv_dims(conv: JaxprEqn) -> ConvDims:
    """The dims of a conv_general_dilated."""
    lhs, kernel, _ = conv.params["dimension_numbers"]
    return ConvDims(lhs, kernel, conv.params["feature_group_count"] * conv.params["batch_group_count"])


def empty_on_host(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array in host memory to be written in parts, as a scan begins the stack of its results there; traceable.

    It is zeros by its type, but XLA takes memory for it and writes nothing: what was not written must not be read as a
    number. Zeros that are moved to host memory would be made whole on the device.
    """
    return jax.lax.broadcast(primitives.empty2_p.bind(  # type: ignore[attr-defined]
        dtype=jax.numpy.dtype(dtype), memory_space=jax.memory.Space.Host), tuple(shape))


def permutation(transpose: JaxprEqn) -> tuple[int, ...]:
    """For each dim of the result of a transpose, that of its operand."""
    return tuple(transpose.params["permutation"])


def broadcast_dims(broadcast: JaxprEqn) -> tuple[int, ...]:
    """For each dim of the operand of a broadcast_in_dim, that of its result; they grow."""
    return tuple(map(int, broadcast.params["broadcast_dimensions"]))


def squeezed_dims(squeeze: JaxprEqn) -> tuple[int, ...]:
    """The dims that a squeeze drops."""
    return tuple(squeeze.params["dimensions"])


def draws_by_key(key: Any) -> bool:
    """Whether `random_bits` of an array of keys like `key` has for each key the bits of that key alone.

    So it is of Threefry; XLA's generators draw for all keys of an array at once.
    """
    return str(key.aval.dtype) == "key<fry>"


def reduced_axes(reduction: JaxprEqn) -> tuple[int, ...]:
    """The dims that a reduce_sum or its like reduces."""
    return tuple(reduction.params["axes"])


def bind_unsharded(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """As `bind_eqn`, without the sharding that the result may have been given."""
    return bind_eqn(eqn, args, **{name: None for name in ("sharding", "out_sharding") if name in eqn.params})


def reduce_all(reduction: JaxprEqn, value: Any) -> Sequence[Any]:
    """The result of `reduction` over every dim of `value`."""
    return bind_eqn(reduction, [value], axes=tuple(range(value.ndim)))
