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

// Bytes that stay in cache: the product map of a strip in level 2, the expanded tile in level 1.
constexpr int kStripBytes = 384 * 1024;
constexpr int kTileBytes = 20 * 1024;

struct Plan {
  Size in, out;
  int p_row;                  // floats of one pixel of the product map, stored twice
  int z_row;                  // floats of one pixel of the wrapped sums, with room in front for the circle
  int z_front;
  int strip;                  // output rows of a strip
  int strip_rows;             // input rows that it reads
  int tile;                   // output columns of a tile
  int tile_height;            // output rows of a tile
};

INLINE int needs(const Stage& s, int outputs) { return (outputs - 1) * s.stride + s.kernel; }

static Plan plan_for(const Stage& s, Size in) {
  Plan p;
  p.in = in, p.out = output_size(s, in);
  p.p_row = up(up(s.mid, W) + s.mid + s.group_in + W, 16);
  p.z_front = up(s.group_out, 16);
  p.z_row = p.z_front + up(s.z_vectors * W + W, 16);
  p.strip = p.out.height;
  while (p.strip > 1 && (needs(s, p.strip) * in.width * p.p_row + 2 * p.strip * p.out.width * p.z_row) * 4 > kStripBytes)
    p.strip = (p.strip + 1) / 2;
  p.strip_rows = std::min(needs(s, p.strip), in.height + s.kernel);
  p.tile = std::min(p.out.width, 28 / s.stride * 2);
  p.tile_height = p.strip;
  while (p.tile > 7 && needs(s, p.tile) * needs(s, 1) * W * 4 > kTileBytes) p.tile = (p.tile + 1) / 2;
  while (p.tile_height > 1 && needs(s, p.tile) * needs(s, p.tile_height) * W * 4 > kTileBytes) p.tile_height--;
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
    store(at + mid, v);
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
  float *z, *zu;   // wrapped sums of the lower and of the upper taps
  float* e;        // expanded tile
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

INLINE void middle_tile(const Stage& s, const Plan& plan, const Strip& t, Depthwise run, int y, int rows, int x, int columns) {
  const int width = needs(s, columns);
  for (int v = 0; v < s.vectors; v++) {
    const Lanes l = lanes(s, v);
    fill(s, plan, l, t, y * s.stride - s.padding, needs(s, rows), x * s.stride - s.padding, width);
    for (int i = 0; i < rows; i++) {
      const ptrdiff_t at = ((ptrdiff_t)(y + i - t.from) * plan.out.width + x) * plan.z_row + l.destination;
      run(s, l, t.e + (ptrdiff_t)i * s.stride * width * W, width, columns, t.z + at, t.zu + at, plan.z_row);
    }
  }
}

// The circle: upper sums move on by `group_out`, and the packed tail's parts are added up.
INLINE void close_row(const Stage& s, float* z, float* zu) {
  if (s.tail_length) {
    for (float* sums : {z, zu}) {
      V total{};
      for (int block = 0; block < s.tail_vectors * s.tail_blocks; block++) {
        const int lane = block % s.tail_blocks * s.tail_length;
        total += load(sums + s.tail_at + (1 + block / s.tail_blocks) * W + lane);
      }
      store(sums + s.tail_at, total);  // lanes past the tail are read by nobody
    }
  }
  if (!s.has_upper) return;
  for (int i = 0; i < s.group_out; i++) zu[i - s.group_out] = zu[s.wrapped - s.group_out + i];
  for (int i = 0; i < s.wrapped; i += W) store(z + i, load(z + i) + load(zu + i - s.group_out));
}

INLINE void middle(const Stage& s, const Plan& plan, const Strip& t) {
  const Depthwise run = depthwise_of(s);
  const ptrdiff_t pixels = (ptrdiff_t)(t.to - t.from) * plan.out.width;
  std::memset(t.z - plan.z_front, 0, 4 * pixels * plan.z_row);
  std::memset(t.zu - plan.z_front, 0, 4 * pixels * plan.z_row);
  for (int y = t.from; y < t.to; y += plan.tile_height)
    for (int x = 0; x < plan.out.width; x += plan.tile)
      middle_tile(s, plan, t, run, y, std::min(plan.tile_height, t.to - y), x, std::min(plan.tile, plan.out.width - x));
  if (s.has_upper || s.tail_length)
    for (ptrdiff_t i = 0; i < pixels; i++) close_row(s, t.z + i * plan.z_row, t.zu + i * plan.z_row);
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
  return (size_t)p.strip_rows * p.in.width * p.p_row + 2 * ((size_t)p.strip * p.out.width * p.z_row + p.z_front) +
         (size_t)needs(s, p.tile_height) * needs(s, p.tile) * W + 256;
}

static void run_block(const Stage& s, const Plan& plan, const float* x, float* y, Scratch& scratch) {
  scratch.reserve(block_scratch(s, plan));
  float* p = scratch.take((size_t)plan.strip_rows * plan.in.width * plan.p_row);
  const size_t z_floats = (size_t)plan.strip * plan.out.width * plan.z_row;
  float* z = scratch.take(z_floats) + plan.z_front;
  float* zu = scratch.take(z_floats) + plan.z_front;
  float* e = scratch.take((size_t)needs(s, plan.tile_height) * needs(s, plan.tile) * W);
  int have_from = 0, have_to = 0;  // rows of the product map in `p`
  for (int from = 0; from < plan.out.height; from += plan.strip) {
    const int to = std::min(plan.out.height, from + plan.strip);
    const int first = std::max(0, from * s.stride - s.padding);
    const int end = std::max(first, std::min(plan.in.height, (to - 1) * s.stride - s.padding + s.kernel));
    const ptrdiff_t row = (ptrdiff_t)plan.in.width * plan.p_row;
    if (have_to > first) std::memmove(p, p + (first - have_from) * row, 4 * (have_to - first) * row);
    const int begin = std::max(have_to, first);
    product_map(s, plan, x + (ptrdiff_t)begin * plan.in.width * s.in_channels, (end - begin) * plan.in.width,
                p + (begin - first) * row);
    have_from = first, have_to = end;
    middle(s, plan, {p, first, from, to, z, zu, e});
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
