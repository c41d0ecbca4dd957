"""Two processes of two devices each train one run: the same numbers, one end.

The tests share few runs, because a process needs 13 s of a core. In the normal run two processes
train until one is told to stop. The same processes then go on to the end. This process trains the
same run alone, on four devices. `--full` adds a kill, a hang, an uninterrupted run of two
processes, and a process that finds no other.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import train.loop
import train.outputs
from models.llama_hf import load_pretrained
from models.sharding import make_mesh
from support.faults import process_flags, timeless
from train.checkpoints.checkpoint import Checkpoints
from train.cli.command_line import parse_command_line
from train.data import BYTES
from train.loop import run
from train.step import abstract_state

ROOT = Path(train.loop.__file__).parents[1]
HEARTBEAT_S = 5
STEP_TIMEOUT_S = 6
FLAGS = """--model.hidden-size 16 --model.intermediate-size 32 --model.num-hidden-layers 1
    --model.num-attention-heads 2 --model.num-key-value-heads 2 --model.head-dim 8
    --data.sequence-length 16 --data.batch-size 4 --data.accumulation-steps 2
    --optimizer.warmup-steps 1 --steps 12 --eval-every 6 --eval-batches 1 --log-every 1
    --checkpoint.every 3 --checkpoint.keep 9 --mesh.fsdp 2 --mesh.tensor 2""".split()
QUIET = ["--sample-tokens", "0", "--no-save"]

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def data_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"the quick brown fox jumps over {i}\n"}) for i in range(300)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return [f"--data.path={folder / 'text.jsonl'}", f"--data.cache-dir={folder / 'cache'}"]


def mesh_of_four():
    return make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_flags):
    """Configuration and folder of the run in one process."""
    flags = [*FLAGS, *QUIET, *data_flags, f"--runs-dir={tmp_path_factory.mktemp('alone')}"]
    config = parse_command_line(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh_of_four())
        return config, run(config)


def start(faults, config_flags, runs_dir, *, runs=1, environments=({}, {}), process_options=None):
    """Starts two processes.

    Args:
      faults: Fault of each process and its step. The fault waits for the checkpoint before the
        step.
      config_flags: Flags of both processes after FLAGS.
      runs_dir: Folder for the run.
      runs: Number of times that each process calls the training loop.
      environments: Variables of each process.
      process_options: Flags of each process, which say how it finds the other.
    """
    usual = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
    usual["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    script = str(Path(__file__).with_name("run_with_fault.py"))
    flags = [*FLAGS, *config_flags, f"--runs-dir={runs_dir}"]
    processes = []
    each = zip(faults, process_options or process_flags(2), environments, strict=True)
    for (fault, step), options, environment in each:
        saved = runs_dir / "demo" / "checkpoints" / str((step - 1) // 3 * 3)
        process = subprocess.Popen(
            [sys.executable, script, fault, str(step), str(saved), str(runs), *options, *flags],
            cwd=ROOT,
            env=os.environ | usual | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    return processes


@dataclasses.dataclass
class End:
    status: int
    printed: str
    errors: str
    at_s: float = 0.0

    def lines(self):
        """The lines of errors, without the logs of libraries."""
        return [line for line in self.errors.splitlines() if line.startswith(("error", "Trace"))]


def ends(processes):
    """How all processes ended, and when."""
    found = {}

    def wait(process):
        printed, errors = process.communicate(timeout=180)
        found[process] = End(process.returncode, printed, errors, time.monotonic())

    threads = [threading.Thread(target=wait, args=[process]) for process in processes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
    assert len(found) == len(processes), "a process did not end"
    return [found[process] for process in processes]


def slurm():
    """The variables that srun sets for each process; JAX makes the port from the job's number."""

    def is_free(job):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", job % 2**12 + 65535 - 2**12 + 1)) != 0

    job = next(job for job in range(os.getpid(), os.getpid() + 100) if is_free(job))
    shared = {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    return [shared | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in ("0", "1")]


CALM = ("none", 0)


@pytest.fixture(scope="module")
def story(tmp_path_factory, data_flags):
    """The folder of the run of two processes, and how they ended.

    Process 1 gets SIGTERM. Both processes stop, call the loop again, and finish the run.
    """
    runs_dir = tmp_path_factory.mktemp("together")
    flags = [*data_flags, "--save", "--sample-tokens", "4"]
    options = [["--distributed.cluster=slurm", f"--distributed.heartbeat-timeout-s={HEARTBEAT_S}"]]
    slurm_options = {"environments": slurm(), "process_options": options * 2}
    both = ends(start([CALM, ("terminate", 6)], flags, runs_dir, runs=2, **slurm_options))
    for end in both:
        assert end.status == 0 and not end.lines(), end.errors
    return runs_dir / "demo", both


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, data_flags):
    """The folder of a run with a kill and a hang, and how the two processes ended each time."""
    runs_dir = tmp_path_factory.mktemp("faulty")
    flags = [*QUIET, *data_flags]
    limit = f"--distributed.step-timeout-s={STEP_TIMEOUT_S}"
    found = {"killed": ends(start([CALM, ("kill", 6)], flags, runs_dir))}
    found["stuck"] = ends(start([CALM, ("hang", 8)], [*flags, limit], runs_dir))
    found["finished"] = ends(start([CALM, CALM], flags, runs_dir))
    assert [end.status for end in found["finished"]] == [0, 0]
    return runs_dir / "demo", found


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_flags):
    """The folder of a run of two processes that nothing interrupts."""
    runs_dir = tmp_path_factory.mktemp("whole")
    first, second = ends(start([CALM, CALM], [*QUIET, *data_flags], runs_dir))
    assert first.status == second.status == 0, first.errors + second.errors
    return runs_dir / "demo"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, data_flags, alone):
    """Two processes resume a checkpoint of one process, until the second is told to stop."""
    runs_dir = tmp_path_factory.mktemp("stopped")
    copy_with(alone[1], runs_dir / "demo", 6)
    faults = [CALM, ("terminate", 9)]
    return runs_dir / "demo", ends(start(faults, [*QUIET, *data_flags], runs_dir))


