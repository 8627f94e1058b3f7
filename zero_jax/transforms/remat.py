"""Activation checkpointing (remat): what each block of a model saves for backward, chosen from outside of the model.

Blocks are found in the traced loss, so that no model needs a hook: the bodies of loops that read parameters or, where
layers are unrolled, the equations between the first reads of `blocks_0/...`, `blocks_1/...`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.gather.gather import KEPT, SECONDARY
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    all_eqns,
    eqn_of,
    is_literal,
    is_on_host_atom,
    jaxpr_to_fun,
    primitive_of,
    replace_eqn,
    run_eqns,
    shape_of,
    trace,
    type_of,
    variables,
)
from zero_jax.jaxpr.primitives import (
    CUSTOM_VJP,
    JIT,
    NAME,
    OWN,
    REMAT,
    SCAN,
    Checkpoint,
    Scan,
    call_jaxpr,
    checkpoint_names,
    is_attention_kernel,
    policy_names,
    with_call_jaxpr,
    with_policy,
)
from zero_jax.transforms.gather_again import with_pullback
from zero_jax.transforms.tiled_products import TILED_PRODUCT


def _products(prim: Any, *avals: Any, **params: Any) -> bool:
    """A checkpoint policy: products with weights are saved, in tiles or not, and the results of attention kernels.

    A kernel's are one array and a number for each row, and to compute them again takes its two products; the scores of
    XLA's attention, products with batch dims, are as large as the square of the sequence and are not saved.
    """
    dots: Any = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return prim.name == TILED_PRODUCT or is_attention_kernel(prim, params) or dots(prim, *avals, **params)


POLICIES: dict[str, Any] = {"full": jax.checkpoint_policies.nothing_saveable, "dots": _products}
"""By name: save nothing but the inputs of blocks; save the products with weights and of attention kernels, too."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """What is saved for the backward pass; the rest is computed again.

    policy: "full" (only the inputs of a block), "dots" (the products with weights and of attention kernels as well), a
    tuple of names (what the model names with `jax.ad_checkpoint.checkpoint_name`), or a policy of
    `jax.checkpoint_policies`. It replaces those of checkpoints that the model has. every: blocks per checkpoint, or
    "sqrt" for the square root of their number.

    Raises ValueError for an unknown policy, or for `every` below 1.
    """

    policy: str | tuple[str, ...] | Callable[..., Any] = "full"
    every: int | str = 1

    def __post_init__(self) -> None:
        of_names = isinstance(self.policy, tuple) and all(isinstance(name, str) for name in self.policy)
        known = self.policy in POLICIES if isinstance(self.policy, str) else of_names or callable(self.policy)
        if not known:
            raise UsageError(f"remat={shown(self.policy)}: give one of {', '.join(map(repr, POLICIES))}, a tuple of "
                             "names, a policy of jax.checkpoint_policies, or None for what the model does itself.")
        if self.every != "sqrt" and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"Remat(every={shown(self.every)}): give the number of blocks per checkpoint, or "
                             "\"sqrt\".")

    @property
    def saveable(self) -> Any:
        """The policy as JAX takes it."""
        if isinstance(self.policy, str):
            return POLICIES[self.policy]
        if isinstance(self.policy, tuple):
            return jax.checkpoint_policies.save_only_these_names(*self.policy)
        return self.policy

    def group(self, blocks: int) -> int:
        """Blocks per checkpoint for a model of `blocks` blocks. Raises ValueError where that does not divide them."""
        if self.every == "sqrt":
            divisors = [size for size in range(1, blocks + 1) if blocks % size == 0]
            return min(divisors, key=lambda size: max(size, blocks // size))  # of two equally near, the smaller
        if blocks % int(self.every):
            raise UsageError(f"Remat(every={self.every}): the model has {blocks} blocks, which do not divide by it: "
                             f"give one of {[size for size in range(1, blocks + 1) if blocks % size == 0]}.")
        return int(self.every)


def remat_of(remat: "Remat | str | tuple[str, ...] | Callable[..., Any] | None") -> Remat | None:
    """A `Remat` from what `make_zero_train_step` takes."""
    return remat if remat is None or isinstance(remat, Remat) else Remat(remat)


def has_checkpoints(jaxpr: Jaxpr) -> bool:
    """Whether anything in a traced loss is checkpointed."""
    return any(primitive_of(eqn) == REMAT for eqn in all_eqns(jaxpr))


def checkpoint_blocks(closed: ClosedJaxpr, names: Sequence[str], remat: Remat) -> ClosedJaxpr:
    """A traced loss with its blocks checkpointed; `names`: of the parameters that are its first inputs.

    Why: a model need not be written with remat, and a plan or a search tries policies without editing the model.
    Cost without: 6673 instead of 1803 MiB of temporaries (the 124M program with remat="full").
    Order: before all other passes, on the outermost jaxpr, whose inputs are the parameters by name; to the others its
    checkpoints are the model's own.

    Raises ValueError where it has no blocks, or where they give no value a name that `remat` saves.
    """
    jaxpr, params = closed.jaxpr, set(closed.jaxpr.invars[:len(names)])
    attempts = (lambda: _with_policy(jaxpr, remat), lambda: _checkpoint_loops(jaxpr, remat, params),
                lambda: _checkpoint_unrolled(jaxpr, names, remat))
    for attempt in attempts:
        edited, num_blocks = attempt()
        if num_blocks:
            _check_names(edited, remat)
            return closed.replace(jaxpr=edited)
    raise UsageError(f"remat={remat.policy!r}: no blocks were found in the model: neither a loop that reads parameters "
                     "nor parameters of numbered blocks (blocks_0/..., blocks_1/...). Checkpoint them in the model "
                     "with zero_jax.remat(Block), or leave remat out.")


def _check_names(jaxpr: Jaxpr, remat: Remat) -> None:
    """Raises ValueError for a name to save that no value in the checkpoints of `jaxpr` has."""
    if not isinstance(remat.policy, tuple):
        return
    blocks = [call_jaxpr(eqn) for eqn in all_eqns(jaxpr) if primitive_of(eqn) == REMAT]
    known = {name for block in blocks for name in _names(block.jaxpr)}
    for block in blocks:
        if not known.issuperset(remat.policy) and any(primitive_of(eqn) == CUSTOM_VJP for eqn in all_eqns(block.jaxpr)):
            fun = jaxpr_to_fun(block)  # as a gradient evaluates it: rules for the forward pass may name values
            known |= _names(trace(lambda *args, fun=fun: jax.vjp(fun, *args)[0],
                                  *map(type_of, block.jaxpr.invars)).jaxpr)
    if missing := [name for name in remat.policy if name not in known]:
        raise UsageError(
            f"remat={remat.policy!r}: nothing in the model's blocks has the name {missing[0]!r}, and nothing would be "
            f"saved by it. Names that there are: {', '.join(map(repr, sorted(known))) or 'none'}. Give one of those, "
            "\"full\" or \"dots\", or name a value in the model: jax.ad_checkpoint.checkpoint_name(x, "
            f"{missing[0]!r}).")


def _names(jaxpr: Jaxpr) -> set[str]:
    """The names of values in `jaxpr`, without those that the library gives."""
    return {name for eqn in all_eqns(jaxpr) if primitive_of(eqn) == NAME for name in checkpoint_names(eqn)
            if not name.startswith(OWN)}


def _with_policy(jaxpr: Jaxpr, remat: Remat) -> tuple[Jaxpr, int]:
    """`jaxpr` with the policy of `remat` in every checkpoint of the model's own, and the number of those."""
    count, eqns = 0, []
    for eqn in jaxpr.eqns:
        if primitive_of(eqn) == REMAT:
            if remat.every != 1:
                raise UsageError(f"Remat(every={remat.every!r}): the model checkpoints its blocks itself, one by one: "
                                 "switch that off in the model, or leave `every` out.")
            eqn, count = with_policy(eqn, remat.saveable), count + 1
        elif primitive_of(eqn) in (SCAN, JIT):
            inner, within = _with_policy(call_jaxpr(eqn).jaxpr, remat)
            eqn, count = with_call_jaxpr(eqn, inner) if within else eqn, count + within
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), count


