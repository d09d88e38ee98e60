"""Golden cases: what single instructions give, worked out by hand from NVIDIA's description of PTX.

A row has the operands, then the result after an equals sign, as patterns. The number of digits is the width;
one digit is a predicate.
"""

INTEGER = {
    "sub.u16x2 %d, %a, %b": ["00000000 00000001 = 0000ffff"],
    "min.u16x2 %d, %a, %b": ["0001ffff 00028000 = 00018000"],
    "min.s16x2 %d, %a, %b": ["0001ffff 00028000 = 00018000", "80000001 0000ffff = 8000ffff"],
    "max.u16x2 %d, %a, %b": ["0001ffff 00028000 = 0002ffff"],
    "max.s16x2 %d, %a, %b": ["80000001 0000ffff = 00000001"],
    "add.s16x2 %d, %a, %b": ["0001ffff 00010001 = 00020000", "7fff8000 0001ffff = 80007fff"],
    "add.s32 %d, %a, %b": ["7fffffff 00000001 = 80000000", "ffffffff 00000001 = 00000000"],
    "sub.s64 %d, %a, %b": ["0000000000000000 0000000000000001 = ffffffffffffffff"],
    "mul.lo.s32 %d, %a, %b": ["ffffffff ffffffff = 00000001", "00010001 00010000 = 00010000"],
    "mul.wide.u32 %d, %a, %b": ["ffffffff ffffffff = fffffffe00000001"],
    "mul.wide.s32 %d, %a, %b": [
        "ffffffff ffffffff = 0000000000000001",
        "ffffffff 00000002 = fffffffffffffffe",
    ],
    "mul.wide.u16 %d, %a, %b": ["ffff ffff = fffe0001"],
    "mul.hi.u32 %d, %a, %b": ["ffffffff ffffffff = fffffffe"],
    "mul.hi.s32 %d, %a, %b": ["ffffffff 00000001 = ffffffff", "80000000 80000000 = 40000000"],
    "mad.lo.s32 %d, %a, %b, %c": ["ffffffff 00000002 00000001 = ffffffff"],
    "mad.wide.u32 %d, %a, %b, %c": ["ffffffff 00000002 0000000000000003 = 0000000200000001"],
    "mad.wide.s32 %d, %a, %b, %c": ["ffffffff 00000002 0000000000000001 = ffffffffffffffff"],
    "min.s32 %d, %a, %b": ["ffffffff 00000001 = ffffffff"],
    "min.u32 %d, %a, %b": ["ffffffff 00000001 = 00000001"],
    "max.s32 %d, %a, %b": ["80000000 00000000 = 00000000"],
    "max.u16 %d, %a, %b": ["8000 7fff = 8000"],
    # Toward zero; the remainder has the sign of the dividend.
    "div.s32 %d, %a, %b": ["fffffff9 00000002 = fffffffd", "00000007 fffffffe = fffffffd"],
    "rem.s32 %d, %a, %b": ["fffffff9 00000002 = ffffffff", "00000007 fffffffe = 00000001"],
    "div.u32 %d, %a, %b": ["ffffffff 00000010 = 0fffffff"],
    "rem.u32 %d, %a, %b": ["ffffffff 00000010 = 0000000f"],
    "div.s64 %d, %a, %b": ["fffffffffffffff9 0000000000000002 = fffffffffffffffd"],
    "rem.s64 %d, %a, %b": ["fffffffffffffff9 0000000000000002 = ffffffffffffffff"],
    "neg.s32 %d, %a": ["00000001 = ffffffff", "80000000 = 80000000"],
    "abs.s32 %d, %a": ["ffffffff = 00000001", "80000000 = 80000000"],
    "and.b32 %d, %a, %b": ["0000ffff 00ff00ff = 000000ff"],
    "or.b16 %d, %a, %b": ["00f0 0f00 = 0ff0"],
    "xor.b64 %d, %a, %b": ["ffffffffffffffff 00000000ffffffff = ffffffff00000000"],
    "and.pred %d, %a, %b": ["1 0 = 0", "1 1 = 1"],
    "or.pred %d, %a, %b": ["1 0 = 1", "0 0 = 0"],
    "not.b32 %d, %a": ["0000ffff = ffff0000"],
    "not.pred %d, %a": ["1 = 0"],
    # A shift is not taken modulo the width: past it nothing is left, or only the sign.
    "shl.b32 %d, %a, %b": [
        *("00000001 0000001f = 80000000", "ffffffff 00000020 = 00000000", "00000001 00000021 = 00000000"),
    ],
    "shl.b64 %d, %a, %b": ["0000000000000001 00000020 = 0000000100000000"],
    "shl.b16 %d, %a, %b": ["0001 0000000f = 8000", "0001 00000010 = 0000"],
    "shr.u32 %d, %a, %b": ["80000000 0000001f = 00000001", "ffffffff 00000020 = 00000000"],
    "shr.s32 %d, %a, %b": ["80000000 0000001f = ffffffff", "80000000 ffffffff = ffffffff"],
    "shr.u16 %d, %a, %b": ["8000 0000000f = 0001", "ffff 00000010 = 0000"],
    # The upper half of (b a) << c; the lower half of (b a) >> c.
    "shf.l.wrap.b32 %d, %a, %b, %c": [
        *("80000000 00000001 00000001 = 00000003", "80000000 00000001 00000021 = 00000003"),
    ],
    "shf.l.clamp.b32 %d, %a, %b, %c": ["80000000 00000001 00000021 = 80000000"],
    "shf.r.wrap.b32 %d, %a, %b, %c": [
        *("00000001 00000003 00000001 = 80000000", "00000001 00000003 00000020 = 00000001"),
    ],
    "shf.r.clamp.b32 %d, %a, %b, %c": ["00000001 00000003 00000028 = 00000003"],
    # The field of c bits from bit b; of s32 its highest bit, or that of the word, is repeated above it.
    "bfe.u32 %d, %a, %b, %c": [
        *("12345678 00000008 00000008 = 00000056", "f2345678 0000001c 00000008 = 0000000f"),
        *("ffffffff 00000028 00000008 = 00000000", "ffffffff 00000004 00000000 = 00000000"),
    ],
    "bfe.s32 %d, %a, %b, %c": [
        *("0000f800 00000008 00000008 = fffffff8", "00007800 00000008 00000008 = 00000078"),
        *("f2345678 0000001c 00000008 = ffffffff", "80000000 00000028 00000008 = ffffffff"),
        *("ffffffff 00000004 00000000 = 00000000", "80000000 00000000 00000020 = 80000000"),
    ],
    "bfe.u64 %d, %a, %b, %c": [
        "123456789abcdef0 00000008 00000008 = 00000000000000de",
        "ffffffffffffffff 00000000 00000040 = ffffffffffffffff",
    ],
    "bfe.s64 %d, %a, %b, %c": [
        "0000f80000000000 00000028 00000008 = fffffffffffffff8",
        "8000000000000000 0000003f 00000008 = ffffffffffffffff",
        "7fffffffffffffff 00000000 00000040 = 7fffffffffffffff",
    ],
    "bfi.b32 %d, %a, %b, %c, 8": [
        *("000001ff 00000000 00000008 = 0000ff00", "00000000 ffffffff 00000008 = ffff00ff"),
        *("ffffffff 00000000 0000001c = f0000000", "ffffffff 12345678 00000020 = 12345678"),
    ],
    # Bytes are numbered from the lowest of a, 0, to the highest of b, 7; with 8 added, its sign alone.
    "prmt.b32 %d, %a, %b, %c": [
        *("33221100 77665544 00007410 = 77441100", "33221100 77665544 00000123 = 00112233"),
        *("80000000 0000007f 0000bc33 = ff008080",),
    ],
    "lop3.b32 %d, %a, %b, %c, 0x96": ["0000ffff 00ff00ff 0f0f0f0f = 0ff0f00f"],  # xor of three
    "lop3.b32 %d, %a, %b, %c, 0xe8": ["0000ffff 00ff00ff 0f0f0f0f = 000f0fff"],  # what most of them say
    "clz.b32 %d, %a": ["00000000 = 00000020", "00000001 = 0000001f", "80000000 = 00000000"],
    "popc.b32 %d, %a": ["00000000 = 00000000", "f000000f = 00000008"],
    "selp.b32 %d, %a, %b, %c": ["00000001 00000002 1 = 00000001", "00000001 00000002 0 = 00000002"],
    "mov.b32 %d, {%a, %b}": ["1111 2222 = 22221111"],  # the lower half first
    "mov.b64 %d, {%a, %b}": ["11111111 22222222 = 2222222211111111"],
    "cvt.u32.u16 %d, %a": ["ffff = 0000ffff"],
    "cvt.s32.s16 %d, %a": ["ffff = ffffffff"],
    "cvt.s64.s32 %d, %a": ["80000000 = ffffffff80000000"],
    "cvt.u64.u32 %d, %a": ["80000000 = 0000000080000000"],
    "cvt.u32.u64 %d, %a": ["1234567890abcdef = 90abcdef"],
    "cvt.u16.u32 %d, %a": ["12345678 = 5678"],
    "cvt.s32.s8 %d, %a": ["000000ff = ffffffff", "0000007f = 0000007f"],  # of a wider register
    "cvt.u32.u8 %d, %a": ["1234 = 00000034"],
    "setp.lt.s32 %d, %a, %b": ["ffffffff 00000000 = 1"],
    "setp.lt.u32 %d, %a, %b": ["ffffffff 00000000 = 0"],
    "setp.lo.u32 %d, %a, %b": ["00000000 ffffffff = 1"],
    "setp.hs.u32 %d, %a, %b": ["ffffffff ffffffff = 1"],
    "setp.ne.b16 %d, %a, %b": ["0001 0002 = 1"],
    "setp.eq.and.b32 %d, %a, %b, %c": ["00000001 00000001 0 = 0", "00000001 00000001 1 = 1"],
    "setp.eq.or.b32 %d, %a, %b, !%c": ["00000001 00000002 0 = 1", "00000001 00000002 1 = 0"],
}

