"""Launches: threads, branches, memory, and what passes between threads."""

import numpy as np
import pytest

from ptx.approximations import Approximations
from ptx.kernel import parse
from ptx.launch import Launch
from ptx.memory import Memory, poisoned

AT = 1 << 40
HEAD = ".reg .b32 %r<20>; .reg .b64 %rd<8>; .reg .pred %p<4>; .reg .b16 %rs<8>; mov.u32 %r1, %tid.x;"
# Byte 4 tid of the output.
OWN = "ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r1, 4, %rd1;"


def launched(body: str, threads: int = 32, blocks: int = 1, size: int = 4096, before: str = "") -> np.ndarray:
    """Return the output of a kernel, as uint32, after one launch."""
    text = f"{before} .visible .entry k(.param .u64 .ptr .global .align 16 out) {{ {HEAD} {body} ret; }}"
    memory, output = Memory(), poisoned(size)
    memory.add(AT, output)
    (kernel,) = parse(text).values()
    Launch(kernel, (blocks, 1, 1), (threads, 1, 1), [AT], memory, Approximations()).run()
    return output.view(np.uint32)


def lanes(body: str, threads: int = 32, blocks: int = 1, before: str = "") -> list[int]:
    """Return what each thread leaves in %r2."""
    whole = ".reg .b32 %own; mov.u32 %own, %ctaid.x; mad.lo.s32 %own, %own, %ntid.x, %r1;"
    end = "ld.param.u64 %rd6, [out]; mad.wide.u32 %rd7, %own, 4, %rd6; st.global.u32 [%rd7], %r2;"
    text = f"{whole} {body} {end}"
    return launched(text, threads, blocks, before=before)[: threads * blocks].tolist()


def test_threads_know_where_they_are():
    body = "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %laneid; mov.u32 %r5, %ntid.x; mov.u32 %r6, %nctaid.x;"
    join = (
        "mad.lo.s32 %r2, %r3, 100, %r4; mad.lo.s32 %r2, %r5, 10000, %r2; mad.lo.s32 %r2, %r6, 1000000, %r2;"
    )
    expected = [2_640_000 + 100 * (n // 64) + n % 32 for n in range(128)]
    assert lanes(body + join, threads=64, blocks=2) == expected


def test_a_guard_leaves_other_threads_alone():
    body = "setp.lt.u32 %p1, %r1, 3; mov.u32 %r2, 7; @%p1 mov.u32 %r2, 1; @!%p1 add.u32 %r2, %r2, %r1;"
    assert lanes(body, 5) == [1, 1, 1, 10, 11]


def test_threads_leave_a_loop_one_by_one_and_meet_again():
    loop = "mov.u32 %r2, 0; $again: add.u32 %r2, %r2, 10; setp.lt.u32 %p1, %r2, %r3; @%p1 bra $again;"
    assert lanes(f"mul.lo.u32 %r3, %r1, 10; {loop} add.u32 %r2, %r2, 1;", 5) == [11, 11, 21, 31, 41]


def test_branches_go_either_way():
    body = "setp.lt.u32 %p1, %r1, 2; @%p1 bra $low; mov.u32 %r2, 5; bra.uni $end; $low: mov.u32 %r2, 4; $end:"
    assert lanes(body, 4) == [4, 4, 5, 5]


def test_a_thread_that_returned_writes_nothing():
    body = f"setp.eq.u32 %p1, %r1, 1; @%p1 ret; {OWN} st.global.u32 [%rd2], %r1;"
    assert launched(body, 3)[:3].tolist() == [0, 0xA5A5A5A5, 2]


def test_what_nothing_was_written_to_is_poison():
    assert lanes("mov.u32 %r2, %r9;", 1) == [0xA5A5A5A5]
    assert lanes(f"{OWN} ld.global.u32 %r2, [%rd2+64];", 1) == [0xA5A5A5A5]
    assert lanes("mov.u32 %r3, smem; ld.shared.u32 %r2, [%r3];", 1, before=SHARED) == [0xA5A5A5A5]


def test_vectors_and_narrow_numbers_are_read_and_written():
    write = f"{OWN} mov.u32 %r4, 0x8081; st.global.v4.b32 [%rd1], {{%r1, %r4, 3, 4}};"
    write += "st.global.b8 [%rd1+16], %r4;"
    read = "ld.global.v2.u16 {%rs1, %rs2}, [%rd1+4]; ld.global.s8 %r2, [%rd1+4]; ld.global.u8 %r3, [%rd1+5];"
    keep = "cvt.u32.u16 %r5, %rs1; st.global.v2.u32 [%rd1+32], {%r2, %r3}; st.global.u32 [%rd1+40], %r5;"
    output = launched(write + read + keep, 1)
    assert output[:4].tolist() == [0, 0x8081, 3, 4]
    assert output[4] == 0xA5A5A581
    assert output[8:11].tolist() == [0xFFFFFF81, 0x80, 0x8081]


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.global.u32 %r2, [%rd1+4096]", "no memory"),
        ("ld.global.u32 %r2, [%rd1+-4]", "no memory"),
        ("st.global.u32 [%rd3], %r1", "no memory"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1+4096]", "no memory"),
        ("ld.global.u32 %r2, [%rd1+2]", "not aligned"),
        ("st.global.b16 [%rd1+1], %rs1", "not aligned"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1+4]", "not aligned to 8"),
        ("st.global.v4.b32 [%rd1+8], {1, 2, 3, 4}", "not aligned to 16"),
        ("ld.shared.u32 %r2, [%r1+4096]", "past the shared memory"),
        ("st.global.u32 [%rd1], %r1", "two threads write"),
    ],
)
def test_a_wrong_address_is_refused(access, message):
    with pytest.raises(RuntimeError, match=message):
        launched(f"mov.b64 %rd3, 0; {OWN} {access};", 2)


