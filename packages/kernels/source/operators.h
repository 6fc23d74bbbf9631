// The operators of the library, and their work on the threads of a session.
#pragma once

#include <atomic>
#include <functional>
#include <new>

#include "tensors.h"

namespace posenc {

// posenc.kernels::MatMulNBits (product.cpp).
const OrtCustomOp* product_operator();

// Tasks for the threads of a session. Its threads must not see an exception.
struct Tasks {
  const std::function<void(size_t)>& task;
  std::atomic<bool> failed{false};

  static void run(void* data, size_t number) {
    Tasks* tasks = static_cast<Tasks*>(data);
    try {
      tasks->task(number);
    } catch (const std::exception&) {
      tasks->failed = true;
    }
  }
};

// Run task 0 .. total - 1, in any order and on any threads of the session, and wait for all.
inline void in_parallel(OrtKernelContext* context, size_t total,
                        const std::function<void(size_t)>& task) {
  Tasks tasks{task};
  ok(api->KernelContext_ParallelFor(context, Tasks::run, total, 0, &tasks));
  if (tasks.failed) throw std::bad_alloc();
}

}  // namespace posenc