def _checkpoint_loops(jaxpr: Jaxpr, remat: Remat, params: set[Any]) -> tuple[Jaxpr, int]:
    """`jaxpr` with iterations checkpointed of loops that take what comes from `params` alone; the number of loops."""
    count, eqns, params = 0, [], set(params)
    for eqn in jaxpr.eqns:
        from_params = [atom in params for atom in variables(eqn.invars)]
        if primitive_of(eqn) == SCAN and any(from_params):
            eqn, count = _checkpoint_iterations(eqn, remat), count + 1
        elif primitive_of(eqn) == JIT:
            inner = call_jaxpr(eqn).jaxpr
            inner, within = _checkpoint_loops(inner, remat, {
                var for var, atom in zip(inner.invars, eqn.invars, strict=True)
                if not is_literal(atom) and atom in params})
            eqn, count = with_call_jaxpr(eqn, inner) if within else eqn, count + within
        elif from_params and all(from_params):
            params.update(eqn.outvars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), count


def _checkpoint_iterations(eqn: JaxprEqn, remat: Remat) -> JaxprEqn:
    """The loop `eqn` with a checkpoint around each iteration, or around each `remat.group` of them."""
    scan, body = Scan.of(eqn), jaxpr_to_fun(call_jaxpr(eqn))
    group = remat.group(scan.length)

    if group == 1:
        return replace_eqn(eqn, lambda *args: scan.run(
            jax.checkpoint(body, policy=remat.saveable, prevent_cse=False), args))

    def loop(*args: Any) -> list[Any]:
        consts, carry, xs = scan.parts(args)

        def one_iteration(carry: Any, xs: Any) -> Any:
            out = body(*consts, *carry, *xs)
            return tuple(out[:len(carry)]), tuple(out[len(carry):])

        def checkpointed_group(carry: Any, xs: Any) -> Any:
            iterations = jax.checkpoint(
                lambda carry, xs: jax.lax.scan(one_iteration, carry, xs, reverse=scan.reverse),
                policy=remat.saveable, prevent_cse=False)
            return iterations(carry, xs)

        num_groups = scan.length // group
        stacked = [x.reshape(num_groups, group, *x.shape[1:]) for x in xs]
        carry, ys = jax.lax.scan(checkpointed_group, tuple(carry), tuple(stacked), num_groups, scan.reverse)
        return [*carry, *(y.reshape(scan.length, *y.shape[2:]) for y in ys)]

    return replace_eqn(eqn, loop)


