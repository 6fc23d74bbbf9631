// The work of a call, divided into tasks for threads.
#pragma once

#include <functional>

#include "call.h"

namespace posenc {

// Runs task 0 .. count - 1, in any order and on any threads, and returns when all have ended.
using Parallel = std::function<void(size_t count, const std::function<void(size_t)>& task)>;

// Append the new keys and values to the caches, and write the output.
void run(Call& call, const Kernels& kernels, const Parallel& parallel);

}  // namespace posenc
