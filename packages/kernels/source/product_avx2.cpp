#define POSENC_SET avx2
#define POSENC_LANES 8
#include "product_kernels.h"
