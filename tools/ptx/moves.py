"""Instructions that move: registers, memory, and between the threads of a warp."""

import numpy as np

from ptx.kernel import Address, Operand, bits
from ptx.launch import SIGNED, WARP, Launch, poison
from ptx.operations import operation

_SPACE = r"(?P<space>\.global|\.shared(?:::cta)?)"
# What is said about caches and order changes no number: threads run in step.
_HINTS = r"(?:\.nc)?(?:\.L1::\w+)?(?:\.L2::\w+)*"
_KIND = r"(?P<kind>[busf](?:8|16|32|64))"


@operation(r"mov\.(?P<kind>pred|[busf](?:16|32|64))")
def move(launch: Launch, d: Operand, a: Operand, kind: str) -> None:
    launch.write(d, launch.read(a, kind))


@operation(r"cvta\.to\.global\.(?P<kind>u64)")
def to_global(launch: Launch, d: Operand, a: Operand, kind: str) -> None:
    launch.write(d, launch.read(a, kind))


@operation(r"selp\.(?P<kind>[busf](?:16|32|64))")
def select(launch: Launch, d: Operand, a: Operand, b: Operand, p: Operand, kind: str) -> None:
    launch.write(d, np.where(launch.read(p, "pred"), *(launch.read(x, f"b{bits(kind)}") for x in (a, b))))


@operation(r"ld\.param\.(?P<kind>[busf](?:8|16|32|64))")
def load_parameter(launch: Launch, d: Operand, place: Address, kind: str) -> None:
    value = launch.parameters[str(place.base)]
    if place.offset or 8 * value.itemsize != bits(kind):
        raise ValueError("a part of a parameter")
    launch.write(d, _signed(value, kind), relaxed=True)


