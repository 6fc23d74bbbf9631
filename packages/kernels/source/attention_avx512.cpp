#define POSENC_SET avx512
#define POSENC_NAME "avx512"
#define POSENC_WIDTH 16
#include "attention.h"
