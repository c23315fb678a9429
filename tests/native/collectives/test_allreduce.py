"""Allreduce: every element type, reduction, path and place of memory, against exact references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.programs import ran
from native.collectives.matrix import SIZES, every_type_and_size
from native.over_devices import also_on_devices
from native.ranks import LAUNCHERS, Seat, as_threads, on_ranks
from native.values import Tensor, expected, reduced_samples, sample
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core, select_instructions

INLINE = 16 << 10  # native kInlineBytes; between hosts up to four times as much
SEGMENT = 512 << 10  # native kSegmentBytesCrowded
REAL_OPS = [op for op in ReduceOp if op is not ReduceOp.ADASUM]
# Which ranks keep their tensors in ring memory: paths are chosen by all ranks together.
MEMORIES: dict[str, Callable[[int], bool]] = {
    "ring": lambda rank: True,
    "ordinary": lambda rank: False,
    "mixed": lambda rank: rank % 2 == 0,
}
ROUNDING = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-23, DType.FLOAT64: 2.0**-52}


def check(
    ring: Communicator,
    dtype: DType,
    shape: tuple[int, ...],
    op: ReduceOp = ReduceOp.SUM,
    *,
    memory: str = "ordinary",
    in_place: bool = True,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """One allreduce; its output must be the reference, and an input that is not the output must be untouched."""
    count = int(np.prod(shape))
    values = sample(dtype, ring.rank, count, op).reshape(shape)
    source = Tensor.of(ring, values, dtype, ring=MEMORIES[memory](ring.rank))
    target = source if in_place else Tensor.of(ring, np.zeros(shape), dtype, ring=MEMORIES[memory](ring.rank))
    ring.allreduce([source.buffer], [target.buffer], op=op, prescale=prescale, postscale=postscale)
    reference = reduced_samples(dtype, ring.size, count, op, prescale, postscale).reshape(shape)
    if dtype in ROUNDING and op is ReduceOp.AVERAGE:
        np.testing.assert_allclose(target.values, reference, rtol=2 * ROUNDING[dtype], atol=0)
    else:
        np.testing.assert_array_equal(target.values, reference)
    if not in_place:
        np.testing.assert_array_equal(source.values, values)


@also_on_devices
@every_type_and_size
def test_every_reduction_of_every_type(launcher: str, size: int, dtype: DType) -> None:
    """Small and odd counts for every reduction; one-shot, push, staged and mixed paths for sums."""
    edge = INLINE // dtype.itemsize
    counts = (edge, edge + 1, 4 * edge + 1, 3 * SEGMENT // dtype.itemsize + 5)
    for count in counts:
        reduced_samples(dtype, size, count, ReduceOp.SUM, 1.0, 1.0)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for op in REAL_OPS:
            for shape in ((), (0,), (7,), (3, 0, 2), (5, 67)):
                check(ring, dtype, shape, op, in_place=len(shape) % 2 == 0)
        for memory in MEMORIES:
            for count in counts:
                check(ring, dtype, (count,), memory=memory, in_place=count % 2 == 0)
        for op in (ReduceOp.AVERAGE, ReduceOp.MAX):
            for memory in ("ring", "ordinary"):
                check(ring, dtype, (edge + 1031,), op, memory=memory)

    LAUNCHERS[launcher](size, body)


@also_on_devices
@pytest.mark.parametrize("dtype", set(DType) - {DType.BOOL})
@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_scale_factors(seat: Seat, size: int, dtype: DType) -> None:
    """Prescale and postscale are fused in; integers are scaled in float64 and truncated each time."""
    ring = seat.open()
    for memory in ("ring", "ordinary"):
        for count in (9, INLINE):
            for prescale, postscale in ((1.5, 1.0), (1.0, 0.5), (0.5, 3.0)):
                check(ring, dtype, (count,), memory=memory, prescale=prescale, postscale=postscale)
            check(ring, dtype, (count,), ReduceOp.MAX, memory=memory, postscale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_segments_past_the_cache(size: int) -> None:
    """Whatever the tensors' places and lengths are modulo a cache line."""
    cases = [(dtype, 3 * SEGMENT // dtype.itemsize + odd) for dtype in (DType.UINT8, DType.INT16, DType.FLOAT32)
             for odd in (0, 1, 15, 64)]  # fmt: skip
    for dtype, count in cases:
        reduced_samples(dtype, size, count, ReduceOp.SUM, 1.0, 1.0)

    def body(seat: Seat) -> None:
        ring = seat.open(staging="memory")
        for dtype, count in cases:
            check(ring, dtype, (count,), memory="ordinary", in_place=count % 2 == 0)

    as_threads(size, body)


def test_segments_go_the_way_that_is_faster() -> None:
    """Both ways are timed at first, the other one now and then; only a clear gain makes ranks write past the cache."""
    staging = core.Staging(core.Options())
    took = {False: 10, True: 20}

    def operate(times: int) -> list[bool]:
        ways = []
        for _ in range(times):
            ways.append(staging.past_cache(4 << 20))
            staging.took(ways[-1], 4 << 20, took[ways[-1]] << 20)
        return ways

    assert operate(8) == [False, True] * 4
    assert sum(operate(64)) == 2
    took[False] = 40  # from now on ranks share no cache
    assert 50 <= sum(operate(64)) <= 56
    took[False] = 10
    assert sum(operate(64)) <= 10
    assert sum(operate(64)) == 2
    took[True] = 10  # no gain
    assert sum(operate(96)) == 3
    assert not any(staging.past_cache(1 << 19) for _ in range(100))


@also_on_devices
@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_averages_of_integers_truncate(seat: Seat, size: int) -> None:
    """Toward zero, and a sum that divides evenly is not one too small (a product with 1/n would be)."""
    ring = seat.open()
    values = np.array([1, -1, size, -size, 49 * size, 7])
    tensor = Tensor.of(ring, values if ring.rank == 0 else values * 0, DType.INT64)
    ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.AVERAGE)
    one = int(size == 1)
    assert tensor.values.tolist() == [one, -one, 1, -1, 49, 7 // size]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("dtype", "tiny"), [(DType.FLOAT16, 2.0**-11), (DType.BFLOAT16, 2.0**-8)])
@on_ranks(7)
def test_half_precision_is_summed_in_float32(seat: Seat, dtype: DType, tiny: float, memory: str) -> None:
    """1 + tiny rounds to 1 in the type itself; only a sum kept in float32 shows what seven tinies add up to."""
    ring = seat.open()
    for count in (5, INLINE):
        value = np.full(count, 1.0 if ring.rank == 0 else tiny)
        tensor = Tensor.of(ring, value, dtype, ring=MEMORIES[memory](ring.rank))
        ring.allreduce([tensor.buffer], [tensor.buffer])
        np.testing.assert_array_equal(tensor.values, np.full(count, 1.0 + 6 * tiny))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@on_ranks(2)
def test_every_bit_pattern_of_the_half_types(seat: Seat, dtype: DType) -> None:
    """All 65,536 patterns pass through float32 and back unchanged: subnormals, infinities, zeros, NaNs stay NaNs."""
    ring = seat.open()
    tensor = Tensor.of(ring, np.zeros(1 << 16), dtype)
    every = np.arange(1 << 16, dtype=np.uint16)
    tensor.array.view(np.uint16)[:] = every
    with np.errstate(invalid="ignore"):
        before = tensor.values.copy()
        ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.MAX)
        np.testing.assert_array_equal(tensor.values, before)
    numbers = ~np.isnan(before)
    np.testing.assert_array_equal(tensor.array.view(np.uint16)[numbers], every[numbers])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", SIZES)