def _checkpoint_unrolled(jaxpr: Jaxpr, names: Sequence[str], remat: Remat) -> tuple[Jaxpr, int]:
    """`jaxpr` with the equations between the first reads of numbered blocks checkpointed; the number of blocks."""
    block_of = {var: _block(name) for var, name in zip(jaxpr.invars, names, strict=False)}
    seen: list[str | None] = []
    segments: list[tuple[str | None, list[JaxprEqn]]] = [(None, [])]
    for eqn in jaxpr.eqns:
        blocks_read = [block_of[atom] for atom in variables(eqn.invars) if atom in block_of]
        new = next((block for block in blocks_read if block != segments[-1][0] and block not in seen), "")
        if new != "":
            seen.append(new)
            segments.append((new, []))
        segments[-1][1].append(eqn)
    starts = [i for i, (name, _) in enumerate(segments) if name is not None]
    if len(starts) < 2:
        return jaxpr, 0
    group = remat.group(len(starts))
    eqns: list[JaxprEqn] = []
    position = 0
    while position < len(segments):
        size = group if position in starts[::group] else 1
        together = [eqn for _, part in segments[position:position + size] for eqn in part]
        if position in starts:
            used_later = {atom for _, part in segments[position + size:] for eqn in part
                          for atom in variables(eqn.invars)} | set(variables(jaxpr.outvars))
            together = [_checkpointed(together, used_later, remat)]
        eqns += together
        position += size
    return jaxpr.replace(eqns=eqns), len(starts)


