// What Python hands over: one struct per stage of a network, plain C. The layout is mirrored in _fused_native.py.
#pragma once
#include <cstdint>

enum StageKind : int32_t { kBlock = 0, kStem = 1, kPointwise = 2 };
enum Gate : int32_t { kSigmoid = 0, kHardsigmoid = 1 };
enum Activation : int32_t { kClamp = 0, kSilu = 1, kHardswish = 2 };

struct Stage {
  int32_t kind;
  int32_t in_channels;
  int32_t out_channels;
  int32_t kernel;         // side of the depthwise (or stem) kernel
  int32_t stride;
  int32_t padding;
  int32_t residual;       // add the input to the output
  int32_t expands;        // 1: there is a first 1x1; else the depthwise runs on the input, copied once (0) or twice (2)
  int32_t mid;            // O: channels of the product map
  int32_t wrapped;        // channels after wrapping
  int32_t group_in;       // distance of the two taps in the product map
  int32_t group_out;      // distance of the two taps in the wrapped channels
  int32_t vectors;        // vectors of expanded channels
  int32_t z_floats;       // floats of a pixel's row of wrapped sums, what runs past the circle and tails included
  int32_t has_upper;      // any upper tap in the wrapping
  int32_t tail_at;        // first channel of the packed tail
  int32_t tail_length;    // channels of the tail, 0: none is packed
  int32_t tail_parts;     // where the parts of lower taps lie in the row; those of upper taps follow
  int32_t tail_vectors;
  int32_t tail_blocks;    // blocks packed into each tail vector
  int32_t activation[3];  // after the first 1x1, after the depthwise, at the end
  int32_t squeeze;        // channels between the matrices of the squeeze-excitation, 0: there is none
  int32_t squeeze_activation;
  int32_t gate;
  float low[3];
  float high[3];
  float squeeze_low;
  float squeeze_high;
  const float* expand;     // [vectors of mid][in_channels][LANES]
  const int32_t* table;    // [vectors][4 + 2 * LANES]: kind, source, destination, upper taps; places of the taps
  const float* constants;  // [vectors][(6 + kernel^2) * LANES]: lower, upper, shift, depthwise, bias, lower, upper
  const float* project;    // [vectors of out][wrapped][LANES]
  const float* bias;       // [vectors of out][LANES]
  const float* reduce;        // [squeeze][vectors][LANES]
  const float* reduce_bias;   // [squeeze], filled up to whole vectors
  const float* restore;       // [vectors][squeeze][LANES]
  const float* restore_bias;  // [vectors][LANES]
};