def test_two_threads_may_write_the_same_number():
    assert launched(f"{OWN} st.global.u32 [%rd1], 5;", 2)[0] == 5


def test_arrays_that_overlap_are_refused():
    memory = Memory()
    memory.add(AT, poisoned(64))
    for start in (AT + 63, AT - 1, AT):
        with pytest.raises(ValueError, match="two arrays"):
            memory.add(start, poisoned(2))
    memory.add(AT + 64, poisoned(2))


def test_a_thread_that_does_not_take_part_may_have_any_address():
    body = "mul.lo.u32 %r3, %r1, 4096; mov.u32 %r2, 9; setp.eq.u32 %p1, %r1, 0;"
    assert lanes(f"{body} @%p1 ld.shared.u32 %r2, [%r3];", 3, before=SHARED) == [0xA5A5A5A5, 9, 9]


def test_memory_of_a_thread_may_be_declared_and_not_used():
    declared = ".local .align 8 .b8 __local_depot0[8];"
    assert lanes(f"{declared} mov.u32 %r2, 5;", 1) == [5]
    with pytest.raises(LookupError, match="not declared"):
        lanes(f"{declared} mov.b64 %rd1, __local_depot0;", 1)


SHARED = ".extern .shared .align 16 .b8 smem[];"


def test_blocks_share_memory_among_their_threads_alone():
    body = (
        "mov.u32 %r3, smem; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4; mov.u32 %r8, %ctaid.x;"
        "mad.lo.s32 %r6, %r8, 100, %r1; st.shared.u32 [%r5], %r6; bar.sync 0; ld.shared.u32 %r2, [%r3+4];"
    )
    text = body.replace("ld.shared.u32 %r2, [%r3+4]", "xor.b32 %r5, %r5, 4; ld.shared.u32 %r2, [%r5]")
    assert lanes(text, 4, 2, ".shared .align 4 .b8 smem[16];") == [1, 0, 3, 2, 101, 100, 103, 102]


def test_a_barrier_that_a_part_of_a_block_reaches_is_refused():
    body = "setp.lt.u32 %p1, %r1, 2; @%p1 bra $end; bar.sync 0; $end: mov.u32 %r2, 0; "
    with pytest.raises(RuntimeError, match="barrier"):
        lanes(body, 4)
    with pytest.raises(RuntimeError, match="barrier"):
        lanes("setp.lt.u32 %p1, %r1, 2; @%p1 bar.sync 0; mov.u32 %r2, 0;", 4)


