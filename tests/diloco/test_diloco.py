"""Slices that train by themselves (DiLoCo): numbers, and what is sent between them."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.plain_training import linen_functions, nnx_functions
from support.slices import INNER, MODELS, STREAMING, VOCABULARY, WIDTH, batches, make, trained
from support.targets import mesh_of, simulated

import zero_jax
from models import gpt2
from zero_jax.contract.verify import check
from zero_jax.diloco.fragments import due
from zero_jax.tree import map_named, named_leaves


def plain_loss(model, batch):
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def plain_diloco(flavour, inner, outer, given, *, slices, every, chunks=None, overlap=False, mix=0.0):
    """Flax and optax alone, slice after slice on one device: (losses, outer parameters).

    chunks: for each fragment a tree of masks like the parameters; None: all of them at once.
    """
    model = MODELS[flavour]
    init, apply = linen_functions(model, plain_loss, ()) if isinstance(model, nn.Module) else nnx_functions(
        model, plain_loss)
    outer_params, variables = jax.jit(init)(jax.random.split(jax.random.key(0))[0], given[0])
    chunks = [jax.tree.map(jnp.ones_like, outer_params)] if chunks is None else chunks

    @jax.jit
    def inner_step(params, variables, state, batch):
        def loss_of(params):
            out, new, _ = apply(params, variables, jax.random.key(0), batch)
            return out, new

        (loss, variables), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), variables, state, loss

    @jax.jit
    def outer_step(outer_params, outer_state, sent, own, mask):
        gradient = jax.tree.map(lambda start, *ends: start - sum(ends) / slices, outer_params, *sent)
        updates, new_state = outer.update(gradient, outer_state)
        chosen = lambda new, old: jax.tree.map(  # noqa: E731
            lambda at, new, old: jnp.where(at, new, old), mask, new, old)
        new_params = chosen(optax.apply_updates(outer_params, updates), outer_params)
        new_state = jax.tree.map(lambda at, new, old: new if old is None else jnp.where(at, new, old),
                                 mask, new_state[0].trace, outer_state[0].trace)
        own = [chosen(jax.tree.map(lambda old, new: mix * old + (1 - mix) * new, each, new_params), each)
               for each in own]
        return new_params, (outer_state[0]._replace(trace=new_state), *outer_state[1:]), own

    params, outer_state = [outer_params] * slices, outer.init(outer_params)
    others, states, losses = [variables] * slices, [inner.init(outer_params)] * slices, []
    for number, batch in enumerate(given):
        before, row = params, []
        params = list(params)
        for index in range(slices):
            part = jax.tree.map(lambda leaf, index=index: np.split(leaf, slices)[index], batch)
            params[index], others[index], states[index], loss = inner_step(
                params[index], others[index], states[index], part)
            row.append(loss)
        losses.append(row)
        fragment = due(number + (not overlap), every=every, fragments=len(chunks))
        if fragment is not None:
            outer_params, outer_state, params = outer_step(
                outer_params, outer_state, before if overlap else params, params, chunks[fragment])
    return np.array(losses), outer_params


def masks(diloco, params):
    """For each fragment, which elements of the true parameters it has; stacked layers are cut in the first dim."""
    def mask(fragment):
        def of(name, leaf):
            chunk = fragment.get(name)
            if chunk is None or chunk.dim is None:
                return np.full(leaf.shape, chunk is not None)
            assert chunk.dim == 0
            layers = np.arange(leaf.shape[0]).reshape(-1, *[1] * (leaf.ndim - 1))
            return np.broadcast_to((layers >= chunk.start) & (layers < chunk.stop), leaf.shape)

        return map_named(of, params)

    return [mask(fragment) for fragment in diloco.fragments()]


def close(left, right, tolerance=2e-4):
    left, right = ({name: np.asarray(leaf) for name, leaf in named_leaves(tree)} for tree in (left, right))
    assert left.keys() == right.keys()
    return all(np.allclose(left[name], right[name], rtol=tolerance, atol=tolerance) for name in left)


ROWS_OF_NUMBERS = [
    pytest.param(0, "nnx", {}, {}, id="0-nnx", marks=pytest.mark.slow),
    pytest.param(3, "linen", STREAMING, {}, id="3-streaming", marks=pytest.mark.slow),
    pytest.param(3, "linen", {"fragments": 2}, {}, id="3-linen"),
    pytest.param(1, "linen", {"overlap": True}, {"accumulate": 2}, id="1-accumulate",
                 marks=pytest.mark.slow),
    pytest.param(3, "linen", {**STREAMING, "fragments": 3}, {}, id="3-three", marks=pytest.mark.slow),
    pytest.param(0, "linen", {"fragments": 2}, {}, id="0-fragments", marks=pytest.mark.slow),
    pytest.param(1, "linen", {"overlap": True}, {}, id="1-overlap", marks=pytest.mark.slow),
    pytest.param(2, "nnx", {"fragments": 2, "nesterov": False}, {}, id="2-nnx", marks=pytest.mark.slow),
    pytest.param(2, "linen", {"fragments": 3}, {"accumulate": 2}, id="2-accumulate", marks=pytest.mark.slow),
    pytest.param(3, "wide", STREAMING, {}, id="3-in-parts", marks=pytest.mark.slow),
    pytest.param(2, "wide", {"overlap": True}, {"accumulate": 2}, id="2-in-parts", marks=pytest.mark.slow),
    pytest.param(3, "wide", STREAMING, {"accumulate": 2, "reduce": "once", "remat": "full"}, id="3-remat-in-parts",
                 marks=pytest.mark.slow),
    pytest.param(3, "nnx", {"every": 1, "overlap": True}, {}, id="3-nnx", marks=pytest.mark.slow),
    pytest.param(3, "linen", {}, {"accumulate": 2, "reduce": "once"}, id="3-once", marks=pytest.mark.slow)]


@pytest.mark.grid
@pytest.mark.parametrize(("stage", "flavour", "options", "step_options"), ROWS_OF_NUMBERS)
def test_numbers_are_those_of_a_plain_loop_over_slices(stage, flavour, options, step_options):
    """Control: the loop with another momentum is another run. The wide model's fragments are sent in parts."""
    given, diloco = batches(8), make(stage, flavour, step_options=step_options, **options)
    losses, state = trained(diloco, given)
    assert diloco.num_parts(0) == (8 * diloco.step.accumulation.microbatches if flavour == "wide" else 1)
    params = diloco.params(state)
    plain = {"slices": 2, "every": diloco.outer.every, "chunks": masks(diloco, params),
             "overlap": diloco.outer.overlap, "mix": diloco.outer.kept}
    outer = optax.sgd(0.7, momentum=0.9, nesterov=diloco.outer.nesterov)
    plain_losses, plain_params = plain_diloco(flavour, INNER, outer, given, **plain)
    np.testing.assert_allclose(losses, plain_losses, rtol=2e-4)
    assert close(params, plain_params)
    other, other_params = plain_diloco(flavour, INNER, optax.sgd(0.7, momentum=0.5, nesterov=True), given, **plain)
    assert not np.allclose(losses, other, rtol=2e-4) and not close(params, other_params)


