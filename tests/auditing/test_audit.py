"""The audit: each planted fault is named, with its place and cost, and clean steps have no finding."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.audited_flavours import CLEAN
from support.audited_steps import HIDDEN, LAYERS, ROWS, TOKENS, WHOLE, WIDTH, mesh_of_8, scanned, shape
from support.targets import target_devices

import zero_jax
from zero_jax.auditing.roles import Leaf, with_roles
from zero_jax.xla.devices import is_described_gpu

MIB = 2**20
PARAMS = LAYERS * 2 * WIDTH * HIDDEN
ONE_BY_ONE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "reduce_scatter", "all_reduce")}

PLANTED = {
    # name: (fault, code, text in its place, MiB or None)
    "moments_replicated": (dict(moments=WHOLE), "optimizer_replicated", "mu['down']", 2 * 4 * PARAMS * 7 / 8 / MIB),
    "one_moment_replicated": (dict(one_moment=WHOLE), "optimizer_replicated", "mu['up']", 4 * PARAMS / 2 * 7 / 8 / MIB),
    "all_replicated": (dict(params=WHOLE, moments=WHOLE), "params_replicated", "params['down']",
                       4 * PARAMS * 7 / 8 / MIB),
    "batch_replicated": (dict(batch=WHOLE, activations=WHOLE), "batch_replicated", "batch",
                         4 * TOKENS * WIDTH * 7 / 8 / MIB),
    "batch_computed_by_all": (dict(batch=WHOLE, activations=WHOLE), "extra_flops", "", None),
    "nothing_donated": (dict(donate=()), "not_donated", "mu['down']", 3 * 4 * PARAMS / 8 / MIB),
    "moments_not_donated": (dict(donate=(0,)), "not_donated", "opt_state[0].mu['down']", 2 * 4 * PARAMS / 8 / MIB),
    "gradients_all_reduced": (dict(params=WHOLE, cast="no"), "gradients_whole", "params['up']",
                              2 * PARAMS * 7 / 8 / MIB),
    "gradients_gathered": (dict(grads=WHOLE), "update_whole", "", 4 * PARAMS * 7 / 8 / MIB),
    "update_computed_whole": (dict(update="whole"), "update_whole", "", 4 * PARAMS * 7 / 8 / MIB),
    "activations_cut_by_width": (dict(activations=P(None, "data")), "activations_moved", "audited_steps.py", None),
    "gathered_in_microbatches": (dict(microbatches=4), "gathered_each_microbatch", "params['up']", None),
    "reduced_in_microbatches": (dict(microbatches=4), "reduced_each_microbatch", "params['down']", None),
    "batch_cut_anew": (dict(microbatches=4), "activations_moved", "audited_steps.py", None),
    "weights_kept": (dict(remat=False), "weights_kept", "params['up']", 2 * PARAMS / MIB),
    "weights_kept_unrolled": (dict(remat=False, scan=False), "weights_kept", "params['down']", 2 * PARAMS / MIB),
    "layers_sliced_from_a_stack": (dict(microbatches=4, scan=False, layers=2), "gathered_often", "params['up']", None),
    "fp32_gathered": (dict(cast="whole"), "sent_in_fp32", "params['up']", None),
    "blocking": (dict(options={"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}), "blocking", "params['up']",
                 None),
    "few_tokens": (dict(tokens=8 * 512), "exposed", "", None),
    "not_combined": (dict(layers=24, scan=False, width=256, hidden=512, options=ONE_BY_ONE), "uncombined",
                     "params['up']", None),
    "moments_on_the_host": (dict(memory="pinned_host"), "host_copies_waited_for", "", 2 * 4 * PARAMS / 8 / MIB),
    "recomputed": (dict(remat=False, options={"xla_gpu_memory_limit_slop_factor": 1}), "recomputed_by_xla",
                   "audited_steps.py", None),
    "too_large": (dict(tokens=100 * TOKENS), "does_not_fit", "batch", None),
    "almost_too_large": (dict(tokens=65 * TOKENS), "near_the_limit", "batch", None),
    "captured_weights": (dict(captured=True), "captured_arrays", "", None),
    "moments_replicated_tpu": (dict(moments=WHOLE, target="v5e:2x4"), "optimizer_replicated", "mu['down']", None),
    "blocking_tpu": (dict(target="v5e:2x4"), "blocking", "params['up']", None),
    "moments_replicated_cpu": (dict(moments=WHOLE, target=None), "optimizer_replicated", "mu['down']", None),
    "not_donated_cpu": (dict(donate=(), target=None), "not_donated", "mu['down']", None),
}
IN_THE_DEFAULT_RUN = ("one_moment_replicated", "weights_kept", "fp32_gathered", "gathered_in_microbatches",
                      "activations_cut_by_width", "moments_on_the_host", "batch_computed_by_all", "not_donated_cpu")


def audited(step):
    if step.options.get("target"):
        target_devices(step.options["target"])  # skips where its compiler is not installed
    return zero_jax.audit(step.jitted, *step.shapes, **step.options)


@functools.cache
def clean():
    return audited(scanned())


def rows(table, fast):
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", rows(PLANTED, IN_THE_DEFAULT_RUN))
def test_a_planted_fault_is_named(name):
    fault, code, place, mib = PLANTED[name]
    report = audited(scanned(**fault))
    found = {each.code: each for each in report.findings}
    assert code in found, report
    finding = found[code]
    assert place in f"{finding.place} {finding.source}", finding
    assert finding.remedy and (finding.bytes > 0 or finding.seconds)
    if mib is not None:
        assert finding.bytes / MIB == pytest.approx(mib, rel=0.02)
    assert code not in {each.code for each in clean().findings}


def test_at_least_twenty_faults_are_planted():
    assert len(PLANTED) >= 20 and len({code for _, code, *_ in PLANTED.values()}) >= 17


@pytest.mark.parametrize("name", rows(CLEAN, ("scan", "tensor", "cpu", "one_device", "zero1_shard_map", "nnx")))
def test_a_clean_step_has_no_finding(name):
    if name.startswith("ours"):
        target_devices("h100:8")
    report = audited(CLEAN[name]())
    if name == "a100" and jax.__version_info__ >= (0, 12):  # whose XLA leaves two of its gathers blocking
        assert [each.code for each in report.findings] == ["blocking"]
        return
    assert report.findings == (), report
    assert "nothing found" in str(report)


def test_the_report_counts_what_the_formulas_say():
    report = clean()
    data = json.loads(json.dumps(report.to_json()))
    assert data["stage"] == 3 and data["devices"] == 8
    assert data["ideal_bytes"] == {"1": 7 * PARAMS, "2": 7 * PARAMS, "3": 10.5 * PARAMS}  # 2, 2, 3 x 4 bytes x 7/8
    assert data["sent_bytes"] == pytest.approx(10.5 * PARAMS / 2, rel=1e-3)  # in bf16
    assert data["memory"]["params"] == 4 * PARAMS / 8 and data["memory"]["optimizer"] == PARAMS + 4
    sick = audited(scanned(moments=WHOLE)).to_json()
    assert sick["memory"]["optimizer"] > 7 * data["memory"]["optimizer"]
    assert sick["findings"][0]["code"] == "optimizer_replicated"


def test_nothing_is_executed():
    report = clean()  # its arguments are shapes alone
    assert is_described_gpu(report.program.devices[0])


def leaf(label, dims=(8, 8), dtype=jnp.float32):
    return Leaf(label, dims, np.dtype(dtype), None, False)


@pytest.mark.parametrize("labels, outputs, roles", [
    (["params['w']", "opt[0].mu['w']", "x"], ["[0]['w']", "[1][0].mu['w']"], ["params", "optimizer", "batch"]),
    (["a['w']", "b[0].mu['w']", "c"], ["[0]['w']", "[1][0].mu['w']"], ["params", "optimizer", "batch"]),
    (["state.params['w']", "state.opt_state[0].nu['w']", "x"], [".params['w']", ".opt_state[0].nu['w']"],
     ["params", "optimizer", "batch"]),
    (["frozen.params['w']", "params['v']", "x"], ["['v']"], ["params", "params", "batch"]),
])
def test_roles_are_found_by_names_and_flow(labels, outputs, roles):
    leaves = [leaf(label, (4,) if label in ("x", "c") else (8, 8)) for label in labels]
    found = with_roles(leaves, [(label, (8, 8), np.dtype(np.float32)) for label in outputs])
    assert [each.role for each in found] == roles


def test_roles_may_be_given():
    leaves = [leaf("first"), leaf("second")]
    outputs = [("[0]", (8, 8), np.dtype(np.float32))]
    assert [each.role for each in with_roles(leaves, outputs)] == ["params", "batch"]
    assert [each.role for each in with_roles(leaves, outputs, params="second")] == ["optimizer", "params"]


def test_bad_input_is_a_line_with_what_to_give():
    mesh = mesh_of_8()
    x = shape(mesh, (8, 8), P("data"))
    with pytest.raises(zero_jax.UsageError, match="is not jitted: give what jax.jit returns"):
        zero_jax.audit(lambda x: x, x)
    with pytest.raises(zero_jax.UsageError, match="does not lower for these arguments"):
        zero_jax.audit(jax.jit(lambda x, y: x), x)
    with pytest.raises(zero_jax.UsageError, match="has no state"):
        zero_jax.audit(jax.jit(lambda x: x.sum()), x)
    target_devices("h100:4")
    with pytest.raises(zero_jax.UsageError, match="has 4 devices, and the arguments have a mesh of 8"):
        zero_jax.audit(jax.jit(lambda x: x + 1), x, target="h100:4")
    with pytest.raises(zero_jax.UsageError, match="unknown target"):
        zero_jax.audit(jax.jit(lambda x: x + 1), x, target="h10:8")
    zero_jax.audit(jax.jit(lambda x: x + 1), x)  # a state and nothing else is a step


def test_unread_arguments_are_no_trouble():
    mesh = mesh_of_8()
    tree = {"a": shape(mesh, (64, 64), ROWS), "unread": shape(mesh, (64,), WHOLE)}

    def step(params, batch, key):
        return {"a": params["a"] - (batch @ params["a"]).sum(), "unread": params["unread"]}

    report = zero_jax.audit(jax.jit(step), tree, shape(mesh, (16, 64), P("data")), shape(mesh, (2,), WHOLE, jnp.uint32))
    assert "params['a']" in next(each for each in report.findings if each.code == "not_donated").place


def test_explicit_axes_and_a_mesh_that_is_set():
    target_devices("h100:8")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(params, batch):
        def loss(params):
            return ((batch @ jax.sharding.reshard(params["w"], P(None, None))) ** 2).mean()

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * jax.sharding.reshard(g, P("data", None)), params, grads)

    params, batch = {"w": shape(mesh, (4096, 4096), P("data", None))}, shape(mesh, (65536, 4096), P("data", None))
    with jax.set_mesh(mesh):
        report = zero_jax.audit(jax.jit(step, donate_argnums=0), params, batch, target="h100:8")
        sick = zero_jax.audit(jax.jit(step), params, batch, target="h100:8")
    assert report.sent_by_purpose()["gather"] == 4 * 4096**2 * 7 / 8
    # Its one gather has no compute before it, so that it blocks.
    assert [each.code for each in report.findings] == ["blocking"]
    assert "not_donated" in [each.code for each in sick.findings]
