"""Several processes on one machine: one training, one program, one end. All of them are real."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jzero
import process_worker
import small
import waiting
from jzero.checkpoint import _inspect

HERE = pathlib.Path(__file__).parent
WORKER = HERE / "process_worker.py"
DEADLINE = 240  # seconds; a run takes about ten, on an idle machine
# Not the settings of conftest.py. Over gloo no scheduler may be chosen: processes would call
# collectives in different orders (docs/facts.md#gloo-pairs-collectives-by-order-alone).
COMPILES_FAST = "--xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax") < "0.11":
    COMPILES_FAST += " --xla_cpu_use_fusion_emitters=false"
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "PYTHONUNBUFFERED": "1",
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def by_hand(num_processes, num_devices):
    """The environment of each process, as a user would set it."""
    common = ENVIRONMENT | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} {COMPILES_FAST}",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(num_processes),
    }
    return [common | {"JAX_PROCESS_ID": str(i)} for i in range(num_processes)]


@contextlib.contextmanager
def started(command, environments, folder):
    """The processes; whatever is left of them is killed, and if the test fails all output is shown."""
    files = [open(folder / f"{i}.out", "w") for i in range(len(environments))]
    processes = [
        subprocess.Popen(
            [*map(str, command)], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        for env, file in zip(environments, files, strict=True)
    ]  # fmt: skip
    try:
        yield processes
    except BaseException:
        for i, process in enumerate(processes):
            print(f"---- process {i}, exit status {process.poll()}:\n{output(folder, i)}")
        raise
    finally:
        for process, file in zip(processes, files, strict=True):
            stop(process)
            file.close()


def stop(process):
    """Ends a process and its children; those of mpirun have groups of their own, and it ends them."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def output(folder, i):
    return (folder / f"{i}.out").read_text(errors="replace")


def wait_until(condition, what):
    waiting.wait_until(condition, what, DEADLINE)


def run(command, environments, folder):
    """Runs the processes to their ends."""
    with started(command, environments, folder) as processes:
        wait_until(
            lambda: (
                all(process.poll() is not None for process in processes)
                or any(process.poll() for process in processes)
            ),
            "all processes end",
        )
        assert [process.poll() for process in processes] == [0] * len(processes)


