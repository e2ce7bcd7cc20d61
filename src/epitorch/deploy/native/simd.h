// Vectors of LANES floats by the compiler's vector extension: one source for every instruction set.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if LANES == 16 || LANES == 8
#include <immintrin.h>
#endif

namespace ISA {

constexpr int W = LANES;
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));
typedef float VU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t VIU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))

INLINE V load(const float* p) { return *reinterpret_cast<const VU*>(p); }
INLINE void store(float* p, V v) { *reinterpret_cast<VU*>(p) = v; }
INLINE V splat(float x) { return x - V{}; }

#if LANES == 16
// The first operand is the bound: a NaN in `v` comes back, as torch's activations do.
INLINE V at_least(V bound, V v) { return (V)_mm512_max_ps((__m512)bound, (__m512)v); }
INLINE V at_most(V bound, V v) { return (V)_mm512_min_ps((__m512)bound, (__m512)v); }
INLINE V load_part(const float* p, int n) { return (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void store_part(float* p, V v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v); }
INLINE V gather(const float* p, const int32_t* at) { return (V)_mm512_i32gather_ps(_mm512_loadu_si512(at), p, 4); }
#elif LANES == 8
INLINE V at_least(V bound, V v) { return (V)_mm256_max_ps((__m256)bound, (__m256)v); }
INLINE V at_most(V bound, V v) { return (V)_mm256_min_ps((__m256)bound, (__m256)v); }
INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE V load_part(const float* p, int n) { return (V)_mm256_maskload_ps(p, first_lanes(n)); }
INLINE void store_part(float* p, V v, int n) { _mm256_maskstore_ps(p, first_lanes(n), (__m256)v); }
INLINE V gather(const float* p, const int32_t* at) {
  return (V)_mm256_i32gather_ps(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), 4);
}
#else
INLINE V at_least(V bound, V v) { return bound > v ? bound : v; }
INLINE V at_most(V bound, V v) { return bound < v ? bound : v; }
INLINE V load_part(const float* p, int n) {
  V v{};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
INLINE void store_part(float* p, V v, int n) {
  for (int i = 0; i < n; i++) p[i] = v[i];
}
INLINE V gather(const float* p, const int32_t* at) {
  V v{};
  for (int i = 0; i < W; i++) v[i] = p[at[i]];
  return v;
}
#endif

// Lanes from a row of at most 32 * N floats, through registers: faster than a gather where the processor can do it.
#if LANES == 16
constexpr bool kPermutes = true;
template <int N>
INLINE V pick(const __m512 (&part)[2 * N], __m512i index) {
  const __m512 first = _mm512_permutex2var_ps(part[0], index, part[1]);
  if constexpr (N == 1) return (V)first;
  const __m512 second = _mm512_permutex2var_ps(part[2 * N - 2], index, part[2 * N - 1]);
  return (V)_mm512_mask_blend_ps(_mm512_test_epi32_mask(index, _mm512_set1_epi32(32)), first, second);
}
template <int N>
INLINE void pick_two(const float* p, const int32_t* places, V& lower, V& upper) {
  __m512 part[2 * N];
  for (int i = 0; i < 2 * N; i++) part[i] = _mm512_loadu_ps(p + i * 16);
  lower = pick<N>(part, _mm512_loadu_si512(places));
  upper = pick<N>(part, _mm512_loadu_si512(places + W));
}
#else
constexpr bool kPermutes = false;
template <int N>
INLINE void pick_two(const float* p, const int32_t* places, V& lower, V& upper) {
  lower = gather(p, places), upper = gather(p, places + W);
}
#endif

INLINE V clamp(V v, V low, V high) { return at_most(high, at_least(low, v)); }

// 1 / v to 2e-7: the processor's estimate and a step of Newton's method, several times faster than a division.
#if LANES == 16
INLINE V reciprocal(V v) {
  const V r = (V)_mm512_rcp14_ps((__m512)v);
  return r * (2.0f - v * r);
}
#elif LANES == 8
INLINE V reciprocal(V v) {
  const V r = (V)_mm256_rcp_ps((__m256)v);
  return r * (2.0f - v * r);
}
#else
INLINE V reciprocal(V v) { return 1.0f / v; }
#endif

// exp by 2^n times a polynomial of degree 5 for 2^r, r in [-1/2, 1/2]; the estimate above ends below 2^126.
INLINE V exponential(V x) {
  x = clamp(x, splat(-87.0f), splat(87.0f));
  const V shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest whole number
  const V r = x * 1.44269504f - (shifted - 12582912.0f);
  V p = splat(1.32765e-3f);
  p = p * r + 9.67554e-3f;
  p = p * r + 5.550713e-2f;
  p = p * r + 2.402212e-1f;
  p = p * r + 6.9314697e-1f;
  p = p * r + 1.00000007f;
  return (V)((VI)p + ((VI)shifted << 23));
}

INLINE V sigmoid(V v) { return reciprocal(1.0f + exponential(-v)); }

template <int A>
INLINE V activate(V v, V low, V high) {
  if constexpr (A == 1) return v * sigmoid(v);
  if constexpr (A == 2) return v * clamp(v + 3.0f, splat(0.0f), splat(6.0f)) * (1.0f / 6.0f);
  return clamp(v, low, high);
}

}  // namespace ISA
