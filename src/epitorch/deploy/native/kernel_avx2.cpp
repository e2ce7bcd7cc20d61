#define LANES 8
#define ISA epitorch_avx2
#include "kernel.h"
