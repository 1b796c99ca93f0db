# Needs Python 3.11 or newer and make; everything else goes into .venv.
#
#   make train        train the language model of experiments/train_lm at stage 3
#   make bench        tokens/s and memory of jax.jit, stages 1 and 3 and offload on the devices that are here, 5 minutes
#   make compare      the same at stages 0 to 3, their loss curves in one picture
#   make tables       the ZeRO paper's tables, from formulas and from what was compiled
#   make compile-tables   compile for GPUs what the tables lack; COMPILE_ARGS="--again ''" for all, half an hour
#   make fsdp2        the same small GPT by jzero and by PyTorch's FSDP2, in turns (installs torch)
#   make host-update  updates in host memory by jzero, DeepSpeed, PyTorch and XLA, in turns (installs torch)
#   make swapper      steps with state on a disk by jzero and DeepSpeed, in turns (installs torch; needs libaio's headers)
#   make offload-traffic  bytes at rest and on the way, with and without offload, counted in arrays; two minutes
#   make offload-delayed  loss with delayed updates beside that without, at three learning rates; a quarter of an hour
#   make offload-timeline what devices and host do in time, drawn from traces; a minute
#   make exactness    every program of tests/zoo in every setting against one device; hours, goes on where it stopped
#   make sampled      20,000 train steps drawn by seed, each against one device; hours, goes on where it stopped
#   make golden       some 300 rows (step, options, mesh) beside what is stored; GOLDEN_ARGS=--update stores it
#   make golden-h200  20 of them compiled for H200s by the newest JAX; four minutes, less where few changed
#   make house        rooms, walks and words of the code, beside those of before
#   make test         the tests, on 8 virtual CPU devices
#   make test-all     these and the slow ones, hours on two cores
#   make test-share   of the slow ones one in thirty; SHARE=1/30 and so on are the others
#   make test-gpu     the tests that need a GPU, with GPU_PYTHON (python3: a JAX that sees it; test dependencies)
#   make test-like-a-gpu  offload and checkpoints on CPUs that refuse to donate what has a view, as a GPU does
#   make one-gpu      checks, speed, memory and these tests on one GPU, in nine minutes; goes on where it stopped
#   make test-newest  the tests with the newest JAX, Flax, optax and Orbax, installed anew each week; says which
#   make test-jax11   a sample of the tests with JAX 0.11.2, which lies between the two
#   make test-flags   another with the newest JAX and its upgrade flags, which are to become defaults
#   make test-oldest  the tests of checkpoints with the oldest Orbax that pyproject.toml permits
#   make lint         ruff and mypy
#   make site         the documentation for a browser, in .cache/site
#   make wheel        wheel and sdist, built, installed where nothing else is, and used from there
#   make clean        remove the environments and caches

PYTHON ?= $(shell .ci/find-python 3.11)
# JAX supports Python versions for about three years, so its newest release needs a newer one.
NEWEST_PYTHON ?= $(shell .ci/find-python 3.12)
BENCH_ARGS ?=
TRAIN_ARGS ?= --stage 3 --devices 8
COMPARE_ARGS ?=
COMPILE_ARGS ?=
FSDP2_ARGS ?=
HOST_UPDATE_ARGS ?=
SWAPPER_ARGS ?=
ONE_GPU_ARGS ?=
EXACTNESS_ARGS ?=
HOUSE_ARGS ?=
GOLDEN_ARGS ?=
SAMPLED_ARGS ?= 20000 0 --processes 2
GPU_PYTHON ?= python3
SHARE ?= 0/30
OFFLOAD_ARGS ?=
# Tracing and compiling small programs is what takes the time, most of it in one thread; a second
# worker costs a fifth more processor time (references are computed once per worker).
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal

BIN := .venv/bin
# JAX 0.11 keeps NumPy's views of an array with it, which other releases do not.
LIKE_A_GPU := $(if $(NEWEST_PYTHON),.venv-jax11,.venv)
SOURCES := jzero tests experiments examples docs .ci

.PHONY: train bench compare exactness sampled golden golden-h200 house tables compile-tables fsdp2 host-update swapper offload-traffic offload-delayed \
    offload-timeline one-gpu test test-all test-share test-gpu test-like-a-gpu test-newest test-jax11 test-flags test-oldest lint site wheel clean

