// Memory of a thread, kept from call to call.
#pragma once

#include <cstddef>
#include <vector>

namespace posenc {

constexpr size_t SPARE = 1 << 18;  // numbers that a thread may keep beyond TIMES those of a call
constexpr size_t TIMES = 4;

// Memory for the numbers of a call, kept while calls need about as many.
template <class Number>
Number* memory(std::vector<Number>& kept, size_t size) {
  if (kept.size() < size || kept.size() > SPARE + TIMES * size) {
    std::vector<Number>().swap(kept);
    kept.resize(size);
  }
  return kept.data();
}

}  // namespace posenc
