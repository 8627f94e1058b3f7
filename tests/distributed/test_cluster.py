"""Several processes as one run: the launcher with stand-ins for Python, and real runs beside one process."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy as safetensors_numpy
from support import command_line
from support.numpy_gpt2 import hugging_face
from support.oracle import slow

from models import gpt2
from zero_jax.cli import main
from zero_jax.distributed import initialize as cluster
from zero_jax.distributed import launch
from zero_jax.distributed.launch import COORDINATOR, LOCAL_DEVICES, NUM_PROCESSES, PROCESS_ID

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # a stand-in may take its place
PLACE = {COORDINATOR: "127.0.0.1:1", NUM_PROCESSES: "2", PROCESS_ID: "0"}


@pytest.mark.parametrize(("environ", "message"), [
    ({COORDINATOR: "127.0.0.1:1"}, "ZERO_JAX_COORDINATOR is set, and ZERO_JAX_NUM_PROCESSES, ZERO_JAX_PROCESS_ID is"),
    (PLACE | {NUM_PROCESSES: "two"}, "ZERO_JAX_NUM_PROCESSES='two' in the environment is not an integer"),
    (PLACE | {PROCESS_ID: "-1"}, "ZERO_JAX_PROCESS_ID='-1'"),
    (PLACE | {PROCESS_ID: "2"}, "ZERO_JAX_PROCESS_ID=2 is not below ZERO_JAX_NUM_PROCESSES=2"),
])
def test_a_place_that_is_none(environ, message):
    with pytest.raises(ValueError, match=message):
        cluster.initialize(environ=environ)


def test_one_process_is_all():
    assert not cluster.initialize(environ={}) 
    assert cluster.choose_devices(3) == jax.devices()[:3]
    with pytest.raises(ValueError, match="devices=9, but 1 processes have 8"):
        cluster.choose_devices(9)


def test_devices_are_as_many_of_each_process(monkeypatch):
    class Device:
        platform = "cpu"

        def __init__(self, number):
            self.process_index = number // 4

    devices = [Device(number) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert cluster.choose_devices(4) == devices[:2] + devices[4:6]
    with pytest.raises(ValueError, match="devices=5 counts those of all 2 processes"):
        cluster.choose_devices(5)
    with pytest.raises(ValueError, match="2 processes have 4 of kind cpu each"):
        cluster.choose_devices(10)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes `launch` start a program of the test in place of Python; it sees `me`, its number."""
    def make(body: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!{PYTHON}\nimport json, os, signal, sys, time\n"
                        f"me = int(os.environ['{PROCESS_ID}'])\n{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(launch.sys, "executable", str(path))
        return path

    return make


def test_each_process_knows_its_place(stand_in, tmp_path):
    out = tmp_path / "told"
    stand_in(f"open(f'{out}{{me}}', 'w').write(json.dumps([dict(os.environ), sys.argv[1:]]))")
    assert launch.launch(["train", "--steps", "3"], processes=3, devices_per_process=2) == 0
    told = [json.loads(Path(f"{out}{number}").read_text()) for number in range(3)]
    assert [environ[PROCESS_ID] for environ, _ in told] == ["0", "1", "2"]
    for environ, args in told:
        assert args == ["-m", "zero_jax", "train", "--steps", "3"]
        assert environ[COORDINATOR] == told[0][0][COORDINATOR] and environ[COORDINATOR].startswith("127.0.0.1:")
        assert (environ[NUM_PROCESSES], environ[LOCAL_DEVICES]) == ("3", "2")


# Processes start in any order: the one that ends waits until the others have done what the test expects of them.
ALL_STARTED = ("from pathlib import Path\nfolder = Path(sys.argv[0]).parent\n(folder / f'started{me}').touch()\n"
               "while len(list(folder.glob('started*'))) < 3: time.sleep(0.01)\n")


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_one_that_fails_ends_all(stand_in, capfd, monkeypatch, end, status):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    stand_in(f"print('from', me, flush=True)\n{ALL_STARTED}"
             f"if me == 1: print('why', file=sys.stderr, flush=True); {end}\ntime.sleep(600)")
    assert launch.launch(["train"], processes=3, devices_per_process=1) == status
    out, err = capfd.readouterr()
    assert out == "from 0\n" and "[process 1] from 1\n[process 1] why\n" in err


def test_what_ends_well_is_shown_of_the_first_alone(stand_in, capfd):
    stand_in("print('from', me)")
    assert launch.launch(["train"], processes=2, devices_per_process=1) == 0
    assert capfd.readouterr() == ("from 0\n", "")


@pytest.mark.parametrize(("sent", "status", "end"), [
    ((signal.SIGTERM,), 75, True), ((signal.SIGINT, signal.SIGINT), 137, False),
    ((signal.SIGKILL,), -signal.SIGKILL, True)])
def test_signals_reach_every_process(stand_in, tmp_path, sent, status, end):
    """And its death does, where it has no time to pass anything on."""
    path = stand_in("def ended(*_):\n"
                    f"    open(f'{tmp_path}/ended{{me}}', 'w')\n"
                    "    sys.exit(75)\n"
                    "signal.signal(signal.SIGTERM, ended)\n"
                    "signal.signal(signal.SIGINT, lambda *_: None)\n"
                    f"sys.path.insert(0, '{ROOT}')\n"
                    "from zero_jax.distributed.launch import end_with_launcher\n"
                    "end_with_launcher()\n"
                    f"open(f'{tmp_path}/ready{{me}}', 'w')\nwhile True: time.sleep(0.05)")
    program = ("import sys\nfrom zero_jax.distributed import launch\nsys.executable = sys.argv[1]\n"
               "sys.exit(launch.launch(['train'], processes=2, devices_per_process=1))")
    with subprocess.Popen([PYTHON, "-c", program, path], cwd=ROOT) as process:
        wait_for(lambda: all((tmp_path / f"ready{number}").exists() for number in range(2)))
        for number in sent:
            process.send_signal(number)
            time.sleep(0.3)
        # Python joins signals that come before it has run the handler: on a busy machine two may have been one.
        wait_for(lambda: process.poll() is not None or process.send_signal(sent[-1]) if len(sent) > 1 else True)
        assert process.wait(timeout=60) == status
    if end:
        wait_for(lambda: all((tmp_path / f"ended{number}").exists() for number in range(2)))
    assert end == (tmp_path / "ended0").exists()


DIES_ONCE = ("from pathlib import Path\nlog = Path(sys.argv[0]).parent / f'log{me}'\n"
             "with log.open('a') as file: print(*sys.argv[3:], os.environ['ZERO_JAX_NUM_PROCESSES'], "
             "os.environ['ZERO_JAX_DEVICES_PER_PROCESS'], os.environ['ZERO_JAX_COORDINATOR'], file=file)\n"
             "first = len(log.read_text().splitlines()) == 1\n"
             f"{ALL_STARTED}"
             "if first and me == 1: END\nif first: time.sleep(600)")


@pytest.mark.parametrize(("end", "restarts", "status"), [
    ("os.kill(os.getpid(), signal.SIGKILL)", 1, 0), ("sys.exit(1)", 1, 0),
    ("os.kill(os.getpid(), signal.SIGKILL)", 0, 137),  # the control: without restarts it is not started again
    ("sys.exit(2)", 1, 2), ("sys.exit(75)", 1, 75)])  # nor after bad input, and when it was asked to end
def test_a_run_whose_process_dies_starts_again(stand_in, tmp_path, capfd, monkeypatch, end, restarts, status):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    stand_in(DIES_ONCE.replace("END", end))
    assert launch.launch(["train"], processes=3, devices_per_process=2, restarts=restarts) == status
    started = [(tmp_path / f"log{number}").read_text().splitlines() for number in range(3)]
    for lines in started:
        assert [line.rpartition(" ")[0] for line in lines] == ["train 3 2", "train --resume 3 2"][: 2 - (status != 0)]
    assert len({line.rpartition(" ")[2] for lines in started for line in lines}) == 2 - (status != 0), "one port each"
    told = "Restart 1 of 1, from the last good checkpoint, on 3 processes with 2 devices each."
    assert (told in capfd.readouterr().err) == (status == 0)


def test_it_starts_again_on_what_is_left(stand_in, tmp_path, capfd):
    stand_in(DIES_ONCE.replace("END", "os.kill(os.getpid(), signal.SIGKILL)"))
    assert launch.launch(["train", "--resume"], processes=3, devices_per_process=2, restarts=3,
                         smaller=lambda left: (left, 1)) == 0
    lines = [(tmp_path / f"log{number}").read_text().splitlines() for number in range(3)]
    assert [each.rpartition(" ")[0] for each in lines[1]] == ["train --resume 3 2", "train --resume --devices 2 2 1"]
    assert len(lines[2]) == 1 and "Process 1 was killed by SIGKILL. Restart 1 of 3" in capfd.readouterr().err


def test_what_is_left_divides_the_batch(monkeypatch):
    """The most processes, and the most devices of each, over which the same global batch divides."""
    chosen = {}
    monkeypatch.setattr(main, "launch", lambda command, *, smaller, **_: chosen.update(smaller=smaller) or 0)
    for batch, least, left, expected in ((24, 1, 2, (2, 4)), (9, 1, 2, (1, 3)), (12, 1, 2, (2, 3)), (24, 3, 2, (3, 4)),
                                         (24, 1, 0, (1, 4))):
        devices = "9" if batch == 9 else "12"
        done = command_line.run(
            "launch", "--processes", "3", "--restarts", "2", "--min-processes", str(least), "--", "train",
            "--batch-size", str(batch), "--devices", devices, "--model", "gpt2:tiny", "--seq-len", "32")
        assert (done.returncode, chosen["smaller"](left)) == (0, expected), done.stderr


@pytest.mark.parametrize(("args", "message"), [
    (["--restarts", "1", "--", "train", "--save-every", "0"], "restarts with --save-every 0"),
    (["--min-processes", "1", "--", "train"], "--min-processes without restarts"),
    (["--restarts", "1", "--min-processes", "3", "--", "train"], "--min-processes 3 is not within 1 to --processes 2"),
    (["--restarts", "-1", "--", "train"], "--restarts -1: give at least 0")])
def test_restarts_that_are_none(args, message):
    done = command_line.run("launch", *args)
    assert done.returncode == 2 and message in command_line.message(done)


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_been(tmp_path):
    trial = [PYTHON, ROOT / "scripts/reliability/elastic_test.py", "--runs", "1", "--kills", "1", "--processes", "3",
             "--folder", tmp_path]
    done = subprocess.run(trial, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1 runs" in done.stdout, done.stdout + done.stderr


def wait_for(done, seconds=60):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def run(out: Path, number: int, *args: str, cwd: Path = ROOT / "tests") -> subprocess.CompletedProcess:
    """`train` as `number` processes of 8 devices together; as it is without launch for 0."""
    start = ["launch", "--processes", str(number), "--devices-per-process", str(8 // number), "--"] if number else []
    command = [PYTHON, "-m", "zero_jax", *start, "train", "--batch-size", "8", "--seq-len", "16", "--max-bytes",
               "50000", "--no-html", "--out", str(out), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


def losses(out: Path) -> dict[str, list[float]]:
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows if name in row] for name in ("loss", "grad_norm", "validation_loss")}


@pytest.mark.grid
@pytest.mark.parametrize(("number", "args"), [
    slow(2, ["--model", "gpt2:tiny", "--steps", "3", "--samples", "0"]),
    slow(4, ["--model", "support.pairs:small", "--steps", "5", "--samples", "1", "--stage", "2",
             "--precision", "bf16"])])
def test_losses_are_those_of_one_process(tmp_path, number, args):
    """The same batches, each process reading its rows, and the same numbers but for the order of sums."""
    found = []
    for count in (0, number):
        done = run(tmp_path / str(count), count, *args)
        assert done.returncode == 0, done.stderr
        found.append(losses(tmp_path / str(count)))
        lines = (tmp_path / f"{count}/train.jsonl").read_text().splitlines()
        assert len(json.loads(lines[0])["devices"]) == 8
        assert [json.loads(line).get("step") for line in lines[1:-1] if "loss" in json.loads(line)] == [
            *range(1, len(found[-1]["loss"]) + 1)], "one process wrote"
        assert done.stdout.count("validation loss") == 2
        assert done.stdout.count("continued by the model") == (number == 4)
    alone, together = found
    assert len(alone["loss"]) >= 3 and len(alone["validation_loss"]) == 1
    for name in alone:
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-5 if "bf16" in args else 2e-6)
    assert not np.allclose(together["loss"][1:], alone["loss"][:-1], rtol=1e-4), "losses of other steps differ"


PROGRAM = """
import sys
import jax, numpy as np, optax
from zero_jax import Names, export_params, import_params, make_zero_train_step
from zero_jax.distributed import initialize as cluster
cluster.initialize()
from models import gpt2
config = gpt2.Config(2, 32, 4, vocab_size=64, max_length=16)
step = make_zero_train_step(gpt2.build(config), 3, optimizer=optax.sgd(0.1))
batch = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in ("inputs", "targets")}
names = Names(**gpt2.huggingface(config))
state = import_params(sys.argv[1], step, step.init(jax.random.key(0), batch), batch, names=names)
print(len(export_params(sys.argv[2], state, step.layout(batch), names=names)), jax.process_count())
try:
    export_params("nowhere/x.safetensors", state, step.layout(batch))
except (ValueError, RuntimeError) as error:
    print(error)
"""


@pytest.mark.slow
def test_parameters_of_two_processes_are_read_and_written_whole(tmp_path):
    tensors = hugging_face(gpt2.Config(2, 32, 4, vocab_size=64, max_length=16))
    safetensors_numpy.save_file(tensors, tmp_path / "x.safetensors")
    started = [start_process(["-c", PROGRAM, str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors")],
                             number, address) for address in [f"127.0.0.1:{launch._free_port()}"] for number in (0, 1)]
    (first, error), (second, other) = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], error + other
    assert "1 2\n" in first and "out=nowhere/x.safetensors cannot be written" in first
    assert "0 2\n" in second and "Process 0 failed" in second
    written = safetensors_numpy.load_file(tmp_path / "y.safetensors")
    assert written.keys() == tensors.keys() and all((written[name] == tensors[name]).all() for name in tensors)


UNEVEN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import flax.linen as nn
import zero_jax
from zero_jax.checkpoint.plain_params import export_orbax
zero_jax.initialize()
step = zero_jax.make_zero_train_step(nn.Sequential([nn.Dense(8), nn.gelu, nn.Dense(1)]), stage=3,
                                     optimizer=optax.adam(1e-2), loss=lambda model, x: jnp.mean(model(x) ** 2))
x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
batch = jax.make_array_from_callback(x.shape, step.batch_sharding, x.__getitem__)
state = step.init(jax.random.key(0), batch)
with zero_jax.Checkpoints(sys.argv[1]) as checkpoints:
    restored = checkpoints.restore(step, batch).state if checkpoints.latest() is not None else None
    for _ in range(3):
        state, metrics = step(state, batch)
        print("LOSS", float(metrics["loss"]).hex())
    if restored is not None:
        print("RESTORED", float(step(restored, batch)[1]["loss"]).hex())
    for save in checkpoints.lock, lambda: checkpoints.save(step, state), lambda: export_orbax(
            sys.argv[1] + "_params", step.params(state)):
        try:
            save()
        except ValueError as error:
            print("REFUSED", error)
"""


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices_train_and_restore_and_save_nothing(tmp_path):
    def run(*devices):
        address = f"127.0.0.1:{launch._free_port()}"
        started = [start_process(["-c", UNEVEN, str(tmp_path / "run")], number, address, devices=each)
                   for number, each in enumerate(devices)]
        ended = [process.communicate(timeout=200) for process in started]
        assert [process.returncode for process in started] == [0, 0], ended
        found = [[line.split(maxsplit=1) for line in output.splitlines()
                  if line.split(" ")[0] in ("LOSS", "RESTORED", "REFUSED")] for output, _ in ended]
        assert found[0] == found[1]
        return [[value for word, value in found[0] if word == kind] for kind in ("LOSS", "RESTORED", "REFUSED")]

    even, uneven = run(2, 2), run(1, 3)
    assert even[1:] == [[], []] and uneven[0] == even[0] and len({*even[0]}) == 3
    model, optimizer, losses = nn.Sequential([nn.Dense(8), nn.gelu, nn.Dense(1)]), optax.adam(1e-2), []
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    first = jax.random.fold_in(jax.random.split(jax.random.key(0))[0], 0)  # as a step draws parameters
    moments = optimizer.init(params := model.init({"params": first}, x))
    for _ in range(4):
        loss, gradients = jax.value_and_grad(lambda params: jnp.mean(model.apply(params, x) ** 2))(params)
        updates, moments = optimizer.update(gradients, moments)
        params, losses = optax.apply_updates(params, updates), [*losses, float(loss)]
    np.testing.assert_allclose([float.fromhex(loss) for loss in uneven[0] + uneven[1]], losses, rtol=1e-6)
    assert len(uneven[2]) == 3 and all("and these have 1, 3: start each" in told for told in uneven[2]), uneven


def start_process(args: list[str], number: int, address: str, *, devices: int = 4) -> subprocess.Popen:
    """Python with `args` as one of two processes."""
    place = {COORDINATOR: address, NUM_PROCESSES: "2", PROCESS_ID: str(number), LOCAL_DEVICES: str(devices)}
    return subprocess.Popen([sys.executable, *args], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | place,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