def found_by(scenario, num_processes, num_devices, folder):
    """What each process found out."""
    run([sys.executable, WORKER, scenario, folder], by_hand(num_processes, num_devices), folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(num_processes)]


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trains_as_one_process(num_processes, tmp_path):
    found = found_by("train", num_processes, 2, tmp_path)
    devices = jax.devices()[: 2 * num_processes]
    for name in process_worker.NAMES[num_processes]:
        assert [each[name] for each in found] == [found[0][name]] * num_processes
        report, losses, state = process_worker.training(devices, name, tmp_path)
        assert found[0][name]["report"] == report
        np.testing.assert_allclose(found[0][name]["losses"], losses, rtol=1e-5)
        saved = np.load(tmp_path / f"{name}.npz").values()
        for actual, leaf in zip(saved, jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(actual, leaf, rtol=1e-5, atol=1e-6)


def test_goes_on_with_fewer_processes(tmp_path):
    """Saved by four processes, gone on with by two of them, and by one: the same losses as of one."""
    four = found_by("first_half", 4, 1, tmp_path)
    two = found_by("second_half", 2, 2, tmp_path)
    mesh = small.mesh(data=4)
    (tmp_path / "whole").mkdir()
    whole = process_worker.go_on(tmp_path / "whole", 2 * process_worker.NUM_STEPS, mesh)
    assert four == [four[0]] * 4
    assert two == [two[0]] * 2
    np.testing.assert_allclose(four[0] + two[0], whole, rtol=1e-5)
    shutil.rmtree(tmp_path / "steps" / str(2 * process_worker.NUM_STEPS))
    one = process_worker.go_on(tmp_path, 2 * process_worker.NUM_STEPS, mesh)
    np.testing.assert_allclose(one, two[0], rtol=1e-5)


@pytest.fixture(scope="module")
def on_hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_hosts")
    return folder, found_by("on_hosts", 2, 2, folder)


@pytest.mark.slow
def test_each_process_has_its_part_of_state_on_the_hosts(on_hosts):
    _, found = on_hosts
    assert [each["rows"] for each in found] == [[10, 10], [10, 10]]  # of 37, padded
    assert [each["rows_of_each"] for each in found] == [[19, 19], [19, 19]]
    assert len({device for each in found for device in each["devices"]}) == 4
    for each in found:
        error, told = each["read"]
        assert error == "StateError"
        assert (
            "other processes have parts of LeafArray(shape=(37, 7), dtype=float32, in host memory, padded"
            in told
        )
        assert "Call train_step.unshard(state) on all processes" in told


@pytest.mark.parametrize("offload", [jzero.NoOffload(), jzero.HostCPU()], ids=str)
@pytest.mark.parametrize("saved", ["steps", "each"])
def test_state_of_several_hosts_is_restored_by_one_process(on_hosts, saved, offload):
    folder, _ = on_hosts
    train_step = jzero.shard_train_step(process_worker.train_step, memory=offload)
    new_state = process_worker.uneven_state
    state = jzero.restore(folder / saved / "1", train_step, jax.eval_shape(new_state))
    process_worker.check_parts(state, new_state())


def test_too_little_memory_on_one_of_several_hosts(on_hosts):
    _, found = on_hosts
    for each in found:
        error, told = each["too_little"]
        assert error == "ProcessError"
        assert "memory: enough on process 0, this process needs " in told
        error, told = each["all_too_little"]
        assert error == "OptionError"
        assert "and 1024 (1.0 KiB) are available" in told
        assert each["enough"] == []


@pytest.fixture(scope="module")
def one_start(tmp_path_factory):
    """The folder of each scenario that two processes ran one after the other, and what each found."""
    folder = tmp_path_factory.mktemp("one_start")
    (folder / "locked_out" / "locked").mkdir(parents=True)
    writer = folder / "locked_out" / "locked" / "_JZERO_WRITER"
    writer.write_text('["node7", "boot pid:[1]", 12, 34, "token"]')
    (folder / "data_goes_on").mkdir()
    first, _ = process_worker.data_goes_on(folder / "data_goes_on", 1)
    found = found_by("one_after_the_other", 2, 1, folder)
    (folder / "data_goes_on" / "first.json").write_text(json.dumps(first))
    return {name: (folder / name, [each[name] for each in found]) for name in found[0]}


@pytest.mark.slow
def test_data_iterators_of_several_processes(one_start):
    folder, found = one_start["uneven_places"]
    assert found == [{"step": 7, "process": 0}, {"step": 7, "process": 1}]
    told = process_worker.uneven_places(folder)
    assert "data iterators cannot go on from 2 to 1 processes: process 0 saved {'step': 7" in told


@pytest.mark.slow
def test_data_go_on_in_another_number_of_processes(one_start):
    """One, two and one: the order of one that is never interrupted, over the end of an epoch of 50."""
    folder, found = one_start["data_goes_on"]
    first = json.loads((folder / "first.json").read_text())
    last, _ = process_worker.data_goes_on(folder, 3)
    of_two = [
        [x for pair in zip(*batches, strict=True) for x in pair]
        for batches in zip(*[batches for batches, _ in found], strict=True)
    ]
    alone = process_worker.own_examples(12)
    assert [*first, *of_two, *last] == [next(alone).tolist() for _ in range(9)]


@pytest.mark.slow
def test_no_iterator_is_moved_if_one_process_cannot(one_start):
    _, found = one_start["data_goes_on"]
    for _, (one_has_none, _, state) in found:
        assert one_has_none[0] == "ProcessError"
        assert "data iterator: one on process 0, none on process 1" in one_has_none[1]
        assert state == {"next_index": 0}
    told = [one_refuses for _, (_, one_refuses, _) in found]
    assert [kind for kind, _ in told] == ["ProcessError", "CheckpointError"]
    assert "failed with CheckpointError" in told[0][1]
    assert "cannot go on from 1 to 2 processes: its pipeline has Filter" in told[1][1]


@pytest.mark.slow
def test_chunks_that_processes_share(one_start):
    folder, found = one_start["prime_shards"]
    assert found == [[[2502, 3], [5003]]] * 2
    train_step = jzero.shard_train_step(process_worker.decay, axes=jzero.Axes(min_shard_bytes=0))
    wanted = process_worker.prime_state()
    restored = jzero.restore(folder / "prime" / "1", train_step, wanted)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(restored[name], leaf)
    leaves = _inspect.inspect(folder / "prime" / "1")[0].leaves
    assert [leaf.chunk_shape for leaf in leaves] == [(81, 3), (239,)]
    assert not (folder / "prime" / "1" / "state" / "fragments").exists()


def test_a_process_that_cannot_write_fails_all(one_start):
    """With its reason, and soon; then all can save the step."""
    _, found = one_start["one_cannot_write"]
    for (told, *then), begins in zip(found, ("process 1 failed", "process 0 failed"), strict=True):
        assert len(told) == 1
        assert f"Checkpointer.save: {begins} with " in told[0]
        assert "File too large" in told[0]
        assert then == [True, [1, 2]]


@pytest.mark.slow
def test_all_processes_are_told_that_another_job_writes(one_start):
    _, told = one_start["locked_out"]
    assert all("process 12 on node7 writes in" in text for text in told)
    assert "process 0 failed with CheckpointError: Checkpointer.save: process 12" in told[1]


UNLIKE = {
    "steps saved": ("ProcessError", "step: 8 on process 0, 9 on process 1"),
    "states": ("ProcessError", "leaves: "),
    "iterators": ("ProcessError", "data iterator: none on process 0, one on process 1"),
    "an iterator fails": (
        "ProcessError",
        "ready on process 0, RuntimeError: the loader of",
    ),
    "steps restored": ("ProcessError", "checkpoint: 2, described by"),
    "paths restored": ("ProcessError", "checkpoint: 2, described by"),
    "shapes restored": ("ProcessError", "failed with CheckpointError: Checkpointer.restore"),
}


@pytest.mark.slow
def test_processes_that_save_or_restore_unlike_things(one_start):
    """All are told, soon, and can go on with what is alike."""
    _, found = one_start["unlike_checkpoints"]
    for name, (kind, text) in UNLIKE.items():
        told = [each[0][name] for each in found]
        kinds = [error for error, _ in told]
        assert kind in kinds, (name, told)
        assert all(kinds), (name, told)
        assert any(text in message for _, message in told), (name, told)
    assert [each[1] for each in found] == [[1, 2, 3]] * 2


@pytest.mark.slow
def test_one_process_is_told_to_end_and_all_save(tmp_path):
    command = [sys.executable, WORKER, "until_preempted", tmp_path]
    with started(command, by_hand(2, 1), tmp_path) as processes:
        ready = [tmp_path / f"{i}.ready" for i in range(2)]
        wait_until(lambda: all(path.exists() for path in ready), "the first steps")
        processes[1].terminate()
        wait_until(lambda: all(p.poll() is not None for p in processes), "both processes end")
        assert [p.poll() for p in processes] == [0, 0]
    steps = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert steps[0] == steps[1]
    assert (tmp_path / "steps" / str(steps[0])).is_dir()


@pytest.fixture(scope="module")
def disagreements(tmp_path_factory):
    return found_by("disagree", 3, 1, tmp_path_factory.mktemp("disagree"))


@pytest.mark.slow(but=[7, 11, 12])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("stage", "options: stage=3 on processes 0, 2, stage=1 on process 1"),
        ("option", "options: comm=Comm() on processes 0, 2, comm=Comm(gather='keep') on process 1"),
        ("batch_shape", "arguments: x float32[12,12] on processes 0, 2, x float32[6,12]"),
        ("batch_that_one_cannot_read", "call: shard_train_step on processes 0, 2, failed with BatchError"),
        ("state_structure", "state: state['w']  float32[12,12]  parameter"),
        ("hyperparameter", "mul 0.10000000149011612:f32[] "),
        ("constant", "program: constant "),
        ("order_of_devices", "mesh: device 0 of process 0 on processes 0, 2, device"),
        ("initial_shape", "state: state  float32[12,12]  other"),
        ("values_of_a_state", "values: state['w'] "),
        ("another_call", "call: init on processes 0, 2, shard on process 1"),
        ("values_of_a_batch", "x float32[12,12] has other values on other processes"),
        ("batch_on_one_process", "x float32[12,12] is on devices of process {} alone"),
    ],
)  # fmt: skip
def test_processes_that_differ_end_with_what_differs(disagreements, case, text):
    of_batch = case.endswith(("of_a_batch", "on_one_process"))
    edit = (
        "jax.make_array_from_process_local_data" if of_batch else "Start them from the same code, "
    )
    for process, found in enumerate(disagreements):
        error, told = found[case]
        assert error == ("BatchError" if of_batch else "ProcessError"), f"on process {process}"
        assert text.replace("{}", str(process)) in told
        assert edit in told
    assert [found["own_mesh"] for found in disagreements] == [[], [], []]  # It waits for nobody.
    assert len({found["agreement"] for found in disagreements}) == 1


