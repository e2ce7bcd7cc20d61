// A strip of output rows: product map, then tile by tile the middle and its wrapped sums.
#pragma once
#include "matmul.h"
#include "middle.h"
#include "plan.h"

namespace ISA {

// ---- product map ----

struct WriteTwice {
  float* p;
  int row, mid;
  MEMBER void operator()(int m, int n, V v) const {
    float* at = p + (ptrdiff_t)m * row + n * W;
    if (mid - n * W >= W)
      store(at, v);
    else
      store_part(at, v, mid - n * W);
    if (mid - n * W >= W)
      store(at + mid, v);
    else
      store_part(at + mid, v, mid - n * W);
  }
};

INLINE void product_map(const Stage& s, const Plan& plan, const float* x, int pixels, float* p) {
  if (s.expands == 1) {
    WriteTwice write{p, plan.p_row, s.mid};
    matmul<Straight>({x, s.in_channels, nullptr, s.expand, s.in_channels}, pixels, up(s.mid, W) / W, write);
    return;
  }
  for (int i = 0; i < pixels; i++) {
    float* at = p + (ptrdiff_t)i * plan.p_row;
    std::memcpy(at, x + (ptrdiff_t)i * s.mid, 4 * s.mid);
    if (s.expands == 2) std::memcpy(at + s.mid, at, 4 * s.mid);
  }
}

// ---- the middle of a strip ----

struct Strip {
  const float* p;  // product map
  int first;       // its first row in the image
  int from, to;    // output rows
  float* z;        // wrapped sums, a row per pixel
  float* e;        // expanded tile, one vector per pixel
  float* sums;     // sums of the tile's lower, then of its upper taps
};

// Expanded channels of the rows and columns that a tile of outputs reads; zeros in the padding.
INLINE void fill(const Stage& s, const Plan& plan, const Lanes& l, const Strip& t, int y, int rows, int x, int width) {
  const int left = std::min(std::max(0, -x), width), right = std::max(left, std::min(width, plan.in.width - x));
  for (int i = 0; i < rows; i++) {
    float* e = t.e + (ptrdiff_t)i * width * W;
    if (y + i < 0 || y + i >= plan.in.height) {
      std::memset(e, 0, 4 * width * W);
      continue;
    }
    std::memset(e, 0, 4 * left * W);
    const float* p = t.p + ((ptrdiff_t)(y + i - t.first) * plan.in.width + x + left) * plan.p_row;
    interpolate_any(s, l, p, plan.p_row, right - left, e + left * W);
    std::memset(e + right * W, 0, 4 * (width - right) * W);
  }
}

struct Tile {
  int y, rows, x, columns;
};

// Add sums to `lanes` floats of every pixel's row, from `at` on.
INLINE void flush(const Plan& plan, const Strip& t, const Tile& tile, const float* sums, int at, int lanes, bool stores) {
  for (int i = 0; i < tile.rows; i++) {
    float* z = t.z + ((ptrdiff_t)(tile.y + i - t.from) * plan.out.width + tile.x) * plan.z_row + at;
    if (stores) {
      for (int j = 0; j < tile.columns; j++, sums += W, z += plan.z_row) store(z, load(sums));
    } else if (lanes == W) {
      for (int j = 0; j < tile.columns; j++, sums += W, z += plan.z_row) store(z, load(z) + load(sums));
    } else {
      for (int j = 0; j < tile.columns; j++, sums += W, z += plan.z_row)
        store_part(z, load_part(z, lanes) + load(sums), lanes);
    }
  }
}

// Sums of upper taps belong `group_out` further on; those of a packed tail keep apart until it is added up.
INLINE void flush_both(const Stage& s, const Plan& plan, const Strip& t, const Tile& tile, int destination) {
  const bool packed = s.tail_length && destination >= s.tail_parts;
  const int used = packed ? W : std::min(W, s.wrapped - destination);
  flush(plan, t, tile, t.sums, destination, used, sums_once(s));
  if (!s.has_upper) return;
  const int further = packed ? s.tail_vectors * W : s.group_out;
  flush(plan, t, tile, t.sums + tile.rows * tile.columns * W, destination + further, used, false);
}

INLINE void middle_tile(const Stage& s, const Plan& plan, const Strip& t, Depthwise run, const Tile& tile) {
  const int width = needs(s, tile.columns), pixels = tile.rows * tile.columns;
  for (int v = 0; v < s.vectors;) {
    const int destination = lanes(s, v).destination;
    std::memset(t.sums, 0, 4 * (size_t)(1 + s.has_upper) * pixels * W);
    for (; v < s.vectors; v++) {
      const Lanes l = lanes(s, v);
      if (l.destination != destination) break;
      fill(s, plan, l, t, tile.y * s.stride - s.padding, needs(s, tile.rows), tile.x * s.stride - s.padding, width);
      for (int i = 0; i < tile.rows; i++) {
        float* sums = t.sums + (ptrdiff_t)i * tile.columns * W;
        run(s, l, t.e + (ptrdiff_t)i * s.stride * width * W, width, tile.columns, sums, sums + pixels * W);
      }
    }
    flush_both(s, plan, t, tile, destination);
  }
}

// Add up the parts of the packed tail: those of lower taps, or of upper ones.
INLINE void close_tail(const Stage& s, const Plan& plan, float* z, ptrdiff_t pixels, int upper) {
  const int parts = s.tail_parts + upper * s.tail_vectors * W, at = s.tail_at + upper * s.group_out;
  for (ptrdiff_t i = 0; i < pixels; i++, z += plan.z_row) {
    V total = load_part(z + at, s.tail_length);
    for (int v = 0; v < s.tail_vectors; v++)
      for (int block = 0; block < s.tail_blocks; block++) total += load(z + parts + v * W + block * s.tail_length);
    store_part(z + at, total, s.tail_length);
  }
}

// What ran past the end of the circle belongs to its beginning.
INLINE void close_circle(const Stage& s, const Plan& plan, float* z, ptrdiff_t pixels) {
  for (ptrdiff_t i = 0; i < pixels; i++, z += plan.z_row)
    for (int j = 0; j < s.group_out; j++) z[j] += z[s.wrapped + j];
}

INLINE ptrdiff_t pixels_of(const Plan& plan, const Strip& t) { return (ptrdiff_t)(t.to - t.from) * plan.out.width; }

INLINE void open_sums(const Stage& s, const Plan& plan, const Strip& t) {
  if (!sums_once(s)) std::memset(t.z, 0, 4 * pixels_of(plan, t) * plan.z_row);
}

INLINE void close_sums(const Stage& s, const Plan& plan, const Strip& t) {
  const ptrdiff_t pixels = pixels_of(plan, t);
  for (int upper = 0; s.tail_length && upper <= s.has_upper; upper++) close_tail(s, plan, t.z, pixels, upper);
  if (s.has_upper) close_circle(s, plan, t.z, pixels);
}

template <class Run>
INLINE void each_tile(const Plan& plan, const Strip& t, Run run) {
  for (int y = t.from; y < t.to; y += plan.tile_height)
    for (int x = 0; x < plan.out.width; x += plan.tile)
      run(Tile{y, std::min(plan.tile_height, t.to - y), x, std::min(plan.tile, plan.out.width - x)});
}

INLINE void middle(const Stage& s, const Plan& plan, const Strip& t) {
  const Depthwise run = depthwise_of<false>(s);
  open_sums(s, plan, t);
  each_tile(plan, t, [&](const Tile& tile) { middle_tile(s, plan, t, run, tile); });
  close_sums(s, plan, t);
}

}  // namespace ISA
