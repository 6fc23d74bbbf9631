#define POSENC_SET avx2
#define POSENC_NAME "avx2"
#define POSENC_WIDTH 8
#include "attention.h"