@pytest.mark.slow
def test_process_that_does_not_come(disagreements):
    for process in (0, 2):
        error, told = disagreements[process]["absence"]
        assert error == "ProcessError"
        assert "process 1 of 3 did not come within 5 s" in told
        assert "sync_global_devices('ready')" in told
    error, told = disagreements[1]["absence"]
    assert error == "ProcessError"
    assert "process 1 came when others had given up waiting" in told


# What process 1 does unlike the others, and what all are told of it. Of two processes; the first has three.
DIFFERENCES = {
    "differ_known": "call 26: arguments: x float32[12,12] on process 1",
    "differ_unreadable": "failed with BatchError: shard_train_step: x is a str",
    "differ_fewer": "call 4: call: shard_train_step on process 0, the end of the process on process 1",
    "differ_at_the_end": "call 203: arguments: x float32[16,12] on process 0, x float32[8,12] on process 1",
}


@pytest.mark.slow
def test_process_that_calls_something_else_ends_all_with_its_name(tmp_path):
    """All cases at once: mostly they wait."""
    with contextlib.ExitStack() as stack:
        running = {}
        for scenario in DIFFERENCES:
            folder = tmp_path / scenario
            folder.mkdir()
            command = [sys.executable, WORKER, scenario, folder]
            num = 3 if scenario == "differ_known" else 2
            running[scenario] = stack.enter_context(started(command, by_hand(num, 1), folder))
        everybody = [process for processes in running.values() for process in processes]
        wait_until(lambda: all(p.poll() is not None for p in everybody), "all processes end")
        end = time.time()
        assert {process.poll() for process in everybody} == {1}
        for scenario, odd in DIFFERENCES.items():
            began = [float(path.read_text()) for path in (tmp_path / scenario).glob("*.differs")]
            assert end - min(began) < 20  # 8, and what a busy machine adds
            for i in range(len(running[scenario])):
                told = output(tmp_path / scenario, i)
                assert "ProcessError: shard_train_step: " in told
                assert odd in told
                assert (
                    "on processes 0, 2" if len(running[scenario]) == 3 else "on process 0"
                ) in told


