"""The time of a step by `preflight`'s model: of programs written by hand, in seconds computed by hand."""

import dataclasses

import pytest

from jzero.preflight import _kernels
from jzero.preflight._clocks import FROM_HOST, TO_HOST, Link
from jzero.preflight._hlo import parse
from jzero.preflight._schedule import Copied, Started, hidden_share, read_program, schedule_of
from jzero.targets._links import with_links
from jzero.targets._target import Topology, find_target

H200 = find_target("test", "h200")
# Round numbers per second: 1000 operations, 100 of float32; 1000 bytes of memory, 100 of each link.
TARGET = dataclasses.replace(
    H200, bf16_flops=1000.0, f32_flops=100.0, memory_bandwidth=1000.0,
    domains=tuple(dataclasses.replace(x, bandwidth=100.0, latency=0.0) for x in H200.domains),
    host=H200.host._replace(bandwidth=100.0),
)  # fmt: skip

# 2 s of 2000 operations; its 600 bytes take less.
PRODUCT = "%@ = bf16[10,10]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims=@"
# 3 s: 3000 bytes.
KERNEL = "%@ = f32[375]{0} negate(%k)"
# 4 s each: one device receives a half of 800 bytes, or sends it; 400 bytes cross to the host, or from there.
GATHER = "%@ = (f32[100]{0}, f32[200]{0}) all-gather-start(%s), replica_groups=[1,2]<=[2]"
GATHERED = "%@.done = f32[200]{0} all-gather-done(%@)"
# A quarter of that.
SHORT = "%@ = (f32[25]{0}, f32[50]{0}) all-gather-start(%q), replica_groups=[1,2]<=[2]"
SHORT_DONE = "%@.done = f32[50]{0} all-gather-done(%@)"
FETCH = "%@ = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(%h)"
FETCHED = "%@.done = f32[100]{0} copy-done(%@)"
SEND = "%@ = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(%s)"
SENT = "%@.done = f32[100]{0:S(5)} copy-done(%@)"


def program(*lines, more=""):
    """The text of a program of these lines."""
    parameters = {
        "w": "bf16[10,10]{1,0}", "k": "f32[375]{0}", "s": "f32[100]{0}", "q": "f32[25]{0}",
        "h": "f32[100]{0:S(5)}",
    }  # fmt: skip
    given = [
        f"%{name} = {shape} parameter({i})" for i, (name, shape) in enumerate(parameters.items())
    ]
    numbered = [named(line, f"v{i}") for i, line in enumerate(lines)]
    body = "\n".join(f"  {line}" for line in [*given, *numbered])
    return f"{more}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def modelled(*texts, under_way=1):
    """The time of a step that starts these programs, or copies, one after the other."""
    started = [Started(read_program(x)) if isinstance(x, str) else x for x in texts]
    found = schedule_of(started, {"data": 2}, TARGET, Topology(1, 2), under_way)
    exposed = sum(c.exposed_seconds or 0.0 for c in found.collectives)
    assert exposed == pytest.approx(found.exposed_seconds)  # each wait belongs to a collective
    return found


def exposed_of(found):
    """Exposed seconds of a step, of what each of its collectives takes alone."""
    return [(c.exposed_seconds, c.seconds * c.times) for c in found.collectives]


def named(line, name):
    return line.replace("@", name)


FLOAT32 = "%@ = f32[10,10]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims=@"
ALGORITHMS = {
    "bf16_bf16_f32_x3": 6.0, "bf16_bf16_f32_x9": 18.0, "tf32_tf32_f32_x3": 12.0, "tf32_tf32_f32": 4.0,
    "bf16_bf16_f32": 2.0, "f32_f32_f32": 20.0,
}  # fmt: skip


