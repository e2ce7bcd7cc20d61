// The library's C interface: picks the instruction set when it runs, and spreads a batch over threads.
#include <algorithm>
#include <thread>
#include <vector>

#include "stage.h"

#define DECLARE(name)                                                                                               \
  namespace epitorch_##name {                                                                                       \
  void run(const Stage*, int, const float*, const int64_t*, int, int, int, int, float*, int64_t);                   \
  }
DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

namespace {

typedef void (*Run)(const Stage*, int, const float*, const int64_t*, int, int, int, int, float*, int64_t);

Run kernel_for(int lanes) {
#if defined(__x86_64__)
  if (lanes == 16) return epitorch_avx512::run;
  if (lanes == 8) return epitorch_avx2::run;
#endif
  return lanes == 4 ? epitorch_portable::run : nullptr;
}

}  // namespace

extern "C" {

int epitorch_stage_size() { return sizeof(Stage); }

// Lanes of the widest vectors that this processor has: 16 (AVX-512), 8 (AVX2 and FMA) or 4.
int epitorch_widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
  return 4;
}

// Run a chain of stages packed for `lanes` on a batch; returns 0, or 1 if there is no kernel for these lanes.
int epitorch_run(int lanes, const Stage* stages, int count, const float* x, const int64_t* strides, int batch, int height,
                 int width, float* y, int64_t y_image, int threads) {
  const Run run = kernel_for(lanes);
  if (!run) return 1;
  threads = std::max(1, std::min(threads, batch));
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++)
    others.emplace_back(run, stages, count, x, strides, batch * t / threads, batch * (t + 1) / threads, height, width, y,
                        y_image);
  run(stages, count, x, strides, 0, batch / threads, height, width, y, y_image);
  for (std::thread& other : others) other.join();
  return 0;
}
}
