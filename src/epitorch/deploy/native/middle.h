// Between the two 1x1 convolutions, one vector of expanded channels at a time: the expanded tensor never exists.
#pragma once
#include "simd.h"
#include "stage.h"

namespace ISA {

// One vector of expanded channels: where its product-map channels lie, where its wrapped sums go, its constants.
struct Lanes {
  int gathered;        // 0: the taps lie side by side from `source` on; 1: at the places given
  int source;
  int destination;
  int upper;           // bit 0: reads upper taps, bit 1: adds to upper sums
  const int32_t* places;
  const float* interpolate;  // lower share, upper share, shift
  const float* taps;         // depthwise weights, then its bias
  const float* wrap;         // lower share, upper share
};

INLINE Lanes lanes(const Stage& s, int v) {
  const int32_t* t = s.table + (ptrdiff_t)v * (4 + 2 * W);
  const int square = s.kernel * s.kernel;
  const float* c = s.constants + (ptrdiff_t)v * (6 + square) * W;
  return {t[0], t[1], t[2], t[3], t + 4, c, c + 3 * W, c + (4 + square) * W};
}

// N is 0 for a gather from memory, or how many pairs of registers hold a pixel of the product map.
template <int A, int N>
INLINE void interpolate_gathered(const Stage& s, const Lanes& l, const float* p, int row, int n, float* e) {
  const V share = load(l.interpolate), other = load(l.interpolate + W), shift = load(l.interpolate + 2 * W);
  const V low = splat(s.low[0]), high = splat(s.high[0]);
  for (int i = 0; i < n; i++, p += row, e += W) {
    V lower, upper;
    if constexpr (N > 0) {
      pick_two<N>(p, l.places, lower, upper);
    } else {
      lower = gather(p, l.places), upper = gather(p, l.places + W);
    }
    store(e, activate<A>(shift + share * lower + other * upper, low, high));
  }
}

// Interpolation, batch norm and activation of `n` pixels: product map to expanded channels.
template <int A>
__attribute__((noinline)) void interpolate(const Stage& s, const Lanes& l, const float* p, int row, int n, float* e) {
  if (l.gathered && kPermutes && s.mid <= 32) return interpolate_gathered<A, 1>(s, l, p, row, n, e);
  if (l.gathered && kPermutes && s.mid <= 64) return interpolate_gathered<A, 2>(s, l, p, row, n, e);
  if (l.gathered) return interpolate_gathered<A, 0>(s, l, p, row, n, e);
  const V lower = load(l.interpolate), upper = load(l.interpolate + W), shift = load(l.interpolate + 2 * W);
  const V low = splat(s.low[0]), high = splat(s.high[0]);
  p += l.source;
  if (l.upper & 1) {
    const int further = s.group_in;
#pragma GCC unroll 4
    for (int i = 0; i < n; i++, p += row, e += W)
      store(e, activate<A>(shift + lower * load(p) + upper * load(p + further), low, high));
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < n; i++, p += row, e += W) store(e, activate<A>(shift + lower * load(p), low, high));
  }
}

INLINE void interpolate_any(const Stage& s, const Lanes& l, const float* p, int row, int n, float* e) {
  switch (s.activation[0]) {
    case kSilu: return interpolate<kSilu>(s, l, p, row, n, e);
    case kHardswish: return interpolate<kHardswish>(s, l, p, row, n, e);
    default: return interpolate<kClamp>(s, l, p, row, n, e);
  }
}

// Keeps: the channels are stored at `z` and their total is added to `zu`; else both are sums of wrapping.
template <int K, int S, int A, bool Keeps, int P>
INLINE void depthwise_pixels(const Stage& s, const Lanes& l, const float* e, int width, float* z, float* zu) {
  V sum[P];
  for (int i = 0; i < P; i++) sum[i] = load(l.taps + K * K * W);
  for (int y = 0; y < K; y++)
    for (int x = 0; x < K; x++) {
      const V tap = load(l.taps + (y * K + x) * W);
      for (int i = 0; i < P; i++) sum[i] += tap * load(e + (y * width + i * S + x) * W);
    }
  const V low = splat(s.low[1]), high = splat(s.high[1]);
  for (int i = 0; i < P; i++) sum[i] = activate<A>(sum[i], low, high);
  if constexpr (Keeps) {
    V total = load(zu);
    for (int i = 0; i < P; i++) store(z + i * W, sum[i]), total += sum[i];
    store(zu, total);
    return;
  }
  const V lower = load(l.wrap), upper = load(l.wrap + W);
  for (int i = 0; i < P; i++) store(z + i * W, load(z + i * W) + lower * sum[i]);
  if (l.upper & 2)
    for (int i = 0; i < P; i++) store(zu + i * W, load(zu + i * W) + upper * sum[i]);
}

// Depthwise convolution, batch norm, activation, and the sums of wrapping (or keeping), for `n` pixels of an output row.
template <int K, int S, int A, bool Keeps>
__attribute__((noinline)) void depthwise(
    const Stage& s, const Lanes& l, const float* e, int width, int n, float* z, float* zu) {
  constexpr int P = LANES == 16 ? 7 : 4, step = Keeps ? 0 : W;
  int i = 0;
  for (; i + P <= n; i += P) depthwise_pixels<K, S, A, Keeps, P>(s, l, e + i * S * W, width, z + i * W, zu + i * step);
  for (; i + 2 <= n; i += 2) depthwise_pixels<K, S, A, Keeps, 2>(s, l, e + i * S * W, width, z + i * W, zu + i * step);
  for (; i < n; i++) depthwise_pixels<K, S, A, Keeps, 1>(s, l, e + i * S * W, width, z + i * W, zu + i * step);
}

typedef void (*Depthwise)(const Stage&, const Lanes&, const float*, int, int, float*, float*);

template <int K, int S, bool Keeps>
INLINE Depthwise depthwise_for(int activation) {
  switch (activation) {
    case kSilu: return depthwise<K, S, kSilu, Keeps>;
    case kHardswish: return depthwise<K, S, kHardswish, Keeps>;
    default: return depthwise<K, S, kClamp, Keeps>;
  }
}

template <bool Keeps>
static Depthwise depthwise_of(const Stage& s) {
  const bool one = s.stride == 1;
  const int a = s.activation[1];
  switch (s.kernel) {
    case 3: return one ? depthwise_for<3, 1, Keeps>(a) : depthwise_for<3, 2, Keeps>(a);
    case 5: return one ? depthwise_for<5, 1, Keeps>(a) : depthwise_for<5, 2, Keeps>(a);
    default: return one ? depthwise_for<7, 1, Keeps>(a) : depthwise_for<7, 2, Keeps>(a);
  }
}

}  // namespace ISA
