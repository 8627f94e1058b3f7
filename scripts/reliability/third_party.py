"""Models that others wrote, installed from a registry, unedited and small: numbers, bytes and times at stages 0 to 3.

    pip install -e '.[third-party,gpu-compiler,tpu-compiler]'            # and google-tunix, for its models
    python scripts/reliability/third_party.py --out third_party.tsv      # no accelerator
    python scripts/reliability/third_party.py --only gpt2 t5 --stages 3 --targets

Each model runs in a process of its own, so that one which fails is a row with its error. Columns: parameters in
thousands; the largest relative difference of three losses from a plain Flax and Optax loop on one device, of all stages
on eight simulated ones; parameters above 4096 elements that stay replicated at stage 3, and that are gathered before
the model runs; for each target, the bytes that each device sends in a step over the paper's, the worst of stages 1 to
3, with a ! where the contract is broken or stage 0 sends more than jit alone does; the CPU time to trace (layout,
initialisation and step, lowered; both a second time in a process), and to compile for eight simulated devices, over
that of the plain loop's.
Exits 1 if a model fails, is further off than 1e-4, or breaks its contract.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, NUM_STEPS, TOLERANCE = 16, 32, 3, 1e-4
VOCABULARY, WIDTH, HEADS, CLASSES, PIXELS = 1024, 256, 4, 128, 32
QUICK = ["--xla_backend_optimization_level=0", *["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version(
    "jaxlib").startswith("0.10.")]
"""XLA flags: programs of simulated devices compile in a third of the time, and send the same."""
LARGE = 4096
"""Elements from which on a parameter that stays replicated is counted."""

BERT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH, "max_position_embeddings": 64}
VIT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
       "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}
LLAMA = {**BERT, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS,
         "max_position_embeddings": 128}  # transformers cuts its table of angles at this many columns
BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH, "max_position_embeddings": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": 2,
      "num_heads": HEADS}
RESNET = {"embedding_size": 64, "hidden_sizes": [128, 256], "depths": [1, 1], "num_labels": CLASSES}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model. make: returns (model, loss, batch); the model has its values, or is a Linen module or NNX factory."""

    package: str
    make: Callable[[], tuple[Any, Any, Any]]
    note: str = ""


