"""LoRA from outside of a model: numbers of adapters written by hand in JAX and Optax, and the base that stays."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.flat import flat_step
from support.hand_lora import applied, by_path, merged_by_hand, nested, plain_lora
from support.oracle import ADAMW, by_name, next_token, slow
from support.programs import Row, compiled_once
from support.workloads import FLAVOURS, token_batches

import zero_jax
from models import gpt2
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.transforms.low_rank import LowRank, adapted, split_low_rank_products

CONFIG = gpt2.Config(2, 36, 2, vocab_size=64, max_length=16)  # no dim divides by 8
RANK, ALPHA = 3, 6.0
QKV_UP = ("qkv", "up/kernel")


@dataclasses.dataclass
class Run:
    losses: np.ndarray
    norms: np.ndarray
    start: dict
    params: dict
    frozen: tuple
    step: zero_jax.ZeroTrainStep
    state: zero_jax.ZeroState


def tuned(model, stage, *, targets=QKV_UP, num_devices=8, batches=None, alpha=ALPHA, lora=None, **options):
    batches = batches or token_batches(3)
    step = flat_step(
        zero_jax.lora(model, RANK, targets, alpha=alpha, **(lora or {})), stage,
        **{"mesh": zero_jax.make_mesh(num_devices), "optimizer": ADAMW} | options)
    state = step.init(jax.random.key(0), batches[0])
    start, before = by_name(step.params(state)), by_name(state.frozen)
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Run(np.array(losses), np.array(norms), start, by_name(step.params(state)),
               (before, by_name(state.frozen)), step, state)


def check(run, model, *, tolerance=1e-6, **options):
    losses, norms, params = plain_lora(applied(model), run.start, token_batches(len(run.losses)),
                                        **{"scale": ALPHA / RANK} | options)
    np.testing.assert_allclose(run.losses, losses, rtol=tolerance)
    np.testing.assert_allclose(run.norms, norms, rtol=20 * tolerance)
    for name, expected in params.items():
        np.testing.assert_allclose(run.params[name], expected, atol=10 * tolerance, err_msg=name)


def check_base_stays(run):
    before, after = run.frozen
    assert before.keys() == after.keys() and len(before) > 10
    for name, leaf in before.items():
        assert leaf.tobytes() == after[name].tobytes(), name


class TestNumbers:
    @pytest.mark.grid
    @pytest.mark.parametrize("flavour, scanned, stage", [
        ("linen", True, 3), slow("nnx", True, 2), slow("nnx", True, 3), slow("linen", False, 0), slow("linen", True, 1),
        slow("nnx", False, 3), slow("linen", True, 0), slow("nnx", True, 0), slow("linen", False, 2)])
    def test_those_of_adapters_by_hand(self, flavour, scanned, stage):
        """Uneven shapes, scanned layers; what is frozen does not move by a bit, and only adapters have moments."""
        model = FLAVOURS[flavour](dataclasses.replace(CONFIG, scan_layers=scanned))
        run = tuned(model, stage)
        check(run, model)
        check_base_stays(run)
        moved = [name for name in run.params if run.params[name].tobytes() != run.start[name].tobytes()]
        assert {name.rsplit("/", 1)[1] for name in moved} == {"kernel_lora_a", "kernel_lora_b"}
        adapters = sum(leaf.size for name, leaf in run.start.items() if "_lora_" in name)
        moments = sum(leaf.size for name, leaf in by_name(run.step.layout().load(run.state).opt_state).items()
                      if "/mu/" in f"/{name}/" or "/nu/" in f"/{name}/")
        assert moments == 2 * adapters
        # Negative control: another scale is another run.
        losses, *_ = plain_lora(applied(model), run.start, token_batches(3), scale=1.0)
        assert np.abs(losses - run.losses).max() > 1e-5

    @pytest.mark.grid
    @pytest.mark.parametrize("stage", [slow(2), slow(3)])
    def test_a_head_that_is_trained_as_a_whole(self, stage):
        model = gpt2.build(CONFIG)
        run = tuned(model, stage, lora={"trainable": ("ln_f",)}, targets="all-linear")
        check(run, model, trainable=("ln_f/scale", "ln_f/bias"))
        assert run.params["ln_f/scale"].tobytes() != run.start["ln_f/scale"].tobytes()
        assert {name for name in run.params if name.endswith("_lora_a")} == {
            f"blocks/{name}/kernel_lora_a" for name in ("qkv", "proj", "up", "down")}

    @pytest.mark.grid
    @pytest.mark.parametrize("target", [slow("stage 3"), slow("microbatches")])
    def test_tensor_parallelism_and_microbatches(self, target):
        config = dataclasses.replace(CONFIG, width=32)
        model = gpt2.build(config)
        options = {"accumulate": 2, "num_devices": 4} if target == "microbatches" else {
            "mesh": zero_jax.make_mesh(data=4, tensor=2), "tensor_rules": gpt2.tensor_rules(config)}
        run = tuned(model, 3, targets="all-linear", **options)
        check(run, model)
        check_base_stays(run)
        if target == "stage 3":
            spec = {leaf.name: str(leaf.spec) for leaf in run.step.layout().placements()}
            assert "tensor" in spec["params/blocks/qkv/kernel_lora_b"]
            assert "tensor" not in spec["params/blocks/qkv/kernel_lora_a"]
            assert "tensor" in spec["params/blocks/down/kernel_lora_a"]

    @pytest.mark.slow
    def test_kernels_of_many_dims_and_both_ways(self):
        """Heads as dims of their own, a raw matrix that is used transposed, one that is used by no product."""

        class Net(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                x = nn.Embed(64, 12)(tokens)
                x = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
                x = jnp.einsum("bsd,ed->bse", x, self.param("mix", nn.initializers.lecun_normal(), (20, 12)))
                return nn.Dense(64)(x * self.param("gain", nn.initializers.ones, (1, 1, 20)))

        batches = token_batches(2)
        run = tuned(Net(), 3, targets=("query", "out", "mix"), num_devices=2, batches=batches)
        shapes = {name: leaf.shape for name, leaf in run.params.items() if "_lora_" in name}
        assert shapes == {
            "attention/query/kernel_lora_a": (12, RANK, 1), "attention/query/kernel_lora_b": (RANK, 2, 6),
            "attention/out/kernel_lora_a": (2, 6, RANK), "attention/out/kernel_lora_b": (RANK, 1, 12),
            "mix_lora_a": (RANK, 12), "mix_lora_b": (20, RANK)}

        def apply(params, batch):
            own, scale = nested(dict(by_path(params))), ALPHA / RANK
            low = own["lora"]
            own = {key: value for key, value in own.items() if key != "lora"}
            attention = own["attention"]
            attention["query"]["kernel"] += scale * jnp.einsum("dr,rhk->dhk", low["qa"][..., 0], low["qb"])
            attention["out"]["kernel"] += scale * jnp.einsum("hkr,rd->hkd", low["oa"], low["ob"][:, 0])
            own["mix"] += scale * jnp.einsum("rd,er->ed", low["ma"], low["mb"])
            return next_token(Net().bind({"params": own}), batch)

        short = {"attention/query/kernel": "q", "attention/out/kernel": "o", "mix": "m"}
        renamed = {name: f"lora/{short[name[:-7]]}{name[-1]}_lora_{name[-1]}" if "_lora_" in name else name
                   for name in run.start}
        start = {renamed[name]: leaf for name, leaf in run.start.items()}

        def unmerged(params, batch):
            low = {key[:2]: value for key, value in params["lora"].items()}
            return apply({**params, "lora": low}, batch)

        losses, _, params = plain_lora(unmerged, start, batches, scale=None)
        np.testing.assert_allclose(run.losses, losses, rtol=1e-6)
        for name, leaf in run.params.items():
            np.testing.assert_allclose(leaf, params[renamed[name]], atol=1e-5, err_msg=name)


class TestProducts:
    """The pass alone: x (W + s A B) as x W + s (x A) B, in every order of dims, and its dropout."""

    SPEC = LowRank((5, 4, 3), (), (0, 1), 2, 1.5, dropout=0.25)

    def arrays(self):
        keys = jax.random.split(jax.random.key(0), 4)
        return (jax.random.normal(keys[0], (7, 4, 5)), jax.random.normal(keys[1], self.SPEC.shape),
                jax.random.normal(keys[2], self.SPEC.a_shape), jax.random.normal(keys[3], self.SPEC.b_shape))

    @pytest.mark.parametrize("equation", ["nji,ijo->no", "nji,ijo->on"])
    def test_numbers_and_what_is_left(self, equation):
        def fun(x, w, a, b):
            return jnp.einsum(equation, x, jnp.swapaxes(jnp.swapaxes(adapted(0, self.SPEC, w, a, b), 0, 2), 0, 2))

        x, w, a, b = self.arrays()
        whole = w + 1.5 * jnp.einsum("ijr,ro->ijo", a[..., :2], b[:, 0])
        split = with_jaxpr_passes(fun, functools.partial(split_low_rank_products, specs={"w": self.SPEC}))
        np.testing.assert_allclose(split(x, w, a, b), jnp.einsum(equation, x, whole), rtol=1e-4, atol=1e-5)
        assert "zero_adapted" in str(jax.make_jaxpr(fun)(x, w, a, b))
        assert "zero_adapted" not in str(jax.make_jaxpr(split)(x, w, a, b))

    def test_what_is_no_product_keeps_the_sum(self):
        def fun(x, w, a, b):
            return jnp.sum(adapted(0, self.SPEC, w, a, b) ** 2) + jnp.sum(x)

        x, w, a, b = self.arrays()
        split = with_jaxpr_passes(fun, functools.partial(split_low_rank_products, specs={"w": self.SPEC}))
        np.testing.assert_allclose(split(x, w, a, b), fun(x, w, a, b), rtol=1e-6)

    def test_dropout_is_of_what_a_multiplies(self):
        key = jax.random.key_data(jax.random.key(7)).reshape(1, 1, 1, -1)
        fun = with_jaxpr_passes(
            lambda x, w, a, b, key: jnp.einsum("nji,ijo->no", x, adapted(0, self.SPEC, w, a, b, key)),
            functools.partial(split_low_rank_products, specs={"w": self.SPEC}))
        x, w, a, b = self.arrays()
        kept = jax.random.bernoulli(jax.random.key(7), 0.75, x.shape)
        thin = jnp.einsum("nji,ijr->nr", jnp.where(kept, x / 0.75, 0), a[..., :2])
        expected = jnp.einsum("nji,ijo->no", x, w) + 1.5 * thin @ b[:, 0]
        np.testing.assert_allclose(fun(x, w, a, b, key), expected, rtol=1e-4, atol=1e-5)


class TestDropout:
    def test_what_it_does_not_reach_is_refused(self):
        """A product in a jitted function of the model's: right without dropout, refused with it."""
        spec = TestProducts.SPEC

        def fun(x, w, a, b, *key):
            weight = adapted(0, spec, w, a, b, *key)
            return jax.jit(lambda x, weight: jnp.einsum("nji,ijo->no", x, weight))(x, weight)

        x, w, a, b = TestProducts().arrays()
        split = with_jaxpr_passes(fun, functools.partial(split_low_rank_products, specs={"blocks/w": spec}))
        np.testing.assert_allclose(split(x, w, a, b), fun(x, w, a, b), rtol=1e-6)
        with pytest.raises(zero_jax.UsageError, match="blocks/w is used elsewhere than in a product"):
            split(x, w, a, b, jax.random.key_data(jax.random.key(7)).reshape(1, 1, 1, -1))

    @pytest.mark.grid
    @pytest.mark.parametrize("flavour", [slow("linen"), slow("nnx")])
    def test_in_training_and_not_in_evaluation(self, flavour):
        model, batches = FLAVOURS[flavour](CONFIG), token_batches(3)
        run = tuned(model, 3, lora={"dropout": 0.5})
        one = tuned(model, 3, num_devices=1, lora={"dropout": 0.5})
        np.testing.assert_allclose(run.losses, one.losses, rtol=1e-6)  # one mask, whatever the devices
        without = tuned(model, 3)
        assert run.losses[0] == pytest.approx(without.losses[0], rel=1e-6)  # B is zero at the start
        assert abs(run.losses - without.losses).max() > 1e-6
        assert float(run.step.evaluator()(run.state, batches[0])) == pytest.approx(float(
            applied(model)(merged_by_hand(nested(run.params), ALPHA / RANK), batches[0])), rel=1e-5)


