"""What reports print: within 80 columns, nothing cut, long lists folded, and all of it in `to_dict` too."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import programs
from jzero._folded import folded, listed
from jzero._quantities import readable_bytes, readable_count
from jzero.reports._lines import WIDTH, wrapped
from jzero.reports._tables import Table
from small import grouped


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def step_of(loss, tx):
    def step(state, x):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "median": jnp.median(x), "rows": x}
        return (optax.apply_updates(params, updates), opt_state), metrics

    return step


REPORTED: dict[str, Any] = {
    "hybrid": dict(
        mesh=mesh(a_node_with_a_long_name=64, local=8), param_axes="local", accumulate=2
    ),
    "pinned": dict(mesh=mesh(data=8), offload=jzero.PinnedHost(2**12)),
}


@pytest.mark.parametrize("options", REPORTED.values(), ids=REPORTED)
def test_reports_fit_a_terminal_and_say_what_their_dicts_say(options):
    state = programs.abstract_state(programs.Model(scan=False))
    rows = 2 * math.prod(options["mesh"].shape.values())
    train_step = jzero.shard_train_step(programs.train_step, **grouped(**options))
    report = train_step.describe(state, programs.tokens(rows))
    text, found = str(report), report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(text.splitlines()) < 60
    one_line = " ".join(text.split())
    for row in found["traffic"]:
        moved = f"{row['elements']:,} {readable_bytes(row['bytes'])} {row['times']}"
        assert f"{row['op']} {row['dtype']} {','.join(row['axes'])} {moved}" in one_line
    for row in found["memory"]:
        assert (
            f"{row['role']} {readable_bytes(row['whole'])} {readable_bytes(row['per_device'])}"
            in one_line
        )
    for row in found["transfers"]:
        assert f"{row['direction']} {row['what']} {row['dtype']} {row['elements']:,}" in one_line
    full = [leaf for leaf in found["leaves"] if leaf["why_full"]]
    assert f"{len(full)} of {len(found['leaves'])} leaves stay" in one_line or not full
    assert f"stage {found['stage']} over {found['devices']} devices" in one_line


def test_keys_of_a_written_step_are_named():
    def step(w, x, key):
        noise = jax.random.uniform(key, ())
        return w - jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2) * noise)(w), "batch")

    train_step = jzero.shard_train_step(step, mesh=mesh(data=8), axes=jzero.Axes(axis_name="batch"))
    report = train_step.describe(jnp.ones((16, 8)), jnp.ones((8, 16)), jax.random.key(0))
    assert "PRNG keys, folded with the device's index: key" in " ".join(str(report).split())
    assert report.to_dict()["keys"] == ["key"]


def test_leaves_alike_are_one_line():
    params: dict[str, Any] = {}
    for i in range(100):
        long = "a_rather_long_name_of_a_module_" * 4 + str(i)
        params[long] = {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(3)}
        params[f"scale_{i}"] = jnp.ones(())

    def loss(params, x):
        return sum(jnp.mean(x * p.sum()) for p in jax.tree.leaves(params))

    step = step_of(loss, optax.sgd(0.1))
    state = params, optax.sgd(0.1).init(params)
    report = jzero.shard_train_step(step, mesh=mesh(data=8)).describe(state, jnp.ones((8, 4)))
    text = "".join(str(report).split())
    assert "200of300leavesstayreplicated:1.6KiBoneachdevice." in text
    assert "100xstate[0]['a_rather" in text
    assert "_of_a_module_{0..99}']['bias']float32[3]" in text
    assert "100xstate[0]['scale_{0..99}']float32[]" in text


def test_folded_names_in_one_line():
    assert listed([f"h_{i}" for i in range(12)] + ["x", "y.z"], 2) == "h_{0..11}, x and 1 more"
    assert folded([f"[{c}]" for c in "bcdefghijk"])[0] == ("[{b,c,d,e,f,g,...}]", 10)
    assert folded(["07", "08", "09", "10", "1"])[0].text == "{1,07..10}"


def test_a_size_stays_with_its_unit():
    assert wrapped("it has 12.5 GiB and 3 Psi", width=12) == ["it has", "12.5 GiB and", "3 Psi"]
    assert wrapped("/a/b 12 B", width=5, cut=False) == ["/a/b", "12 B"]
    assert wrapped("/a/bcdefgh 12 B", width=5, cut=False) == ["/a/bcdefgh", "12 B"]


@pytest.mark.parametrize("width", [80, 30])
def test_tables_keep_their_numbers(width):
    cells = [
        (f"{'row' * 12}_{i}", *(f"{i}.{j} GiB" for j in range(5)), "a remark of some length")
        for i in range(3)
    ]
    header = ("a name", *(f"a long title {j}" for j in range(5)), "")
    lines = Table(header, cells).text(width)
    assert max(map(len, lines)) <= width
    assert all(f"{i}.{j} GiB" in "\n".join(lines) for i in range(3) for j in range(5))
    assert " ".join(lines).count("remark") == 3
    assert Table(header, []).text(width)


def test_estimates_as_dict_and_text():
    for options in (
        {"offload": jzero.HostCPU(delayed_update=True)},
        {"accumulate": 4, "gather": "keep"},
    ):
        devices = {"a_node_with_a_long_name": 64, "local": 8}
        found = jzero.estimate("1T", **grouped(devices=devices, param_axes="local", **options))
        rows, text = found.to_dict(), str(found)
        assert json.loads(json.dumps(rows)) == rows
        assert max(map(len, text.splitlines())) <= WIDTH
        assert readable_count(rows["num_params"]) in text
        one_line = " ".join(text.split())
        for row in rows["memory"]:
            sizes = f"{readable_bytes(row['whole'])} {readable_bytes(row['per_device'])}"
            assert f"{row['role']} {sizes}" in one_line
        for row in rows["traffic"]:
            assert f"{row['elements']:,} {readable_bytes(row['bytes'])}" in one_line
        for name in ("total", "at_rest", "on_host"):
            assert rows[name] == getattr(found, name)


def epoch_of(tx):
    """An epoch as a loop over minibatches in one step."""

    def epoch(state, images, labels):
        def iteration(state, batch):
            params, opt_state = state
            loss, grads = jax.value_and_grad(
                lambda p: jnp.mean((jnp.tanh(batch[0] @ p["w"]) - batch[1]) ** 2)
            )(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(iteration, state, (images, labels))

    params = {"w": jnp.ones((16, 8))}
    return epoch, (params, tx.init(params))


@pytest.mark.parametrize("num", [8, 3])
@pytest.mark.parametrize("axes", [{"data": 8}, {"node": 2, "data": 4}], ids=str)
def test_a_loop_over_minibatches_is_told_how_to_split_their_rows(num, axes):
    """Their number is that of the devices, which get whole minibatches, or is not, and all come whole."""
    epoch, state = epoch_of(optax.adam(1e-2))
    batch = jnp.ones((num, 32, 16)), jnp.ones((num, 32, 8))
    options = {"mesh": mesh(**axes), "min_shard_bytes": 0, "axis_names": tuple(axes)}
    found = jzero.shard_train_step(epoch, **grouped(**options)).describe(state, *batch)
    text = " ".join(str(found).split())
    spec = "P(None, 'data')" if len(axes) == 1 else "P(None, ('node', 'data'))"
    specs = f"in_specs={{'images': {spec}, 'labels': {spec}}}"
    assert "dim 0 of {images,labels}, with all rows. If this dim counts minibatches, shard" in text
    assert specs in text
    assert found.to_dict()["looped"] == ["images", "labels"]
    given = eval(specs.partition("=")[2], {"P": jax.P})
    split = jzero.shard_train_step(epoch, in_specs=given, **grouped(**options)).describe(
        state, *batch
    )
    assert (split.looped, split.movements) == ((), ())
    assert "minibatches" not in str(split)
    # Other loops, and other batches that come whole.
    plain = jzero.shard_train_step(lambda w, x: w - x.mean() * w, **grouped(**options))
    assert plain.describe(jnp.ones(8), jnp.ones((13, 16))).looped == ()


def test_a_stage_without_optimizer_state_lists_what_it_does_not_shard():
    """A loop's next iteration computes rows with what the moments made: they are as parameters."""
    epoch, state = epoch_of(optax.adam(1e-2))
    batch = jnp.ones((4, 32, 16)), jnp.ones((4, 32, 8))
    for stage in (1, 2, 3):
        options = {"stage": stage, "mesh": mesh(data=8), "min_shard_bytes": 0}
        text = str(jzero.shard_train_step(epoch, **grouped(**options)).describe(state, *batch))
        says = f"Stage {stage} shards optimizer state, and no leaf is only that" in text
        assert says == (stage < 3)
        assert (
            "2 x state[1][0].{mu,nu}['w'] float32[16,8]" in text.partition("no leaf")[2]
        ) == says
        assert ("No leaf that the stage shards is left replicated." in text) == (not says)
        step = step_of(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adam(1e-2))
        once = jzero.shard_train_step(step, **grouped(**options))
        assert "optimizer state, and" not in str(once.describe(state, batch[0][0]))


