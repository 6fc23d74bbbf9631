#include "work.h"

#include <algorithm>
#include <vector>

namespace posenc {
namespace {

constexpr size_t ENOUGH = 32;     // tiles with which threads need no division by parts
constexpr int64_t SMALL = 1 << 20;  // products of numbers below which one thread is faster

constexpr int64_t TOGETHER = 4;   // heads whose decays add up in turn, since each waits for the last

// Memory of a thread, kept from call to call.
template <class Number>
Number* memory(std::vector<Number>& kept, size_t size) {
  if (kept.size() < size) kept.resize(size);
  return kept.data();
}

thread_local std::vector<float> of_thread, of_call;
thread_local std::vector<double> of_sums, of_counts;

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
  float* kept = memory(of_thread, 2 * size + kernels.scratch_size(call, queries));
  const Partial total(call, queries, kept), partial(call, queries, kept + size);
  kernels.clear(call, queries, total);
  for (int64_t part = tiles.first_part(tile); part <= tiles.last_part(tile); part++) {
    kernels.attend(call, tile, part, partial, kept + 2 * size);
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
  std::vector<float> partials(size * (tasks.size() + 1));
  const auto partial = [&](size_t task, const Tile& tile) {
    return Partial(call, tile.tokens * call.group, partials.data() + task * size);
  };
  parallel(tasks.size(), [&](size_t number) {
    const Task& task = tasks[number];
    const size_t scratch = kernels.scratch_size(call, task.tile.tokens * call.group);
    kernels.attend(call, task.tile, task.part, partial(number, task.tile),
                   memory(of_thread, scratch));
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
int64_t products(const Call& call) {
  int64_t total = 0;
  for (int64_t row = 0; row < call.rows; row++)
    total += (call.first[row] + call.count[row]) * call.count[row];
  return total * call.heads * call.keys.size;
}

}  // namespace

void run(Call& call, const Kernels& kernels, const Parallel& parallel) {
  const Parallel alone = [](size_t count, const std::function<void(size_t)>& task) {
    for (size_t number = 0; number < count; number++) task(number);
  };
  const bool small = products(call) < SMALL;
  const Parallel& chosen = small ? alone : parallel;
  call.queries = memory(of_call, call.rows * call.tokens * call.heads * call.keys.size);
  chosen(call.rows * call.tokens, [&](size_t number) {
    const int64_t row = number / call.tokens, token = number % call.tokens;
    if (token < call.count[row]) kernels.prepare(call, row, token);
  });
  if (call.decays) {
    const int64_t by_row = (call.heads + TOGETHER - 1) / TOGETHER;
    call.decay_sums = memory(of_sums, call.rows * call.heads * call.slots);
    chosen(call.rows * by_row, [&](size_t number) {
      sum_decays(call, number / by_row, number % by_row * TOGETHER);
    });
  }
  clear_padding(call);
  const Tiles tiles(call);
  if (call.count_rows) {
    call.parts = (call.slots + PART - 1) / PART;
    call.counted = memory(of_counts, call.rows * call.heads * call.tokens * call.parts);
    chosen(tiles.count(), [&](size_t number) {
      const Tile tile = tiles.at(number);
      const size_t size = kernels.scratch_size(call, tile.tokens * call.group);
      if (tile.tokens)
        kernels.count(call, tile, tiles.first_part(tile), tiles.last_part(tile),
                      memory(of_thread, size));
    });
  }
  if (small || tiles.count() >= ENOUGH)
    chosen(tiles.count(), [&](size_t number) { whole(tiles, kernels, number); });
  else
    divided(tiles, kernels, chosen);
}

}  // namespace posenc