def test_fused_tensors_travel_as_one(size: int, launcher: str) -> None:
    """Tensors of many shapes, empty ones too, in one operation; inline, and over several segments."""
    small = [(3,), (0,), (), (2, 5), (1,)]
    large = [(SEGMENT // 4 - 1,), (0,), (7,), (3, 50_001), ()]

    def body(seat: Seat) -> None:
        ring = seat.open()
        for shapes in (small, large):
            for memory in MEMORIES:
                inputs = [[sample(DType.FLOAT32, rank + i, int(np.prod(s))).reshape(s) for i, s in enumerate(shapes)]
                          for rank in range(size)]  # fmt: skip
                at = MEMORIES[memory](ring.rank)
                sources = [Tensor.of(ring, values, DType.FLOAT32, ring=at) for values in inputs[ring.rank]]
                targets = [Tensor.of(ring, np.zeros(s), DType.FLOAT32, ring=at) for s in shapes]
                ring.allreduce([t.buffer for t in sources], [t.buffer for t in targets], postscale=2.0)
                for i, target in enumerate(targets):
                    reference = expected([values[i] for values in inputs], DType.FLOAT32, ReduceOp.SUM, 1.0, 2.0)
                    np.testing.assert_array_equal(target.values, reference)

    LAUNCHERS[launcher](size, body)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [2, 4])
def test_adasum_combines_in_pairs(size: int, launcher: str) -> None:
    """Each tensor of a fused operation by itself, small and over several pages; the same bits on every rank."""

    def combine(parts: list[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        a, b = combine(parts[: len(parts) // 2]), combine(parts[len(parts) // 2 :])
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    def body(seat: Seat) -> list[bytes]:
        ring = seat.open()
        said = []
        for counts in ((5,), (3, 40_001, 7)):
            values = [[np.random.default_rng([rank, n]).normal(size=n) for n in counts] for rank in range(size)]
            tensors = [Tensor.of(ring, own, DType.FLOAT64) for own in values[ring.rank]]
            buffers = [tensor.buffer for tensor in tensors]
            ring.allreduce(buffers, buffers, op=ReduceOp.ADASUM, prescale=2.0, postscale=0.25)
            for index, tensor in enumerate(tensors):
                reference = combine([values[rank][index] for rank in range(size)]) / 2
                np.testing.assert_allclose(tensor.values, reference, rtol=1e-9, atol=1e-12)
                said.append(tensor.array.tobytes())
        return said

    results = LAUNCHERS[launcher](size, body)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_agree_to_the_bit(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one machine's kernels compute, another one's compute too: RING_ISA chooses in a fresh process."""
    import sys

    script = (
        "import hashlib, sys; import numpy as np; sys.path.insert(0, 'tests')\n"
        "from native.ranks import as_threads; from native.values import Tensor\n"
        "from ring_notebook.core.buffers import DType; from ring_notebook.core.communicator import ReduceOp\n"
        "digest = hashlib.sha256()\n"
        "def body(seat):\n"
        "    ring = seat.open(); out = []\n"
        "    for dtype in set(DType) - {DType.BOOL}:\n"
        "        for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.PRODUCT):\n"
        "            values = np.random.default_rng([ring.rank, int(dtype)]).uniform(0, 11, 5003)\n"
        "            tensor = Tensor.of(ring, values, dtype)\n"
        "            ring.allreduce([tensor.buffer], [tensor.buffer], op=op, prescale=0.37, postscale=1.3)\n"
        "            out.append((int(dtype), int(op), tensor.array.tobytes()))\n"
        "    return sorted(out)\n"
        "for part in as_threads(3, body)[0]: digest.update(part[2])\n"
        "from ring_notebook.core.native import core; print(core.isa(), digest.hexdigest())\n"
    )
    outcomes = {}
    for name in ("baseline", isa):
        monkeypatch.setenv("RING_ISA", name)
        done = ran([sys.executable, "-c", script], check=True)
        used, outcomes[name] = done.stdout.split()
        if used != name:
            pytest.skip(f"NOT TESTED: this processor has no {name}")
    assert outcomes[isa] == outcomes["baseline"]


def test_instructions_that_the_processor_lacks_are_said() -> None:
    """RING_ISA is a wish: the warning says what is used in its place."""
    with pytest.warns(RuntimeWarning, match="RING_ISA=avx2: this processor has no avx2; baseline is used"):
        select_instructions(lambda _: "baseline", "avx2")
    with pytest.raises(ValueError, match="there are no kernels for 'sse9'; the choices are baseline, avx2 and avx512"):
        core.select_isa("sse9")
