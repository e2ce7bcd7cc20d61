// A chain of stages on one image: strips of rows, so that what lies between two convolutions stays in cache.
#pragma once
#include "squeeze.h"
#include "strip.h"

namespace ISA {

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

struct Buffers {
  float *p, *z, *e, *sums;
};

// behind the last pixel a vector may be read past the end
static Buffers take_buffers(const Stage& s, const Plan& plan, Scratch& scratch) {
  return {scratch.take((size_t)plan.strip_rows * plan.in.width * plan.p_row + 64),
          scratch.take((size_t)plan.strip * plan.out.width * plan.z_row + 64),
          scratch.take((size_t)needs(s, plan.tile_height) * needs(s, plan.tile) * W),
          scratch.take((size_t)2 * plan.tile_height * plan.tile * W)};
}

// Call `run` with every strip, its product map made.
template <class Run>
INLINE void each_strip(const Stage& s, const Plan& plan, const float* x, const Buffers& b, Run run) {
  int have_from = 0, have_to = 0;
  for (int from = 0; from < plan.out.height; from += plan.strip) {
    const int to = std::min(plan.out.height, from + plan.strip);
    const int first = std::max(0, from * s.stride - s.padding);
    const int end = std::max(first, std::min(plan.in.height, (to - 1) * s.stride - s.padding + s.kernel));
    const bool direct = reads_input(s);
    if (!direct) move_on(s, plan, x, b.p, first, end, have_from, have_to);
    run(Strip{direct ? x + (ptrdiff_t)first * plan.in.width * s.mid : b.p, first, from, to, b.z, b.e, b.sums});
  }
}

INLINE void project(const Stage& s, const Plan& plan, const Strip& t, const float* x, float* y) {
  const ptrdiff_t at = (ptrdiff_t)t.from * plan.out.width * s.out_channels;
  last_product<Straight>(s, {t.z, plan.z_row, nullptr, s.project, s.wrapped}, pixels_of(plan, t), y + at,
                         s.residual ? x + at : nullptr);
}

static void run_squeezed(const Stage& s, const Plan& plan, const float* x, float* y, const Buffers& b, const Kept& kept) {
  each_strip(s, plan, x, b, [&](const Strip& t) { keep(s, plan, t, kept); });
  make_gates(s, plan, kept);
  for (int from = 0; from < plan.out.height; from += plan.strip) {
    const Strip t{nullptr, 0, from, std::min(plan.out.height, from + plan.strip), b.z, b.e, b.sums};
    wrap(s, plan, t, kept);
    project(s, plan, t, x, y);
  }
}

static void run_block(const Stage& s, const Plan& plan, const float* x, float* y, Scratch& scratch) {
  scratch.reserve(block_scratch(s, plan) + kept_floats(s, plan));
  const Buffers b = take_buffers(s, plan, scratch);
  if (s.squeeze) return run_squeezed(s, plan, x, y, b, take_kept(s, plan, scratch));
  each_strip(s, plan, x, b, [&](const Strip& t) {
    middle(s, plan, t);
    project(s, plan, t, x, y);
  });
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
