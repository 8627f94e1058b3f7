"""What makes a negative control of a step: each changes one thing of its program while it is lowered and compiled."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zero_jax.gather.gather import GATHER_SCOPE, compute_spec, is_scatter
from zero_jax.jaxpr.equations import jaxpr_to_fun, primitive_of, replace_eqn
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.jaxpr.primitives import call_jaxpr, out_shardings, own_use
from zero_jax.sharding.mesh import constrain
from zero_jax.views.local import LocalView


def sent_by_xla(jaxpr: Any) -> Any:
    """What is gathered, and what is scattered, by constraints."""
    def gather(eqn: Any) -> Any:
        use = own_use(eqn)

        def run(value: Any) -> Any:
            with jax.named_scope(GATHER_SCOPE):
                value = constrain(use.cast(constrain(value, use.mesh, use.sent)), use.mesh, use.sent)
                return use.stored_shape.load(constrain(value, use.mesh, compute_spec(use.sent, use.axes)))

        return replace_eqn(eqn, run)

    def scatter(eqn: Any) -> Any:
        call, sharding = jaxpr_to_fun(call_jaxpr(eqn)), out_shardings(eqn)[0]
        return replace_eqn(eqn, lambda value: constrain(
            constrain(call(value)[0], sharding.mesh, P()), sharding.mesh, sharding.spec))

    return jaxpr.replace(eqns=[gather(eqn) if primitive_of(eqn) == GATHER_SCOPE else scatter(eqn) if is_scatter(eqn)
                               else eqn for eqn in jaxpr.eqns])


@contextlib.contextmanager
def partitioned(step: Any = None, batch: Any = None) -> Iterator[None]:
    """The gradient is left to XLA's partitioner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_jax.step.functions.in_parts", lambda run, *_: with_jaxpr_passes(run, sent_by_xla))
        patch.setattr("zero_jax.step.gradients.read_before_loops", lambda jaxpr: jaxpr)
        yield


@contextlib.contextmanager
def annotated(step: Any, batch: Any) -> Iterator[None]:
    """The same layout and nothing but jit: parameters are divided by annotation alone."""
    layout = step.layout(batch)
    step.functions.known_layout = dataclasses.replace(layout, uses=jax.tree.map(lambda _: None, layout.state.params))
    with partitioned(step, batch):
        yield


@contextlib.contextmanager
def kept(step: Any, batch: Any) -> Iterator[None]:
    """Parameters are gathered where they are used, and stay whole for the backward pass."""
    layout = step.layout(batch)
    stage = dataclasses.replace(layout.stage, shards_params=False)
    step.functions.known_layout = dataclasses.replace(layout, stage=stage)
    yield


@contextlib.contextmanager
def unsent_by_one_device() -> Iterator[list[Any]]:
    """The last of 8 devices adds nothing to the gradients, in the local view; gives the axes they are summed over."""
    right, sent = LocalView._reduced, []

    def forgetful(self: LocalView, eqn: Any, gradient: Any) -> Any:
        sent.append(gradient.spread.partial)
        kept = jnp.where(jax.lax.axis_index("data") == 7, 0, gradient.array)
        return right(self, eqn, dataclasses.replace(gradient, array=kept, parts={}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalView, "_reduced", forgetful)
        yield sent


@contextlib.contextmanager
def in_tiles_of_8(step: Any, batch: Any) -> Iterator[None]:
    """Parts of gradients that fill no tiles are sent in tiles of 8 x 128 values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_jax.gather.reduce_scatter._tile_rows", lambda within_products: 8)
        yield


@contextlib.contextmanager
def in_one_chunk(step: Any, batch: Any) -> Iterator[None]:
    """Parts of gradients that fill no tiles are sent flat, at once, whatever their size, and with no barrier behind."""
    with flat(step, batch), pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_jax.gather.reduce_scatter.MAX_FLAT_BYTES", 2**40)
        patch.setattr("zero_jax.gather.reduce_scatter.optimization_barrier", lambda value: value)
        yield


@contextlib.contextmanager
def flat(step: Any, batch: Any) -> Iterator[None]:
    """Parts of gradients that fill no tiles are sent flat, also where they nearly do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_jax.gather.reduce_scatter.MAX_PADDING", -1)
        yield


@contextlib.contextmanager
def with_queue(step: Any, batch: Any) -> Iterator[None]:
    """Gathers on the SparseCores may start while others are sent, also where no loop runs over the layers."""
    step.programs.compiler_options |= {"xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True}
    yield


@contextlib.contextmanager
def uncoded(step: Any, batch: Any) -> Iterator[None]:
    """What is to be quantised is sent in its own dtype, and nothing says so."""
    layout = step.layout(batch)
    uses = jax.tree.map(lambda use: dataclasses.replace(use, codes=None, quantize_gradient=False), layout.uses)
    step.functions.known_layout = dataclasses.replace(layout, uses=uses, quantized=None)
    yield
