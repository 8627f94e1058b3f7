"""What a checkpoint of slices that train by themselves (DiLoCo) holds for whoever has one model: its outer parameters.

Its `params/...` have a leading dim of the slices; the outer ones, in float32, are among the optimizer's state.
"""

import dataclasses
import math
from typing import Any

import jax

from zero_jax.checkpoint.integrity import read_arrays, verify
from zero_jax.checkpoint.logical_state import logical_state_of
from zero_jax.checkpoint.manifest import PARAMS, Manifest, check_fit
from zero_jax.layout.layout import Layout
from zero_jax.layout.slices import mean_of_slices, stacked, stacked_shape
from zero_jax.precision import wide_dtype

OUTER = "opt_state/outer/params/"
"""Before the name of a parameter."""


def slices_in(manifest: Manifest) -> int | None:
    """Of how many slices a checkpoint is, of states or of parameters alone; None: of one model."""
    leaves = manifest.leaves
    params = {name.partition("/")[2]: leaf.shape for name, leaf in leaves.items() if name.startswith("params/")}
    outer = {name.removeprefix(OUTER): leaf.shape for name, leaf in leaves.items() if name.startswith(OUTER)}
    if not outer or not all(params.values()):
        return None
    number = next(iter(params.values()), (0,))[0]
    return number if params == {name: (number, *shape) for name, shape in outer.items()} else None


def read_outer(path: Any, manifest: Manifest, layout: Layout, num_slices: int, *, cast: bool) -> dict[str, jax.Array]:
    """By the names that they have in one state: outer and frozen parameters, and the mean of the slices' variables.

    layout: of one state. In logical shapes and the layout's dtypes, sharded. Raises as `Checkpoints.load_params`.
    """
    saved_as = logical_state_of(_layout_of_slices(layout, num_slices))
    names = [name for name in saved_as.names if name.split("/")[0] in PARAMS]
    sources = {name: OUTER + name.removeprefix("params/") if name.startswith("params/") else name for name in names}
    saved = {f"params/{name.removeprefix(OUTER)}" if name.startswith(OUTER) else name: leaf
             for name, leaf in manifest.leaves.items() if name.startswith((OUTER, "frozen/", "variables/"))}
    check_fit(dataclasses.replace(manifest, leaves=saved), saved_as.leaves(names), str(path), cast=cast)
    saved = {name: saved[name] for name in names}
    files = read_arrays(path, {sources[name]: leaf for name, leaf in saved_as.abstract(saved).items()})
    arrays, digests = saved_as.to_leaves(
        {name: files[sources[name]] for name, leaf in saved.items() if math.prod(leaf.shape)}, saved, store=False)
    verify(path, saved, digests)
    dtypes = {name: leaf.dtype for name, leaf in logical_state_of(layout).leaves(names).items()}

    def one_state(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: mean_of_slices(leaf) if name.startswith("variables/") else leaf if name.startswith("frozen/")
                else leaf.astype(dtypes[name]) for name, leaf in arrays.items()}

    return jax.jit(one_state)(arrays)


def _layout_of_slices(layout: Layout, num_slices: int) -> Layout:
    """`layout` with what a checkpoint of slices has of each parameter and variable."""
    state, shapes = layout.state, layout.stored_shapes
    params = jax.tree.map(lambda leaf: leaf.update(dtype=wide_dtype(leaf.dtype)), state.params)
    variables = jax.tree.map(lambda leaf: stacked(leaf, num_slices, layout.axes), state.variables)
    return dataclasses.replace(
        layout, state=dataclasses.replace(state, params=params, variables=variables),
        stored_shapes=dataclasses.replace(shapes, variables=jax.tree.map(
            lambda shape: stacked_shape(shape, num_slices), shapes.variables)))
