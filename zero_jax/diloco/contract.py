"""What the programs of a DiLoCo step may send between slices, and what they must."""

import dataclasses

import jax.numpy as jnp

from zero_jax.contract.params import min_itemsize
from zero_jax.contract.report import Contract
from zero_jax.diloco.fragments import Fragment, real_dtype
from zero_jax.diloco.options import OuterOptions
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import named_leaves


def changed_contract(contract: Contract, fragment: Fragment | None, layout: Layout, options: OuterOptions,
                     parts: int = 1) -> Contract:
    """The contract of the program that averages `fragment`, from that of a slice's step and the layout of one slice.

    parts: in how many it is sent; several are sent in the rounds of loops. At stages 0 to 2 the slices gather the new
    parameters that they store whole.
    """
    axes, min_bytes = layout.axes, min_itemsize(layout.axes.platform)
    gathered = sum(
        fragment[name].elements * max(real_dtype(leaf.dtype).itemsize, min_bytes) * (axes.zero_size - 1)
        for name, leaf in named_leaves(layout.state.params)
        if fragment is not None and name in fragment and leaf.sharding.spec != fragment[name].spec)
    sent = fragment_bytes(fragment, axes, options)
    changes = {"slices": sent, "outer": gathered}
    return dataclasses.replace(contract, slices_in_loops=parts > 1, budgets=tuple(
        dataclasses.replace(budget, communication_bytes=changes.get(budget.key, budget.communication_bytes))
        for budget in contract.budgets))


def fragment_bytes(fragment: Fragment | None, axes: MeshAxes, options: OuterOptions) -> float:
    """Bytes that each device sends to sum a fragment's outer gradients over the slices, as rings do; 0 for none."""
    if fragment is None:
        return 0.0
    itemsize = max(jnp.dtype(options.dtype).itemsize, min_itemsize(axes.platform))
    num_slices = axes.size(axes.slices)
    return 2 * (num_slices - 1) / num_slices * itemsize * sum(piece.elements for piece in fragment.values())