class TestValues:
    @pytest.mark.slow
    def test_from_a_base_that_one_has(self):
        """Adapters are new, everything else is as given; also by `with_params`, and where the base is an NNX module."""
        model, batch = gpt2.build(CONFIG), token_batches(1)[0]
        base = model.init(jax.random.key(5), batch["inputs"])["params"]
        step = zero_jax.make_zero_train_step(zero_jax.lora(model, RANK, QKV_UP), 3, mesh=zero_jax.make_mesh(2))
        state = step.init(jax.random.key(0), batch, params=base)
        params = by_name(step.params(state))
        for name, leaf in by_name(base).items():
            np.testing.assert_array_equal(params.pop(name), leaf)
        assert len(params) == 4
        assert all(np.abs(leaf).max() > 0 for name, leaf in params.items() if name.endswith("_a"))
        assert all(np.abs(leaf).max() == 0 for name, leaf in params.items() if name.endswith("_b"))
        np.testing.assert_allclose(step.evaluator()(state, batch), next_token(model.bind({"params": base}), batch),
                                   rtol=1e-6)

    @pytest.mark.slow
    def test_a_checkpoint_has_its_alpha(self, tmp_path):
        """Control: of the same alpha it is restored."""
        batch, mesh = token_batches(1)[0], zero_jax.make_mesh(2)
        saved, same, other = (zero_jax.make_zero_train_step(
            zero_jax.lora(gpt2.build(CONFIG), RANK, QKV_UP, alpha=alpha), 3, mesh=mesh) for alpha in (6, 6.0, 4.0))
        with zero_jax.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(saved, saved.init(jax.random.key(0), batch), wait=True)
            checkpoints.restore(same, batch)
            for read in (checkpoints.restore, checkpoints.load_params):
                with pytest.raises(zero_jax.CheckpointError, match=r"adapters of alpha=6.0, .* alpha=4.0, .* give"):
                    read(other, batch)

    def test_a_checkpoint_of_another_rank_is_told_by_shapes(self, tmp_path):
        batch, mesh = token_batches(1)[0], zero_jax.make_mesh(2)
        saved, other = (zero_jax.make_zero_train_step(
            zero_jax.lora(gpt2.build(CONFIG), rank, QKV_UP), 3, mesh=mesh) for rank in (2, 3))
        with zero_jax.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(saved, saved.init(jax.random.key(0), batch), wait=True)
            for read in (checkpoints.restore, checkpoints.load_params):
                with pytest.raises(zero_jax.CheckpointError, match=r"_a.*, 2\].*, 3\]") as error:
                    read(other, batch)
                assert "alpha" not in str(error.value)


