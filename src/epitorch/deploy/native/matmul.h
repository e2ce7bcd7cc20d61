// Small matrix products with a packed right-hand side: rows of pixels times [vectors][depth][LANES].
#pragma once
#include <algorithm>

#include "simd.h"

namespace ISA {

// Rows of a register tile for 1, 2, 3, 4 vectors of columns; MobileNet's images have multiples of 7 pixels.
#if LANES == 16
constexpr int kRows[5] = {0, 14, 14, 7, 7};
constexpr int kWide = 4;
#elif LANES == 8
constexpr int kRows[5] = {0, 7, 6, 4, 4};
constexpr int kWide = 2;
#else
constexpr int kRows[5] = {0, 7, 4, 4, 4};
constexpr int kWide = 2;
#endif

// Where a row's element of depth k lies: k itself, or from a table (a convolution's window).
struct Straight {
  INLINE int at(const int32_t*, int k) { return k; }
};
struct Window {
  INLINE int at(const int32_t* places, int k) { return places[k]; }
};

struct Product {
  const float* a;
  ptrdiff_t row;  // floats between rows of a
  const int32_t* places;
  const float* b;
  int depth;
};

template <int M, int N, class Place, class Write>
INLINE void tile(const Product& t, int m, int n, Write& write) {
  V sum[M][N] = {};
  const float* a = t.a + m * t.row;
  const float* b = t.b + (ptrdiff_t)n * t.depth * W;
  const ptrdiff_t column = (ptrdiff_t)t.depth * W;
  for (int k = 0; k < t.depth; k++) {
    V right[N];
    for (int j = 0; j < N; j++) right[j] = load(b + j * column + (ptrdiff_t)k * W);
    const float* left = a + Place::at(t.places, k);
    for (int i = 0; i < M; i++) {
      const V x = splat(left[i * t.row]);
      for (int j = 0; j < N; j++) sum[i][j] += x * right[j];
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) write(m + i, n + j, sum[i][j]);
}

template <int N, class Place, class Write>
__attribute__((noinline)) void columns(const Product& t, int rows, int n, Write& write) {
  int m = 0;
  for (; m + kRows[N] <= rows; m += kRows[N]) tile<kRows[N], N, Place>(t, m, n, write);
  constexpr int half = kRows[N] == 14 ? 7 : 2;
  for (; m + half <= rows; m += half) tile<half, N, Place>(t, m, n, write);
  for (; m < rows; m++) tile<1, N, Place>(t, m, n, write);
}

template <class Place, class Write>
INLINE void matmul(const Product& t, int rows, int vectors, Write& write) {
  int n = 0;
  while (n < vectors) {
    const int left = vectors - n;
    const int take = left <= kWide ? left : std::min(kWide, left - left / 2);
    switch (take) {
      case 1: columns<1, Place>(t, rows, n, write); break;
      case 2: columns<2, Place>(t, rows, n, write); break;
      case 3: columns<3, Place>(t, rows, n, write); break;
      default: columns<4, Place>(t, rows, n, write); break;
    }
    n += take;
  }
}

}  // namespace ISA
