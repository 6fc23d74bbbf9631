#include "work.h"

#include <algorithm>
#include <initializer_list>
#include <new>

#include "thread_memory.h"

namespace posenc {
namespace {

constexpr size_t ENOUGH = 32;     // tiles with which threads need no division by parts
constexpr int64_t SMALL = 1 << 20;  // products of numbers below which one thread is faster

constexpr int64_t TOGETHER = 4;   // heads whose decays add up in turn, since each waits for the last

// Product of sizes. Raises std::bad_alloc if it overflows.
size_t product(std::initializer_list<int64_t> sizes) {
  size_t total = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(total, size, &total)) throw std::bad_alloc();
  return total;
}

thread_local std::vector<float> of_thread, of_call;
thread_local std::vector<double> of_sums, of_counts;
thread_local std::vector<Query> of_tile;

// Memory of a thread for a tile, with further numbers behind.
Memory memory_of(const Call& call, const Kernels& kernels, const Tile& tile, size_t further = 0) {
  const int64_t queries = tile.tokens * call.group;
  return {memory(of_thread, kernels.scratch_size(call, queries) + further),
          memory(of_tile, 2 * queries)};
}

// Tiles of a call, and the parts of the keys that each of them attends to.
struct Tiles {
  const Call& call;
  int64_t tokens;   // of a tile
  int64_t by_row;   // tiles of the tokens of a row

  explicit Tiles(const Call& call)
      : call(call),
        tokens(std::clamp<int64_t>(TILE / call.group, 1, call.tokens)),
        by_row((call.tokens + tokens - 1) / tokens) {}

  size_t count() const { return call.rows * call.kv_heads * by_row; }

  int64_t queries() const { return tokens * call.group; }

  // A tile without tokens consists of padding alone.
  Tile at(size_t number) const {
    const int64_t of_row = number % by_row, head = number / by_row;
    const int64_t row = head / call.kv_heads, token = of_row * tokens;
    return {row, head % call.kv_heads, token,
            std::clamp<int64_t>(call.count[row] - token, 0, tokens)};
  }

  int64_t first_part(const Tile& tile) const {
    int64_t begin = INT64_MAX;
    for (int64_t s = 0; s < tile.tokens; s++)
      begin = std::min(begin, first_visible(call, tile.row, tile.first_token + s));
    return begin / PART;
  }

