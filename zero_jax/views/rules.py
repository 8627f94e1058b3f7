"""What each primitive makes of operands that the devices hold in parts: one table, a function for each family.

A rule takes the equation, of the global shapes, and how its operands are spread. It returns a `Plan`: how the operands
must be spread so that each device computes its part of the results from its parts of the operands alone, and how the
results then are. None: no such way is known; operands are then gathered over as few mesh axes as let a rule hold.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.jaxpr import primitives
from zero_jax.jaxpr.equations import JaxprEqn, is_literal, shape_of
from zero_jax.typing import AxisNames, Shape
from zero_jax.views.spread import Plan, Split, Spread, Ways, evenly, local_shape, ndim_at, shape_at, whole

Rule = Callable[[JaxprEqn, Sequence[Spread], Ways], Plan | None]

ELEMENTWISE = primitives.ELEMENTWISE | frozenset(
    "bessel_i0e bessel_i1e clz complex eq_to igamma igamma_grad_a igammac le_to log2 lt_to mulhi one_minus_square "
    "polygamma polynomial random_clone random_gamma_grad regularized_incomplete_beta stop_gradient zeta".split())

LINEAR = frozenset("neg copy name real imag add sub add_any mul div select_n convert_element_type".split())
"""Elementwise primitives that, of values that are yet to be summed over devices, may be taken before the sum."""


def plan_of(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan:
    """How devices compute `eqn`: in parts along as many mesh axes as a rule allows."""
    name = eqn.primitive.name
    rule = RULES.get(name) or (_leading if name.startswith("dot_product_attention") else None)
    if rule is None:
        return dataclasses.replace(plan_whole(eqn), repeats=_split_over(spreads))
    if all(spread.is_whole for spread in spreads):
        return plan_whole(eqn)
    if name not in SUMS_PASS:
        spreads = [spread.without_sum for spread in spreads]
    names = _split_over(spreads)
    some = [each for number in range(max(1, len(names))) for each in itertools.combinations(names, number)]
    for repeats in sorted(some, key=ways):
        plan = rule(eqn, [_without(spread, repeats, ways) for spread in spreads], ways)
        if plan is not None:
            return dataclasses.replace(plan, repeats=repeats)
    return dataclasses.replace(plan_whole(eqn), repeats=names)


def _split_over(spreads: Sequence[Spread]) -> tuple[str, ...]:
    """The axes over which dims are split."""
    return tuple(sorted({name for spread in spreads for split in spread.dims if split for name in split.axes}))


def _without(spread: Spread, names: Sequence[str], ways: Ways) -> Spread:
    """`spread` after gathers over mesh axes."""
    def of_dim(split: Split | None) -> Split | None:
        axes, outer, blocks = [], [], 1
        for name, own in zip(split.axes, split.outer, strict=True) if split else ():
            if name in names:
                blocks *= own * ways((name,))
            else:
                axes, outer, blocks = [*axes, name], [*outer, own * blocks], 1
        return Split(tuple(axes), tuple(outer)) if axes else None

    return Spread(tuple(map(of_dim, spread.dims)), spread.partial) if names else spread


def plan_whole(eqn: JaxprEqn) -> Plan:
    """Every device computes all of it."""
    return Plan(tuple(whole(ndim_at(atom)) for atom in eqn.invars), tuple(whole(ndim_at(var)) for var in eqn.outvars))


def plan_back(eqn: JaxprEqn, want: Spread, ways: Ways) -> Plan | None:
    """How devices compute just their parts of the one result of `eqn`, of whole operands, so that it is as `want`."""
    name = eqn.primitive.name
    if name in ELEMENTWISE and len(eqn.outvars) == 1:
        return Plan(tuple(_fitting(want, shape_at(atom), shape_at(eqn.outvars[0])) for atom in eqn.invars), (want,))
    if name == primitives.BROADCAST:
        dims, shape = primitives.broadcast_dims(eqn), shape_at(eqn.invars[0])
        operand = Spread(tuple(want.dims[dim] if shape[i] == shape_at(eqn.outvars[0])[dim] else None
                               for i, dim in enumerate(dims)))
        return Plan((operand,), (want,), _sizes(eqn, "shape", want, ways))
    if name == primitives.RESHAPE:
        operand = _reshaped(shape_at(eqn.outvars[0]), want, shape_at(eqn.invars[0]), ways)
        return operand and Plan((operand,), (want,), _sizes(eqn, "new_sizes", want, ways))
    return None


# Shapes -------------------------------------------------------------------------------------------------------------


def _sizes(eqn: JaxprEqn, name: str, spread: Spread, ways: Ways) -> tuple[tuple[str, Any], ...]:
    return ((name, local_shape(shape_at(eqn.outvars[0]), spread, ways)),)


def _fitting(spread: Spread, shape: Shape, result: Shape) -> Spread:
    """`spread` of an elementwise result of shape `result` as that of an operand of `shape`; scalars, 1s are whole."""
    if len(shape) != len(result):
        return whole(len(shape))
    return Spread(tuple(dim if size == other else None
                        for dim, size, other in zip(spread.dims, shape, result, strict=True)), spread.partial)


def _joint(spreads: Sequence[Spread]) -> Spread:
    """How those of equal ranks are split together: of two that want the same mesh axis for other dims, as the first."""
    dims: list[Split | None] = [None] * len(spreads[0].dims)
    taken: set[str] = set()
    for spread in spreads:
        for dim, split in enumerate(spread.dims):
            if split and dims[dim] is None and taken.isdisjoint(split.axes):
                dims[dim] = split
                taken |= {*split.axes}
    return Spread(tuple(dims), _sums(spreads))


def _scattered(spread: Spread, shape: Shape, dims: Sequence[int], ways: Ways) -> Spread:
    """`spread` after its sum, scattered along the largest of `dims` that divides."""
    even = [dim for dim in dims if not spread.dims[dim] and shape[dim] % ways(spread.partial) == 0]
    if not spread.partial or not even:
        return spread.without_sum
    at = max(even, key=lambda dim: shape[dim])
    return Spread(tuple(Split(spread.partial) if dim == at else split for dim, split in enumerate(spread.dims)))


def _sums(spreads: Sequence[Spread]) -> AxisNames:
    """The axes over which something is yet to be summed; none where one of them splits a dim: it is summed before."""
    partial = {name for spread in spreads for name in spread.partial}
    split = {name for spread in spreads for dim in spread.dims if dim for name in dim.axes}
    return tuple(sorted(partial)) if partial.isdisjoint(split) else ()


def _is_zero(atom: Any) -> bool:
    return is_literal(atom) and ndim_at(atom) == 0 and atom.val == 0


# Families -----------------------------------------------------------------------------------------------------------


def _elementwise(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    result, partial, summed = shape_at(eqn.outvars[0]), _sum_passes(eqn, spreads), _summed(eqn, spreads)
    joint = _joint([whole(len(result)), *(
        _fitting(spread, shape_at(atom), result) for atom, spread in zip(eqn.invars, spreads, strict=True)
        if len(spread.dims) == len(result))])
    return Plan(tuple(Spread(_fitting(joint, shape_at(atom), result).dims, partial if i in summed else ())
                      for i, atom in enumerate(eqn.invars)), (Spread(joint.dims, partial),) * len(eqn.outvars))


def _summed(eqn: JaxprEqn, spreads: Sequence[Spread]) -> Sequence[int]:
    """The operands in which an elementwise primitive is linear: of those, sums over devices may be taken later."""
    name = eqn.primitive.name
    if name in ("add", "sub", "add_any"):
        return range(len(spreads))
    if name == "select_n":
        return range(1, len(spreads))
    return [i for i, spread in enumerate(spreads) if spread.partial]


def _sum_passes(eqn: JaxprEqn, spreads: Sequence[Spread]) -> AxisNames:
    """The axes over which the result is yet to be summed: none where the sum is taken before."""
    name = eqn.primitive.name
    summed = [i for i, spread in enumerate(spreads) if spread.partial]
    if name not in LINEAR or not summed:
        return ()
    dtypes = [shape_of(atom).dtype.kind for atom in (*(eqn.invars[i] for i in summed), *eqn.outvars)]
    if name == "convert_element_type" and any(kind in "biu" for kind in dtypes):
        return ()
    if name == "mul" and len(summed) > 1 or name == "div" and summed != [0] or name == "select_n" and 0 in summed:
        return ()
    return _sums(spreads)


def _reshape(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    out = _reshaped(shape_at(eqn.invars[0]), spreads[0], shape_at(eqn.outvars[0]), ways)
    return None if out is None else Plan((spreads[0],), (out,), _sizes(eqn, "new_sizes", out, ways))


def _reshaped(shape: Shape, spread: Spread, result: Shape, ways: Ways) -> Spread | None:
    """How an array of `shape` that is spread so is spread once it has the shape `result`; None: not as a `Spread`."""
    dims: list[Split | None] = [None] * len(result)
    if 0 in shape:
        return None
    for at, split in enumerate(spread.dims):
        before = math.prod(shape[:at])  # blocks of the array, of each of which the devices along an axis have parts
        for name, outer in zip(split.axes, split.outer, strict=True) if split else ():
            before, number = before * outer, ways((name,))
            for dim, size in enumerate(result):
                own, rest = divmod(before, math.prod(result[:dim]))
                known = dims[dim] or Split(())
                blocks = math.prod(known.outer) * ways(known.axes)
                if not rest and own % blocks == 0 == size % (own * number):
                    dims[dim] = Split((*known.axes, name), (*known.outer, own // blocks))
                    break
            else:
                return None
            before *= number
    return Spread(tuple(dims), spread.partial)


def _broadcast(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    larger = math.prod(shape_at(eqn.outvars[0])) > math.prod(shape_at(eqn.invars[0]))
    operand = spreads[0].without_sum if larger else spreads[0]
    dims: list[Split | None] = [None] * ndim_at(eqn.outvars[0])
    for i, dim in enumerate(primitives.broadcast_dims(eqn)):
        dims[dim] = operand.dims[i]
    out = Spread(tuple(dims), operand.partial)
    return Plan((operand,), (out,), _sizes(eqn, "shape", out, ways))


def _transpose(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    return Plan((spreads[0],), (Spread(tuple(spreads[0].dims[dim] for dim in primitives.permutation(eqn)),
                                       spreads[0].partial),))


def _dropped(spread: Spread, dims: Sequence[int], partial: AxisNames | None = None) -> Spread:
    kept = tuple(split for dim, split in enumerate(spread.dims) if dim not in dims)
    return Spread(kept, spread.partial if partial is None else partial)


def _squeeze(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    return Plan((spreads[0],), (_dropped(spreads[0], primitives.squeezed_dims(eqn)),))


def _sum(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    axes = primitives.reduced_axes(eqn)
    return Plan((spreads[0],), (_dropped(spreads[0], axes, (*_over(spreads[0], axes), *spreads[0].partial)),))


def _over(spread: Spread, dims: Sequence[int]) -> AxisNames:
    """The mesh axes that split one of `dims`."""
    return tuple(name for dim in dims if spread.dims[dim] for name in spread.dims[dim].axes)  # type: ignore[union-attr]


def _combined(combine: str) -> Rule:
    def rule(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
        axes = primitives.reduced_axes(eqn)
        over = _over(spreads[0], axes)
        if over and not combine:
            return None
        return Plan((spreads[0],), (_dropped(spreads[0], axes),), combine=combine if over else "", over=over)

    return rule


def _along(name: str) -> Rule:
    """Of what works along the dims that this parameter names: none of them may be split."""
    def rule(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
        given = eqn.params[name]
        along = tuple(given) if isinstance(given, (tuple, list)) else (int(given),)
        joint = _joint(spreads)
        along = tuple(dim % len(joint.dims) for dim in along)
        if _over(joint, along):
            return None
        return Plan((joint,) * len(eqn.invars), (joint,) * len(eqn.outvars))

    return rule


def _pad(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    operand, padded = spreads[0], [tuple(amounts) != (0, 0, 0) for amounts in eqn.params["padding_config"]]
    if any(operand.dims):  # of fewer values than the result has
        free = [dim for dim, more in enumerate(padded) if not more]
        operand = _scattered(operand, shape_at(eqn.invars[0]), free, ways)
    if any(operand.dims) or not _is_zero(eqn.invars[1]):
        operand = operand.without_sum
    if any(split and more for split, more in zip(operand.dims, padded, strict=True)):
        return None
    return Plan((operand, whole(0)), (operand,))


def _slice(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    shape, result = shape_at(eqn.invars[0]), shape_at(eqn.outvars[0])
    strides = eqn.params["strides"] or (1,) * len(shape)
    if any(split and (size != kept or stride != 1)
           for split, size, kept, stride in zip(spreads[0].dims, shape, result, strides, strict=True)):
        return None
    limits = tuple(size if split is None else size // ways(split.axes)
                   for size, split in zip(eqn.params["limit_indices"], spreads[0].dims, strict=True))
    return Plan((spreads[0],), (spreads[0],), (("limit_indices", limits),))


def _dynamic_slice(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    operand, *starts = spreads
    if any(any(start.dims) for start in starts) or any(split and size != kept for split, size, kept in zip(
            operand.dims, shape_at(eqn.invars[0]), shape_at(eqn.outvars[0]), strict=True)):
        return None
    return Plan((operand, *(start.without_sum for start in starts)), (operand,),
                _sizes(eqn, "slice_sizes", operand, ways))


def _dynamic_update_slice(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    operand, update, *starts = spreads
    joint = _joint([operand, update])
    if any(any(start.dims) for start in starts) or any(split and size != part for split, size, part in zip(
            joint.dims, shape_at(eqn.invars[0]), shape_at(eqn.invars[1]), strict=True)):
        return None
    return Plan((joint, joint, *(start.without_sum for start in starts)), (joint,))


def _tile(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    dims = tuple(split and Split(split.axes, (split.outer[0] * times, *split.outer[1:]))
                 for split, times in zip(spreads[0].dims, eqn.params["reps"], strict=True))
    return Plan((spreads[0],), (Spread(dims, spreads[0].partial),))


def _stack(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    joint, at = _joint([spread.without_sum for spread in spreads]), eqn.params["axis"]
    return Plan((joint,) * len(spreads), (Spread((*joint.dims[:at], None, *joint.dims[at:])),))


def _unstack(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    at = eqn.params["axis"]
    return None if spreads[0].dims[at] else Plan((spreads[0],), (_dropped(spreads[0], [at]),) * len(eqn.outvars))


def _window(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """reduce_window and its like, select_and_scatter_add: windows of one along the split dims."""
    params, joint = eqn.params, _joint(spreads)
    sizes = params.get("window_dimensions")
    if sizes is None or len(joint.dims) != len(sizes):
        return None
    for dim, split in enumerate(joint.dims):
        alone = sizes[dim] == 1 and params["window_strides"][dim] == 1 and tuple(params["padding"][dim]) == (0, 0)
        if split and not (alone and all((params.get(name) or (1,) * len(sizes))[dim] == 1
                                        for name in ("base_dilation", "window_dilation"))):
            return None
    ins = tuple(joint if ndim_at(atom) == len(joint.dims) else whole(ndim_at(atom)) for atom in eqn.invars)
    return Plan(ins, (joint,) * len(eqn.outvars))


def _dot(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    (contracted, batched) = primitives.dot_dims(eqn)
    partial = _bilinear(spreads)
    if partial:
        outs = Spread((None,) * ndim_at(eqn.outvars[0]), partial)
        return Plan(tuple(spreads), (outs,))
    sides = [list(spread.dims) for spread in spreads]
    paired = [{0: left, 1: right} for left, right in [*zip(*batched, strict=True), *zip(*contracted, strict=True)]]
    free = [[dim for dim in range(len(dims)) if dim not in (*batched[side], *contracted[side])]
            for side, dims in enumerate(sides)]
    taken: set[str] = set()

    def claim(split: Split | None, dims: Mapping[int, int]) -> None:
        """`split` for dims by their operand, unless another dim has one of its mesh axes."""
        split = split if split and taken.isdisjoint(split.axes) else None
        taken.update(split.axes if split else ())
        for side, dim in dims.items():
            sides[side][dim] = split

    # What both have alike first; then what the larger one has: the other is gathered where both want a mesh axis.
    wanted = [[sides[side][dim] for side, dim in dims.items()] for dims in paired]
    alike = [i < len(batched[0]) or left == right for i, (left, right) in enumerate(wanted)]
    for splits, dims, both in zip(wanted, paired, alike, strict=True):
        claim(splits[0] or splits[1] if both else None, dims)
    for side in sorted((0, 1), key=lambda side: -math.prod(shape_at(eqn.invars[side]))):
        for dim in free[side]:
            claim(sides[side][dim], {side: dim})
        for splits, dims in zip(wanted, paired, strict=True):
            if splits[side] and not sides[side][dims[side]]:
                claim(splits[side], dims)
    for side, spread in enumerate(spreads if taken else ()):  # each device computes a part of what is summed before
        due = Spread(tuple(sides[side]), tuple(name for name in spread.partial if name not in taken))
        sides[side] = list(_scattered(due, shape_at(eqn.invars[side]), free[side], ways).dims)
        taken.update(due.partial)
    lhs, rhs = sides
    summed = tuple(name for dim in contracted[0] if lhs[dim] for name in lhs[dim].axes)  # type: ignore[union-attr]
    out = Spread((*(lhs[dim] for dim in batched[0]), *(lhs[dim] for dim in free[0]), *(rhs[dim] for dim in free[1])),
                 summed)
    return Plan((Spread(tuple(lhs)), Spread(tuple(rhs))), (out,))


def _bilinear(spreads: Sequence[Spread]) -> AxisNames:
    """Of a product: the axes over which its result is yet to be summed, where one operand is and the other is whole."""
    if sum(bool(spread.partial) for spread in spreads) == 1 and not any(any(spread.dims) for spread in spreads):
        return spreads[0].partial or spreads[1].partial
    return ()


def _ragged_dot(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """Rows in groups: each device's rows, of smaller groups (`spread.group_sizes`)."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (summed, summed_right), (batched, _) = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    if batched or len(spreads[2].dims) != 1:
        return None
    rows_right = summed_right[summed.index(rows)] if rows in summed else None
    spreads = [_scattered(spread, shape_at(atom), [] if dim is None else [dim], ways)
               for spread, atom, dim in zip(spreads, eqn.invars, (rows, rows_right, None), strict=True)]
    split = spreads[0].dims[rows] or (None if rows_right is None else spreads[1].dims[rows_right])
    left, right = _only(spreads[0].dims, rows, split), _only(spreads[1].dims, rows_right, split)
    dims = (None,) * ndim_at(eqn.outvars[0])
    out = _only(dims, 0, split) if rows_right is None else Spread(dims, split.axes if split else ())
    return Plan((left, right, whole(1)), (out,))


