// Squeeze-excitation: the gate needs the mean over the whole image of every channel after the depthwise, so these
// channels are kept, and a second pass gates and wraps them. Keeping beats computing them twice (docs/fused.md).
#pragma once
#include "strip.h"

namespace ISA {

struct Kept {
  float* channels;  // [vectors][pixels of the output][W]
  float* totals;    // [vectors][W]
  float* gates;     // [vectors][2][W]: both shares of wrapping, times the gate
  float* narrow;    // between the two matrices
};

INLINE size_t kept_pixels(const Plan& plan) { return (size_t)plan.out.height * plan.out.width; }

INLINE size_t kept_floats(const Stage& s, const Plan& plan) {
  return s.squeeze ? s.vectors * (kept_pixels(plan) + 3) * W + up(s.squeeze, W) + 128 : 0;
}

INLINE Kept take_kept(const Stage& s, const Plan& plan, Scratch& scratch) {
  Kept kept{scratch.take(s.vectors * kept_pixels(plan) * W), scratch.take((size_t)s.vectors * W),
            scratch.take((size_t)2 * s.vectors * W), scratch.take(up(s.squeeze, W))};
  std::memset(kept.totals, 0, 4 * (size_t)s.vectors * W);
  return kept;
}

// ---- first pass ----

INLINE void keep_tile(const Stage& s, const Plan& plan, const Strip& t, const Kept& kept, Depthwise run, const Tile& tile) {
  const int width = needs(s, tile.columns);
  for (int v = 0; v < s.vectors; v++) {
    const Lanes l = lanes(s, v);
    fill(s, plan, l, t, tile.y * s.stride - s.padding, needs(s, tile.rows), tile.x * s.stride - s.padding, width);
    std::memset(t.sums, 0, 4 * W);
    float* to = kept.channels + (v * kept_pixels(plan) + (size_t)tile.y * plan.out.width + tile.x) * W;
    for (int i = 0; i < tile.rows; i++, to += (ptrdiff_t)plan.out.width * W)
      run(s, l, t.e + (ptrdiff_t)i * s.stride * width * W, width, tile.columns, to, t.sums);
    store(kept.totals + v * W, load(kept.totals + v * W) + load(t.sums));
  }
}

INLINE void keep(const Stage& s, const Plan& plan, const Strip& t, const Kept& kept) {
  const Depthwise run = depthwise_of<true>(s);
  each_tile(plan, t, [&](const Tile& tile) { keep_tile(s, plan, t, kept, run, tile); });
}

// ---- the gate ----

INLINE V activate_any(int activation, V v, V low, V high) {
  switch (activation) {
    case kSilu: return activate<kSilu>(v, low, high);
    case kHardswish: return activate<kHardswish>(v, low, high);
    default: return activate<kClamp>(v, low, high);
  }
}

INLINE float add_up(V v) {
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

static void make_gates(const Stage& s, const Plan& plan, const Kept& kept) {
  const float share = 1.0f / (float)kept_pixels(plan);
  for (int r = 0; r < s.squeeze; r++) {
    V sum{};
    const float* row = s.reduce + (ptrdiff_t)r * s.vectors * W;
    for (int v = 0; v < s.vectors; v++) sum += load(kept.totals + v * W) * load(row + v * W);
    kept.narrow[r] = s.reduce_bias[r] + share * add_up(sum);
  }
  const V low = splat(s.squeeze_low), high = splat(s.squeeze_high);
  for (int r = 0; r < s.squeeze; r += W)
    store(kept.narrow + r, activate_any(s.squeeze_activation, load(kept.narrow + r), low, high));
  for (int v = 0; v < s.vectors; v++) {
    V gate = load(s.restore_bias + v * W);
    const float* rows = s.restore + (ptrdiff_t)v * s.squeeze * W;
    for (int r = 0; r < s.squeeze; r++) gate += kept.narrow[r] * load(rows + r * W);
    gate = clamp(gate, splat(-87.0f), splat(87.0f));
    gate = s.gate == kSigmoid ? sigmoid(gate) + (gate - gate) : clamp(gate + 3.0f, splat(0.0f), splat(6.0f)) * (1.0f / 6.0f);
    const float* wrap = lanes(s, v).wrap;
    store(kept.gates + 2 * v * W, gate * load(wrap));
    store(kept.gates + (2 * v + 1) * W, gate * load(wrap + W));
  }
}

// ---- second pass ----

// Vectors [from, to) have one destination: their gated sums, and those of their upper taps, for P pixels.
template <int P, bool Upper>
INLINE void wrap_pixels(const Kept& kept, const float* f, size_t vector, int from, int to, float* sums, float* upper) {
  V low[P] = {}, high[P] = {};
  for (int v = from; v < to; v++) {
    const V a = load(kept.gates + 2 * v * W), b = load(kept.gates + (2 * v + 1) * W);
    for (int i = 0; i < P; i++) {
      const V x = load(f + v * vector + i * W);
      low[i] += a * x;
      if constexpr (Upper) high[i] += b * x;
    }
  }
  for (int i = 0; i < P; i++) store(sums + i * W, low[i]);
  if constexpr (Upper)
    for (int i = 0; i < P; i++) store(upper + i * W, high[i]);
}

template <bool Upper>
__attribute__((noinline)) void wrap_row(
    const Kept& kept, const float* f, size_t vector, int from, int to, int n, float* sums, float* upper) {
  constexpr int P = LANES == 16 ? 7 : 4;
  int i = 0;
  for (; i + P <= n; i += P) wrap_pixels<P, Upper>(kept, f + i * W, vector, from, to, sums + i * W, upper + i * W);
  for (; i < n; i++) wrap_pixels<1, Upper>(kept, f + i * W, vector, from, to, sums + i * W, upper + i * W);
}

INLINE void wrap_tile(const Stage& s, const Plan& plan, const Strip& t, const Kept& kept, const Tile& tile) {
  const size_t vector = kept_pixels(plan) * W;
  const ptrdiff_t pixels = (ptrdiff_t)tile.rows * tile.columns;
  for (int from = 0, to; from < s.vectors; from = to) {
    const int destination = lanes(s, from).destination;
    for (to = from + 1; to < s.vectors && lanes(s, to).destination == destination; to++) {
    }
    for (int i = 0; i < tile.rows; i++) {
      const float* f = kept.channels + ((size_t)(tile.y + i) * plan.out.width + tile.x) * W;
      float* sums = t.sums + (ptrdiff_t)i * tile.columns * W;
      const auto run = s.has_upper ? wrap_row<true> : wrap_row<false>;
      run(kept, f, vector, from, to, tile.columns, sums, sums + pixels * W);
    }
    flush_both(s, plan, t, tile, destination);
  }
}

INLINE void wrap(const Stage& s, const Plan& plan, const Strip& t, const Kept& kept) {
  open_sums(s, plan, t);
  each_tile(plan, t, [&](const Tile& tile) { wrap_tile(s, plan, t, kept, tile); });
  close_sums(s, plan, t);
}

}  // namespace ISA