@pytest.mark.grid
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow),
                                   pytest.param(3, marks=pytest.mark.slow)])
def test_averaging_plain_sgd_in_every_step_is_synchronous_training(stage):
    """Control: averaging every other step is not."""
    given, plain = batches(4), {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
    diloco = make(stage, inner=optax.sgd(0.1), every=1, **plain)
    losses, state = trained(diloco, given)
    synchronous, sync_losses = diloco.step.init(jax.random.key(0), given[0]), []
    for batch in given:
        synchronous, metrics = diloco.step(synchronous, batch)
        sync_losses.append(metrics["loss"])
    np.testing.assert_allclose(losses.mean(1), sync_losses, rtol=1e-6)
    assert close(diloco.params(state), diloco.step.params(synchronous), 1e-6)
    seldom = make(stage, inner=optax.sgd(0.1), every=2, **plain)
    assert not close(seldom.params(trained(seldom, given)[1]), diloco.step.params(synchronous), 1e-6)


def check_contracts(diloco, batch):
    """Every program keeps its contract, and what is wrong with it is found. Each is compiled once."""
    made, compile_one = {}, diloco.compiled_step

    def compiled_step(batch, fragment=None):
        if fragment not in made:
            made[fragment] = compile_one(batch, fragment)
        return made[fragment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diloco, "compiled_step", compiled_step)
        reports = diloco.verify(batch)
    sent = {fragment: report.contract.budget("slices").communication_bytes for fragment, report in reports.items()}
    assert sent[None] == 0 and all(sent[fragment] > 0 for fragment in sent if fragment is not None)
    slices = [result for result in reports[None].results if result.budget.key == "slices"]
    assert slices[0].collectives == ()
    # Controls: an outer step is no step of slices alone, and these are no outer step; synchronous training is neither.
    outer, alone = made[0], made[None]
    assert any("between slices" in line for line in check(outer.collectives, alone.contract).violations)
    assert any("must, of the outer gradients" in line for line in check(alone.collectives, outer.contract).violations)
    every_step = diloco.step.compiled_step(batch).collectives
    assert any("between slices" in line for line in check(every_step, alone.contract).violations)
    return sent


def test_nothing_crosses_between_slices_but_the_fragment_that_is_due():
    given = batches(1)[0]
    sent = check_contracts(make(**STREAMING), given)
    # Two slices of four devices: each sends its quarter of the parameters once. Padded, in float32.
    assert sum(sent.values()) == pytest.approx(4 * (4 * (WIDTH * 2 * WIDTH * 2 + 3 * WIDTH)
                                                    + (2 * WIDTH + 1) * VOCABULARY) / 4, rel=0.2)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "stage"), [("h100:8", 3), ("h100:8", 0), ("v5e:2x4", 3)])