train: .venv/installed
	$(BIN)/python experiments/train_lm/train_linen.py $(TRAIN_ARGS)

# With GPU_PYTHON, a JAX that sees the GPUs, on those.
bench: $(if $(filter command environment,$(origin GPU_PYTHON)),,.venv/installed)
	$(if $(filter command environment,$(origin GPU_PYTHON)),$(GPU_PYTHON),$(BIN)/python) experiments/bench/run.py $(BENCH_ARGS)

compare: .venv/installed
	$(BIN)/python experiments/train_lm/compare.py $(COMPARE_ARGS)

exactness: .venv/installed
	$(BIN)/python tests/run_zoo.py table $(EXACTNESS_ARGS)
	$(BIN)/python experiments/exactness/report.py

sampled: .venv/installed
	$(BIN)/python tests/run_zoo.py sampled $(SAMPLED_ARGS)

golden: .venv/installed
	$(BIN)/python tests/run_golden.py $(GOLDEN_ARGS)

golden-h200: .venv-newest/installed
	.venv-newest/bin/python tests/run_golden.py --h200 $(GOLDEN_ARGS)

house: .venv/installed
	$(BIN)/python experiments/house/measure.py $(HOUSE_ARGS)

tables: .venv/installed
	$(BIN)/python experiments/paper_tables/tables.py
	$(BIN)/python experiments/paper_tables/infinity.py

compile-tables: .venv-newest/installed
	JAX_PLATFORMS=cpu .venv-newest/bin/python experiments/paper_tables/tables.py --compile $(COMPILE_ARGS)

fsdp2: .venv-fsdp2/installed
	.venv-fsdp2/bin/python experiments/fsdp2/compare.py $(FSDP2_ARGS)

# DeepSpeed compiles its operator with the ninja that stands beside its Python.
host-update: .venv-host-update/installed
	PATH="$(CURDIR)/.venv-host-update/bin:$$PATH" DS_ACCELERATOR=cpu JAX_PLATFORMS=cpu \
	    .venv-host-update/bin/python experiments/offload/host_update/compare.py $(HOST_UPDATE_ARGS)

swapper: .venv-host-update/installed
	PATH="$(CURDIR)/.venv-host-update/bin:$$PATH" DS_ACCELERATOR=cpu JAX_PLATFORMS=cpu \
	    .venv-host-update/bin/python experiments/infinity/against_deepspeed.py $(SWAPPER_ARGS)

offload-traffic: .venv/installed
	$(BIN)/python experiments/offload/traffic/measure.py $(OFFLOAD_ARGS)

offload-delayed: .venv/installed
	$(BIN)/python experiments/offload/delayed/compare.py $(OFFLOAD_ARGS)

