#define POSENC_SET plain
#define POSENC_NAME "plain"
#define POSENC_WIDTH 4
#include "attention.h"
