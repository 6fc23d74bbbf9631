#define POSENC_SET plain
#define POSENC_LANES 4
#include "product_kernels.h"