# 1 is 3f800000, and its next number 3f800001; a NaN that an operation makes is 7fffffff.
FLOAT = {
    "add.rn.f32 %d, %a, %b": [
        # 1 + 2^-24 is halfway and goes to the even 1; a bit more goes up.
        *("3f800000 33800000 = 3f800000", "3f800000 33800001 = 3f800001", "3f800001 33800000 = 3f800002"),
        # Subnormal numbers are kept; the largest number and half its unit overflow.
        *("00800000 80000001 = 007fffff", "7f7fffff 73000000 = 7f800000", "7f7fffff 72ffffff = 7f7fffff"),
        *("80000000 00000000 = 00000000", "80000000 80000000 = 80000000"),
        *("7f800000 ff800000 = 7fffffff", "ffc00001 3f800000 = 7fffffff"),
    ],
    "add.rn.ftz.f32 %d, %a, %b": ["00000001 00000001 = 00000000", "00800001 80800000 = 00000000"],
    "sub.rn.f32 %d, %a, %b": ["3f800000 3f800000 = 00000000", "3f800000 3f7fffff = 33800000"],
    "mul.rn.f32 %d, %a, %b": [
        *("3f800001 3f800001 = 3f800002", "00800000 3f000000 = 00400000", "00000001 3f000000 = 00000000"),
        *("00000003 3f000000 = 00000002", "80000000 3f800000 = 80000000", "00000000 7f800000 = 7fffffff"),
    ],
    "mul.rn.ftz.f32 %d, %a, %b": ["80400000 40000000 = 80000000", "80800000 3f000000 = 80000000"],
    "mul.f32 %d, %a, %b": ["40400000 40000000 = 40c00000"],
    "add.rn.bf16 %d, %a, %b": ["3f80 3b80 = 3f80", "3f81 3b80 = 3f82", "3f80 3b81 = 3f81"],
    "mul.rn.bf16 %d, %a, %b": ["3f81 3f81 = 3f82", "7f7f 4000 = 7f80"],
    "sub.rn.bf16 %d, %a, %b": ["7f80 7f80 = 7fff"],
    "add.rn.f16 %d, %a, %b": ["3c00 1000 = 3c00", "3c01 1000 = 3c02", "7bff 4c00 = 7c00"],
    "fma.rn.f32 %d, %a, %b, %c": [
        # (1 + 2^-23)^2 - (1 + 2^-22) = 2^-46, all of which a product that is rounded loses.
        *("3f800001 3f800001 bf800002 = 28800000", "3f800000 3f800000 33800000 = 3f800000"),
        # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is halfway; 2^-100 decides, which a float64 sum loses.
        *("3f800800 3f800800 0d800000 = 3f801001", "3f800800 3f800800 8d800000 = 3f801000"),
        *("3f800800 3f800800 00000000 = 3f801000", "53000000 2c800000 3f800001 = 40400000"),
        *("00000000 7f800000 3f800000 = 7fffffff", "80000000 3f800000 80000000 = 80000000"),
        *("00000001 3f000000 00000000 = 00000000", "00000001 3f000000 00000001 = 00000002"),
    ],
    "div.rn.f32 %d, %a, %b": [
        *("3f800000 40400000 = 3eaaaaab", "3f800000 00000000 = 7f800000", "bf800000 00000000 = ff800000"),
        *("00000000 80000000 = 7fffffff", "00000001 40000000 = 00000000", "00000003 40000000 = 00000002"),
    ],
    "sqrt.rn.f32 %d, %a": [
        *("40000000 = 3fb504f3", "80000000 = 80000000", "bf800000 = 7fffffff", "00000001 = 1a3504f3"),
    ],
    "rcp.rn.f32 %d, %a": ["40400000 = 3eaaaaab", "80000000 = ff800000"],
    "div.full.f32 %d, %a, %b": ["3f800000 40400000 = 3eaaaaab"],
    "sqrt.approx.f32 %d, %a": ["40800000 = 40000000"],
    "rcp.approx.f32 %d, %a": ["40000000 = 3f000000"],
    "ex2.approx.f32 %d, %a": ["40400000 = 41000000", "ff800000 = 00000000"],
    "lg2.approx.f32 %d, %a": ["41000000 = 40400000", "00000000 = ff800000"],
    # -0 is below 0 in either order; a NaN loses, but for .NaN.
    "min.f32 %d, %a, %b": [
        *("00000000 80000000 = 80000000", "80000000 00000000 = 80000000"),
        *("7fc00000 3f800000 = 3f800000", "7fc00000 ffc00000 = 7fffffff"),
    ],
    "max.f32 %d, %a, %b": [
        *("00000000 80000000 = 00000000", "80000000 00000000 = 00000000"),
        *("3f800000 7fc00000 = 3f800000", "ff800000 bf800000 = bf800000"),
    ],
    "max.NaN.f32 %d, %a, %b": ["3f800000 ffc00000 = 7fffffff", "bf800000 3f800000 = 3f800000"],
    "min.NaN.f32 %d, %a, %b": ["3f800000 7fc00000 = 7fffffff"],
    "max.bf16 %d, %a, %b": ["8000 0000 = 0000", "7fc0 3f80 = 3f80"],
    "max.NaN.bf16 %d, %a, %b": ["7fc0 3f80 = 7fff"],
    "neg.f32 %d, %a": ["00000000 = 80000000", "bf800000 = 3f800000"],
    "abs.f32 %d, %a": ["80000000 = 00000000", "ff800000 = 7f800000"],
    "neg.bf16 %d, %a": ["3f80 = bf80"],
    "abs.bf16 %d, %a": ["bf80 = 3f80"],
    # The sign of the first operand, the rest of the second.
    "copysign.f32 %d, %a, %b": ["80000000 3f800000 = bf800000", "3f800000 ff800000 = 7f800000"],
    "setp.eq.f32 %d, %a, %b": ["00000000 80000000 = 1", "7fc00000 7fc00000 = 0"],
    "setp.ne.f32 %d, %a, %b": ["7fc00000 7fc00000 = 0", "3f800000 00000000 = 1"],
    "setp.neu.f32 %d, %a, %b": ["7fc00000 7fc00000 = 1", "3f800000 3f800000 = 0"],
    "setp.gtu.f32 %d, %a, %b": ["7fc00000 3f800000 = 1", "3f800000 3f800000 = 0"],
    "setp.gt.f32 %d, %a, %b": ["7fc00000 3f800000 = 0", "7f800000 3f800000 = 1"],
    "setp.nan.f32 %d, %a, %b": ["7fc00000 3f800000 = 1", "3f800000 3f800000 = 0"],
    "setp.num.f32 %d, %a, %b": ["7fc00000 3f800000 = 0", "3f800000 3f800000 = 1"],
    "setp.gt.ftz.f32 %d, %a, %b": ["00000001 00000000 = 0"],
    "setp.nan.bf16 %d, %a, %b": ["7fc0 3f80 = 1"],
    "setp.lt.and.f32 %d, %a, %b, %c": ["00000000 3f800000 1 = 1", "00000000 3f800000 0 = 0"],
}