@operation(rf"ld(?:\.volatile)?{_SPACE}{_HINTS}(?:\.v[248])?(?:\.L2::cache_hint)?\.{_KIND}")
def load(launch: Launch, d: Operand, place: Address, *policy: Operand, space: str, kind: str) -> None:
    memory, addresses = _addresses(launch, place, space)
    live = np.ones(1, bool) if addresses.size == 1 else launch.executing()
    targets = d if isinstance(d, tuple) else (d,)
    _check_alignment(addresses[live], len(targets) * bits(kind) // 8)
    for n, target in enumerate(targets):
        loaded = memory.load(addresses[live] + np.uint64(n * bits(kind) // 8), bits(kind))
        value = np.zeros(addresses.shape, loaded.dtype)
        value[live] = loaded
        launch.write(target, _signed(value, kind), relaxed=True)


@operation(rf"st(?:\.volatile)?{_SPACE}{_HINTS}(?:\.v[248])?\.{_KIND}")
def store(launch: Launch, place: Address, a: Operand, *policy: Operand, space: str, kind: str) -> None:
    memory, addresses = _addresses(launch, place, space)
    live, sources = launch.executing(), a if isinstance(a, tuple) else (a,)
    addresses = launch.everywhere(addresses)[live]
    _check_alignment(addresses, len(sources) * bits(kind) // 8)
    for n, source in enumerate(sources):
        value = launch.everywhere(launch.read(source, f"b{bits(kind)}", relaxed=True))[live]
        memory.store(addresses + np.uint64(n * bits(kind) // 8), value)


@operation(r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16")
def load_matrix(launch: Launch, d: Operand, place: Address) -> None:
    """Give each thread a pair out of a row of eight, whose address another thread of the warp has."""
    _need_whole_warps(launch)
    memory, addresses = _addresses(launch, place, ".shared")
    live = np.flatnonzero(launch.executing())
    lane, warp = live % WARP, live // WARP * WARP
    assert isinstance(d, tuple)
    for n, target in enumerate(d):
        rows = launch.everywhere(addresses)[warp + 8 * n + lane // 4]
        value = np.zeros(launch.count, np.uint32)
        value[live] = memory.load(rows + (4 * (lane % 4)).astype(np.uint64), 32)
        launch.write(target, value)


@operation(r"shfl\.sync\.(?P<how>bfly|down|up|idx)\.b32")
def shuffle(
    launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, members: Operand, how: str
) -> None:
    """Give each thread the number of another of its warp, within a segment that `c` describes.

    The last warp of a block may be short: what its threads read past that is poison.
    """
    target, _, valid_target = str(d).partition("|")
    lane, by = launch.lane.astype(np.int64), launch.read(b, "b32").astype(np.int64) & 31
    clamp = launch.read(c, "b32").astype(np.int64)
    segment = clamp >> 8 & 31
    last = (lane & segment) | (clamp & 31 & ~segment)
    sources = {"bfly": lane ^ by, "down": lane + by, "up": lane - by}
    source = (lane & segment) | (by & ~segment) if how == "idx" else sources[how]
    valid = source >= last if how == "up" else source <= last
    thread = np.arange(launch.count) + np.where(valid, source - lane, 0)
    inside = np.minimum(thread, launch.count - 1)
    exists = (thread == inside) & (launch.block[inside] == launch.block)
    if not launch.executing()[inside[launch.executing() & exists]].all():
        raise RuntimeError("a shuffle reads a thread that does not take part")
    value = np.where(exists, launch.everywhere(launch.read(a, "b32"))[inside], poison(32))
    launch.write(target, value)
    if valid_target:
        launch.write(valid_target, launch.everywhere(valid))


_REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@operation(
    r"redux\.sync\.(?P<how>add|min|max)\.(?P<kind>[us]32)|redux\.sync\.(?P<joint>and|or|xor)\.(?P<of>b32)"
)
def reduce(
    launch: Launch, d: Operand, a: Operand, members: Operand,
    how: str | None, kind: str | None, joint: str | None, of: str | None,
) -> None:  # fmt: skip
    """Give each thread what the numbers of its whole warp come to."""
    _need_whole_warps(launch)
    if (launch.read(members, "b32") != np.uint32(0xFFFFFFFF)).any():
        raise NotImplementedError("a part of a warp")
    values = launch.everywhere(launch.read(a, kind or of or "")).reshape(-1, WARP)
    whole = _REDUCE[how or joint or ""].reduce(values, axis=1, dtype=values.dtype)
    launch.write(d, np.repeat(whole, WARP))


@operation(r"membar\.(?:gl|cta)|fence\.\S+|griddepcontrol\.(?:wait|launch_dependents)|createpolicy\.\S+")
def nothing(launch: Launch, *operands: Operand) -> None:
    """Order memory or describe a cache: threads run in step, and there is no cache."""


def _addresses(launch: Launch, place: Address, space: str):
    """Return the memory of a space, and the addresses in it."""
    base, offset = launch.read(place.base, _address_kind(launch, place)).astype(np.uint64), place.offset
    addresses = base + np.uint64(offset & (1 << 64) - 1)
    if space == ".global":
        return launch.memory, addresses
    if (launch.everywhere(addresses)[launch.executing()] >= launch.stride).any():
        raise RuntimeError("past the shared memory of a block")
    return launch.shared, addresses + launch.block.astype(np.uint64) * np.uint64(launch.stride)


def _check_alignment(addresses: np.ndarray, size: int) -> None:
    if (addresses % np.uint64(size)).any():
        raise RuntimeError(f"an address is not aligned to {size} bytes")


def _address_kind(launch: Launch, place: Address) -> str:
    is_register = isinstance(place.base, str) and place.base.startswith("%")
    return f"b{launch.kernel.width(str(place.base)) if is_register else 64}"


def _need_whole_warps(launch: Launch) -> None:
    warps = launch.executing().reshape(-1, WARP)
    if (warps.any(1) != warps.all(1)).any():
        raise RuntimeError("only a part of a warp takes part")


def _signed(value: np.ndarray, kind: str) -> np.ndarray:
    return value.view(SIGNED[bits(kind)]) if kind[0] == "s" else value
