"""The environment of every test: 8 virtual CPU devices, fast compiles, clean caches.

`JZERO_TEST_GPU=1 pytest` leaves platform and flags alone and runs on the real devices instead.
`JZERO_TEST_OPTIMIZED=1 pytest` compiles as users do, with all of XLA's and LLVM's optimizations.
"""

import gc
import importlib.metadata
import os
import pathlib
import signal
import sys
import tempfile

# Each of these must be in the environment before JAX is imported. There, and not in jax.config, so
# that scripts which tests start as processes of their own run under the same settings.
assert "jax" not in sys.modules, (
    "a pytest plugin imported JAX before tests/conftest.py could set it up"
)

XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # XLA ends a process in which some device waits this long for another; its own 40 s is too near
    # to what 8 devices need on 2 busy cores.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "300",
    # Small programs are not compiled any faster in several parts (docs/facts.md#one-part-compiles-faster).
    "--xla_cpu_parallel_codegen_split_count": "1",
    # This scheduler lets virtual devices reach the collectives of a lax.cond in different orders:
    # they then wait for each other for ever (docs/facts.md#one-scheduler-deadlocks).
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
if importlib.metadata.version("jax") < "0.11":
    # Halves the time to compile; newer releases have no other way to compile.
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Threads of XLA's pool: a device that waits in a collective holds one, and a program may have
    # several under way on each device.
    "PJRT_NPROC": "32",
    # Flax and optax keep to strict ranks, but not to strict dtypes: optax's bias correction raises a
    # float to an int32 count.
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Compiling is most of a test's time; without LLVM's optimizations it takes half. The optimized
    # HLO, its memory and its collectives stay the same, to the line and byte.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    # A program that was compiled before loads in a twentieth of the time. Names are a part of the
    # cache's key, since tests read them in compiled programs; line numbers are not, lest every edit
    # compile everything again.
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}
if os.environ.get("JZERO_TEST_OPTIMIZED"):
    ENVIRONMENT["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "false"
    XLA_FLAGS.pop("--xla_cpu_use_fusion_emitters", None)
if not os.environ.get("JZERO_TEST_GPU"):
    given = os.environ.get("XLA_FLAGS", "")
    ours = [f"{flag}={value}" for flag, value in XLA_FLAGS.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

# JAX makes objects by the million, few of them in circles: looking for these is 6 % of a trace and compile.
gc.set_threshold(20_000, 20)

# Tests start many processes: each would compile all of jzero's modules anew, which is half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# readline tells the processes that pytest-xdist starts how wide the terminal is.
os.environ.pop("COLUMNS", None)

# A shell has what it runs in the background ignore Ctrl-C, and some tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from _pytest.faulthandler import fault_handler_stderr_fd_key  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

import slow  # noqa: E402
import versions  # noqa: E402
from gs_server import gs, gs_endpoint  # noqa: E402, F401
from s3_server import s3, s3_endpoint  # noqa: E402, F401

# Every run draws the same examples; none fails for being slow on a busy machine.
hypothesis.settings.register_profile("jzero", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jzero")


# Where a worker of xdist writes the stacks of all threads when it crashes, or when a test hangs: for
# pytest_terminal_summary, since what it says on stderr is far from what a long run prints last.
STACKS = "JZERO_TEST_STACKS"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="jzero-stacks-")
        config.add_cleanup(folder.cleanup)
        os.environ[STACKS] = folder.name
        return
    path = pathlib.Path(os.environ[STACKS]) / os.environ["PYTEST_XDIST_WORKER"]
    with path.open("wb") as file:
        os.dup2(file.fileno(), config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.unmark(config, items)  # before pytest leaves out what is slow
    if share := os.environ.get("JZERO_TEST_SHARE"):
        slow.keep_share(config, items, share)


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
    """Frees a module's compiled programs: a process can map only so many pieces of machine code."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def float64():
    """JAX's 64-bit types, for all threads and not for a context: callbacks run in XLA's threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def optax_promotions():
    """optax itself relies on JAX's default promotions."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def no_compilation_cache():
    """Programs are compiled, not read from the disk.

    XLA:CPU before 0.11 loses, in programs that it reads, the order of collectives of loops within loops: two
    run at once under one name, and the process ends (docs/facts.md#programs-from-the-disk-lose-their-order).
    """
    if importlib.metadata.version("jax") >= "0.11":
        yield
        return
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in sorted(pathlib.Path(os.environ[STACKS]).iterdir()):
        if text := path.read_text(errors="replace"):
            terminalreporter.section(f"stacks of {path.name}")
            terminalreporter.write_line("\n".join(text.splitlines()[:200]))
    terminalreporter.write_line(versions.line())
