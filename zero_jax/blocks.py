"""Activation checkpointing: which blocks of a model keep what for the backward pass, chosen from outside of it.

Blocks are the bodies of the loops that read parameters and, where layers are unrolled, what lies between the first
readings of `blocks_0/...`, `blocks_1/...`: found in the traced loss, so that no model needs a hook.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives

from zero_jax.rewrite import as_fun, bound, shape_of

POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""By name: keep nothing but the inputs of blocks; keep the products of weights, too."""

CARRIED = "zero_carried"
"""The name of what a loop carries."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """What is kept for the backward pass; the rest is computed again.

    policy: "full" (only what enters a block), "dots" (the products with weights as well), a tuple of names (what the
    model names with `jax.ad_checkpoint.checkpoint_name`), or a policy of `jax.checkpoint_policies`. It replaces those
    of checkpoints that the model has. every: blocks to a checkpoint, or "sqrt" for the square root of their number.
    """

    policy: str | tuple[str, ...] | Callable[..., Any] = "full"
    every: int | str = 1

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            raise ValueError(f"remat={self.policy!r}: give one of {', '.join(map(repr, POLICIES))}, a tuple of names, "
                             "a policy of jax.checkpoint_policies, or None for what the model does itself.")
        if self.every != "sqrt" and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(f"Remat(every={self.every!r}): give the number of blocks to a checkpoint, or \"sqrt\".")

    @property
    def saveable(self) -> Any:
        """The policy as JAX takes it."""
        if isinstance(self.policy, str):
            return POLICIES[self.policy]
        if isinstance(self.policy, tuple):
            return jax.checkpoint_policies.save_only_these_names(*self.policy)
        return self.policy

    def group(self, blocks: int) -> int:
        """Blocks to a checkpoint, of so many. Raises ValueError where that does not divide them."""
        if self.every == "sqrt":
            divisors = [size for size in range(1, blocks + 1) if blocks % size == 0]
            return min(divisors, key=lambda size: max(size, blocks // size))  # of two that are as near, the smaller
        if blocks % int(self.every):
            raise ValueError(f"Remat(every={self.every}): the model has {blocks} blocks, which do not divide by it: "
                             f"give one of {[size for size in range(1, blocks + 1) if blocks % size == 0]}.")
        return int(self.every)


def remat_of(remat: "Remat | str | tuple[str, ...] | Callable[..., Any] | None") -> Remat | None:
    """A `Remat` from what `make_zero_train_step` takes."""
    return remat if remat is None or isinstance(remat, Remat) else Remat(remat)


def has_checkpoints(jaxpr: core.Jaxpr) -> bool:
    """Whether anything in a traced loss is checkpointed."""
    return any(eqn.primitive is primitives.remat_p or any(map(has_checkpoints, core.jaxprs_in_params(eqn.params)))
               for eqn in jaxpr.eqns)


def checkpoint_blocks(closed: core.ClosedJaxpr, names: Sequence[str], remat: Remat) -> core.ClosedJaxpr:
    """A traced loss with its blocks checkpointed; `names`: of the parameters that are its first inputs.

    Raises ValueError where it has no blocks.
    """
    jaxpr, params = closed.jaxpr, set(closed.jaxpr.invars[:len(names)])
    edits = (lambda: _with_policy(jaxpr, remat), lambda: _loops(jaxpr, remat, params),
             lambda: _unrolled(jaxpr, names, remat))
    for edit in edits:
        edited, found = edit()
        if found:
            return closed.replace(jaxpr=edited)
    raise ValueError(f"remat={remat.policy!r}: no blocks were found in the model: neither a loop that reads parameters "
                     "nor parameters of numbered blocks (blocks_0/..., blocks_1/...). Checkpoint them in the model "
                     "with zero_jax.remat(Block), or leave remat out.")


def name_carried(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """An edit: what a loop carries gets a name in its body, where a checkpoint policy around the loop can keep it.

    A policy is asked about what a body computes. Without the name it keeps what leaves a round, of every block where
    several are one checkpoint, and backward makes what enters a round from it by another loop: all checkpoints twice.
    """
    return jaxpr.replace(eqns=[_named(eqn) if eqn.primitive is primitives.scan_p else eqn for eqn in jaxpr.eqns])


def _named(eqn: core.JaxprEqn) -> core.JaxprEqn:
    body, (consts, carries) = eqn.params["jaxpr"], _numbers(eqn)
    invars, eqns = list(body.jaxpr.invars), []
    for place in range(consts, carries):
        inside = invars[place]
        if jnp.issubdtype(inside.aval.dtype, jnp.floating):
            invars[place] = core.Var(inside.aval)
            (name,) = jax.make_jaxpr(lambda x: checkpoint_name(x, CARRIED))(shape_of(inside)).jaxpr.eqns
            eqns.append(name.replace(invars=[invars[place]], outvars=[inside]))
    body = body.replace(jaxpr=body.jaxpr.replace(invars=invars, eqns=[*eqns, *body.jaxpr.eqns]))
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def _numbers(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Of the inputs of the loop `eqn`: where those that it carries begin and end.

    By shapes, since JAX names their numbers differently from 0.12 on: what is scanned over has one dim more.
    """
    inner = eqn.params["jaxpr"].jaxpr
    carried = sum(shape_of(outer).ndim == shape_of(own).ndim
                  for outer, own in zip(eqn.outvars, inner.outvars, strict=True))
    scanned = sum(shape_of(outer).ndim > shape_of(own).ndim
                  for outer, own in zip(eqn.invars, inner.invars, strict=True))
    carries = len(eqn.invars) - scanned
    return carries - carried, carries


