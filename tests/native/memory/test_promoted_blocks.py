"""Promoted blocks of the preloaded allocator, with its table called as the core calls it."""

from __future__ import annotations

from native.memory.test_preload import run

TABLE = """
import mmap, sys
table = (ctypes.c_void_p * 9).in_dll(c, "ring_preload_v1")
GIVE_BACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
LEFT = ctypes.CFUNCTYPE(ctypes.c_size_t)
class Source(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("owner", ctypes.c_void_p), ("give_back", GIVE_BACK), ("left", LEFT)]
class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("used", "cached", "promoted", "reserved")]
P, N, B = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
kinds = [(B,), (B, P), (None, P), (N, P, N), (N, P, N), (B, P, N, P), (None, N), (None,), (Counts,)]
activate, attach, detach, offset_of, claim, promote, retire, trim, counts = (
    ctypes.CFUNCTYPE(*kind)(address) for kind, address in zip(kinds, table))
NOWHERE = (1 << 64) - 1
fd = os.memfd_create("ring")
os.ftruncate(fd, 1 << 30)
ring = mmap.mmap(fd, 1 << 30)
ring_address = ctypes.addressof(ctypes.c_char.from_buffer(ring))
returned = []
left = 1 << 40
source = Source(fd, 1, GIVE_BACK(lambda owner, offset: returned.append(offset)), LEFT(lambda: left))
assert activate() and attach(ctypes.byref(source)) and not attach(ctypes.byref(source))
def move(block, size, offset):
    for _ in range(100_000):
        if claim(block, size):
            return promote(block, offset, ring_address + offset)
"""


def test_a_block_moves_and_keeps_its_address() -> None:
    run(
        TABLE
        + """
size = 5 * MIB - 100
block = c.aligned_alloc(64, size)
ctypes.memset(block, 7, size)
assert claim(block, size) == 0, "what is reduced once is not worth a copy"
assert claim(block + 64, size - 64) == 0 and claim(block, size - 64) == 0, "others may write to the rest"
assert offset_of(block, size) == NOWHERE
assert move(block, size, 2 * MIB)
assert offset_of(block, size) == 2 * MIB and offset_of(block + 100, 5) == 2 * MIB + 100
assert offset_of(block + 100, 6 * MIB) == NOWHERE
assert ring[2 * MIB : 2 * MIB + size] == b"\\7" * size
ring[2 * MIB] = 9
assert ctypes.string_at(block, 2) == b"\\11\\7"
assert claim(block, size) == 0 and not promote(block, 100 * MIB, ring_address)
c.free(block)
assert (counts().cached, counts().promoted) == (5 * MIB, 5 * MIB)
assert c.aligned_alloc(64, size) == block and offset_of(block, 1) == 2 * MIB, "it stays promoted when it is free"
c.free(block)
trim()
assert returned == [2 * MIB] and counts().promoted == counts().cached == 0
"""
    )


def test_memory_that_another_rank_may_write_to_is_given_to_no_other_tensor() -> None:
    run(
        TABLE
        + """
block = c.aligned_alloc(64, MIB)
assert move(block, MIB, 0)
retire(MIB // 2)
assert returned == [] and offset_of(block, 1) == 0, "its tensor still has it"
c.free(block)
assert returned == [0]
assert c.aligned_alloc(64, MIB) == block and offset_of(block, 1) == NOWHERE
ring[0] = 5
assert ctypes.string_at(block, 1) == b"\\0"
"""
    )


def test_promoted_blocks_are_the_last_to_go_and_come_back_later_each_time() -> None:
    run(
        TABLE
        + """
def claims_until_moved(block, size, offset):
    for number in range(1, 100):
        if claim(block, size):
            assert promote(block, offset, ring_address + offset)
            return number
size, other = 64 * MIB, 128 * MIB
first, second = c.aligned_alloc(64, size), c.aligned_alloc(64, size - 8 * MIB)
assert claims_until_moved(first, size, 0) == 2
c.free(first), c.free(second)
c.free(c.aligned_alloc(64, 72 * MIB))
assert (counts().promoted, returned) == (size, []), "a private block that was freed later goes first"
for expected in (4, 8):
    c.free(c.aligned_alloc(64, other))
    assert returned.pop() == 0 and counts().promoted == 0
    other += 64 * MIB
    first = c.aligned_alloc(64, size)
    assert claims_until_moved(first, size, 0) == expected
    c.free(first)
"""
    )


def test_without_its_owner_a_block_is_private_again_once_it_is_freed() -> None:
    run(
        TABLE
        + """
used, free = c.aligned_alloc(64, MIB), c.aligned_alloc(64, MIB)
assert move(used, MIB, 0) and move(free, MIB, MIB)
ctypes.memset(used, 3, MIB)
c.free(free)
detach(1)
assert returned == [MIB] and offset_of(used, 1) == NOWHERE and claim(used, MIB) == 0
assert attach(ctypes.byref(source))
child = os.fork()
if child == 0:
    ok = ctypes.string_at(used, MIB) == b"\\3" * MIB
    ctypes.memset(used, 4, MIB)
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0 and ctypes.string_at(used, MIB) == b"\\3" * MIB
c.free(used)
assert counts().promoted == 0 and returned == [MIB]
"""
    )


