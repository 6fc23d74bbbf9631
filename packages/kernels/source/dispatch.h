// Kernels for this processor.
#pragma once

#include "call.h"

namespace posenc {

// Kernels of the widest instruction set of this processor whose vectors divide the size. The
// environment variable POSENC_INSTRUCTIONS names the widest one that is used: avx512, avx2 or plain.
// Raises std::runtime_error if it names another, or one that this processor lacks.
const Kernels& kernels_for(int64_t size);

}  // namespace posenc
