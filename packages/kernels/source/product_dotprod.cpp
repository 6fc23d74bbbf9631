#define POSENC_SET dotprod
#define POSENC_LANES 4
#include "product_kernels.h"