def _conv(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    lhs_dims, kernel_dims, out_dims = eqn.params["dimension_numbers"]
    out: list[Split | None] = [None] * ndim_at(eqn.outvars[0])
    partial = _bilinear(spreads)
    if partial:
        return Plan(tuple(spreads), (Spread(tuple(out), partial),))
    lhs, kernel = spreads[0].dims, spreads[1].dims
    batch, features = lhs[lhs_dims[0]], lhs[lhs_dims[1]] or kernel[kernel_dims[1]]
    if features is not None:
        if eqn.params["feature_group_count"] != 1:
            return None
        return Plan((_only(lhs, lhs_dims[1], features), _only(kernel, kernel_dims[1], features)),
                    (Spread(tuple(out), features.axes),))
    if batch is not None:
        if eqn.params["batch_group_count"] != 1:
            return None
        return Plan((_only(lhs, lhs_dims[0], batch), whole(len(kernel))), (_only(out, out_dims[0], batch),))
    if (split := kernel[kernel_dims[0]]) is not None and (
            eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1):
        return Plan((whole(len(lhs)), _only(kernel, kernel_dims[0], split)), (_only(out, out_dims[1], split),))
    return None


def _only(dims: Sequence[Any], dim: int | None, split: Split | None) -> Spread:
    return Spread(tuple(split if at == dim else None for at in range(len(dims))))


def _gather(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    numbers, sizes = eqn.params["dimension_numbers"], list(map(int, eqn.params["slice_sizes"]))
    shape = shape_at(eqn.invars[0])
    operand, indices = spreads[0], spreads[1].without_sum
    if spreads[1].partial or not _sums(spreads):
        operand = operand.without_sum
    offsets = list(map(int, numbers.offset_dims))
    gone = {*map(int, numbers.collapsed_slice_dims), *map(int, numbers.operand_batching_dims)}
    windows = [dim for dim in range(len(shape)) if dim not in gone]
    rows = [dim for dim in range(ndim_at(eqn.outvars[0])) if dim not in offsets]  # as dims of the indices
    pairs = dict(zip(map(int, numbers.operand_batching_dims), map(int, numbers.start_indices_batching_dims),
                     strict=True))
    ins_operand: list[Split | None] = [None] * len(shape)
    ins_indices: list[Split | None] = [*indices.dims[:-1], None]
    out: list[Split | None] = [None] * ndim_at(eqn.outvars[0])
    for own, row in pairs.items():
        ins_operand[own] = ins_indices[row] = operand.dims[own] or ins_indices[row]
        if ins_operand[own]:
            sizes[own] = 1
    taken = {name for split in ins_indices if split for name in split.axes}
    for dim, split in enumerate(operand.dims):
        if split and dim in windows and sizes[dim] == shape[dim] and taken.isdisjoint(split.axes):
            ins_operand[dim] = out[offsets[windows.index(dim)]] = split
            sizes[dim] //= ways(split.axes)
        elif split and dim in gone and dim not in pairs and not any(ins_indices):
            ins_indices = [*evenly(shape_at(eqn.invars[1])[:-1], split.axes, ways), None]  # each takes some rows
    for row, split in zip(rows, ins_indices, strict=False):
        out[row] = split
    return Plan((Spread(tuple(ins_operand), operand.partial), Spread(tuple(ins_indices))),
                (Spread(tuple(out), operand.partial),), (("slice_sizes", tuple(sizes)),))


def _scatter(*, adds: bool) -> Rule:
    def rule(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
        numbers, shape = eqn.params["dimension_numbers"], shape_at(eqn.invars[0])
        operand, indices, updates = (spread.without_sum for spread in spreads)
        window = list(map(int, numbers.update_window_dims))
        pairs = dict(zip(map(int, numbers.operand_batching_dims), map(int, numbers.scatter_indices_batching_dims),
                         strict=True))
        gone = {*map(int, numbers.inserted_window_dims), *pairs}
        windows = [dim for dim in range(len(shape)) if dim not in gone]
        rows = [dim for dim in range(ndim_at(eqn.invars[2])) if dim not in window]  # of updates, as dims of the indices
        ins_operand: list[Split | None] = [None] * len(shape)
        ins_indices: list[Split | None] = [None] * ndim_at(eqn.invars[1])
        ins_updates: list[Split | None] = [None] * ndim_at(eqn.invars[2])
        for own, row in pairs.items():
            split = operand.dims[own] or indices.dims[row] or updates.dims[rows[row]]
            ins_operand[own] = ins_indices[row] = ins_updates[rows[row]] = split
        taken = {name for split in ins_operand if split for name in split.axes}
        for dim, at in zip(windows, window, strict=True):
            split = operand.dims[dim] or updates.dims[at]
            if split and shape_at(eqn.invars[2])[at] == shape[dim] and taken.isdisjoint(split.axes):
                ins_operand[dim] = ins_updates[at] = split
                taken |= {*split.axes}
        summed: list[str] = []
        for row, at in enumerate(rows):
            split = indices.dims[row] or updates.dims[at]
            if split and ins_updates[at] is None and taken.isdisjoint(split.axes):
                if not adds:
                    return None
                ins_indices[row] = ins_updates[at] = split
                taken |= {*split.axes}
                summed += split.axes
        if summed and any(ins_operand):
            return None
        later = [name for name in (*spreads[0].partial, *spreads[2].partial) if adds and name not in taken]
        partial = tuple({*summed, *later})  # of an operand that is whole, one device has what is added to
        return Plan((Spread(tuple(ins_operand), partial), Spread(tuple(ins_indices)),
                     Spread(tuple(ins_updates), tuple({*later}))), (Spread(tuple(ins_operand), partial),))

    return rule


def _leading(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """What works on each entry of the first dim by itself; operands whose first dim is another are whole."""
    first = next((spread for spread in spreads if spread.dims and spread.dims[0]), None)
    if first is None or any(any(spread.dims[1:]) for spread in spreads):
        return None
    size = shape_at(eqn.invars[list(spreads).index(first)])[0]

    def spread(atom: Any) -> Spread:
        ndim = ndim_at(atom)
        return _only((None,) * ndim, 0, first.dims[0]) if ndim and shape_at(atom)[0] == size else whole(ndim)  # type: ignore[arg-type]

    return Plan(tuple(map(spread, eqn.invars)), tuple(map(spread, eqn.outvars)))


def _matrices(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """Decompositions and transforms, whose last dims are those of each matrix."""
    last = len(eqn.params["fft_lengths"]) if "fft_lengths" in eqn.params else 2
    joint = _joint(spreads)
    if any(joint.dims[-last:]) or any(len(spread.dims) != len(joint.dims) for spread in spreads):
        return None
    lead = joint.dims[:-last]
    return Plan((joint,) * len(eqn.invars), tuple(
        Spread((*lead, *[None] * (ndim_at(var) - len(lead)))) for var in eqn.outvars))


def _barrier(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    return Plan(tuple(spreads), tuple(spreads))


def _random_bits(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """Of an array of keys, each of which draws by itself."""
    if not primitives.draws_by_key(eqn.invars[0]):
        return None
    return Plan((spreads[0],), (Spread((*spreads[0].dims, *[None] * len(eqn.params["shape"]))),))


def _keys(eqn: JaxprEqn, spreads: Sequence[Spread], ways: Ways) -> Plan | None:
    """random_wrap, random_unwrap, random_split and random_fold_in of arrays of keys."""
    name = eqn.primitive.name
    if name == "random_fold_in":
        joint = _joint(spreads) if len(spreads[0].dims) == len(spreads[1].dims) else None
        return joint and Plan((joint, joint), (joint,))
    if name == "random_wrap":
        out = Spread(spreads[0].dims[:ndim_at(eqn.outvars[0])])
        return None if any(spreads[0].dims[ndim_at(eqn.outvars[0]):]) else Plan((spreads[0],), (out,))
    more = [None] * (ndim_at(eqn.outvars[0]) - len(spreads[0].dims))
    return Plan((spreads[0],), (Spread((*spreads[0].dims, *more)),))


RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "zero_float8"), _elementwise),
    primitives.RESHAPE: _reshape,
    primitives.BROADCAST: _broadcast,
    primitives.TRANSPOSE: _transpose,
    primitives.SQUEEZE: _squeeze,
    primitives.SUM: _sum,
    **dict.fromkeys(("reduce_max", "reduce_or"), _combined("max")),
    **dict.fromkeys(("reduce_min", "reduce_and"), _combined("min")),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _combined("")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k", "split"), _along("axis")),
    **dict.fromkeys(("sort", "concatenate"), _along("dimension")),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "rev": _along("dimensions"),
    "tile": _tile,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
                     "select_and_scatter_add", "select_and_gather_add"), _window),
    primitives.DOT: _dot,
    primitives.CONV: _conv,
    primitives.RAGGED_DOT: _ragged_dot,
    primitives.GATHER_ROWS: _gather,
    primitives.SCATTER_ADD: _scatter(adds=True),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max", "scatter_mul", "scatter_min",
                     "scatter_max"), _scatter(adds=False)),
    **dict.fromkeys(("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve", "fft", "householder_product"),
                    _matrices),
    **dict.fromkeys((primitives.BARRIER, "device_put"), _barrier),
    primitives.RANDOM_BITS: _random_bits,
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_split", "random_fold_in"), _keys),
}

SUMS_PASS = LINEAR | {
    primitives.RESHAPE, primitives.BROADCAST, primitives.TRANSPOSE, primitives.SQUEEZE, primitives.SUM, primitives.DOT,
    "cumsum", "concatenate", "pad", "slice", "dynamic_slice", "dynamic_update_slice", "rev", "split", "tile", "unstack",
    primitives.CONV, primitives.RAGGED_DOT, primitives.GATHER_ROWS, primitives.SCATTER_ADD, primitives.BARRIER}
"""Primitives that are linear, so that a sum over devices may be taken after them."""
