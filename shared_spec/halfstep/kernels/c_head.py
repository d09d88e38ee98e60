"""The head of a C kernel, with types, and conversions and roundings without a C operator."""

TYPES = {
    "float32": "float", "int32": "i32", "uint8": "u8", "bool": "bool", "bfloat16": "u16",
    "int16": "i16", "float16": "u16", "int64": "i64", "int8": "i8",
    "float8_e4m3fn": "u8", "float8_e5m2": "u8", "float8_e3m4": "u8", "uint16": "u16",
}  # fmt: skip
HEAD = r"""
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef int8_t i8; typedef uint8_t u8; typedef int16_t i16; typedef uint16_t u16;
typedef int32_t i32; typedef uint32_t u32; typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline))

/* A zero that the compiler cannot see. */
i32 halfstep_zero = 0;

INLINE i32 bits(float x) { i32 y; memcpy(&y, &x, 4); return y; }
INLINE float real(i32 x) { float y; memcpy(&y, &x, 4); return y; }
INLINE i32 lsr(i32 x, int by) { return (i32)((u32)x >> by); }
INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
INLINE i32 larger(i32 a, i32 b) { return a > b ? a : b; }
INLINE float minimum(float a, float b) { i32 nan = a != a ? -1 : 0; return real(bits(a < b ? a : b) | nan); }
INLINE float maximum(float a, float b) { i32 nan = a != a ? -1 : 0; return real(bits(a > b ? a : b) | nan); }
INLINE float sign(float x) { return (float)((x > 0) - (x < 0)); }
/* To the nearest whole number, ties to even. From 2^23 on every float is whole. */
INLINE float even(float x) {
  i32 b = bits(x);
  float r = (real(b & 0x7FFFFFFF) + 0x1p23f) - 0x1p23f;
  r = real(bits(r) | (b & (i32)0x80000000u));
  return fabsf(x) < 0x1p23f ? r : x;
}
INLINE float of_bfloat16(u16 x) { return real((i32)((u32)x << 16)); }
INLINE u16 upper_half(float x) { return (u16)((u32)bits(x) >> 16); }
INLINE u16 to_bfloat16(float x) {
  u32 b = (u32)bits(x), r = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  return (u16)(x != x ? 0x7FC0u : r);
}
/* float16, which not every compiler has: below 2^-14 the numbers are multiples of 2^-24. */
INLINE float of_float16(u16 x) {
  i32 m = x & 0x7FFF;
  float r = m < 0x400 ? real(m + bits(0.5f)) - 0.5f : real((m << 13) + (112 << 23));
  r = m >= 0x7C00 ? real((m << 13) | 0x7F800000) : r;
  return real(bits(r) | (i32)((u32)(x & 0x8000) << 16));
}
INLINE u16 to_float16(float x) {
  i32 b = bits(x) & 0x7FFFFFFF;
  i32 small = bits(real(b) + 0.5f) - bits(0.5f);
  i32 large = (b + 0xFFF + ((b >> 13) & 1) - (112 << 23)) >> 13;
  i32 r = b < (113 << 23) ? small : large;
  r = r > 0x7C00 ? 0x7C00 : r;
  r = b > 0x7F800000 ? 0x7E00 : r;
  return (u16)(r | ((bits(x) >> 16) & 0x8000));
}
/* float8_e4m3fn: below 2^-6 the codes are multiples of 2^-9. NaN has all bits set. */
INLINE float of_float8_e4m3fn(u8 x) {
  i32 m = x & 0x7F;
  float r = real(m << 20) * 0x1p120f;
  r = m == 0x7F ? __builtin_nanf("") : r;
  return real(bits(r) | (i32)((u32)(x & 0x80) << 24));
}
INLINE u8 to_float8_e4m3fn(float x) {
  i32 b = bits(x) & 0x7FFFFFFF;
  i32 small = bits(real(b) + 0x1p14f) - bits(0x1p14f);
  i32 large = (b + 0x7FFFF + ((b >> 20) & 1) - (120 << 23)) >> 20;
  i32 r = b < (121 << 23) ? small : large;
  r = r > 0x7E ? 0x7F : r;
  return (u8)(r | ((bits(x) >> 24) & 0x80));
}
INLINE float of_float8_e5m2(u8 x) {
  i32 m = x & 0x7F;
  float r = real(m << 21) * 0x1p112f;
  r = m == 0x7C ? __builtin_inff() : r;
  r = m > 0x7C ? __builtin_nanf("") : r;
  return real(bits(r) | (i32)((u32)(x & 0x80) << 24));
}
INLINE u8 to_float8_e5m2(float x) {
  i32 b = bits(x) & 0x7FFFFFFF;
  i32 small = bits(real(b) + 0x1p7f) - bits(0x1p7f);
  i32 large = (b + 0xFFFFF + ((b >> 21) & 1) - (112 << 23)) >> 21;
  i32 r = b < (113 << 23) ? small : large;
  r = r > 0x7C ? 0x7C : r;
  r = b > 0x7F800000 ? 0x7F : r;
  return (u8)(r | ((bits(x) >> 24) & 0x80));
}
"""
