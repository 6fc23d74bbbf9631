#define POSENC_SET avx512
#define POSENC_LANES 16
#include "product_kernels.h"
