// A chain of stages on one image: strips of rows, so that what lies between two convolutions stays in cache.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "matmul.h"
#include "middle.h"

namespace ISA {

struct Size {
  int height, width;
};

// Where an image lies: floats between channels, rows and columns.
struct Image {
  const float* data;
  ptrdiff_t channel, row, column;
};

INLINE int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE Size output_size(const Stage& s, Size in) {
  if (s.kind == kPointwise) return in;
  return {(in.height + 2 * s.padding - s.kernel) / s.stride + 1, (in.width + 2 * s.padding - s.kernel) / s.stride + 1};
}

// Bytes that stay in cache: the product map and the sums of a strip in level 2, what a tile touches in level 1.
constexpr int kStripBytes = 256 * 1024;
constexpr int kTileBytes = 20 * 1024;
constexpr int kColumns = 28;

struct Plan {
  Size in, out;
  int p_row;                  // floats of one pixel of the product map, stored twice
  int z_row;                  // floats of one pixel of the wrapped sums, with room behind for the circle and tails
  int strip;                  // output rows of a strip
  int strip_rows;             // input rows that it reads
  int tile;                   // output columns of a tile
  int tile_height;            // output rows of a tile
};

INLINE int needs(const Stage& s, int outputs) { return (outputs - 1) * s.stride + s.kernel; }

// Rows a multiple of 4 KiB apart would share few places of the cache.
INLINE int spread(int floats) { return up(floats, 4) % 64 ? up(floats, 4) : up(floats, 4) + 16; }

INLINE int tile_floats(const Stage& s, int rows, int columns) {
  return (needs(s, rows) * needs(s, columns) + 2 * rows * columns) * W;
}

// Whether the depthwise convolution can read the input where it lies: whole vectors, no circle.
INLINE bool reads_input(const Stage& s) { return s.expands == 0 && s.mid % W == 0; }

// Whether every wrapped sum has one destination: it is then stored, not added.
INLINE bool sums_once(const Stage& s) { return !s.has_upper && !s.tail_length; }

static Plan plan_for(const Stage& s, Size in) {
  Plan p;
  p.in = in, p.out = output_size(s, in);
  p.p_row = reads_input(s) ? s.mid : spread(2 * s.mid + s.group_in);
  p.z_row = spread(s.z_floats);
  p.strip = p.out.height;
  while (p.strip > 1 && (needs(s, p.strip) * in.width * p.p_row + p.strip * p.out.width * p.z_row) * 4 > kStripBytes)
    p.strip = (p.strip + 1) / 2;
  p.strip_rows = std::min(needs(s, p.strip), in.height + s.kernel);
  p.tile = std::min(p.out.width, kColumns);
  p.tile_height = p.strip;
  while (p.tile > 7 && tile_floats(s, 1, p.tile) * 4 > kTileBytes) p.tile = (p.tile + 1) / 2;
  while (p.tile_height > 1 && tile_floats(s, p.tile_height, p.tile) * 4 > kTileBytes) p.tile_height--;
  return p;
}

// Memory of one thread, kept between calls. Lanes that nothing writes are read and thrown away: they start as zeros.
class Scratch {
 public:
  float* take(size_t floats) {
    const size_t at = used_;
    used_ += (floats + 31) / 16 * 16;
    return base_ + at;
  }
  void reserve(size_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    memory_.assign(floats + 16, 0.0f);
    base_ = memory_.data() + (16 - reinterpret_cast<uintptr_t>(memory_.data()) / 4 % 16) % 16;
    size_ = floats;
  }

