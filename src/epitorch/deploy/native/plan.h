// Sizes of a stage on one image: strips and tiles that stay in cache, and the memory for them.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "simd.h"
#include "stage.h"

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

}  // namespace ISA