def named_product(call, shape, operand, algorithm="ALG_UNSET"):
    """A product as XLA calls a library's."""
    return (
        f'%@ = ({shape}, s8[4194304]{{0}}) custom-call({operand}, {operand}), custom_call_target="{call}", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        f'"precision_config":{{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"{algorithm}"}}}}}}'
    )


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (PRODUCT, 2.0),
        (KERNEL, 3.0),
        # 200 operations, but 402 bytes.
        ("%@ = bf16[1,1]{1,0} dot(%r, %c), lhs_contracting_dims={1}, rhs_contracting_dims=@", 0.402),
        # Float32 by TF32, half as fast; and exactly, without tensor cores.
        ("%@ = f32[10,10]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims=@", 4.0),
        ("%@ = f32[10,10]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims=@, "
         "operand_precision={highest,highest}", 20.0),
        # Eight bits, twice as fast.
        ("%@ = f32[10,10]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims=@", 1.0),
        ('%@ = (bf16[10,10]{1,0}, s8[4194304]{0}) custom-call(%w, %w), custom_call_target="__cublas$gemm", '
         'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
         2.0),
        # XLA's other calls of products; four of TF32 for a complex one.
        (named_product("__cublas$lt$matmul", "bf16[10,10]{1,0}", "%w"), 2.0),
        (named_product("__cublas$lt$matmul$f8", "bf16[10,10]{1,0}", "%b"), 1.0),
        (named_product("__cublas$lt$matmul", "c64[10,10]{1,0}", "%z"), 16.0),
        # Of float32, in passes: three of bfloat16, three of TF32, one of bfloat16; exactly.
        *((f"{FLOAT32}, algorithm=dot_{name}", seconds) for name, seconds in ALGORITHMS.items()),
        *((named_product("__cublas$lt$matmul", "f32[10,10]{1,0}", "%f", f"ALG_DOT_{name.upper()}"), seconds)
          for name, seconds in ALGORITHMS.items()),
    ],
)  # fmt: skip
def test_kernels_by_a_roofline(line, seconds):
    inputs = [
        "%r = bf16[1,100]{1,0} parameter(5)", "%c = bf16[100,1]{1,0} parameter(6)",
        "%f = f32[10,10]{1,0} parameter(7)", "%b = s8[10,10]{1,0} parameter(8)",
        "%z = c64[10,10]{1,0} parameter(9)",
    ]  # fmt: skip
    found = modelled(program(*inputs, line))
    assert found.step_seconds == found.compute_seconds == pytest.approx(seconds)
    assert found.product_seconds == (0.0 if line == KERNEL else pytest.approx(seconds))
    assert found.kernel_bytes == (3000 if line == KERNEL else 0)


def test_transfers_alone():
    """Their time is that of their links, and all of it is waited for."""
    found = modelled(program(named(GATHER, "g"), named(GATHERED, "g")))
    assert (found.step_seconds, found.exposed_seconds, found.exposed_copy_seconds) == (4.0, 4.0, 0)
    assert (found.collective_seconds, found.compute_seconds) == (4.0, 0)
    found = modelled(program(named(FETCH, "f"), named(FETCHED, "f")))
    assert (found.step_seconds, found.exposed_seconds, found.exposed_copy_seconds) == (4.0, 0, 4.0)
    assert (found.from_host_seconds, found.to_host_seconds, found.kernel_bytes) == (4.0, 0, 0)
    found = modelled(program(named(SEND, "t"), named(SENT, "t")))
    assert (found.from_host_seconds, found.to_host_seconds) == (0, 4.0)
    assert hidden_share(found.collectives) is None


def test_each_way_has_a_stream():
    both = (named(FETCH, "f"), named(SEND, "t"), named(FETCHED, "f"), named(SENT, "t"))
    assert modelled(program(*both)).step_seconds == 4.0
    two = (named(FETCH, "f"), named(FETCH, "e"), named(FETCHED, "f"), named(FETCHED, "e"))
    assert modelled(program(*two)).step_seconds == 8.0
    beside = (named(GATHER, "g"), *both, named(GATHERED, "g"))
    assert modelled(program(*beside)).step_seconds == 4.0


def test_a_second_collective_waits_for_the_first_or_shares_the_links():
    text = program(
        named(GATHER, "long"), named(SHORT, "short"), PRODUCT, named(SHORT_DONE, "short"),
        PRODUCT, named(GATHERED, "long"),
    )  # fmt: skip
    # The long one until 4 s, then the short one until 5 s; products from 0 to 2 and from 5 to 7. From 2 to 4
    # the short one is awaited while the long one runs: these seconds of the long one are exposed.
    found = modelled(text)
    assert (found.exposed_seconds, found.step_seconds) == (3.0, 7.0)
    assert exposed_of(found) == [(2.0, 4.0), (1.0, 1.0)]
    assert [c.hidden for c in found.collectives] == [0.5, 0.0]
    assert hidden_share(found.collectives) == pytest.approx(0.4)
    # Each at half the rate: the short one is over at 2 s, and then the long one has 3 s left, to 5 s.
    found = modelled(text, under_way=2)
    assert (found.exposed_seconds, found.step_seconds) == (1.0, 5.0)
    assert exposed_of(found) == [(1.0, 4.0), (0.0, 1.0)]
    assert hidden_share(found.collectives) == pytest.approx(0.8)
    assert found.collective_seconds == 5.0