 private:
  std::vector<float> memory_;
  float* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

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

INLINE void middle(const Stage& s, const Plan& plan, const Strip& t) {
  const Depthwise run = depthwise_of(s);
  const ptrdiff_t pixels = (ptrdiff_t)(t.to - t.from) * plan.out.width;
  if (!sums_once(s)) std::memset(t.z, 0, 4 * pixels * plan.z_row);
  for (int y = t.from; y < t.to; y += plan.tile_height)
    for (int x = 0; x < plan.out.width; x += plan.tile)
      middle_tile(s, plan, t, run,
                  {y, std::min(plan.tile_height, t.to - y), x, std::min(plan.tile, plan.out.width - x)});
  for (int upper = 0; s.tail_length && upper <= s.has_upper; upper++) close_tail(s, plan, t.z, pixels, upper);
  if (s.has_upper) close_circle(s, plan, t.z, pixels);
}

// ---- the last convolution of a stage ----

template <int A>
struct WriteOut {
  float* y;
  const float* x;  // null, or what is added
  int channels;
  const float* bias;
  V low, high;
  MEMBER void operator()(int m, int n, V v) const {
    const ptrdiff_t at = (ptrdiff_t)m * channels + n * W;
    const int left = channels - n * W;
    v = activate<A>(v + load(bias + n * W), low, high);
    if (left >= W) {
      store(y + at, x ? v + load(x + at) : v);
    } else {
      store_part(y + at, x ? v + load_part(x + at, left) : v, left);
    }
  }
};

template <class Place>
INLINE void last_product(const Stage& s, const Product& t, int rows, float* y, const float* x) {
  const int vectors = up(s.out_channels, W) / W;
  const V low = splat(s.low[2]), high = splat(s.high[2]);
  if (s.activation[2] == kSilu) {
    WriteOut<kSilu> write{y, x, s.out_channels, s.bias, low, high};
    matmul<Place>(t, rows, vectors, write);
  } else if (s.activation[2] == kHardswish) {
    WriteOut<kHardswish> write{y, x, s.out_channels, s.bias, low, high};
    matmul<Place>(t, rows, vectors, write);
  } else {
    WriteOut<kClamp> write{y, x, s.out_channels, s.bias, low, high};
    matmul<Place>(t, rows, vectors, write);
  }
}

// ---- stages ----

static size_t block_scratch(const Stage& s, const Plan& p) {
  return (size_t)p.strip_rows * p.in.width * p.p_row + (size_t)p.strip * p.out.width * p.z_row +
         tile_floats(s, p.tile_height, p.tile) + 512;
}

// Rows [first, end) of the product map at `p`; what is there of them already moves to the front.
INLINE void move_on(const Stage& s, const Plan& plan, const float* x, float* p, int first, int end, int& from, int& to) {
  const ptrdiff_t row = (ptrdiff_t)plan.in.width * plan.p_row;
  if (to > first) std::memmove(p, p + (first - from) * row, 4 * (to - first) * row);
  const int begin = std::max(to, first);
  product_map(s, plan, x + (ptrdiff_t)begin * plan.in.width * s.in_channels, (end - begin) * plan.in.width,
              p + (begin - first) * row);
  from = first, to = end;
}

static void run_block(const Stage& s, const Plan& plan, const float* x, float* y, Scratch& scratch) {
  scratch.reserve(block_scratch(s, plan));
  // behind the last pixel a vector may be read past the end
  float* p = scratch.take((size_t)plan.strip_rows * plan.in.width * plan.p_row + 64);
  float* z = scratch.take((size_t)plan.strip * plan.out.width * plan.z_row + 64);
  float* e = scratch.take((size_t)needs(s, plan.tile_height) * needs(s, plan.tile) * W);
  float* sums = scratch.take((size_t)2 * plan.tile_height * plan.tile * W);
  int have_from = 0, have_to = 0;
  for (int from = 0; from < plan.out.height; from += plan.strip) {
    const int to = std::min(plan.out.height, from + plan.strip);
    const int first = std::max(0, from * s.stride - s.padding);
    const int end = std::max(first, std::min(plan.in.height, (to - 1) * s.stride - s.padding + s.kernel));
    const bool direct = reads_input(s);
    if (!direct) move_on(s, plan, x, p, first, end, have_from, have_to);
    const float* rows = direct ? x + (ptrdiff_t)first * plan.in.width * s.mid : p;
    middle(s, plan, {rows, first, from, to, z, e, sums});
    const ptrdiff_t at = (ptrdiff_t)from * plan.out.width * s.out_channels;
    last_product<Straight>(s, {z, plan.z_row, nullptr, s.project, s.wrapped}, (to - from) * plan.out.width, y + at,
                           s.residual ? x + at : nullptr);
  }
}

// A plain convolution of few channels: rows of the window side by side, read at a table of places.
static void run_stem(const Stage& s, const Plan& plan, Image x, float* y, Scratch& scratch) {
  const int length = plan.in.width + 2 * s.padding + s.stride, depth = s.in_channels * s.kernel * s.kernel;
  scratch.reserve((size_t)s.in_channels * s.kernel * length + depth + 256);
  float* rows = scratch.take((size_t)s.in_channels * s.kernel * length);
  int32_t* places = reinterpret_cast<int32_t*>(scratch.take(depth));
  for (int k = 0; k < depth; k++) places[k] = k / s.kernel * length + k % s.kernel;
  for (int i = 0; i < plan.out.height; i++) {
    std::memset(rows, 0, 4 * (size_t)s.in_channels * s.kernel * length);
    for (int c = 0; c < s.in_channels; c++)
      for (int k = 0; k < s.kernel; k++) {
        const int at = i * s.stride - s.padding + k;
        if (at < 0 || at >= plan.in.height) continue;
        const float* from = x.data + c * x.channel + at * x.row;
        float* to = rows + (c * s.kernel + k) * length + s.padding;
        if (x.column == 1) {
          std::memcpy(to, from, 4 * plan.in.width);
        } else {
          for (int j = 0; j < plan.in.width; j++) to[j] = from[j * x.column];
        }
      }
    last_product<Window>(s, {rows, s.stride, places, s.project, depth}, plan.out.width,
                         y + (ptrdiff_t)i * plan.out.width * s.out_channels, nullptr);
  }
}

// Run stages on one image. The result lies channels last in `y`; what lies between in two buffers.
static void run_image(const Stage* stages, int count, Image x, Size size, float* y, Scratch& scratch, Scratch& between) {
  size_t largest = 0;
  Size now = size;
  for (int i = 0; i + 1 < count; i++) {
    now = output_size(stages[i], now);
    largest = std::max(largest, (size_t)now.height * now.width * stages[i].out_channels);
  }
  between.reserve(2 * largest + 96);
  float* buffers[2] = {between.take(largest), between.take(largest)};
  for (int i = 0; i < count; i++) {
    const Stage& s = stages[i];
    const Plan plan = plan_for(s, size);
    float* to = i + 1 == count ? y : buffers[i % 2];
    if (s.kind == kStem) {
      run_stem(s, plan, x, to, scratch);
    } else if (s.kind == kPointwise) {
      last_product<Straight>(s, {x.data, s.in_channels, nullptr, s.project, s.in_channels}, size.height * size.width, to,
                             nullptr);
    } else {
      run_block(s, plan, x.data, to, scratch);
    }
    size = plan.out;
    x = {to, 1, (ptrdiff_t)size.width * s.out_channels, s.out_channels};
  }
}

}  // namespace ISA