def copy_with(folder, to, step):
    """A copy of a run with one of its checkpoints."""
    shutil.copytree(folder, to)
    for path in (to / "checkpoints").iterdir():
        if path.name != str(step):
            shutil.rmtree(path)


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


def state_of(config, folder, mesh):
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        restored = checkpoints.restore(abstract_state(config, mesh))
    assert restored is not None
    return restored


def losses_of(folder):
    return [row["loss" if "loss" in row else "val_loss"] for row in rows_of(folder)]


def test_losses_are_those_of_one_process(story, alone):
    """The losses differ by the rounding of sums in another order."""
    losses = losses_of(story[0])
    assert len(losses) == len(set(losses)) == 12 + 3
    np.testing.assert_allclose(losses, losses_of(alone[1]), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("interrupted", ["story", "faulty"])
def test_an_interrupted_run_ends_as_the_whole_one_to_the_bit(interrupted, whole, alone, request):
    folder, _ = request.getfixturevalue(interrupted)
    config, _ = alone
    assert rows_of(folder) == rows_of(whole)
    step, state = state_of(config, whole, mesh_of_four())
    got_step, got = state_of(config, folder, mesh_of_four())
    assert step == got_step == 12
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(state))


def test_model_and_sample(story, alone):
    """Parameters that no process has whole are written, and generate text."""
    mesh = mesh_of_four()
    config = dataclasses.replace(alone[0], sample_tokens=4)
    with jax.set_mesh(mesh):
        params = state_of(config, story[0], mesh)[1].params
        sample = train.outputs.sample(config, BYTES, params, 0.0)
    model = load_pretrained(story[0] / "model")
    saved = jax.device_get(nnx.state(model, nnx.Param))
    chex.assert_trees_all_equal(saved, jax.device_get(params))
    assert f"--- sample at temperature 0.0 ---\n{sample}\n" in story[1][0].printed
    assert (story[0] / "report.html").exists()


def test_one_process_writes_and_prints(story):
    first, second = story[1]
    assert "compiled the step in" in first.printed and "step " in first.printed
    # Both processes have lines of Gloo.
    assert "compiled" not in second.printed and "step " not in second.printed
    config = json.loads((story[0] / "config.json").read_text())
    assert config["environment"]["num_processes"] == 2
    assert config["environment"]["num_devices"] == 4


def test_text_is_tokenized_once_by_processes_that_start_at_once(story, data_flags):
    cache = Path(data_flags[1].partition("=")[2])
    assert len(list(cache.iterdir())) == 1
    assert "tokens in 2" in story[1][0].printed


def stopped_after(end):
    (step,) = re.findall(r"stopped after step (\d+);", end.printed)
    return int(step)


def test_a_signal_to_one_process_stops_both_after_the_same_step(story):
    folder, (first, _) = story
    step = stopped_after(first)
    assert 3 < step < 12
    assert f"going on after step {step} of 12" in first.printed
    assert (folder / "checkpoints" / str(step)).is_dir()