def test_whole_arguments_are_counted():
    """A model that is only read, beside the state: no other line has its bytes."""

    def distill(w, teacher, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - x @ teacher["w"]) ** 2))(w)
        return w - g, loss

    w, x = jnp.ones((512, 512)), jnp.ones((16, 512))
    specs: dict[str | int, jax.P] = {"teacher": jax.P()}
    report = jzero.shard_train_step(distill, state=0, in_specs=specs).describe(w, {"w": w}, x)
    assert "replicated arguments take 1.0 MiB of each device" in " ".join(str(report).split())
    assert report.to_dict()["whole_argument_bytes"] == w.nbytes
    split = jzero.shard_train_step(distill, state=0).describe(w, {"w": w}, x)
    assert "whole arguments" not in str(split)


def test_a_refusal_says_where_a_model_goes_that_is_only_read():
    def distill(w, teacher, x):
        return w - x.sum() * jnp.linalg.inv(teacher), x.sum()

    step = jzero.shard_train_step(distill, state=0, comm=jzero.Comm(max_gather_bytes=1000))
    with pytest.raises(jzero.StepError, match="carry a model that is only read in the state"):
        step.describe(jnp.ones((64, 64)), jnp.eye(64), jnp.ones((16, 64)))


# -- the time of a step ----------------------------------------------------------------------------