def test_compilers_of_accelerators_send_outer_gradients_in_their_dtype(target, stage):
    """Control: in float32 they are twice as many bytes."""
    given = {name: jax.ShapeDtypeStruct((64, 128), jnp.int32) for name in ("inputs", "targets")}
    from models import gpt2

    def of(dtype):
        step = zero_jax.make_zero_train_step(
            gpt2.build(gpt2.Config(2, 256, 4, vocab_size=1024, max_length=128)), stage, precision="bf16",
            mesh=mesh_of(target, replica=2))
        return zero_jax.make_diloco_step(step, every=4, dtype=dtype)

    diloco, wide = of("bfloat16"), of("float32")
    sent = check_contracts(diloco, given)
    assert sent[0] == wide.contract(given, 0).budget("slices").communication_bytes / 2
    assert any("between slices" in line for line in check(
        wide.compiled_step(given, 0).collectives, diloco.contract(given, 0)).violations)


@pytest.mark.slow
def test_losses_that_name_axes_of_the_mesh_do_so_in_slices():
    """Control: a shard_map of the user's over the slices is refused in words."""
    from models import gpt2

    model = gpt2.build(gpt2.Config(1, 16, 2, vocab_size=VOCABULARY, max_length=4))
    mesh, given = zero_jax.make_mesh(replica=2), batches(3)
    chunked = zero_jax.chunked_next_token_loss(mesh, 2)
    curves = [trained(zero_jax.make_diloco_step(
        zero_jax.make_zero_train_step(model, 3, loss=loss, mesh=mesh), every=2), given)[0] for loss in (None, chunked)]
    np.testing.assert_allclose(*curves, rtol=1e-5)
    wrapped = zero_jax.make_zero_train_step(model, 3, loss=lambda *args: chunked(*args), mesh=mesh)
    with pytest.raises(zero_jax.UsageError, match="names the axis 'replica' of the slices"):
        trained(zero_jax.make_diloco_step(wrapped, every=2, overlap=True), given)