  int64_t last_part(const Tile& tile) const {
    return (call.first[tile.row] + tile.first_token + tile.tokens - 1) / PART;
  }
};

// Attend to all parts of a tile, one after the other.
void whole(const Tiles& tiles, const Kernels& kernels, size_t number) {
  const Call& call = tiles.call;
  const Tile tile = tiles.at(number);
  if (!tile.tokens) return;
  const int64_t queries = tile.tokens * call.group;
  const size_t size = Partial::size(call, queries);
  const Memory memory = memory_of(call, kernels, tile, 2 * size);
  float* further = memory.numbers + kernels.scratch_size(call, queries);
  const Partial total(call, queries, further), partial(call, queries, further + size);
  kernels.clear(call, queries, total);
  for (int64_t part = tiles.first_part(tile); part <= tiles.last_part(tile); part++) {
    kernels.attend(call, tile, part, partial, memory);
    kernels.merge(call, queries, total, partial);
  }
  kernels.finish(call, tile, total);
}

// Attend to each part of each tile in a task of its own, then add up the parts of each tile.
void divided(const Tiles& tiles, const Kernels& kernels, const Parallel& parallel) {
  const Call& call = tiles.call;
  struct Task {
    Tile tile;
    int64_t part;
    bool last;
  };
  std::vector<Task> tasks;
  for (size_t number = 0; number < tiles.count(); number++) {
    const Tile tile = tiles.at(number);
    if (!tile.tokens) continue;
    const int64_t last = tiles.last_part(tile);
    for (int64_t part = tiles.first_part(tile); part <= last; part++)
      tasks.push_back({tile, part, part == last});
  }
  const size_t size = Partial::size(call, tiles.queries());
  std::vector<float> partials(product({int64_t(size), int64_t(tasks.size() + 1)}));
  const auto partial = [&](size_t task, const Tile& tile) {
    return Partial(call, tile.tokens * call.group, partials.data() + task * size);
  };
  parallel(tasks.size(), [&](size_t number) {
    const Task& task = tasks[number];
    kernels.attend(call, task.tile, task.part, partial(number, task.tile),
                   memory_of(call, kernels, task.tile));
  });
  bool begins = true;
  for (size_t number = 0; number < tasks.size(); number++) {
    const Task& task = tasks[number];
    const int64_t queries = task.tile.tokens * call.group;
    const Partial total = partial(tasks.size(), task.tile);
    if (begins) kernels.clear(call, queries, total);
    kernels.merge(call, queries, total, partial(number, task.tile));
    if (task.last) kernels.finish(call, task.tile, total);
    begins = task.last;
  }
}

void clear_padding(const Call& call) {
  const int64_t width = call.heads * call.values.size;
  for (int64_t row = 0; row < call.rows; row++) {
    float* output = call.output + row * call.tokens * width;
    std::fill(output + call.count[row] * width, output + call.tokens * width, 0.0f);
    for (int64_t head = 0; call.row_weights && head < call.heads; head++) {
      float* sums = call.row_weights + (row * call.heads + head) * call.tokens * call.table_rows;
      std::fill(sums + call.count[row] * call.table_rows, sums + call.tokens * call.table_rows, 0.0f);
    }
  }
}

// Add up the decays of some heads of a row, from the first slot on.
void sum_decays(const Call& call, int64_t row, int64_t first_head) {
  const float* decays[TOGETHER];
  double *sums[TOGETHER], totals[TOGETHER] = {};
  for (int64_t i = 0; i < TOGETHER; i++) {
    const int64_t head = row * call.heads + std::min(first_head + i, call.heads - 1);
    decays[i] = call.decays + head * call.decay_slots;
    sums[i] = call.decay_sums + head * call.slots;
  }
  for (int64_t t = 0; t < call.first[row] + call.count[row]; t++)
    for (int64_t i = 0; i < TOGETHER; i++) sums[i][t] = totals[i] += decays[i][t];
}

// Number of products of a key with a query, times the size of a head.
double products(const Call& call) {
  double total = 0;
  for (int64_t row = 0; row < call.rows; row++)
    total += static_cast<double>(call.first[row] + call.count[row]) * call.count[row];
  return total * call.heads * call.keys.size;
}

}  // namespace

void run(Call& call, const Kernels& kernels, const Parallel& parallel) {
  const Parallel alone = [](size_t count, const std::function<void(size_t)>& task) {
    for (size_t number = 0; number < count; number++) task(number);
  };
  const bool small = products(call) < SMALL;
  const Parallel& chosen = small ? alone : parallel;
  call.queries = memory(of_call, product({call.rows, call.tokens, call.heads, call.keys.size}));
  chosen(call.rows * call.tokens, [&](size_t number) {
    const int64_t row = number / call.tokens, token = number % call.tokens;
    if (token < call.count[row]) kernels.prepare(call, row, token);
  });
  const size_t sums = call.decays ? product({call.rows, call.heads, call.slots}) : 0;
  call.decay_sums = memory(of_sums, sums);
  if (call.decays) {
    const int64_t by_row = (call.heads + TOGETHER - 1) / TOGETHER;
    chosen(call.rows * by_row, [&](size_t number) {
      sum_decays(call, number / by_row, number % by_row * TOGETHER);
    });
  }
  clear_padding(call);
  const Tiles tiles(call);
  call.parts = call.count_rows ? (call.slots + PART - 1) / PART : 0;
  call.counted = memory(of_counts, product({call.rows, call.heads, call.tokens, call.parts}));
  if (call.count_rows) {
    chosen(tiles.count(), [&](size_t number) {
      const Tile tile = tiles.at(number);
      if (tile.tokens)
        kernels.count(call, tile, tiles.first_part(tile), tiles.last_part(tile),
                      memory_of(call, kernels, tile));
    });
  }
  if (small || tiles.count() >= ENOUGH)
    chosen(tiles.count(), [&](size_t number) { whole(tiles, kernels, number); });
  else
    divided(tiles, kernels, chosen);
}

}  // namespace posenc
