"""The checks of scripts/paper/tables.py: each section of the paper as a function that yields its numbers and ours.

Ours come from zero_jax/planning/formulas.py and arithmetic.py alone. GB are 1e9 bytes.
"""

import itertools
import re

import arithmetic
import printed as paper
from printed import Check, agrees, check, erratum, parse, text
from runs import ERRATA, RUNS, block_params

from models.gpt2 import PRESETS
from zero_jax.planning import formulas
from zero_jax.planning.formulas import PAPER, model_state_bytes
from zero_jax.stages import STAGES

GB, GIB, FP16 = 1e9, 2**30, 2
OPTIMIZER = ("master", "momentum", "variance")
NAMES = [stage.name for stage in STAGES]


def states(stage, num_params, **degrees):
    return sum(model_state_bytes(PAPER, stage, num_params, **degrees).values())


def model_states():
    num_params, data = paper.FIGURE_1_PARAMS, paper.FIGURE_1_DATA
    for stage, printed in enumerate(paper.FIGURE_1):
        yield check("bars of Figure 1", f"GB of {NAMES[stage]}", printed, states(stage, num_params, data=data) / GB)
    group = "reductions of section 5"
    for stage, printed in ((1, "4x"), (2, "8x")):
        limit = states(0, 1, data=1) / states(stage, 1, data=10**9)
        yield check(group, f"{NAMES[stage]}, N_d without end", printed, limit)
    yield check(group, "P_os+g+p, N_d = 64", "64x", states(0, 1, data=1) / states(3, 1, data=64))
    most = states(0, 1, data=1) / states(3, 1, data=64, model=16)
    yield check(group, "P_os+g+p, N_d = 64 and N_m = 16", "1024x", most)
    trillion = states(3, 1e12, data=64, model=16) / GB
    yield check(group, "GB of 1T on 1024 GPUs, N_d = 64 and N_m = 16", "<32", trillion)


def table_1():
    """Rows of the paper's table, cell by cell."""
    for data, row in paper.TABLE_1.items():
        columns = itertools.product(paper.TABLE_1_SIZES.items(), (1, 2, 3))
        for ((name, num_params), stage), printed in zip(columns, row.split(), strict=True):
            yield check("cells of Table 1", f"{name} {NAMES[stage]} N_d={data}", printed,
                        states(stage, num_params, data=data) / GB)


def table_1_bold():
    """Bold is the smallest N_d that fits, one in a column or none."""
    columns = itertools.product(paper.TABLE_1_SIZES.items(), (1, 2, 3))
    for index, ((name, num_params), stage) in enumerate(columns):
        bold = [data for data, row in paper.TABLE_1.items() if row.split()[index].endswith("*")]
        fits = [data for data in paper.TABLE_1 if states(stage, num_params, data=data) <= paper.TABLE_1_MEMORY][:1]
        yield Check("columns' bold cells", f"{name} {NAMES[stage]}", str(bold), str(fits), bold == fits)


def table_2_exact(stage, model):
    return arithmetic.max_params(PAPER, stage, paper.TABLE_2_MEMORY, data=paper.TABLE_2_DATA, model=model)


def table_2():
    """Rows beyond the first are the paper's rounded first row, times MP; and near what is exact."""
    for model, (row, _) in paper.TABLE_2.items():
        for stage, printed in enumerate(row.split()):
            exact, first = table_2_exact(stage, model), table_2_exact(stage, 1)
            value = exact if model == 1 else round(first, -8) * model
            ok = agrees(printed, value) and abs(exact / parse(printed)[0] - 1) < 0.03
            yield Check("cells of Table 2", f"{NAMES[stage]} MP={model}", printed, text(exact), ok)


def table_2_measured():
    for model, (_, measured) in paper.TABLE_2.items():
        share = parse(measured.split()[1])[0] / table_2_exact(1, model)
        yield check("ratios of measured to formula", f"P_os MP={model}", paper.TABLE_2_MEASURED, share,
                    "states are a lower bound of memory")


def communication():
    for stage, printed in paper.COMMUNICATION.items():
        sent = arithmetic.communication_elements(stage, 1)
        total, baseline = sum(sent.values()), sum(arithmetic.communication_elements(0, 1).values())
        values = (sent["reduce"], total - sent["reduce"], total, total / baseline)
        parts = ("reduce", "gather", "total", "over data parallel")
        for what, number, value in zip(parts, printed, values, strict=True):
            yield check("communication volumes", f"{NAMES[stage]}: {what}, per parameter", number, value)