@pytest.mark.parametrize("pairs", ["{0,1},{1,2},{2,3},{3,0}", "{1,2},{0,1},{2,3},{3,0}"])
def test_a_permutation_takes_its_slowest_pair(pairs):
    """Whichever is listed first: 400 bytes at 10 a second between hosts, at 100 within one."""
    lines = (
        "%p = (f32[100]{0}, f32[100]{0}) collective-permute-start(%s), "
        f"source_target_pairs={{{pairs}}}",
        "%p.done = f32[100]{0} collective-permute-done(%p)",
    )
    step = [Started(read_program(program(*lines)))]
    target = with_links(TARGET, {1: 10.0})
    found = schedule_of(step, {"node": 2, "local": 2}, target, Topology(2, 2))
    assert found.step_seconds == found.collectives[0].seconds == 40.0
    assert found.collectives[0].axes == ("node", "local")
    step = [Started(read_program(program(*lines).replace(pairs, "{0,1},{3,2}")))]
    found = schedule_of(step, {"node": 2, "local": 2}, target, Topology(2, 2))
    assert (found.step_seconds, found.collectives[0].axes) == (4.0, ("local",))


def test_latencies_of_collectives_are_not_shared():
    link = Link(under_way=2)
    link.begin("first", 4.0, 0.0, latency=1.0)
    link.begin("second", 1.0, 0.0, latency=2.0)
    # The first flows alone from 1 to 2, then both share the link: the second's 1 s takes until 4.
    assert (link.end("second"), link.end("first")) == (4.0, 6.0)
    alone = Link()
    alone.begin("first", 4.0, 0.0, latency=1.0)
    alone.begin("second", 1.0, 0.0, latency=2.0)
    assert (alone.end("first"), alone.end("second"), alone.last()) == (5.0, 8.0, 8.0)


def test_no_collective_is_hidden_by_less_than_nothing():
    """Nothing else runs: rounding, or links that are shared, must not make it `-0 %`."""
    (gather,) = modelled(program(named(GATHER, "g"), named(GATHERED, "g"))).collectives
    late = gather._replace(exposed_seconds=gather.seconds * (1 + 1e-9))
    assert f"{100 * late.hidden:.0f} %" == "0 %"
    shared = gather._replace(exposed_seconds=1.2 * gather.seconds)
    assert hidden_share([shared]) == 0


BODY = """\
%body (p: (f32[])) -> (f32[]) {
  %w = bf16[10,10]{1,0} parameter(0)
  %h = f32[100]{0:S(5)} parameter(1)
  %s = f32[100]{0} parameter(2)
@
}
"""
LOOP = '%loop = (f32[]) while(%s), body=%body, backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_is_multiplied_out():
    lines = (
        named(GATHER, "g"), named(FETCH, "f"), named(PRODUCT, "d"), named(GATHERED, "g"),
        named(FETCHED, "f"),
    )  # fmt: skip
    body = named(BODY, "\n".join(f"  {line}" for line in lines))
    found = modelled(program(KERNEL, LOOP, more=body))
    assert (found.step_seconds, found.exposed_seconds) == (3.0 + 5 * 4.0, 5 * 2.0)
    assert (found.product_seconds, found.compute_seconds) == (10.0, 13.0)
    assert (found.collective_seconds, found.from_host_seconds) == (20.0, 20.0)
    assert [c.times for c in found.collectives] == [5]
    assert exposed_of(found) == [(5 * 2.0, 5 * 4.0)]
    # What began before hides behind the whole loop: 3 s of the first iteration's wait are for it.
    around = program(named(GATHER, "o"), LOOP, named(GATHERED, "o"), more=body)
    found = modelled(around)
    assert found.step_seconds == 4.0 + 5 * 4.0
    assert found.exposed_seconds == 5 * 2.0 + 4.0
    # Until 2 s a product; then the one before the loop is exposed until 4 s, the first one inside until 8 s.
    assert exposed_of(found) == [(2.0, 4.0), (4.0 + 4 * 2.0, 5 * 4.0)]
    body = named(BODY, "  " + named(PRODUCT, "d"))
    around = program(named(GATHER, "o"), LOOP, named(GATHERED, "o"), more=body)
    assert modelled(around).step_seconds == 10.0


def test_a_loop_in_a_loop_is_multiplied_out():
    """As layers within microbatches; and a step may run the program twice."""
    layers = named(BODY, "\n".join(f"  {named(line, 'g')}" for line in (GATHER, GATHERED)))
    microbatches = named(BODY, f"  {LOOP}").replace("%body", "%microbatch", 1)
    loops = LOOP.replace("%body", "%microbatch").replace('"5"', '"3"')
    text = program(loops, more=layers + microbatches)
    found = modelled(text)
    assert (found.step_seconds, [c.times for c in found.collectives]) == (3 * 5 * 4.0, [3 * 5])
    twice = Started(read_program(text))
    assert [c.times for c in modelled(twice, twice).collectives] == [2 * 3 * 5]