class TestCompiled:
    """Of the compiled programs of targets: the contract, what is held, and what is sent for the base."""

    @pytest.mark.grid
    @pytest.mark.parametrize("target, stage, flavour, options", [
        slow("h100:8", 3, "linen", {}), slow("v5e:2x4", 3, "nnx", {}), slow("h100:8", 2, "nnx", {}),
        slow("h100:8", 3, "linen", {"tensor": 2})])
    def test_contract(self, target, stage, flavour, options):
        config = gpt2.Config(2, 256, 4, vocab_size=2048, max_length=32)
        tensor = {"tensor_rules": gpt2.tensor_rules(config)} if options else {}
        row = Row(target, stage, zero_jax.lora(FLAVOURS[flavour](config), 8, "all-linear"), sizes=options,
                  options=tensor)
        program = compiled_once(f"lora {target} {stage} {flavour} {options}", row)
        program.verify()
        step, batch = row.make()
        layout, num_devices = step.layout(batch), 8
        base = sum(leaf.size for leaf in jax.tree.leaves(layout.state.frozen))
        adapters = sum(leaf.size for leaf in jax.tree.leaves(layout.state.params))
        assert adapters < base / 20
        # The base in bfloat16, adapters with two moments in float32 (and a copy in bfloat16 at stage 2).
        expected = 2 * base / num_devices + 12 * adapters / num_devices if stage == 3 else (
            2 * base + 2 * adapters + 12 * adapters / num_devices)
        if not options:
            assert layout.device_bytes == pytest.approx(expected, rel=0.02)
            if target == "h100:8":  # a TPU's arguments are padded to tiles: 1.1 of them, as small as these adapters are
                assert program.memory.argument_size_in_bytes == pytest.approx(expected, rel=0.02)
            # Negative control: with moments of the base it would be several times as much.
            assert program.memory.argument_size_in_bytes < (10 * base / num_devices if stage == 3 else 2.5 * base)