@pytest.mark.slow
def test_difference_that_nothing_else_notices_keeps_a_checkpoint_from_being_made(tmp_path):
    for found in found_by("differ_unseen", 2, 1, tmp_path):
        for error, told in (found["saved"], found["again"]):
            assert error == "ProcessError"
            assert "call 203: arguments: x float32[16,12] on process 0, x float32[8,12] on" in told
            assert "Pass batches of the same shapes, in the same order" in told
        assert found["seconds"] < 10


@pytest.mark.slow
def test_what_is_looked_at_is_compared(tmp_path):
    for error, told in found_by("differ_slowly_and_unshard", 2, 1, tmp_path):
        assert error == "ProcessError"
        assert (
            "call 26: arguments: x float32[16,12] on process 0, x float32[8,12] on process 1"
            in told
        )


def test_cost_of_comparing(one_start):
    for found in one_start["costs"][1]:
        # A hundredth of a step of 10 ms is 100 us. How long processes wait for each other is the machine's.
        assert found["same"] < 20, found  # 0.5 us
        assert found["change"] < 50, found  # 1.4 us


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_others(victim, tmp_path):
    command = [sys.executable, WORKER, "step_forever", tmp_path]
    with started(command, by_hand(2, 2), tmp_path) as processes:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "both processes step")
        processes[victim].kill()
        start = time.monotonic()
        other = processes[1 - victim]
        wait_until(lambda: other.poll() is not None, "the other process ends")
        # The step itself fails at once, and the exit waits until the dead process has missed its
        # heartbeats (10 s in the worker).
        assert time.monotonic() - start < 60
        assert other.poll() != 0
        told = output(tmp_path, 1 - victim)
        assert "JaxRuntimeError" in told or "JAX distributed service detected fatal errors" in told


# -- the training script -------------------------------------------------------------------------

SCRIPT = [sys.executable, HERE / "small_training.py", *"train_linen --steps 3 --devices 4".split()]


def losses_of(folder):
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]


@pytest.mark.slow
def test_a_script_started_by_hand_and_by_mpirun(tmp_path):
    own = tmp_path / "by_hand"
    own.mkdir()
    run([*SCRIPT, "--out", own], by_hand(2, 2), own)
    assert len(losses_of(own)) == 3
    assert "held-out loss" in output(own, 0)
    assert "loss" not in output(own, 1)  # One process reports for all.
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on this machine (Debian: openmpi-bin)")
    environment = ENVIRONMENT | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    run(["mpirun", "-n", "2", *SCRIPT, "--out", tmp_path], [environment], tmp_path)
    assert output(tmp_path, 0).count("held-out loss") == 1
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(own), rtol=1e-5)
