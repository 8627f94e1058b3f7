"""Steps that go on without overlap where XLA fails to compile what is asked of it by default."""

import warnings

import jax
import pytest
from support.flat import flat_step
from support.slices import batches as slice_batches
from support.slices import make
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.step import options, overlap
from zero_jax.step.programs import may_be_of_overlap

CONFIG = gpt2.Config(2, 32, 4, vocab_size=64, max_length=16)
BATCHES = token_batches(2)


@pytest.fixture
def _unknown_option(monkeypatch):
    """XLA does not compile what a step asks of it by default."""
    for module in (overlap, options):
        monkeypatch.setattr(module, "overlap_options", lambda device, asked, **_: (
            {} if asked is False else {"xla_no_such_option": True}))


def trained(**asked):
    step = flat_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(8), **asked)
    state, losses = step.init(jax.random.key(0), BATCHES[0]), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return step, state, losses


def warned(made):
    return [each for each in made if "goes on without" in str(each.message)]


@pytest.mark.usefixtures("_unknown_option")
def test_a_step_goes_on_without_and_tells_once():
    """With the numbers of a step that does not ask. The control is one that was told to: it fails."""
    with warnings.catch_warnings(record=True) as made:
        warnings.simplefilter("always")
        step, _, losses = trained()
    (told,) = warned(made)
    assert "No such compile option: 'xla_no_such_option'" in str(told.message)
    assert "xla_no_such_option" not in step.layout().describe() and losses == trained(overlap=False)[2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        trained(overlap=True)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.usefixtures("_unknown_option")
@pytest.mark.parametrize("ask", [
    lambda step, state: step.verify(BATCHES[0]), lambda step, state: step.gradients(state, BATCHES[0]),
    lambda step, state: step.multi(state, jax.tree.map(lambda leaf: leaf[None], BATCHES[0]))])
def test_so_does_each_of_its_programs(ask):
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(8))
    state = step.init(jax.random.key(0), BATCHES[0])
    with pytest.warns(RuntimeWarning, match="goes on without"):
        ask(step, state)


@pytest.mark.slow
@pytest.mark.usefixtures("_unknown_option")
def test_so_do_slices():
    batch, step = slice_batches(1)[0], make()
    with pytest.warns(RuntimeWarning, match="goes on without"):
        step(step.init(jax.random.key(0), batch), batch)


@pytest.mark.parametrize("text, expected", [
    ("INTERNAL: RET_CHECK failure shard_count == subgroup_size", True),
    ("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:", True),
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required (44.56G) exceeds (15.75G).", False)])
def test_what_does_not_fit_in_memory_is_no_reason(text, expected):
    """It needs less without, and `plan` says so: whether that is enough is not ours to say."""
    assert may_be_of_overlap(jax.errors.JaxRuntimeError(text)) == expected