def assert_death_is_told(first, killed):
    """Process 1 was killed, and process 0 ended with one line."""
    assert killed.status == -signal.SIGKILL
    assert first.status == 1
    assert first.lines() == [
        "error: process 1 gave no sign of life for 5 s: it was killed or stopped, or its machine "
        "cannot be reached. The same commands go on from the last checkpoint, if there is one"
    ]
    # Process 0 lingers for some seconds, and the machine may be busy.
    assert HEARTBEAT_S - 2 < first.at_s - killed.at_s < HEARTBEAT_S + 20


@pytest.mark.full
def test_the_death_of_a_process_ends_the_other_with_one_line(faulty):
    assert_death_is_told(*faulty[1]["killed"])


@pytest.mark.full
def test_a_hang_names_the_step_and_shows_where(faulty):
    first, stuck = faulty[1]["stuck"]
    assert "going on after step 3 of 12" in first.printed
    assert first.status == stuck.status == 1
    for end, what in ((first, "process 0: step 8"), (stuck, "process 1: the batch of step 8")):
        (line,) = end.lines()
        assert line.startswith(f"error: {what} was not finished within {STEP_TIMEOUT_S} s (--dis")
    assert re.search(r'loop\.py", line \d+ in _log\n', first.errors)
    assert re.search(r'run_with_fault\.py", line \d+ in batch\n', stuck.errors)


@pytest.mark.full
def test_from_four_devices_to_two_processes_to_two_devices(
    stopped, alone, tmp_path, monkeypatch, capsys
):
    folder, (first, second) = stopped
    assert first.status == second.status == 0, first.errors + second.errors
    assert "going on after step 6 of 12" in first.printed
    step = stopped_after(first)
    assert 8 <= step < 12
    copy_with(folder, tmp_path / "demo", step)
    mesh = make_mesh(data=2, fsdp=1, devices=jax.devices()[:2])
    monkeypatch.setattr(train.loop, "mesh_of", lambda config: mesh)
    folder = run(dataclasses.replace(alone[0], runs_dir=tmp_path))
    assert f"going on after step {step} of 12" in capsys.readouterr().out
    losses = losses_of(folder)
    assert len(losses) == 12 + 3
    np.testing.assert_allclose(losses, losses_of(alone[1]), rtol=1e-5)


# Processes without a training run


PROGRAM = """
import os
import signal
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from pathlib import Path
from models.sharding import make_mesh
from train import distributed
from train.outputs import new_run_dir

jax.config.update("jax_num_cpu_devices", 2)
with distributed.started(distributed.flags(sys.argv[3:])):
    me = jax.process_index()
    folder = distributed.of_first(lambda: str(new_run_dir(Path(sys.argv[1]), "run")))
    mesh = make_mesh(data=1, fsdp=4)
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = np.arange(8)
    votes = distributed.StopVote(mesh)
    stops = [votes.stops(me == 1 and step == 2) for step in range(5)]
    array = distributed.to_devices({"a": whole}, split)["a"]
    print(folder, distributed.all_say(True), distributed.all_say(me == 0), stops, file=sys.stderr)
    print("gathered", distributed.gathered(array).tolist(), file=sys.stderr, flush=True)
    # Process 0 may still receive data from process 1, which must not end before it has sent them.
    distributed.of_first(lambda: "gathered")
    if me == 1 and sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 1:
        sys.exit("error: no room")
    distributed.all_say(True)
"""


def ends_of_program(folder, ending):
    """How two processes of PROGRAM end, of which process 1 is killed or has an error."""
    return ends(
        [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), ending, *flags],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for flags in process_flags(2)
        ]
    )


def test_processes_agree_until_one_dies(tmp_path):
    first, second = ends_of_program(tmp_path, "kill")
    stops = [False, False, False, True, False]
    for end in (first, second):
        assert f"{tmp_path / 'run'} True False {stops}\n" in end.errors
        assert "gathered [0, 1, 2, 3, 4, 5, 6, 7]\n" in end.errors
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_death_is_told(first, second)


@pytest.mark.full
def test_the_error_of_a_process_ends_the_other_with_one_line(tmp_path):
    first, second = ends_of_program(tmp_path, "error")
    assert (first.status, second.status) == (1, 1)
    assert second.lines() == ["error: no room"]
    (line,) = first.lines()
    assert line.startswith("error: process 1 ended: no room. The same commands go on")


@pytest.mark.full
def test_a_process_that_does_not_come(tmp_path):
    flags = [*process_flags(2)[0], "--distributed.initialization-timeout-s=1"]
    result = subprocess.run(
        [sys.executable, "-m", "train", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: not all processes met at 127.0.0.1:")
    assert "within 1 s" in line
