"""The floors: which module may import which, read from the sources; nothing is imported here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 300

# A module imports from lower floors only, so that the table can be read from the top and the code from there too.
FLOORS: dict[str, tuple[int, str]] = {
    "tree": (0, "pytrees by path: names and bytes"),
    "stages": (0, "the stage table"),
    "state": (0, "what a step carries to the next"),
    "precision": (1, "dtypes that are stored, used and reduced"),
    "mesh": (0, "the device mesh and the roles of its axes"),
    "losses": (0, "the default loss, and what losses and optimizers tell as metrics"),
    "once": (0, "one gather per array and trace"),
    "rewrite": (0, "a traced function with its equations edited"),
    "targets": (0, "chips and slices of them: memory, rates and links; no JAX"),
    "hardware": (1, "devices that are described and not there"),
    "hlo_text": (0, "compiled text as a structure"),
    "hlo_groups": (0, "who takes part in a collective"),
    "safetensors_file": (0, "files of tensors: their headers, slices of them, and writing them"),
    "tensor_names": (1, "our names of parameters and those in a file"),
    "stored_part": (1, "parts of a leaf as it is stored"),
    "preemption": (0, "SIGTERM: save and end"),
    "watchdog": (0, "where a process hangs"),
    "launch": (0, "several processes on one machine"),
    "cluster": (1, "several processes as one run"),
    "interop": (8, "parameters from and to files of tensors"),
    "token_file": (0, "files of token ids"),
    "digest": (0, "a checksum of an array, however it is sharded"),
    "manifest": (0, "what a checkpoint holds, as JSON, and whether a step can take it"),
    "storage": (0, "where checkpoints lie: orbax"),
    "processes": (0, "agreement between the processes of a run"),
    "integrity": (1, "whether a checkpoint on disk is as it was saved"),
    "retention": (2, "a folder of checkpoints, and which of them are kept"),
    "flops": (0, "FLOPs of a model as it is written"),
    "generate": (0, "text from a model"),
    "data": (0, "tokens as global batches"),
    "trained": (1, "which parameters are trained"),
    "accounting": (1, "the paper's arithmetic: bytes, wire and FLOPs by formula"),
    "view": (0, "how a leaf is stored where its shape does not divide"),
    "guard": (0, "steps whose numbers are bad: loss scale, skipping, spikes"),
    "rounding": (0, "stochastic rounding"),
    "gather": (1, "the use of a stored parameter, and the reduce-scatter of its gradient"),
    "model_choice": (0, "the model that a name stands for"),
    "surroundings": (0, "what is there before a run: folders, checkpoints, accelerators; no JAX"),
    "config": (1, "what a run is told; no JAX, so that a mistake is answered at once"),
    "plan_config": (2, "what a plan is told; no JAX"),
    "export_config": (1, "what the command export is told; no JAX"),
    "batch": (1, "what a batch must be"),
    "reads": (1, "how a model reads its parameters, found by tracing"),
    "hlo_shape": (1, "the arrays of a result: bytes with padding, and memory space"),
    "hlo_alias": (2, "which results lie in the memory of an operand"),
    "buffers": (3, "what lies in memory while a program runs, and when"),
    "residual": (4, "what a step's temporaries are: gathered weights, gradients, activations"),
    "kept": (5, "what a traced step keeps from forward to backward"),
    "memory": (5, "where all the memory goes: by formula, as placed, as compiled"),
    "memory_table": (6, "that as tables"),
    "hlo_collective": (1, "one collective of a compiled program"),
    "hlo_cost": (1, "FLOPs and memory traffic of an instruction"),
    "hlo_flow": (1, "which parameter a collective serves"),
    "hlo_events": (2, "what a schedule is made of, and what it adds up to"),
    "hlo_schedule": (3, "a compiled program as events"),
    "hlo": (4, "the collectives that a compiled program runs"),
    "timing": (4, "when the events of a schedule run, and what a step waits for"),
    "contract_report": (2, "what is promised, what is sent for it, and both as text"),
    "contract": (6, "what a stage lets cross the wire, and whether a program keeps to it"),
    "corpus": (1, "text as tokens, and its held-out split"),
    "passes": (2, "edits of the traced loss, and what backward may keep"),
    "scatter": (1, "a sum of the devices' values, scattered over one mesh axis after another"),
    "partial": (2, "gradients as sums over devices, each made where its part is"),
    "transform": (1, "whether an optimizer can run in a step"),
    "widen": (2, "gradients computed in the dtype they are reduced in"),
    "elementwise": (1, "an optimizer on leaves as they are stored"),
    "choose": (2, "how one leaf is divided"),
    "divide": (3, "how all leaves of the state are divided"),
    "tensor": (1, "which dims tensor parallelism splits"),
    "layout": (4, "where every leaf of the state lies"),
    "matrices": (5, "optimizers of whole matrices: who computes which"),
    "linen": (2, "Linen modules as pure functions"),
    "nnx": (2, "NNX modules as pure functions"),
    "functional": (3, "where the two flavours part"),
    "optimizers": (5, "optimizers by name, and the bytes that they keep"),
    "report": (5, "what a run shows: tables, curves, bytes"),
    "blocks": (1, "what each block of a model keeps for the backward pass"),
    "activations": (2, "where activations lie: P_a, host memory, sequence parallelism"),
    "zero_r": (3, "what a step does about activations, buffers and hierarchies"),
    "chunked": (1, "cross entropy without whole logits"),
    "gradients": (5, "forward and backward of a batch or a microbatch"),
    "accumulate": (6, "a step's gradient from many microbatches"),
    "working_copy": (5, "the narrower copy of the parameters that the model reads"),
    "update": (6, "from the gradient to the next state"),
    "initial": (7, "the state before the first step"),
    "evaluate": (7, "a function of the model from a state: nothing changes"),
    "step": (8, "a train step: all of the above in the order of the paper"),
    "make": (9, "make_zero_train_step: what a user may say of a step"),
    "portable": (7, "a state by name and in true shapes, and back"),
    "checkpoint": (9, "checkpoints of a run: save anywhere, restore anywhere"),
    "planner": (10, "a step on hardware that is not there: memory, wire, time"),
    "loop": (9, "the training loop, its log and its curves"),
    "__init__": (11, "what users import"),
    "resume": (10, "going on with a run from its last good checkpoint"),
    "train": (12, "a training run as a function of its config"),
    "search": (11, "what fits"),
    "plan_report": (12, "a plan as tables, JSON and a figure"),
    "planning": (13, "the commands plan and inspect"),
    "exporting": (13, "the command export"),
    "cli": (14, "the command line, derived from the configs"),
    "__main__": (15, "python -m zero_jax"),
}
FLAX_ROOMS = {"linen", "nnx", "functional"}
ORBAX_ROOMS = {"storage"}


def imported(source: str) -> Iterator[str]:
    """Every dotted name that `source` imports, at any depth; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(source: str) -> Iterator[str]:
    """Every dotted expression in `source`: jax._src.core and its like need no import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def room_of(name: str) -> str | None:
    """The module of zero_jax that `name` is or lies in; `__init__` for the package itself, None for others'."""
    package, *rest = name.split(".")
    if package != "zero_jax":
        return None
    return rest[0] if rest and rest[0] in FLOORS else "__init__"