def test_threads_that_returned_need_not_reach_a_barrier():
    body = f"setp.lt.u32 %p1, %r1, 2; @%p1 ret; bar.sync 0; {OWN} st.global.u32 [%rd2], 1;"
    assert launched(body, 4)[:4].tolist() == [0xA5A5A5A5, 0xA5A5A5A5, 1, 1]


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("bfly.b32 %r2, %r1, 1, 31", [n ^ 1 for n in range(32)]),
        ("bfly.b32 %r2, %r1, 16, 31", [n ^ 16 for n in range(32)]),
        ("down.b32 %r2, %r1, 4, 31", [min(n + 4, n if n > 27 else 31) for n in range(32)]),
        ("up.b32 %r2, %r1, 4, 0", [n - 4 if n > 3 else n for n in range(32)]),
        ("idx.b32 %r2, %r1, 5, 31", [5] * 32),
        # In segments of eight: the mask is 24, and the last lane of each is 7 further on.
        ("idx.b32 %r2, %r1, 5, 0x181f", [n // 8 * 8 + 5 for n in range(32)]),
        ("down.b32 %r2, %r1, 4, 0x181f", [n + 4 if n % 8 < 4 else n for n in range(32)]),
    ],
)
def test_shuffles_read_other_lanes(shuffle, expected):
    assert lanes(f"shfl.sync.{shuffle}, -1;") == expected
    twice = lanes(f"shfl.sync.{shuffle}, -1;", 64)
    assert twice[32:] == [x + 32 for x in expected]  # the second warp keeps to itself


def test_a_shuffle_says_whether_it_was_in_its_segment():
    body = "shfl.sync.down.b32 %r3|%p1, %r1, 4, 31, -1; selp.b32 %r2, 1, 0, %p1;"
    assert lanes(body) == [1] * 28 + [0] * 4


def test_past_the_end_of_a_short_warp_a_shuffle_reads_poison():
    down = lanes("shfl.sync.down.b32 %r2, %r1, 1, 31, -1;", 36)
    assert down == [*range(1, 32), 31, 33, 34, 35, 0xA5A5A5A5]


def test_a_shuffle_of_a_thread_that_takes_no_part_is_refused():
    body = (
        "mov.u32 %r2, 0; setp.lt.u32 %p1, %r1, 3; @%p1 bra $in; bra $end; "
        "$in: shfl.sync.bfly.b32 %r2, %r1, 1, 31, 7; $end:"
    )
    with pytest.raises(RuntimeError, match="does not take part"):
        lanes(body)


def test_matrices_are_read_from_the_rows_that_other_threads_name():
    fill = (
        "mov.u32 %r3, smem; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4; st.shared.u32 [%r5], %r1; bar.sync 0;"
    )
    # Lane n names the row at 16 (7 - n): thread t gets pair t % 4 of row 7 - t / 4.
    read = (
        "and.b32 %r6, %r1, 7; sub.u32 %r6, 7, %r6; shl.b32 %r6, %r6, 4; add.u32 %r6, %r3, %r6;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r6];"
    )
    expected = [4 * (7 - t // 4) + t % 4 for t in range(32)]
    assert lanes(fill + read, before=".shared .align 16 .b8 smem[128];") == expected


def test_a_statement_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="not understood"):
        launched("Add %r1, %r1, 1;")
    with pytest.raises(ValueError, match="two widths"):
        launched(".reg .b64 %r<3>;")


def test_a_launch_must_fit_its_kernel():
    (kernel,) = parse(".entry k(.param .u64 out) .reqntid 64 { ret; }").values()
    with pytest.raises(ValueError, match="arguments"):
        Launch(kernel, (1, 1, 1), (64, 1, 1), [], Memory(), Approximations())
    with pytest.raises(ValueError, match="blocks"):
        Launch(kernel, (1, 1, 1), (32, 1, 1), [AT], Memory(), Approximations())


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [("add.s32", 496, 1520), ("max.u32", 31, 63), ("min.s32", 0, 32), ("or.b32", 31, 63), ("and.b32", 0, 32)],
)
def test_a_warp_is_reduced_for_all_its_threads(how, first, second):
    reduced = lanes(f"redux.sync.{how} %r2, %r1, 0xffffffff;", 64)
    assert reduced == [first] * 32 + [second] * 32


def test_a_part_of_a_warp_is_not_reduced():
    with pytest.raises(NotImplementedError, match="part of a warp"):
        lanes("redux.sync.or.b32 %r2, %r1, 15;", 32)
    with pytest.raises(RuntimeError, match="part of a warp"):
        lanes("setp.lt.u32 %p1, %r1, 4; @%p1 redux.sync.or.b32 %r2, %r1, 0xffffffff;", 32)