def arrays(length=LENGTH):
    """Whatever a model may be called with, by the names that arguments have in transformers."""
    import numpy as np

    rng = np.random.default_rng(0)
    mask = (np.arange(length) < rng.integers(length // 2, length + 1, (ROWS, 1))).astype(np.int32)
    tokens = {"input_ids": rng.integers(4, VOCABULARY, (ROWS, length)).astype(np.int32), "attention_mask": mask,
              "position_ids": np.tile(np.arange(length, dtype=np.int32), (ROWS, 1)),
              "token_type_ids": np.zeros((ROWS, length), np.int32)}
    return {**tokens, **{f"decoder_{name}": leaf for name, leaf in tokens.items()},
            "pixel_values": rng.normal(size=(ROWS, PIXELS, PIXELS, 3)).astype(np.float32),
            "input_features": rng.normal(size=(ROWS, 16, 2 * length)).astype(np.float32),
            "input_values": rng.normal(size=(ROWS, 1600)).astype(np.float32)}


def cross_entropy(logits, targets):
    """The mean over all positions; a target for each example, or for each position."""
    import jax.numpy as jnp
    import optax

    targets = targets.reshape(targets.shape + (1,) * (logits.ndim - 1 - targets.ndim))
    targets = jnp.broadcast_to(targets, logits.shape[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def transformers(name: str, config: dict[str, Any], targets: str = "input_ids", **options: Any) -> Case:
    """A Flax model of transformers with the parameters that it makes itself.

    targets: which of `arrays` it predicts; "classes": a class for each example; "pairs": which text has which image.
    options: of its call.
    """
    def make():
        import jax.numpy as jnp
        import numpy as np

        if "T5" in name:
            with_old_clip()
        cls = getattr(importlib.import_module("transformers"), f"Flax{name}")
        model = cls(cls.config_class(**config), seed=0)  # called as deterministic, so that nothing is dropped
        accepted, known = inspect.signature(type(model.module).__call__).parameters, arrays()
        names = [name for name in accepted if name in known and name not in options]
        nothing = {"head_mask": None} if "head_mask" in accepted else {}
        batch = {name: known[name] for name in names}
        if targets == "classes":
            batch["targets"] = np.random.default_rng(1).integers(0, CLASSES, ROWS)
        elif targets != "pairs":
            batch["targets"] = known[targets]

        def loss(module, batch):
            out = module(**{name: batch[name] for name in names}, **nothing, **options, return_dict=True)
            if targets == "pairs":
                return cross_entropy(out.logits_per_text, jnp.arange(ROWS))
            return cross_entropy(out.logits, batch["targets"])

        return model, loss, batch

    return Case("transformers", make, "jnp.clip(a_max=), which JAX has removed, put back" if "T5" in name else "")


def with_old_clip():
    """Puts an argument name back that `jnp.clip` had when the last Flax models of transformers were written."""
    import jax.numpy as jnp

    now: Any = jnp.clip
    jnp.clip = lambda array, *bounds, a_max=None, **named: now(array, *bounds, **(
        named if a_max is None else {**named, "max": a_max}))


def tunix(family: str, cls: str, **config: Any) -> Case:
    """A decoder of tunix, an NNX module, whose parameters have partitioning metadata for the axes fsdp and tp."""
    def make():
        import jax.numpy as jnp
        from flax import nnx

        module = importlib.import_module(f"tunix.models.{family}.model")
        known = {"num_layers": 2, "vocab_size": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": 2 * WIDTH,
                 "num_heads": HEADS, "head_dim": WIDTH // HEADS, "num_kv_heads": 2, "rope_theta": 10000,
                 "norm_eps": 1e-6, **config}
        model = getattr(module, cls)(module.ModelConfig(**known), rngs=nnx.Rngs(0))

        def loss(model, batch):
            causal = jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool)) & (batch["attention_mask"][:, None] > 0)
            logits, _ = model(batch["input_ids"], batch["position_ids"], None, causal)
            return cross_entropy(logits, batch["targets"])

        batch = {name: arrays()[name] for name in ("input_ids", "attention_mask", "position_ids")}
        return model, loss, {**batch, "targets": batch["input_ids"]}

    return Case("google-tunix", make)


CASES = {
    "gpt2": transformers("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}),
    "gptj": transformers("GPTJForCausalLM", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "rotary_dim": 32}),
    "gpt-neo": transformers("GPTNeoForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS,
        "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 16}),
    "bert": transformers("BertForMaskedLM", BERT),
    "roberta": transformers("RobertaForMaskedLM", {**BERT, "max_position_embeddings": 72}),
    "albert": transformers("AlbertForMaskedLM", {**BERT, "embedding_size": 128}),
    "electra": transformers("ElectraForMaskedLM", {**BERT, "embedding_size": WIDTH}),
    "distilbert": transformers("DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 2 * WIDTH,
        "max_position_embeddings": 64}),
    "roformer": transformers("RoFormerForMaskedLM", BERT),
    "big-bird": transformers("BigBirdForMaskedLM", {**BERT, "attention_type": "original_full"}),
    "t5": transformers("T5ForConditionalGeneration", T5, "decoder_input_ids"),
    "long-t5": transformers("LongT5ForConditionalGeneration", {**T5, "local_radius": 7}, "decoder_input_ids"),
    "bart": transformers("BartForConditionalGeneration", BART, "decoder_input_ids"),
    "pegasus": transformers("PegasusForConditionalGeneration", BART, "decoder_input_ids"),
    "opt": transformers("OPTForCausalLM", {**BERT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": transformers("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}),
    "xglm": transformers("XGLMForCausalLM", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH,
        "max_position_embeddings": 64}),
    "llama": transformers("LlamaForCausalLM", LLAMA),
    "mistral": transformers("MistralForCausalLM", LLAMA),
    "gemma": transformers("GemmaForCausalLM", LLAMA),
    "whisper": transformers("WhisperForConditionalGeneration", {
        **BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, "decoder_input_ids"),
    "wav2vec2": transformers("Wav2Vec2ForCTC", {
        **BERT, "vocab_size": CLASSES, "conv_dim": [128, 128], "conv_stride": [10, 8], "conv_kernel": [10, 8],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
        "do_stable_layer_norm": True, "feat_extract_norm": "layer"}, "classes"),
    "vit": transformers("ViTForImageClassification", VIT, "classes"),
    "beit": transformers("BeitForImageClassification", VIT, "classes"),
    "dinov2": transformers("Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, "classes"),
    "clip": transformers("CLIPModel", {
        "text_config": BERT, "vision_config": VIT, "projection_dim": WIDTH}, "pairs"),
    "resnet": transformers("ResNetForImageClassification", RESNET, "classes", deterministic=False),
    "regnet": transformers("RegNetForImageClassification", {
        **RESNET, "groups_width": 64}, "classes", deterministic=False),
    "tunix-llama3": tunix("llama3", "Llama3"),
    "tunix-qwen2": tunix("qwen2", "Qwen2"),
    "tunix-qwen3": tunix("qwen3", "Qwen3"),
}


def plain_loop(model: Any, loss: Any, batch: Any) -> tuple[Any, Any, Any]:
    """(init, step, start): a train step of Flax and Optax alone; `init(batch)` is the state, but for the values."""
    import flax.linen as nn
    import jax
    import optax
    from flax import nnx
    from flax.core import unfreeze

    optimizer = make_optimizer()
    if not isinstance(model, nn.Module) and not hasattr(model, "module"):
        return plain_nnx_loop(nnx.split(model, nnx.Param, ...), loss, optimizer)
    module = getattr(model, "module", model)

    def init(batch):
        variables = unfreeze(nn.init(loss, module)(jax.random.key(0), batch))
        return variables, optimizer.init(variables["params"])

    def step(state, batch):
        variables, opt_state = state
        params, others = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}

        def loss_of(params):
            return nn.apply(loss, module, mutable=list(others))({"params": params, **others}, batch)

        (value, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return ({"params": optax.apply_updates(params, updates), **new}, opt_state), (value, optax.tree.norm(grads))

    own = unfreeze(model.params) if hasattr(model, "params") else init(batch)[0]
    variables = own if "params" in own else {"params": own}
    start = variables, optimizer.init(variables["params"])
    return init, step, start


def plain_nnx_loop(split: Any, loss: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """The same of an NNX module that is made already."""
    import jax
    import optax
    from flax import nnx

    graphdef, params, others = split

    def init(batch):
        return params, optimizer.init(params)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params, others), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, optax.tree.norm(grads))

    return init, step, (params, optimizer.init(params))


def make_optimizer():
    import optax

    return optax.adamw(3e-4, eps=1e-6)  # 1e-8 amplifies rounding where a gradient passes through zero


def timed(fun: Callable[[], Any]) -> tuple[Any, float]:
    """What `fun` returns, and the CPU seconds that it took: others may use the machine."""
    gc.collect()
    started = time.process_time()
    return fun(), time.process_time() - started


def measure(name: str, stages: list[int], targets: list[str], precision: str | None) -> dict[str, Any]:
    """All figures of one model, in this process."""
    import jax
    import numpy as np

    import zero_jax
    from zero_jax.xla import devices as xla_devices

    zero_jax.simulate_devices(8)
    case = CASES[name]
    model, loss, batch = case.make()
    row: dict[str, Any] = {"model": name, "package": f"{case.package} {importlib.metadata.version(case.package)}",
                           "note": case.note, "worst_loss": 0.0, "targets": {}}

    # The plain loop, and the times of its program.
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    init, plain_step, state = plain_loop(model, loss, batch)
    abstract_state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    for _ in range(2):  # the first time is for imports and for JAX's own caches
        gc.freeze()
        _, seconds = timed(lambda: jax.jit(lambda *args: init(*args)).lower(abstract))
        lowered, step_seconds = timed(lambda: jax.jit(lambda *args: plain_step(*args)).lower(abstract_state, abstract))
    row["plain_trace_s"] = seconds + step_seconds
    compiled, row["plain_compile_s"] = timed(lowered.compile)
    expected = []
    for _ in range(NUM_STEPS):
        state, (value, norm) = compiled(state, batch)
        expected.append((float(value), float(norm)))

    for stage in stages:
        def make(devices: Any = None, stage: int = stage, **options: Any) -> Any:
            return zero_jax.make_zero_train_step(
                model, stage, loss=loss, optimizer=make_optimizer(), mesh=zero_jax.make_mesh(devices=devices),
                **options)

        if stage == stages[0]:
            make().lower(abstract)
            gc.freeze()
        step = make()
        _, seconds = timed(lambda: step.lower_init(abstract))  # noqa: B023 (called at once)
        _, step_seconds = timed(lambda: step.lower(abstract))  # noqa: B023
        row.setdefault("traces_s", {})[stage] = seconds + step_seconds
        row["trace_s"] = max(row["traces_s"].values())
        state, losses = step.init(jax.random.key(0), batch), []
        for number in range(NUM_STEPS):
            (state, metrics), seconds = timed(lambda: jax.block_until_ready(step(state, batch)))  # noqa: B023
            losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if not number:  # traced before
                row["compile_s"] = max(row.get("compile_s", 0.0), seconds)
        difference = np.max(np.abs(np.array(losses) - expected) / np.abs(expected), axis=0)
        row["worst_loss"] = max(row["worst_loss"], float(difference[0]))
        row["worst_norm"] = max(row.get("worst_norm", 0.0), float(difference[1]))
        layout, contract = step.layout(), step.contract(abstract)
        row["params"] = layout.num_params
        if stage == 3:
            large = {each.name: each for each in contract.params if each.size >= LARGE}
            row["replicated"] = [name for name, each in large.items() if not each.gathered]
            row["up_front"] = [each.name for each in contract.params if each.up_front]

    for target in targets:
        devices = xla_devices.target_devices(target)
        results = row["targets"][target] = {}
        for stage in stages:
            if stage == 1 and 2 in stages:
                continue  # one program (zero_jax/stages.py says why)
            step = zero_jax.make_zero_train_step(
                model, stage, loss=loss, optimizer=make_optimizer(), mesh=zero_jax.make_mesh(devices=devices),
                precision=precision)
            compiled_step, seconds = timed(lambda: step.compiled_step(abstract))  # noqa: B023
            report, size = compiled_step.report, 2 if precision == "bf16" else 4
            ideal = step.stage.communication * layout.num_params * size * (len(devices) - 1) / len(devices)
            results[stage] = {"ratio": report.communication_bytes / ideal, "violations": list(report.violations),
                              "report": str(report), "compile_s": seconds}
            if stage == 0:  # which XLA alone reduces; a tied embedding twice
                sent = data_parallel_bytes(plain_step, abstract_state, abstract, step.mesh)
                if report.communication_bytes > 1.01 * sent + LARGE:
                    results[stage]["violations"].append(f"jit alone sends {sent:,.0f} bytes")
    return row


def data_parallel_bytes(plain_step: Any, state: Any, batch: Any, mesh: Any) -> float:
    """What each device sends in a step of the plain loop, jitted with its batch over all devices of `mesh`."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zero_jax.xla import hlo
    from zero_jax.xla.devices import compiled_for

    def on(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if leaf.ndim else P())), tree)

    lowered = jax.jit(plain_step, out_shardings=NamedSharding(mesh, P())).lower(
        on(state, P()), on(batch, P(mesh.axis_names)))
    return hlo.communication_bytes(compiled_for(lowered, mesh.devices.flat[0], {}).as_text())


def cells(row: dict[str, Any], targets: list[str]) -> list[str]:
    """A row of the table."""
    if "error" in row:
        return [row["model"], "", "failed", *[""] * (4 + len(targets)), row["error"].splitlines()[-1][:90]]
    ratios = []
    for target in targets:
        stages = row["targets"][target].values()
        broken = "!" if any(each["violations"] for each in stages) else ""
        worst = max((each["ratio"] for stage, each in row["targets"][target].items() if int(stage)), default=math.nan)
        ratios.append(f"{worst:.3f}{broken}")
    counts = (str(len(row[key])) if key in row else "" for key in ("replicated", "up_front"))  # of stage 3
    return [row["model"], f"{row['params'] / 1e3:,.0f}", f"{row['worst_loss']:.0e}", *counts, *ratios,
            f"{row['trace_s'] / row['plain_trace_s']:.1f}", f"{row['compile_s'] / row['plain_compile_s']:.1f}",
            "; ".join(filter(None, (row["package"], row["note"])))]


def is_right(row: dict[str, Any]) -> bool:
    """Whether a model trains on the numbers of one device and keeps its contracts."""
    return "error" not in row and row["worst_loss"] <= TOLERANCE and row["worst_norm"] <= 10 * TOLERANCE and not any(
        each["violations"] for stages in row["targets"].values() for each in stages.values())


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own; an error is a row."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", file.name, "--only", name, "--stages",
                   *map(str, args.stages), "--targets", *args.targets]
        command += ["--precision", args.precision] if args.precision else []
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, env={
            **os.environ, "XLA_FLAGS": " ".join(QUICK), "JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
        written = Path(file.name).read_text()
    if done.returncode or not written:
        return {"model": name, "error": done.stderr.strip() or f"status {done.returncode}"}
    return json.loads(written)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models; default: all")
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--targets", nargs="*", default=["h100:8", "v5e:2x4"], help="may be none")
    parser.add_argument("--precision", help="of the steps for targets; default: as the model declares")
    parser.add_argument("--out", type=Path, help="a TSV file; JSON with every stage goes beside it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.worker.write_text(json.dumps(measure(args.only[0], args.stages, args.targets, args.precision)))
        return 0
    header = ["model", "params k", "loss off by", "replicated", "up front",
              *(f"{target} over ideal" for target in args.targets), "trace x", "compile x", "from"]
    rows, lines = [], ["\t".join(header)]
    print(lines[0], flush=True)
    for name in args.only:
        rows.append(run(name, args))
        lines.append("\t".join(cells(rows[-1], args.targets)))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")
            args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    right = sum(map(is_right, rows))
    print(f"{right} of {len(rows)} are right")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    sys.exit(main())