def _with_policy(jaxpr: core.Jaxpr, remat: Remat) -> tuple[core.Jaxpr, int]:
    """Every checkpoint of the model's own gets the policy; its blocks stay as they are."""
    count, eqns = 0, []
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.remat_p:
            if remat.every != 1:
                raise ValueError(f"Remat(every={remat.every!r}): the model checkpoints its blocks itself, one by one: "
                                 "switch that off in the model, or leave `every` out.")
            eqn, count = eqn.replace(params={**eqn.params, "policy": remat.saveable}), count + 1
        elif eqn.primitive in (primitives.scan_p, primitives.jit_p):
            inner, found = _with_policy(eqn.params["jaxpr"].jaxpr, remat)
            eqn, count = _with_inner(eqn, inner) if found else eqn, count + found
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), count


def _loops(jaxpr: core.Jaxpr, remat: Remat, params: set[Any]) -> tuple[core.Jaxpr, int]:
    """Loops over what comes from `params` alone, with their rounds checkpointed."""
    count, eqns, params = 0, [], set(params)
    for eqn in jaxpr.eqns:
        atoms = [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
        taken = [atom in params for atom in atoms]
        if eqn.primitive is primitives.scan_p and any(taken):
            eqn, count = _grouped(eqn, remat), count + 1
        elif eqn.primitive is primitives.jit_p:
            pairs = zip(eqn.params["jaxpr"].jaxpr.invars, eqn.invars, strict=True)
            inner, found = _loops(eqn.params["jaxpr"].jaxpr, remat, {var for var, atom in pairs
                                  if not isinstance(atom, core.Literal) and atom in params})
            eqn, count = _with_inner(eqn, inner) if found else eqn, count + found
        elif taken and all(taken):
            params.update(eqn.outvars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), count


def _with_inner(eqn: core.JaxprEqn, inner: core.Jaxpr) -> core.JaxprEqn:
    return eqn.replace(params={**eqn.params, "jaxpr": eqn.params["jaxpr"].replace(jaxpr=inner)})


def _grouped(eqn: core.JaxprEqn, remat: Remat) -> core.JaxprEqn:
    """The loop `eqn` with a checkpoint around each round, or around so many of them."""
    params, length = eqn.params, eqn.params["length"]
    group = remat.group(length)
    body, (consts, carries) = as_fun(params["jaxpr"]), _numbers(eqn)

    def loop(*args: Any) -> list[Any]:
        closed, carry, xs = args[:consts], args[consts:carries], args[carries:]

        def block(carry: Any, xs: Any) -> Any:
            out = jax.checkpoint(body, policy=remat.saveable, prevent_cse=False)(*closed, *carry, *xs)
            return tuple(out[:len(carry)]), tuple(out[len(carry):])

        def many(carry: Any, xs: Any) -> Any:
            def inner(carry: Any, xs: Any) -> Any:
                out = body(*closed, *carry, *xs)
                return tuple(out[:len(carry)]), tuple(out[len(carry):])

            run = jax.checkpoint(lambda carry, xs: jax.lax.scan(inner, carry, xs, reverse=params["reverse"]),
                                 policy=remat.saveable, prevent_cse=False)
            return run(carry, xs)

        if group == 1:
            carry, ys = jax.lax.scan(block, tuple(carry), tuple(xs), length, params["reverse"], params["unroll"])
            return [*carry, *ys]
        stacked = [x.reshape(length // group, group, *x.shape[1:]) for x in xs]
        carry, ys = jax.lax.scan(many, tuple(carry), tuple(stacked), length // group, params["reverse"])
        return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]

    return retraced(eqn, loop)


def _unrolled(jaxpr: core.Jaxpr, names: Sequence[str], remat: Remat) -> tuple[core.Jaxpr, int]:
    """What lies between the first readings of numbered blocks, as checkpoints."""
    block_of = {var: _block(name) for var, name in zip(jaxpr.invars, names, strict=False)}
    seen: list[str | None] = []
    segments: list[tuple[str | None, list[core.JaxprEqn]]] = [(None, [])]
    for eqn in jaxpr.eqns:
        reads = [block_of[atom] for atom in eqn.invars if not isinstance(atom, core.Literal) and atom in block_of]
        new = next((block for block in reads if block != segments[-1][0] and block not in seen), "")
        if new != "":
            seen.append(new)
            segments.append((new, []))
        segments[-1][1].append(eqn)
    blocks = [i for i, (name, _) in enumerate(segments) if name is not None]
    if len(blocks) < 2:
        return jaxpr, 0
    group = remat.group(len(blocks))
    eqns: list[core.JaxprEqn] = []
    done = 0
    while done < len(segments):
        size = group if done in blocks[::group] else 1
        together = [eqn for _, part in segments[done:done + size] for eqn in part]
        if done in blocks:
            later = {atom for _, part in segments[done + size:] for eqn in part for atom in eqn.invars
                     if not isinstance(atom, core.Literal)}
            later |= {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
            together = _checkpointed(together, later, remat)
        eqns += together
        done += size
    return jaxpr.replace(eqns=eqns), len(blocks)


def _checkpointed(eqns: Sequence[core.JaxprEqn], later: set[Any], remat: Remat) -> list[core.JaxprEqn]:
    """`eqns` as one checkpoint, which gives what is used `later`."""
    made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    inputs = list(dict.fromkeys(atom for eqn in eqns for atom in eqn.invars
                                if not isinstance(atom, core.Literal) and atom not in made))
    outputs = [var for var in made if var in later]

    def block(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        for eqn in eqns:
            env.update(zip(eqn.outvars, bound(eqn, [
                atom.val if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]), strict=True))
        return [env[var] for var in outputs]

    (traced,) = jax.make_jaxpr(jax.checkpoint(block, policy=remat.saveable))(
        *map(shape_of, inputs)).jaxpr.eqns
    return [traced.replace(invars=inputs, outvars=outputs)]


def _block(name: str) -> str | None:
    """The numbered block to which the parameter `name` belongs.

    >>> _block("decoder/blocks_3/ln_1/scale"), _block("blocks/3/norm/scale"), _block("head/kernel")
    ('decoder/blocks_3', 'blocks/3', None)
    """
    parts = name.split("/")[:-1]
    found = next((i for i, part in enumerate(parts) if re.fullmatch(r"(.*_)?\d+", part)), None)
    return None if found is None else "/".join(parts[:found + 1])


def retraced(eqn: core.JaxprEqn, fun: Callable[..., Any]) -> core.JaxprEqn:
    """A call of `fun`, which computes what `eqn` does, in its place."""
    (call,) = jax.make_jaxpr(jax.jit(fun))(*map(shape_of, eqn.invars)).jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)