def residuals():
    """Sections 3.2 and 6: activations, buffers, and what P_a sends."""
    group, gpt2 = "facts of ZeRO-R", dict(layers=48, hidden=1600, batch=32)
    large = dict(layers=125, hidden=8192, batch=32, length=1024)
    gpt2_states = model_state_bytes(PAPER, 0, 1.5e9, data=1)
    yield check(group, "1.5B: GB of fp16 weights", "3", gpt2_states["weights"] / GB)
    yield check(group, "1.5B: GB of fp16 gradients", "3", gpt2_states["gradients"] / GB)
    yield check(group, "1.5B: GB of optimizer states", "18", sum(gpt2_states[part] for part in OPTIMIZER) / GB)
    yield check(group, "1.5B: GB of model states", "24", states(0, 1.5e9, data=1) / GB)
    for length in (1000, 1024):
        total = FP16 * formulas.activation_elements(**gpt2, length=length) / GB
        yield check(group, f"1.5B: GB of activations, seq {length}", "~60", total)
    yield check(group, "1.5B: with checkpoints, root of 60", "~8", total**0.5, "the root of a number of GB")
    flops = [arithmetic.train_flops_per_token(1.5e9, 48, 1600, 1024, recompute=again) for again in (True, False)]
    yield check(group, "recomputation, % of FLOPs", "33", 100 * (flops[0] / flops[1] - 1))
    checkpoints = formulas.checkpoint_elements(**large)
    yield check(group, "100B: GB of checkpoints, one per layer", "~60", FP16 * checkpoints / GB)
    yield check(group, "100B, MP 16: per GPU, read as 1e9 elements", "~33", checkpoints / GB)
    split = formulas.checkpoint_elements(**large, model=16)
    yield check(group, "the same with P_a", "~2", split / GB)
    yield check(group, "P_a divides checkpoints by", "16x", checkpoints / split, "the batch may grow as much")
    one = dict(layers=1, hidden=8192, batch=1, length=1024)
    parallel, extra = arithmetic.tensor_parallel_elements(**one), arithmetic.partitioned_gather_elements(**one)
    yield check(group, "MP sends per block, seq x hidden", "12", parallel / (1024 * 8192))
    yield check(group, "P_a sends beside it, %", "<10", 100 * extra / parallel)
    yield check(group, "P_a sends beside it, %", "8.33", 100 * extra / parallel)
    for num_params, printed in ((1.5e9, "6"), (3e9, "12")):
        buffer = formulas.fused_buffer_bytes(num_params) / GB
        yield check(group, f"{text(num_params)}: GB of fused fp32 buffer", printed, buffer)
    grown = formulas.fused_buffer_bytes(3e9, limit=GB) / formulas.fused_buffer_bytes(1.5e9, limit=GB)
    yield check(group, "growth of C_B's from 1.5B to 3B", "1x", grown)
    for hidden in (768, 1600):
        yield check(group, f"FLOPs per byte of checkpoint, hidden {hidden}", ">10000",
                    arithmetic.arithmetic_intensity(hidden))
    ratio = arithmetic.arithmetic_intensity(3200) / arithmetic.arithmetic_intensity(1600)
    yield check(group, "the same from hidden 1600 to 3200", "2x", ratio)