def faults(module: str, source: str) -> list[str]:
    """What breaks a rule in `source`, the text of zero_jax/`module`.py."""
    if module not in FLOORS:
        return [f"zero_jax/{module}.py stands on no floor: place it in FLOORS, tests/test_imports.py"]
    found = []
    for name in imported(source):
        room = room_of(name)
        if room is not None and FLOORS[room][0] >= FLOORS[module][0]:
            found.append(f"{module} (floor {FLOORS[module][0]}) imports {name} (floor {FLOORS[room][0]})")
        if name.split(".")[0] == "flax" and module not in FLAX_ROOMS:
            found.append(f"{module} imports {name}: only {sorted(FLAX_ROOMS)} know Flax")
        if name.split(".")[0] in ("orbax", "etils", "tensorstore") and module not in ORBAX_ROOMS:
            found.append(f"{module} imports {name}: only {sorted(ORBAX_ROOMS)} know orbax")
        if name.split(".")[0] == "models" or name == "relative import":
            found.append(f"{module}: {name}")
    lines = source.count("\n")
    return found + private(module, source) + ([f"{module}: {lines} lines"] if lines > MAX_LINES else [])


def private(module: str, source: str) -> list[str]:
    """What `source` takes from inside JAX."""
    names = {*imported(source), *attributes(source)}
    return [f"{module} uses {name}" for name in sorted(names) if name.startswith("jax._src") or "._src." in name]