def _checkpointed(eqns: Sequence[JaxprEqn], used_later: set[Any], remat: Remat) -> JaxprEqn:
    """`eqns` as one checkpoint, which returns those of their results that are in `used_later`."""
    results = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    inputs = list(dict.fromkeys(
        atom for eqn in eqns for atom in variables(eqn.invars) if atom not in results))
    outputs = [var for var in results if var in used_later]

    def block(*values: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inputs, values, strict=True))
        run_eqns(eqns, env)
        return [env[var] for var in outputs]

    return eqn_of(jax.checkpoint(block, policy=remat.saveable), inputs, outputs)


def _block(name: str) -> str | None:
    """The numbered block to which the parameter `name` belongs.

    >>> _block("decoder/blocks_3/ln_1/scale"), _block("blocks/3/norm/scale"), _block("head/kernel")
    ('decoder/blocks_3', 'blocks/3', None)
    """
    parts = name.split("/")[:-1]
    number_at = next((i for i, part in enumerate(parts) if re.fullmatch(r"(.*_)?\d+", part)), None)
    return None if number_at is None else "/".join(parts[:number_at + 1])


def isolate_inner_remat(jaxpr: Jaxpr, *, activations: Any = None, host_in_barriers: bool = True) -> Jaxpr:
    """Makes every checkpoint of the model's own a `jax.custom_vjp` that keeps for backward what its policy says.

    Why: gathered parameters that backward takes from forward are kept, and what hpZ gathered, whatever the model's
    policy says; and `activations` (an `activation_partitioning.Activations`) may keep its residuals elsewhere.
    Order: behind every pass that edits what is checkpointed, since the rules of a custom_vjp are functions, in which no
    pass can edit; before `gather_again_in_loops`, which leaves loops alone whose bodies are checkpointed already.

    host_in_barriers: whether parameters in host memory may be operands of the barrier that keeps XLA from merging
    forward and recomputation. XLA:TPU takes all operands of such a barrier for the host's (libtpu of jax 0.10.2).
    """

    def isolated(eqn: JaxprEqn) -> JaxprEqn:
        checkpoint = Checkpoint.of(eqn)
        prevent_cse = checkpoint.prevent_cse
        if prevent_cse is True and not host_in_barriers:
            prevent_cse = tuple(not is_on_host_atom(atom) for atom in eqn.invars)
        call = _with_own_policy(jaxpr_to_fun(call_jaxpr(eqn)), checkpoint.policy, prevent_cse=prevent_cse,
                                on_host=[is_on_host_atom(atom) for atom in eqn.invars], activations=activations)
        if any(not jnp.issubdtype(shape_of(var).dtype, jnp.inexact) for var in eqn.outvars):
            call = jax.jit(_without_tangents_of_integers(call))
        return eqn_of(call, eqn.invars, eqn.outvars)

    return jaxpr.replace(eqns=[isolated(eqn) if primitive_of(eqn) == REMAT else eqn for eqn in jaxpr.eqns])


def _with_own_policy(fun: Callable[..., Any], policy: Any, *, prevent_cse: Any, on_host: Sequence[bool],
                     activations: Any = None) -> Callable[..., Any]:
    """`fun` as a `jax.custom_vjp` whose residuals are what `policy` keeps, whatever a policy around it says."""
    def saveable(prim: Any, *avals: Any, **params: Any) -> Any:
        saved = policy is not None and policy(prim, *avals, **params)
        return saved or prim.name != NAME and not {KEPT, SECONDARY}.isdisjoint(policy_names(prim, params))

    checkpointed = jax.checkpoint(fun, policy=saveable, prevent_cse=prevent_cse)

    def forward(*args: Any) -> tuple[Any, Any]:
        out, pullback = jax.vjp(checkpointed, *args)
        return out, pullback if activations is None else jax.tree.map(activations.stash, pullback)

    def restore(pullback: Any) -> Any:
        return pullback if activations is None else jax.tree.map(activations.fetch, pullback)

    return with_pullback(checkpointed, forward, restore, on_host)


def _without_tangents_of_integers(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a custom_vjp, of whose integers JAX has tangents, which a `lax.cond` refuses of its index."""
    return lambda *args: [out if jnp.issubdtype(out.dtype, jnp.inexact) else jax.lax.stop_gradient(out)
                          for out in call(*args)]