WRONG = {
    "no step": (lambda: zero_jax.make_diloco_step(MODELS["linen"], every=3), "give the step that"),
    "every": (lambda: make(every=0), "every=0: give at least 1"),
    "every is a text": (lambda: make(every="3"), "every='3'"),
    "more fragments than steps": (lambda: make(fragments=4), "at most 3 fragments"),
    "fragments": (lambda: make(fragments=0), "fragments=0"),
    "learning rate": (lambda: make(learning_rate=-1), "learning_rate=-1"),
    "momentum": (lambda: make(momentum=1.0), "momentum=1.0"),
    "mix": (lambda: make(overlap=True, mix=1.0), "mix=1.0"),
    "nesterov": (lambda: make(nesterov="yes"), "nesterov='yes'"),
    "dtype": (lambda: make(dtype="int8"), "dtype='int8'"),
    "more fragments than leaves": (
        lambda: make(flavour="nnx", every=9, fragments=9).layout(batches(1)[0]), "make 5: give at most 5"),
    "owners": (lambda: make(inner=optax.partition(
        {"whole": zero_jax.whole_matrices(optax.sgd(1e-2, momentum=0.9), zero_jax.make_mesh(replica=2)), "rest": INNER},
        lambda params: jax.tree.map(lambda leaf: "whole" if leaf.ndim == 2 else "rest", params),
    )).layout(batches(1)[0]), "gather"),
    "a batch that does not divide": (lambda: make().layout(batches(1, 12)[0]), "does not divide"),
    "a state of another step": (
        lambda: trained((diloco := make()), batches(1), diloco.step.init(jax.random.key(0), batches(1)[0])),
        "not of this step"),
    "an evaluator of a state of another step": (
        lambda: (diloco := make()).layout(batches(1)[0]) and diloco.evaluator()(
            diloco.step.init(jax.random.key(0), batches(1)[0]), batches(1)[0]), "not of this step"),
    "inside of jit": (lambda: jax.jit(diloco := make())(diloco.init(jax.random.key(0), batches(1)[0]), batches(1)[0]),
                      "inside of jit"),
    "another number of slices": (lambda: trained(diloco := make(), batches(1), dataclasses.replace(
        diloco.init(jax.random.key(0), batches(1)[0]), rng=jax.random.split(jax.random.key(0), 3))), "rng is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_error(name):
    call, message = WRONG[name]
    with pytest.raises(zero_jax.UsageError) as caught:
        call()
    assert message in str(caught.value)


def test_a_wrong_batch_is_told_and_the_next_one_trains():
    """Control: a batch that is right compiles nothing anew."""
    given, diloco = batches(3), make()
    state = diloco.init(jax.random.key(0), given[0])
    with pytest.raises(KeyError, match="targets"):
        diloco(state, {"inputs": given[0]["inputs"]})
    state, _ = diloco(state, given[0])
    programs = len(diloco.programs)
    with pytest.raises(zero_jax.UsageError, match="has in addition extra, beside the first batch"):
        diloco(state, {**given[1], "extra": np.ones(len(given[1]["inputs"]), np.float32)})
    with pytest.raises(zero_jax.UsageError, match="lacks targets, beside the first batch"):
        diloco(state, {"inputs": given[1]["inputs"]})
    before = len(diloco.programs)
    diloco(state, given[1])
    assert len(diloco.programs) == before > programs
    with pytest.raises(zero_jax.UsageError, match="before is a ZeroTrainStep: give the DiLoCoStep"):
        diloco.resized(diloco.init(jax.random.key(0), given[0]), diloco.step)


def test_due_sends_each_fragment_once_in_every_so_many_steps():
    for every, fragments in ((1, 1), (5, 1), (5, 2), (7, 7), (10, 3)):
        order = [due(number, every=every, fragments=fragments) for number in range(2 * every + 1)]
        assert order[0] is None and order[every] == order[2 * every] == fragments - 1
        for start in (1, every + 1):
            assert [each for each in order[start:start + every] if each is not None] == list(range(fragments))


@pytest.mark.slow
def test_attention_of_slices_attends_within_them():
    """With a kernel in a shard_map, as on TPUs. Control: one over all slices is refused in words."""
    tokens = np.random.default_rng(2).integers(0, 64, (2, 16, 129)).astype(np.int32)
    given = [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]
    with simulated("v5p:2x2x2"):
        mesh = zero_jax.make_mesh(replica=2)
        splash = zero_jax.attention(mesh, kernel="splash")

        def losses(kernel):
            config = gpt2.Config(1, 256, 2, vocab_size=64, max_length=128, attention=kernel)
            step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, optimizer=INNER)
            return trained(zero_jax.make_diloco_step(step, every=2), given)[0]

        plain = zero_jax.attention(mesh, kernel="xla")
        np.testing.assert_allclose(losses(splash.of_slices()), losses(plain), rtol=1e-4)
        with pytest.raises(zero_jax.UsageError, match=r"names the axis 'replica' .* attention\(mesh\).of_slices\(\)"):
            losses(splash)