def test_a_fork_that_memory_is_too_short_for_is_an_error() -> None:
    """Its caller gets it, and the text says what to do; the snapshot that is there counts."""
    said = run(
        TABLE
        + """
def fork():
    child = os.fork()
    if child == 0:
        os._exit(ctypes.string_at(block, size) != b"\\7" * size)
    return os.waitpid(child, 0)[1]
size = 5 * MIB
block = c.aligned_alloc(64, size)
ctypes.memset(block, 7, size)
left = 0
assert fork() == 0, "nothing is promoted"
assert move(block, size, 2 * MIB)
left = size - 1
os.dup2(1, 2)
try:
    os.fork()
except OSError as error:
    assert error.errno == 12
else:
    raise AssertionError
left = size
assert fork() == 0
left = 0
assert fork() == 0, "it takes the place of the snapshot before"
"""
    )
    assert "cannot be forked, because there is no memory left for a copy of its tensors" in said


# `fill` makes mappings until the process may have no more; what it returns, `empty` takes away.
FULL = """
c.mmap.restype = P
c.mmap.argtypes = [P, N, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
c.munmap.argtypes, c.mprotect.argtypes = [P, N], [P, N, ctypes.c_int]
def fill():
    most = int(open("/proc/sys/vm/max_map_count").read())
    if most > 1 << 20:
        print("NOT TESTED: this system allows any number of mappings")
        sys.exit()
    range_ = c.mmap(None, most * 4096 * 2, 0, 0x4022, -1, 0)
    made = [(range_, most * 4096 * 2)]
    for page in range(0, most * 2, 2):
        if c.mprotect(range_ + page * 4096, 4096, 1):
            break
    while (more := c.mmap(None, 4096, len(made) % 2, 0x22, -1, 0)) != NOWHERE:
        made.append((more, 4096))
    return made
def empty(made):
    for address, length in made:
        assert c.munmap(address, length) == 0
patterns = [bytes([value]) * MIB for value in range(8)]
c.memcmp.argtypes = [P, ctypes.c_char_p, N]
def holds(block, value):  # takes no memory for that
    return c.memcmp(block, patterns[value], MIB) == 0
def block_of(value, offset=None):
    block = c.aligned_alloc(64, MIB)
    ctypes.memset(block, value, MIB)
    assert offset is None or move(block, MIB, offset)
    return block
"""


def test_without_mappings_a_block_stays_where_it_is() -> None:
    """It neither moves into ring memory nor out of it, and its tensors have what was written to them."""
    run(
        TABLE
        + FULL
        + """
moved, again, private = block_of(3, 0), block_of(4, 2 * MIB), block_of(5)
made = fill()
assert move(private, MIB, 4 * MIB) is False and holds(private, 5) and offset_of(private, 1) == NOWHERE
ctypes.memset(private, 6, MIB)
assert ring[4 * MIB] == 5, "its memory is its own"
c.free(again)
trim()
assert (returned, counts().cached, counts().promoted) == ([], MIB, 2 * MIB)
assert c.aligned_alloc(64, MIB) == again and offset_of(again, 1) == 2 * MIB, "the next tensor has it"
assert holds(moved, 3)
ctypes.memset(again, 7, MIB)
empty(made)
assert move(private, MIB, 4 * MIB) and holds(private, 6) and holds(again, 7)
for block in (moved, again, private):
    c.free(block)
trim()
assert sorted(returned) == [0, 2 * MIB, 4 * MIB] and counts().promoted == counts().cached == 0
later = [block_of(value) for value in range(5)]
assert all(holds(block, value) for value, block in enumerate(later))
"""
    )


def test_without_mappings_memory_that_others_may_write_to_is_given_to_nobody() -> None:
    run(
        TABLE
        + FULL
        + """
retired, cached, held = block_of(1, 0), block_of(2, MIB), block_of(3, 2 * MIB)
retire(0)
c.free(cached)
made = fill()
c.free(retired)
detach(1)
assert returned == []
others = [block_of(value) for value in range(4)]
assert not {retired, cached} & set(others) and holds(held, 3)
assert offset_of(held, 1) == NOWHERE
ring[:MIB] = ring[MIB : 2 * MIB] = patterns[7]
assert all(holds(block, value) for value, block in enumerate(others))
empty(made)
trim()
assert (returned, counts().promoted) == ([], MIB)
later = [block_of(value) for value in range(4)]
assert {retired, cached} < set(later) and all(holds(block, value) for value, block in enumerate(later))
"""
    )


def test_without_mappings_a_fork_is_an_error() -> None:
    said = run(
        TABLE
        + FULL
        + """
def fork():
    child = os.fork()
    if child == 0:
        ok = holds(block, 7)
        ctypes.memset(block, 1, MIB)
        trim()
        os._exit(not ok)
    return os.waitpid(child, 0)[1]
block = block_of(7, 0)
made = fill()
os.dup2(1, 2)
try:
    fork()
except OSError as error:
    assert error.errno == 12
else:
    raise AssertionError
assert holds(block, 7)
empty(made)
assert fork() == 0 and holds(block, 7)
"""
    )
    assert "as many mappings as it may" in said