BRANCHES = """\
%first (p: f32[375]) -> f32[375] {
  %k = f32[375]{0} parameter(0)
  %n = f32[375]{0} negate(%k)
}

%second (q: bf16[10,10]) -> bf16[10,10] {
  %w = bf16[10,10]{1,0} parameter(0)
  %s = f32[100]{0} parameter(1)
  %d = bf16[10,10]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g = (f32[100]{0}, f32[200]{0}) all-gather-start(%s), replica_groups=[1,2]<=[2]
  %g.done = f32[200]{0} all-gather-done(%g)
}
"""


@pytest.mark.parametrize(
    "choice",
    [
        "conditional(%q, %k, %w, %k), branch_computations={%first, %second, %first}",
        "conditional(%q, %k, %w), true_computation=%first, false_computation=%second",
    ],
)
def test_of_a_conditional_the_slowest_branch_runs(choice):
    """The kernel takes 3 s, the product and the gather 6 s, which hide 4 s of the gather before them."""
    line = f"%@ = f32[] {choice}"
    found = modelled(program(named(GATHER, "o"), line, named(GATHERED, "o"), more=BRANCHES))
    assert found.step_seconds == 8.0
    assert (found.product_seconds, found.compute_seconds, found.kernel_bytes) == (2.0, 2.0, 0)
    assert [c.op for c in found.collectives] == ["all-gather"] * 2
    found = modelled(program(line, KERNEL, more=BRANCHES))
    assert (found.step_seconds, found.kernel_bytes) == (9.0, 3000)
    slow = BRANCHES.replace("f32[375]", "f32[1000]")
    found = modelled(program(line, more=slow))
    assert (found.step_seconds, found.collectives, found.kernel_bytes) == (8.0, (), 8000)


def test_loops_of_unknown_length_count_once_and_are_counted():
    body = named(BODY, "  " + named(PRODUCT, "d"))
    unknown = LOOP.split(", backend_config")[0]
    found = modelled(program(LOOP, unknown, KERNEL, more=body))
    assert (found.step_seconds, found.unknown_loops) == (5 * 2.0 + 2.0 + 3.0, 1)
    # Once in each different program, and not where nothing runs.
    twice = read_program(program(unknown, more=body))
    found = modelled(Started(twice), Started(twice), program(unknown, more=named(BODY, "")))
    assert (found.step_seconds, found.unknown_loops) == (4.0, 1)


def test_a_program_that_fetches_hides_behind_nothing():
    """All programs share one compute stream: a fetch hides within the program of the products only."""
    compute = program(PRODUCT, PRODUCT)
    fetch = program(named(FETCH, "f"), named(FETCHED, "f"))
    found = modelled(compute, fetch, compute)
    assert (found.step_seconds, found.exposed_copy_seconds) == (12.0, 4.0)
    within = program(named(FETCH, "f"), PRODUCT, PRODUCT, named(FETCHED, "f"))
    found = modelled(within, compute)
    assert (found.step_seconds, found.exposed_copy_seconds) == (8.0, 0.0)
    # So does a kernel that reads pinned memory: XLA starts it on the compute stream.
    kernel = program("%@ = f32[100]{0} copy(%h)")
    found = modelled(compute, kernel, compute)
    assert (found.step_seconds, found.exposed_copy_seconds) == (
        pytest.approx(12.0),
        pytest.approx(3.6),
    )
    assert found.kernel_bytes == 400


SLICE = """\
%fetch (p0: f32[8,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[8,100]{1,0:S(5)} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,100}
}

%store (p2: f32[8,100], p3: f32[1,100], p4: s32[]) -> f32[8,100] {
  %p2 = f32[8,100]{1,0:S(5)} parameter(0)
  %p3 = f32[1,100]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  ROOT %update = f32[8,100]{1,0:S(5)} dynamic-update-slice(%p2, %p3, %p4, %p4)
}
"""