CONVERSION = {
    # 1 + 2^-8 is halfway between bfloat16 numbers and goes to the even one, 1.
    "cvt.rn.bf16.f32 %d, %a": ["3f808000 = 3f80", "3f808001 = 3f81", "3f818000 = 3f82", "7f7fffff = 7f80"],
    "cvt.rn.f16.f32 %d, %a": ["477fefff = 7bff", "477ff000 = 7c00", "33000000 = 0000", "33000001 = 0001"],
    "cvt.f32.bf16 %d, %a": ["3f80 = 3f800000", "8001 = 80010000"],
    "cvt.f32.f16 %d, %a": ["3c00 = 3f800000", "0001 = 33800000", "fc00 = ff800000"],
    "cvt.f64.f32 %d, %a": ["3f800001 = 3ff0000020000000"],
    "cvt.rn.f32.f64 %d, %a": ["3ff0000010000000 = 3f800000", "3ff0000010000001 = 3f800001"],
    # 2^24 + 1 is halfway between numbers; so is 2^32 - 2^7.
    "cvt.rn.f32.u32 %d, %a": ["01000001 = 4b800000", "ffffff80 = 4f800000", "ffffff7f = 4f7fffff"],
    "cvt.rn.f32.s32 %d, %a": ["80000000 = cf000000", "ffffffff = bf800000"],
    "cvt.rn.f32.s64 %d, %a": ["0000000001000001 = 4b800000", "4000004000000001 = 5e800001"],
    "cvt.rn.f32.u64 %d, %a": ["8000008000000001 = 5f000001", "8000008000000000 = 5f000000"],
    "cvt.rn.f32.s8 %d, %a": ["00000080 = c3000000"],
    "cvt.rn.f32.u16 %d, %a": ["ffff = 477fff00"],
    "cvt.rn.bf16.s16 %d, %a": ["0101 = 4380", "0103 = 4382"],
    # To the nearest, halves to even; toward zero; saturated; NaN is 0.
    "cvt.rni.s32.f32 %d, %a": ["40200000 = 00000002", "40600000 = 00000004", "bfc00000 = fffffffe"],
    "cvt.rzi.s32.f32 %d, %a": [
        *("bfc00000 = ffffffff", "4f000000 = 7fffffff", "ff800000 = 80000000", "7fc00000 = 00000000"),
    ],
    "cvt.rzi.u32.f32 %d, %a": ["bf800000 = 00000000", "4f800000 = ffffffff", "4f7fffff = ffffff00"],
    "cvt.rzi.s8.f32 %d, %a": ["43480000 = 007f"],  # 200, and a wider register
    "cvt.rni.f32.f32 %d, %a": ["40200000 = 40000000", "bf000000 = 80000000", "4b000001 = 4b000001"],
    "cvt.rmi.f32.f32 %d, %a": ["bf000000 = bf800000"],
    "cvt.rpi.f32.f32 %d, %a": ["bf000000 = 80000000"],
    # Of two numbers the first is the upper half.
    "cvt.rn.bf16x2.f32 %d, %a, %b": ["3f800000 40000000 = 3f804000", "7fc00000 3f808001 = 7fff3f81"],
    "cvt.rn.f16x2.f32 %d, %a, %b": ["3f800000 40000000 = 3c004000"],
    # e4m3: bias 7, 448 the largest, 2^-9 the smallest; e5m2: bias 15, 57344 and 2^-16.
    "cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b": [
        *("3f800000 c0000000 = 38c0", "43e00000 7f800000 = 7e7e", "ff800000 7fc00000 = fe7f"),
        *("3b000000 3a800000 = 0100", "3a800001 3f880000 = 0138", "3f980000 80000000 = 3a80"),
    ],
    "cvt.rn.satfinite.e5m2x2.f32 %d, %a, %b": [
        *("3f800000 c0000000 = 3cc0", "47600000 7f800000 = 7b7b", "ffc00000 37800000 = 7f01"),
    ],
    "cvt.rn.f16x2.e4m3x2 %d, %a": ["38c0 = 3c00c000", "0180 = 18008000", "7f7e = 7fff5f00"],
    "cvt.rn.f16x2.e5m2x2 %d, %a": ["3cfc = 3c00fc00", "017b = 01007b00"],
}
