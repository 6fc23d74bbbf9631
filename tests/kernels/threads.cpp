// Calls of the kernels on several threads, for the thread sanitizer: outputs must be those of one
// thread, bit for bit.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "work.h"

using posenc::Call;

namespace {

constexpr int64_t ROWS = 2, TOKENS = 3, HEADS = 6, KV_HEADS = 2, CAPACITY = 1500, SIZE = 64;

std::vector<float> numbers(size_t count) {
  std::vector<float> result(count);
  uint32_t state = 1;
  for (float& number : result) {
    state = state * 1664525u + 1013904223u;
    number = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
  }
  return result;
}

std::vector<float> output(const posenc::Parallel& parallel, const std::vector<int64_t>& first,
                          posenc::Format format) {
  std::vector<float> heads = numbers(ROWS * TOKENS * (HEADS + 2 * KV_HEADS) * SIZE);
  std::vector<float> keys = numbers(ROWS * KV_HEADS * CAPACITY * SIZE);
  if (format != posenc::FLOAT32) keys.assign(keys.size(), 0.0f);  // others have NaN
  std::vector<float> values = keys;
  const std::vector<float> decays = numbers(ROWS * HEADS * CAPACITY);
  std::vector<float> result(ROWS * TOKENS * HEADS * SIZE);
  const std::vector<int64_t> count(ROWS, TOKENS);
  Call call;
  call.rows = ROWS;
  call.tokens = TOKENS;
  call.heads = HEADS;
  call.kv_heads = KV_HEADS;
  call.group = HEADS / KV_HEADS;
  call.capacity = CAPACITY;
  call.first = first.data();
  call.count = count.data();
  call.q = heads.data();
  call.q_stride = call.keys.stride = call.values.stride = (HEADS + 2 * KV_HEADS) * SIZE;
  call.keys.heads = call.q + HEADS * SIZE;
  call.values.heads = call.keys.heads + KV_HEADS * SIZE;
  call.keys.size = call.values.size = SIZE;
  call.keys.slots = keys.data();
  call.values.slots = values.data();
  call.format = format;
  call.scale = 0.125f;
  call.decays = decays.data();
  call.decay_slots = call.slots = CAPACITY;
  const std::vector<float> turns = numbers(ROWS * TOKENS * 3 * posenc::DIGITS * SIZE / 2);
  call.turns = {turns.data(), turns.data(), SIZE / 2, false};
  call.turn_rows = 3 * posenc::DIGITS;
  call.output = result.data();
  posenc::run(call, posenc::kernels_for(SIZE), parallel);
  return result;
}

}  // namespace

int main() {
  const posenc::Parallel alone = [](size_t count, const std::function<void(size_t)>& task) {
    for (size_t number = 0; number < count; number++) task(number);
  };
  const posenc::Parallel together = [](size_t count, const std::function<void(size_t)>& task) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
      threads.emplace_back([&] {
        for (size_t number = next++; number < count; number = next++) task(number);
      });
    for (std::thread& thread : threads) thread.join();
  };
  for (const std::vector<int64_t>& first : {std::vector<int64_t>{1400, 700}, {1200, 0}})
    for (posenc::Format format : {posenc::FLOAT32, posenc::FLOAT16})
      if (output(alone, first, format) != output(together, first, format)) {
        std::puts("outputs differ between numbers of threads");
        return 1;
      }
  return 0;
}