def test_slices_that_xla_moves_beside_products():
    """An asynchronous fusion, as XLA writes it; of the stack its slice counts, each way."""
    lines = (
        "%stack = f32[8,100]{1,0:S(5)} parameter(5)",
        "%i = s32[] parameter(6)",
        "%one = f32[1,100]{1,0} parameter(7)",
        "%f = ((f32[8,100]{1,0:S(5)}, s32[]), f32[1,100]{1,0}, u32[]) fusion-start(%stack, %i), calls=%fetch",
        "%g = ((f32[8,100]{1,0:S(5)}), f32[8,100]{1,0:S(5)}, u32[]) fusion-start(%stack, %one), calls=%store",
        PRODUCT,
        "%f.done = f32[1,100]{1,0} fusion-done(%f)",
        "%g.done = f32[8,100]{1,0:S(5)} fusion-done(%g)",
    )  # fmt: skip
    found = modelled(program(*lines, more=SLICE))
    assert (found.from_host_seconds, found.to_host_seconds) == (4.0, 4.0)
    assert (found.step_seconds, found.exposed_copy_seconds) == (4.0, 2.0)


def test_copies_between_programs():
    """`device_put` runs beside programs, until one reads what it makes; the step ends when all is over."""
    compute = read_program(program(PRODUCT, PRODUCT))
    arrives = Started(None, copies=(Copied("host", "here", FROM_HOST, 600),))
    found = modelled(arrives, Started(compute, ("here",)))
    assert (found.step_seconds, found.exposed_copy_seconds) == (10.0, 6.0)
    found = modelled(arrives, Started(compute), Started(compute, ("here",)))
    assert (found.step_seconds, found.exposed_copy_seconds) == (10.0, 2.0)
    leaves = Started(None, copies=(Copied("grad", "sent", TO_HOST, 500),))
    found = modelled(Started(compute), leaves, Started(compute))
    assert (found.step_seconds, found.to_host_seconds) == (9.0, 5.0)
    # One that reads another's result begins when that is over.
    back = Started(None, copies=(Copied("sent", "back", FROM_HOST, 500),))
    found = modelled(leaves, back, Started(compute, ("back",)))
    assert found.step_seconds == 5.0 + 5.0 + 4.0


# Forward, and both gradients, as XLA calls cuDNN: 2 images of 8 x 8, kernels of 3 x 3, features 4 to 6.
IMAGE, FILTER, OUT = "bf16[2,8,8,4]{3,2,1,0}", "bf16[6,3,3,4]{3,2,1,0}", "bf16[2,8,8,6]{3,2,1,0}"
CONVOLUTION = (
    "  %y = ({}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, "
    'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{}"'
)


@pytest.mark.parametrize(
    ("what", "operands", "result"),
    [
        ("Forward", (IMAGE, FILTER), OUT),
        ("BackwardInput", (OUT, FILTER), IMAGE),
        ("BackwardFilter", (IMAGE, OUT), FILTER),
    ],
)
def test_operations_of_a_convolution(what, operands, result):
    assert flops(operands, CONVOLUTION.format(result, what)) == 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)


def test_operations_of_a_convolution_that_xla_computes():
    line = f"  %y = {OUT} convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f"
    kernel = "bf16[3,3,4,6]{3,2,1,0}"
    assert flops((IMAGE, kernel), line) == 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    spread = line.replace("pad=1_1x1_1", "pad=1_1x1_1 lhs_dilate=2x2")
    assert flops((IMAGE, kernel), spread) == 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4) / 4


@pytest.mark.parametrize(
    ("target", "mask", "factor"),
    [("fmhaSoftmax", "NO_MASK", 4), ("fmhaSoftmaxBackward", "NO_MASK", 10), ("fmhaSoftmax", "CAUSAL", 2)],
)  # fmt: skip
def test_operations_of_fused_attention(target, mask, factor):
    """Products of scores, 2 x 3 heads of 16 x 32, with a head's 8 elements: two forwards, five backwards."""
    line = (
        "  %y = (bf16[2,16,3,8]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b, %b), "
        f'custom_call_target="__cudnn${target}", backend_config={{"cudnn_fmha_backend_config":{{'
        '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","3","16","32"]},'
        f'"mask_type":"{mask}"}}}}'
    )
    operands = ("bf16[2,16,3,8]{3,2,1,0}", "bf16[2,32,3,8]{3,2,1,0}")
    assert flops(operands, line) == factor * 2 * 3 * 16 * 32 * 8


def flops(operands, line):
    """Operations on tensor cores of one line, whose operands %a and %b have these shapes."""
    given = [
        f"  %{name} = {x} parameter({i})"
        for i, (name, x) in enumerate(zip("ab", operands, strict=True))
    ]
    computations, entry = parse("\n".join(["ENTRY %main () -> f32[] {", *given, line, "}"]))
    shapes = {x.name: x.shape for x in computations[entry]}
    found = _kernels.work_of(computations[entry][-1], shapes, computations).flops
    assert found is not None
    assert found.f32 == 0
    return found.tensor
