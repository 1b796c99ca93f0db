"""examples/launch: each launcher starts processes that train; stand-ins do what a cluster would."""

import os
import pathlib
import re
import runpy
import socket
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
STAND_INS = ROOT / "tests" / "stand_ins"
ENVIRONMENT = {
    "PATH": f"{STAND_INS}:{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(STAND_INS)]),
    "PYTHON": sys.executable,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}
ARGS = ["--steps", "3"]
FIRST_SLURM_PORT = 61440  # JAX takes the port that the number of the job says, from here on.


def free_port(first=0):
    for port in range(first, 65536):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return listener.getsockname()[1]
    raise AssertionError("no port is free")


def ends(command, environments, cwd=ROOT):
    """What processes print, which run to their ends at the same time."""
    processes = [
        subprocess.Popen([*map(str, command)], cwd=cwd, env=ENVIRONMENT | environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for environment in environments
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return "".join(printed)


@pytest.fixture(scope="module")
def loss():
    """Of three steps on the devices of this process."""
    return runpy.run_path(str(LAUNCH / "train.py"))["main"](ARGS)


def check(printed, processes, loss, steps="0 to 3"):
    (found,) = re.findall(
        r"^processes (\d+), devices (\d+), steps (.*), loss (\S+)$", printed, re.M
    )
    assert found[:3] == (str(processes), str(2 * processes), steps)
    assert float(found[3]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_one_node(loss, tmp_path):
    """From any directory."""
    check(ends([LAUNCH / "one_node.sh", *ARGS], [{}], cwd=tmp_path), 1, loss)


def directives():
    text = (LAUNCH / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))


@pytest.mark.slow
def test_slurm(loss, tmp_path):
    """JAX itself finds the processes by Slurm's variables; what they saved, one process goes on with."""
    assert directives()["ntasks-per-node"] == directives()["gpus-per-node"]
    job = free_port(FIRST_SLURM_PORT) - FIRST_SLURM_PORT
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": "2"}
    saving = ["--checkpoints", tmp_path, "--steps"]
    printed = ends(["bash", LAUNCH / "slurm.sbatch", *saving, "2"], [slurm])
    assert "processes 2, devices 4, steps 0 to 2, " in printed
    check(ends([LAUNCH / "one_node.sh", *saving, "3"], [{}]), 1, loss, "2 to 3")


@pytest.mark.slow
def test_jobset(loss):
    """The container's command and environment, as in each pod; DNS and volumes are left out."""
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    (index,) = [one["valueFrom"] for one in container["env"] if "valueFrom" in one]
    assert index["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    assert spec["completionMode"] == "Indexed"
    assert variables["JAX_NUM_PROCESSES"] == str(spec["completions"]) == str(spec["parallelism"])
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    name = jobset["metadata"]["name"]
    host, port = variables["JAX_COORDINATOR_ADDRESS"].split(":")
    assert (host, job["replicas"]) == (f"{name}-{job['name']}-0-0.{name}", 1)
    assert int(port) > 1024
    assert container["command"][0] == "python"
    variables["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    pods = [variables | {"JAX_PROCESS_ID": str(i)} for i in range(spec["completions"])]
    check(ends([sys.executable, *container["command"][1:], *ARGS], pods), 2, loss)


@pytest.mark.slow
def test_ray(loss):
    """Through a stand-in of Ray, which starts a process for each actor."""
    printed = ends([sys.executable, LAUNCH / "ray_launch.py", "--gpus", "2", "--", *ARGS], [{}])
    check(printed, 2, loss)
    assert re.findall(r"^loss (\S+)$", printed, re.MULTILINE) == [f"{loss:.6f}"]
