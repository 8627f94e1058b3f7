"""The first generation of a state in files: of what the model makes, or of what a user has."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.distributed.initialize import local, zeros_of
from zero_jax.frontends.model_functions import stored_values
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.disk_leaves import expanded
from zero_jax.state import ZeroState, state_key
from zero_jax.step.call_checks import check_is_state
from zero_jax.step.disk.access import StepWithFiles
from zero_jax.step.disk.given_leaves import GivenLeaves
from zero_jax.step.disk.init import InitialOptimizerState
from zero_jax.step.disk.initial_state import InitialState, ValuesByLeaf
from zero_jax.step.disk.initial_values import InitialValues
from zero_jax.step.disk.states import DiskStates
from zero_jax.step.start import checked_values, with_values
from zero_jax.step.trainable import split_trainable
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, Params, PRNGKey, Pytree
from zero_jax.xla import live_chip

LOG = logging.getLogger("zero_jax")


class StepThatBegins(StepWithFiles):
    """How a step whose state is in files makes the first one."""

    def init(self, rng: PRNGKey, batch: Batch, *, params: Pytree | None = None) -> ZeroState:
        """As `ZeroTrainStep.init`, and the first generation is written.

        With `Offload(parameters="disk")` what the model makes is made to be written: no device has more at a time than
        a layer's shard, or a leaf's that is no stack, and what makes it. A stack of which no layer can be made alone
        (drawn from one key) is made whole, which a warning says. Raises ValueError where such a stack takes more than a
        device has, where the folder has the state of a run, and where the disk is too small.
        """
        rng, batch_like = state_key(rng), self.abstract_batch(batch)
        self._check_capacity(batch)
        states, given = self._opened(batch, DiskStates.create), self._given_params if params is None else (
            self._named(params, batch))
        layout = self.layout(batch)
        if self.options.in_layers:
            values, others = self.initial_values(rng, batch), dict(named_leaves(jax.jit(
                lambda: {"step": jnp.zeros((), jnp.int32), "guard": self._guard.init()},
                out_shardings={"step": layout.shardings.step, "guard": layout.shardings.guard})()))
            if given is None:
                return self._begin_by_leaf(states, values, others)
            others |= values([name for name in values.names if name.partition("/")[0] in ("variables", "rng")])
            return self._begin_from_given(given, others)
        fields = ("step", "frozen", "variables", "guard", "rng") if given is not None else (
            "step", "params", "frozen", "variables", "guard", "rng")
        nothing = {field.name: None for field in dataclasses.fields(ZeroState) if field.name not in fields}

        def make(rng: PRNGKey, given: Any, batch: Batch) -> ZeroState:
            return dataclasses.replace(self._init(rng, given, batch), **nothing)

        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch_like) if any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)) else batch
        shardings = dataclasses.replace(layout.shardings, **nothing)
        state = jax.jit(make, in_shardings=(None, None, self._batch_shardings(batch)), out_shardings=shardings)(
            rng, self._model.given, zeros)
        if given is None:
            return self._begin(states, state)
        like = layout.state
        return self._with_values(dataclasses.replace(state, params=like.params, frozen=like.frozen), given)

    def with_params(self, state: ZeroState, params: Pytree) -> ZeroState:
        """As `ZeroTrainStep`, and a generation of the new state is written; as in `init`, layer by layer."""
        check_is_state(state)
        self._current(state)
        if not self.options.in_layers:
            return self._with_values(expanded(self.layout(), state), self._named(params))
        new = self._begin_from_given(self._named(params), {
            name: leaf for name, leaf in named_leaves(state)
            if name.partition("/")[0] in ("step", "variables", "guard", "rng")})
        kept = {id(leaf) for leaf in jax.tree.leaves(new)}
        for leaf in jax.tree.leaves(state):
            if id(leaf) not in kept:
                leaf.delete()
        return new

    def initial_values(self, rng: PRNGKey, batch: Batch) -> InitialValues:
        """What `init` makes of the model, leaf by leaf; rng and batch may be abstract, where nothing is to be made."""
        def make(rng: PRNGKey, given: Any, batch: Batch) -> Any:
            model_rng, step_rng = jax.random.split(rng)
            values, variables = self._init_model(model_rng, batch, given)
            params, frozen = split_trainable(values, self.options.frozen)
            return {"params": params, "frozen": frozen, "variables": variables, "rng": step_rng}

        like = self.abstract_batch(batch)
        batch = jax.tree.map(lambda leaf, to: zeros_of(to) if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(
            rng, jax.Array) else leaf, batch, like)
        given = self._model.given
        return InitialValues(self.layout(batch), make, (rng, given, batch), (
            None, jax.tree.map(lambda _: None, given), jax.tree.map(lambda leaf: leaf.sharding, like)))

    def _begin(self, states: DiskStates, state: ZeroState) -> ZeroState:
        """The state whose parameters, all in memory, are those of `state`: the rest follows, and is written."""
        layout = self.layout()
        make = InitialOptimizerState(layout, self._optimizer, dict(named_leaves(state.params)).__getitem__)
        small = make([name for name in make.names if name not in layout.disk])
        others = {**dict(named_leaves(dataclasses.replace(state, opt_state=None, ema=None, weights=None, disk=None))),
                  **small, **self._weights(state.params, layout)}

        def value_of(name: str) -> Any:
            return others[name] if name in others else make([name])[name]

        commit = states.write_all(value_of, int(state.step), self._note)
        for name in layout.disk:
            if name in others:
                others[name].delete()
        return self._kept(layout, others, commit.token)

    def _begin_by_leaf(self, states: DiskStates, values: ValuesByLeaf, others: Mapping[str, Any]) -> ZeroState:
        """The state from `values`, each made where it is written.

        others: what of the state does not follow from `values`, by name; and what does, where these do not have it.
        Stacks that cannot be made layer by layer are made whole, and named in a warning; in an error, where that takes
        more than a device has.
        """
        layout = self.layout()
        initial = InitialState(layout, values, self._optimizer, lambda params: self._weights(params, layout), others,
                               live_chip.memory_limit(local(list(self.mesh.devices.flat))))
        if initial.whole_stacks:
            LOG.warning(initial.warning)
        commit = states.write_all(initial.whole, int(others["step"]), self._note, initial.layer)
        return self._kept(layout, initial.resident, commit.token)

    def _begin_from_given(self, given: Mapping[str, Any], others: Mapping[str, Any]) -> ZeroState:
        layout = self.layout()
        values = GivenLeaves(layout, checked_values(stored_values(self._model, given, others["rng"]), layout))
        return self._begin_by_leaf(self._opened(None, DiskStates.create), values, others)

    def _with_values(self, state: ZeroState, given: Mapping[str, Any]) -> ZeroState:
        def derive(state: ZeroState, params: Params, *, optimizer: Any, layout: Layout, **fields: Any) -> ZeroState:
            del optimizer, layout
            states = self._opened(None, DiskStates.create)
            return self._begin(states, dataclasses.replace(state, params=params, **fields))

        return with_values(state, stored_values(self._model, given, state.rng), layout=self.layout(),
                           optimizer=self._optimizer, derive=derive)