class TestBadInput:
    """One clear error before anything compiles."""

    @pytest.mark.parametrize("arguments, told", [
        ({"targets": "qvk"}, "target 'qvk' matches no parameter of GPT2; the nearest are blocks/qkv/kernel"),
        ({"targets": "ln_1"}, "'ln_1' matches blocks/ln_1/bias, .*not used in matrix products alone"),
        ({"targets": "wte"}, "'wte' matches wte/embedding, which is not used in matrix products alone"),
        ({"rank": 64}, "rank=64 is more than blocks/qkv/kernel has, a matrix of 36 x 108: give at most 36"),
        ({"trainable": "head"}, "trainable: 'head' matches no parameter"),
        ({"trainable": "qkv"}, "blocks/qkv/kernel is both a target and trainable")])
    def test_what_does_not_fit_the_model(self, arguments, told):
        arguments = {"rank": RANK, "targets": "qkv"} | arguments
        step = zero_jax.make_zero_train_step(
            zero_jax.lora(gpt2.build(CONFIG), arguments.pop("rank"), arguments.pop("targets"), **arguments), 3,
            mesh=zero_jax.make_mesh(8))
        with pytest.raises(zero_jax.UsageError, match=told):
            step.layout(token_batches(1)[0])

    @pytest.mark.parametrize("arguments, told", [
        ({"rank": 0}, "rank=0: give at least 1"), ({"rank": 2.5}, "rank=2.5: give a whole number"),
        ({"targets": ()}, "targets=\\(\\): name the kernels"), ({"targets": "("}, "is no regular expression"),
        ({"targets": 5}, "targets=5: give a text"), ({"alpha": -1}, "alpha=-1: give a number above 0"),
        ({"dropout": 1.0}, "dropout=1.0: give a share"), ({"dropout": "0.1"}, "dropout='0.1'")])
    def test_what_makes_no_sense(self, arguments, told):
        arguments = {"rank": 4, "targets": "qkv"} | arguments
        with pytest.raises(zero_jax.UsageError, match=told):
            zero_jax.lora(gpt2.build(CONFIG), **arguments)

    @pytest.mark.parametrize("overwritten", [True, False])
    def test_a_kernel_that_the_model_overwrites_and_reads_again(self, overwritten):
        """The control is the model that does not."""
        class Net(nnx.Module):
            def __init__(self, rngs):
                self.layer = nnx.Linear(8, 8, rngs=rngs)

            def __call__(self, x):
                x = self.layer(x)
                if overwritten:
                    self.layer.kernel.set_value(jnp.ones((8, 8)))
                return self.layer(x)

        step = zero_jax.make_zero_train_step(
            zero_jax.lora(lambda rngs: Net(rngs), 2, "kernel"), 3, loss=lambda model, batch: model(batch).mean())
        batch = np.ones((8, 8), np.float32)
        if not overwritten:
            assert step.init(jax.random.key(0), batch).frozen
            return
        with pytest.raises(zero_jax.UsageError, match="layer/kernel .* which is not stored as such .* of the targets"):
            step.init(jax.random.key(0), batch)

    def test_adapters_twice(self):
        with pytest.raises(zero_jax.UsageError, match="has adapters already"):
            zero_jax.lora(zero_jax.lora(gpt2.build(CONFIG), 4, "qkv"), 4, "up")
