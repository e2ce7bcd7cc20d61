#define LANES 16
#define ISA epitorch_avx512
#include "kernel.h"