LAYERS, DIM, ROWS = 4, 256, 64


def scanned_step(state, x):
    params, moments = state

    def loss(w):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    moments = 0.9 * moments + grads
    return (params - 0.1 * moments, moments), value


def time_of(memory, rates, num=2):
    weights = jax.ShapeDtypeStruct((LAYERS, DIM, DIM), jnp.float32)
    train_step = jzero.shard_train_step(
        scanned_step, mesh=mesh(data=num), memory=memory, axes=jzero.Axes(min_shard_bytes=0)
    )
    x = jax.ShapeDtypeStruct((num * ROWS, DIM), jnp.float32)
    return train_step.describe((weights, weights), x).time(rates)


def test_a_step_computes_and_moves_what_its_program_does():
    """Products of the forward pass, two derivatives of each; gathers once a pass; both at the given rates."""
    rates = jzero.Rates(peak=10**12, interconnect=10**9)
    parts = {part.name: part for part in time_of(None, rates).parts}
    products, nbytes = 2 * LAYERS * ROWS * DIM**2 / 1e12, 4 * LAYERS * DIM**2 / 1e9
    assert parts["forward pass"].compute == pytest.approx(products, rel=0.02)
    # The first layer's input needs no derivative.
    assert (2 - 1 / LAYERS) * products < parts["backward pass"].compute < 2.02 * products
    assert parts["forward pass"].ways == {"between devices": pytest.approx(nbytes)}
    # The gradients are scattered, and the loss is summed.
    assert parts["backward pass"].ways == {"between devices": pytest.approx(2 * nbytes, rel=1e-3)}
    assert parts["forward pass"].exposed == pytest.approx(nbytes - products, rel=0.02)


def test_what_hides_behind_compute():
    """A slower device hides more; an update on the host, with parameters on the devices, hides nowhere."""
    slow, fast = (jzero.Rates(peak=peak, pcie="1GB/s") for peak in (10**9, 10**15))
    memory = jzero.Memory(params=jzero.PinnedHost(device_bytes=2**21), optimizer=jzero.HostCPU())
    assert time_of(memory, slow).exposed == 0
    assert time_of(memory, fast).exposed > 0
    after = {part.name: part for part in time_of(jzero.HostCPU(), slow).parts}["update"]
    shard = 4 * LAYERS * DIM**2 / 2 / 1e9
    # Gradients go down, and the parameters, which the update reads; new ones come up at the same time.
    assert after.ways == {"to host": pytest.approx(2 * shard), "to device": pytest.approx(shard)}
    assert after.exposed == pytest.approx(2 * shard, rel=0.02)
    found = time_of(jzero.HostCPU(), slow)
    assert found.untimed == ("between devices", "host update")
    assert found.hides_from == {}


def test_a_time_needs_a_peak():
    with pytest.raises(jzero.OptionError, match=r"Report.time: rates=Rates\(pcie="):
        time_of(None, jzero.Rates(pcie="1GB/s"))