def model_faults(module: str, source: str) -> list[str]:
    """What breaks a rule in `source`, the text of models/`module`.py: a model knows nothing of sharding."""
    found = [f"models/{module} imports {name}" for name in imported(source)
             if name.split(".")[0] == "zero_jax" or name.startswith("jax.sharding")]
    return found + private(module, source)


def sources(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).glob("**/*.py"))
    assert paths
    return paths


@pytest.mark.parametrize("path", sources("zero_jax"), ids=lambda path: path.stem)
def test_floors_of_zero_jax(path):
    assert faults(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", sources("models"), ids=lambda path: path.stem)
def test_models_know_nothing_of_sharding(path):
    assert model_faults(path.stem, path.read_text()) == []


def test_the_table_names_what_there_is():
    assert sorted(FLOORS) == [path.stem for path in sources("zero_jax")]
    assert all(purpose and "\n" not in purpose for _, purpose in FLOORS.values())


@pytest.mark.parametrize(
    "module, source, fault",
    [
        ("tree", "from zero_jax.step import make_zero_train_step", "tree (floor 0) imports"),
        ("tree", "from zero_jax import layout", f"imports zero_jax.layout (floor {FLOORS['layout'][0]})"),
        ("tree", "from zero_jax import mesh", "imports zero_jax.mesh (floor 0)"),
        ("tree", "import zero_jax.layout as l", "imports zero_jax.layout"),
        ("tree", "import zero_jax", f"imports zero_jax (floor {FLOORS['__init__'][0]})"),
        ("tree", "from zero_jax import make_mesh", f"(floor {FLOORS['__init__'][0]})"),
        ("tree", "def f():\n    from zero_jax import step\n", "imports zero_jax.step"),
        ("step", "from . import layout", "relative import"),
        ("step", "import flax.linen as nn", "know Flax"),
        ("step", "from flax import nnx", "know Flax"),
        ("checkpoint", "import orbax.checkpoint", "know orbax"),
        ("step", "from models import gpt2", "models.gpt2"),
        ("step", "from jax._src import core", "step uses jax._src.core"),
        ("step", "import jax._src.core", "step uses jax._src.core"),
        ("step", "import jax\njax._src.core.Jaxpr", "step uses jax._src"),
        ("step", "x = 1\n" * (MAX_LINES + 1), f"step: {MAX_LINES + 1} lines"),
        ("utils", "", "stands on no floor"),
    ],
)
def test_a_broken_rule_is_found(module, source, fault):
    assert any(fault in found for found in faults(module, source)), faults(module, source)


@pytest.mark.parametrize(
    "source", ["import zero_jax", "from zero_jax.mesh import make_mesh", "from jax.sharding import Mesh"])
def test_a_model_that_knows_of_sharding_is_found(source):
    assert model_faults("gpt2", source)


def test_what_is_allowed_is_not_refused():
    assert faults("linen", "import flax.linen as nn\nfrom zero_jax import once\nimport zero_jax.tree\n") == []
    assert model_faults("gpt2", "import flax.linen as nn\nimport jax\nfrom models.gpt2 import Config\n") == []