def memory_of(name, config, *, gpus, model, batch):
    """(GB of states, GB of checkpoints) of a GPU in configuration `name` of Table 3: 12 L h^2 parameters, seq 1024."""
    stage, partitioned, on_host = paper.TABLE_3[name][:3] if name in paper.TABLE_3 else (0, False, False)
    checkpoints = FP16 * formulas.checkpoint_elements(
        config.num_layers, config.width, batch, 1024, model=model if partitioned else 1)
    model_states = states(stage, block_params(config), data=gpus // model, model=model)
    return model_states / GB, 0 if on_host else checkpoints / GB


def memory_of_run(run):
    """The same of a run: "ZeRO" is P_os+g with P_a, and baselines are stage 0."""
    name = "C4" if run.system == "ZeRO" else run.system
    return memory_of(name, run.config, gpus=run.gpus, model=run.tensor_parallel, batch=run.batch)


def table_3():
    group, sizes = "numbers of Table 3", {}
    for run in (run for run in RUNS if run.figure == 6):
        *_, label, blocks, model_states, checkpoints, total = paper.TABLE_3[run.system]
        sizes[run.system] = block_params(run.config)
        yield check(group, f"{run.system}: size", label, sizes[run.system])
        yield check(group, f"{run.system}: 12 L h^2", blocks, sizes[run.system])
        memory = memory_of_run(run)
        yield check(group, f"{run.system}: GB of states", model_states, memory[0])
        yield check(group, f"{run.system}: GB of checkpoints", checkpoints, memory[1])
        yield check(group, f"{run.system}: GB of both", total, sum(memory))
    order = " < ".join(sorted(sizes, key=sizes.get))
    yield Check("orderings", "Fig. 6: sizes", paper.TABLE_3_ORDER, order, order == paper.TABLE_3_ORDER)


def orderings():
    """Fig. 7: how memory changes from one configuration to the next. Less than 1 GB of 32 is no change."""
    for preset, batch, pair, printed in (
            ("40b-50x8192", 16, ("C1", "C2"), "falls"), ("40b-50x8192", 16, ("C4", "C5"), "no change"),
            ("100b", 32, ("C4", "C5"), "falls")):
        first, then = (sum(memory_of(name, PRESETS[preset], gpus=400, model=16, batch=batch)) for name in pair)
        ours = "falls" if first - then > 1 else "no change"
        yield Check("orderings", f"Fig. 7: {preset}, {pair[0]} to {pair[1]}", printed,
                    f"{ours}: {first:.1f} to {then:.1f} GB", ours == printed)


def name_fits(config, name):
    """Whether 12 L h^2 + V h is within 10 % of the size in the name of a preset."""
    size = parse(re.match(r"[\d.]+[bt]", name)[0].upper())[0]
    return abs((block_params(config) + config.vocab_size * config.width) / size - 1) < 0.10


def broken_rules(run):
    """The appendix's four rules, its total and the name of the model, where broken."""
    config, tensor = run.config, run.tensor_parallel
    broken = {
        "hidden % heads": config.width % config.num_heads, "hidden % MP": config.width % tensor,
        "heads % MP": config.num_heads % tensor, "GPUs % MP": run.gpus % tensor,
        "total": run.total_batch - run.batch * run.gpus // tensor,
        "size": not name_fits(config, run.preset) and run.preset != paper.MISLABELLED}
    return [rule for rule, left in broken.items() if left]


def name_of(run):
    return f"Fig. {run.figure} {run.system} {run.preset} {run.gpus} GPUs"


def too_large(run):
    return (run.figure, run.preset, run.system) == paper.TOO_LARGE


def runs():
    for run in RUNS:
        broken = broken_rules(run)
        total = run.batch * run.gpus // run.tensor_parallel
        yield Check("run configurations", name_of(run), str(run.total_batch), str(total), not broken, ", ".join(broken))
    for run in RUNS:
        if not too_large(run):
            yield check("runs within 32 GB by formula", name_of(run), "<32", sum(memory_of_run(run)))


def sizes():
    for preset, printed in paper.BLOCK_PARAMS.items():
        yield check("sizes by 12 L h^2", preset, printed, block_params(PRESETS[preset]))
    for preset, printed in paper.ALL_PARAMS.items():
        yield check("sizes with embeddings", preset, printed, PRESETS[preset].num_params)
    nlg = PRESETS["17b"]
    yield check("sizes by 12 L h^2", "Turing-NLG's head dim", "152", nlg.width / nlg.num_heads)


def headlines():
    group = "headline numbers"
    yield check(group, "400 GPUs at 38 TFlops, PFlops", "15", 400 * 38 / 1000)
    yield check(group, "38 of V100's 125 TFlops, %", ">30", 100 * 38 / 125)
    yield check(group, "Megatron 40B over two nodes: 5 of 125 TFlops, %", "<5", 100 * 5 / 125)
    yield check(group, "1T over BERT-Large's 0.33B", "~3000", 1e12 / 0.33e9)
    yield check(group, "3000 x 67 minutes, days", "140", 3000 * 67 / 60 / 24)


def others():
    """Other systems' formulas, from the same byte counts."""
    group = "others' formulas"
    for system, preset, stage, whole, formula in paper.PUBLISHED:
        counts = getattr(formulas, preset)
        split = dict.fromkeys((True, False), 0)
        for size, divided in counts.coefficients(stage).values():
            split[divided] += size
        ours = f"{split[False]} + {split[True]}/N"
        yield Check(group, system, formula, ours, ours == formula)
        if whole:
            yield check(group, f"{system}: whole", whole, sum(model_state_bytes(counts, 0, 1, data=1).values()))
    ask = dict(data=paper.T5_3B_DATA, largest_layer=paper.T5_3B_LARGEST_LAYER)
    host = formulas.UPDATE
    for (name, printed), (stage, away) in zip(
            paper.T5_3B_GIB.items(), ((1, ()), (2, ()), (3, ()), (3, host), (3, (*host, "weights"))), strict=True):
        sizes = model_state_bytes(formulas.DEEPSPEED, stage, paper.T5_3B, **ask, host=away)
        yield check(group, f"DeepSpeed t5-3b on 8 GPUs, {name}, GiB", printed, sum(sizes.values()) / GIB)


def errata():
    cells = [(parse(cell.paper)[0], float(cell.ours), cell) for cell in table_1()]
    cut = [(cell.paper, cell.ours) for printed, exact, cell in cells if int(exact) == printed != round(exact)]
    yield Check("errata", "Table 1: cells cut, not rounded, in 128B and 1T", f"{cut[0][0]}, ...", f"{cut[0][1]}, ...",
                len(cut) == 8, "eight of them; 7.5B is rounded")
    yield erratum("Table 2: P_os at MP 4 is 4 x the rounded 7.6B", "30.4B", "30.57B", table_2_exact(1, 4),
                  note="so are rows 2 to 5; exact values are in the table")
    checkpoints = formulas.checkpoint_elements(125, 8192, 32, 1024)
    yield erratum("100B, MP 16: 33 GB per GPU, read as fp16", "~33", "67.1", FP16 * checkpoints / GB,
                  note="2x apart from the 60 GB of the same model: elements, not bytes")
    yield erratum("100B, MP 16 with P_a: 2 GB per GPU, read as fp16", "~2", "4.19", FP16 * checkpoints / 16 / GB,
                  note="the same 2x")
    yield erratum("1.5B: 8 GB of checkpoints, one per layer", "~8", "5.03",
                  FP16 * formulas.checkpoint_elements(48, 1600, 32, 1024) / GB,
                  note="8 is the root of 60, whose unit is GB")
    yield erratum("1.5B: the same, one per sqrt(layers) layers and those recomputed", "~8", "9.45",
                  FP16 * formulas.sqrt_checkpoint_elements(48, 1600, 32, 1024) / GB,
                  note="the schedule that is called the root")
    for preset, (hidden, corrected) in paper.WRONG_HIDDEN.items():
        label = preset.upper()
        yield erratum(f"arXiv v3, Table 4: {label} with hidden {hidden}", f"~{label}", corrected,
                      12 * PRESETS[preset].num_layers * hidden**2, note=ERRATA[preset])
    odd = paper.MISLABELLED
    yield erratum(f"Fig. 4: {odd.upper()} of DDP, 40 x 1536", odd.upper(), paper.ALL_PARAMS[odd],
                  PRESETS[odd].num_params, note=ERRATA[odd])
    heads = PRESETS["17b"].num_heads
    yield Check("errata", "Turing-NLG: heads % MP at MP 16", "0", str(heads % 16), heads % 16 > 0 == heads % 4,
                ERRATA["17b"])
    totals = {run.system: sum(memory_of_run(run)) for run in RUNS if run.figure == 6}
    c2 = totals.pop("C2")
    yield Check("errata", "Table 3: C2 holds less than the other four, GB", f"{min(totals.values()):.1f}", f"{c2:.1f}",
                c2 < min(totals.values()) - 5, "by formula it could go beyond 60B")
    run = next(run for run in RUNS if too_large(run))
    yield erratum(f"{name_of(run)}: batch 32 without P_a, GB", "<32", "54.4", sum(memory_of_run(run)),
                  note="40.3 GB are checkpoints, one per layer: the run must have kept fewer, or partitioned them")
    code = model_state_bytes(formulas.DEEPSPEED, 2, paper.T5_3B, data=paper.T5_3B_DATA)
    yield erratum("DeepSpeed's documents: GiB of t5-3b at ZeRO-2", paper.T5_3B_GIB["ZeRO-2, documents"],
                  paper.T5_3B_GIB["ZeRO-2, code"], sum(code.values()) / GIB,
                  note="the documents have stage 1's formula")