offload-timeline: .venv/installed
	$(BIN)/python experiments/offload/timeline/timeline.py $(OFFLOAD_ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-all: .venv/installed
	$(BIN)/python -m pytest -q -m "" $(PYTEST_ARGS)

test-share: .venv/installed
	JZERO_TEST_SHARE=$(SHARE) $(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

# Four processes share the GPU: tracing and compiling is most of their time.
test-gpu:
	JZERO_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON) -m pytest -v -n 4 --dist loadfile tests/gpu

# A GPU's XLA refuses to donate what somebody has a view of; tests/refuse_like_a_gpu.py has CPUs do so.
test-like-a-gpu: $(LIKE_A_GPU)/installed
	$(LIKE_A_GPU)/bin/python -m pytest -q -m "" $(PYTEST_ARGS) tests/test_views_of_pinned.py
	PYTHONPATH=tests $(LIKE_A_GPU)/bin/python -m pytest -q $(PYTEST_ARGS) -p refuse_like_a_gpu \
	    tests/test_checkpoint_tiers.py tests/test_offload_params.py \
	    tests/test_example_scripts.py::test_lora_trains_on_what_linen_gpt_has_saved
	PYTHONPATH=tests JZERO_TEST_GPU=cpu JAX_PLATFORMS=cpu $(LIKE_A_GPU)/bin/python -m pytest -q $(PYTEST_ARGS) \
	    -p refuse_like_a_gpu tests/gpu/test_checkpoint.py

one-gpu:
	$(GPU_PYTHON) experiments/offload/one_gpu/run.py $(ONE_GPU_ARGS)

test-newest:
	@find .venv-newest/installed -mtime +6 -delete 2>/dev/null || true  # Older than a week: the newest again.
	@if [ -z "$(NEWEST_PYTHON)" ]; then \
	    echo "test-newest: NOT RUN: no Python 3.12 or newer on this machine"; \
	else \
	    $(MAKE) --no-print-directory .venv-newest/installed && \
	    .venv-newest/bin/python tests/versions.py && \
	    .venv-newest/bin/python -m pytest -q $(PYTEST_ARGS); \
	fi

# Both samples need Python 3.12; without it make test-newest has said so.
test-jax11: $(if $(NEWEST_PYTHON),.venv-jax11/installed)
	test -z "$(NEWEST_PYTHON)" || .venv-jax11/bin/python tests/samples.py release -q $(PYTEST_ARGS)

test-flags: $(if $(NEWEST_PYTHON),.venv-newest/installed)
	test -z "$(NEWEST_PYTHON)" || .venv-newest/bin/python tests/samples.py flags -q $(PYTEST_ARGS)

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -q $(PYTEST_ARGS) tests/test_checkpoint.py tests/test_checkpoint_faults.py \
	    tests/test_checkpoint_writers.py tests/test_export.py

# Every warning is an error, so that a link that leads nowhere is one.
site: .venv-site/installed
	JAX_PLATFORMS=cpu .venv-site/bin/sphinx-build --fail-on-warning --keep-going --quiet -c docs . .cache/site

# In two environments of its own, both new: one builds, in the other is nothing but the wheel and what it asks for.
wheel:
	@test -n "$(PYTHON)" || { echo "jzero needs Python 3.11 or newer, with its venv module"; exit 1; }
	PYTHON="$(PYTHON)" .ci/wheel

# An experiment is a folder of scripts that import each other by their bare names, so each is
# checked by itself: two of them may both have a plot.py. What they share is experiments.shared. One with
# an __init__.py is a package, whose modules tests import, too.
lint: .venv/installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy jzero tests examples
	@for folder in $(sort $(dir $(wildcard experiments/*/*.py experiments/*/*/*.py))); do \
	    echo "mypy $$folder"; path=$$folder; [ ! -e "$$folder/__init__.py" ] || path=; \
	    MYPYPATH="$$path" $(BIN)/mypy "$$folder" || exit 1; \
	done

.venv-oldest/installed: EXTRAS := test
.venv-oldest/installed: PINS := orbax-checkpoint==0.12.6
# The newest JAX also has XLA's compilers for GPUs and TPUs (600 MB each, and chatty where there are none).
.venv/installed: EXTRAS := test
.venv-site/installed: EXTRAS := site
.venv-newest/installed: EXTRAS := test,preflight,preflight-tpu
.venv-newest/installed: PYTHON := $(NEWEST_PYTHON)
.venv-jax11/installed: EXTRAS := test
.venv-jax11/installed: PINS := jax==0.11.2 jaxlib==0.11.2
.venv-jax11/installed: PYTHON := $(NEWEST_PYTHON)

# One rule for all of them; a change of pyproject.toml installs again.
.venv/installed .venv-newest/installed .venv-jax11/installed .venv-oldest/installed .venv-site/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jzero needs Python 3.11 or newer, with its venv module"; exit 1; }
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[$(EXTRAS)]' $(PINS)
	@touch $@

# PyTorch and jzero side by side, for this one experiment.
.venv-fsdp2/installed: pyproject.toml experiments/fsdp2/requirements.txt
	@test -n "$(PYTHON)" || { echo "jzero needs Python 3.11 or newer, with its venv module"; exit 1; }
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable . --requirement experiments/fsdp2/requirements.txt
	@touch $@

# DeepSpeed's setup.py asks for the PyTorch that it will run with, so it is installed after it, without isolation.
.venv-host-update/installed: pyproject.toml experiments/offload/host_update/requirements.txt
	@test -n "$(PYTHON)" || { echo "jzero needs Python 3.11 or newer, with its venv module"; exit 1; }
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[offload,plot]' setuptools wheel \
	    --requirement experiments/offload/host_update/requirements.txt
	DS_ACCELERATOR=cpu $(@D)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-jax11 .venv-oldest .venv-site .venv-wheel .venv-fsdp2 .venv-host-update .cache .hypothesis
