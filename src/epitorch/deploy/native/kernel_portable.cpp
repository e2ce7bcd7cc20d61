#define LANES 4
#define ISA epitorch_portable
#include "kernel.h"
