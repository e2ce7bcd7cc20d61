// The entry point of one instruction set; each kernel_*.cpp defines LANES and ISA and includes this file.
#pragma once
#include "chain.h"

namespace ISA {

// Images [from, to) of a batch; `strides` are those of the batch, channels, rows and columns of the input in floats.
void run(const Stage* stages, int count, const float* x, const int64_t* strides, int from, int to, int height, int width,
         float* y, int64_t y_image) {
  thread_local Scratch scratch, between;
  for (int n = from; n < to; n++) {
    const Image image{x + n * strides[0], strides[1], strides[2], strides[3]};
    run_image(stages, count, image, {height, width}, y + n * y_image, scratch, between);
  }
}

}  // namespace ISA
