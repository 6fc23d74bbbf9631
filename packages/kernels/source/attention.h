// Attention of a few queries over one part of the keys, for the instruction set that the file which
// includes it is compiled for.
//
// Keys and values are read once for all queries of a tile. Numbers of a query depend on nothing
// else in the call: products add up in CHAINS (vectors.h), values in the order of the slots.
#pragma once

#include <cmath>

#include "distances.h"
#include "turns.h"

namespace posenc {
namespace POSENC_SET {
namespace {

constexpr int QUERIES = 4;                    // that one loop over values serves
constexpr int COLUMNS = WIDTH == 16 ? 4 : 2;  // vectors of a value in it: 16 or 8 sums in registers

// Add `count` values, C vectors of numbers of each, to the sums of N queries. ALONE: the tile has
// no others, and later values are asked for here.
template <bool ALONE, int N, int C, class Number>
inline void add_values(const Number* values, int64_t count, int64_t size, const float* weights,
                       float* total) {
  Vector parts[N][C];
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) parts[r][c] = load(total + r * size + c * WIDTH);
  for (int64_t t = 0; t < count; t++) {
    Vector value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const Number* numbers = values + t * size + c * WIDTH;
      value[c] = load(numbers);
      if (ALONE && c * WIDTH * sizeof(Number) % LINE == 0)
        __builtin_prefetch(numbers + AHEAD / sizeof(Number));
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) parts[r][c] += weights[r * PART + t] * value[c];
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(total + r * size + c * WIDTH, parts[r][c]);
}

template <bool ALONE, int N, class Number>
inline void add_values(const Number* values, int64_t count, int64_t size, const float* weights,
                       float* total) {
  int64_t c = 0;
  for (; c + COLUMNS * WIDTH <= size; c += COLUMNS * WIDTH)
    add_values<ALONE, N, COLUMNS>(values + c, count, size, weights, total + c);
  for (; c < size; c += WIDTH)
    add_values<ALONE, N, 1>(values + c, count, size, weights, total + c);
}

// Add values, weighted, to the sums of a few queries.
template <bool ALONE, class Number>
inline void add_values(const Number* values, int64_t count, int64_t size, const float* weights,
                       int64_t number, float* total) {
  switch (number) {
    case 1: return add_values<ALONE, 1>(values, count, size, weights, total);
    case 2: return add_values<ALONE, 2>(values, count, size, weights, total);
    case 3: return add_values<ALONE, 3>(values, count, size, weights, total);
    default: return add_values<ALONE, QUERIES>(values, count, size, weights, total);
  }
}

// Add the values of slots from .. from + count - 1, weighted, to the sums of a few queries. A query
// reads only those that it sees: 0 times infinity is NaN.
inline void add_visible(const Query* queries, const float* values, int64_t from, int64_t count,
                        int64_t size, const float* weights, int64_t number, float* total) {
  const auto place = [&](int64_t slot) { return std::clamp(slot - from, int64_t{0}, count); };
  const auto add = [&](int64_t first, int64_t some, int64_t begin, int64_t end) {
    if (begin < end)
      add_values<false>(values + begin * size, end - begin, size, weights + first * PART + begin,
                        some, total + first * size);
  };
  int64_t begin = 0, end = count;  // slots that all of them see
  for (int64_t r = 0; r < number; r++) {
    begin = std::max(begin, place(queries[r].begin));
    end = std::min(end, place(queries[r].end));
  }
  end = std::max(begin, end);
  for (int64_t r = 0; r < number; r++)
    add(r, 1, place(queries[r].begin), std::min(begin, place(queries[r].end)));
  add(0, number, begin, end);
  for (int64_t r = 0; r < number; r++)
    add(r, 1, std::max(end, place(queries[r].begin)), place(queries[r].end));
}

// Add the values of a part, weighted, to the sums of all queries. Numbers are converted once for
// many queries.
template <class Number>
void add_values(const Call& call, const Tile& tile, const Number* values, int64_t from,
                int64_t count, const Scratch& scratch, float* total) {
  const int64_t size = call.values.size, number = tile.tokens * call.group;
  const bool alone = tile.tokens == 1;  // all queries see the same slots
  const int64_t begin = alone ? std::clamp(scratch.queries->begin - from, int64_t{0}, count) : 0;
  const int64_t end = alone ? std::clamp(scratch.queries->end - from, begin, count) : count;
  for (int64_t t = begin; t < end; t += GROUP) {
    const int64_t some = std::min(GROUP, end - t);
    if (alone && number <= QUERIES) {
      add_values<true>(values + t * size, some, size, scratch.scores + t, number, total);
      continue;
    }
    Ahead ahead(values + t * size, some, size, (number + QUERIES - 1) / QUERIES);
    const float* group = rows(values + t * size, some, some, size, scratch.copy);
    for (int64_t r = 0; r < number; r += QUERIES) {
      ahead.ask();
      const int64_t of_block = std::min<int64_t>(QUERIES, number - r);
      const float* weights = scratch.scores + r * PART + t;
      if (alone)
        add_values<false>(group, some, size, weights, of_block, total + r * size);
      else
        add_visible(scratch.queries + r, group, from + t, some, size, weights, of_block,
                    total + r * size);
    }
  }
}

// Slots of a part, and their number.
struct Slots {
  int64_t from, count;
};

// Products of the queries of a tile with the keys of a part that some of them see.
template <class Number>
Slots products(const Call& call, const Tile& tile, int64_t part, const Scratch& scratch) {
  const int64_t number = tile.tokens * call.group, start = part * PART;
  Query* queries = scratch.queries;
  int64_t begin = INT64_MAX, end = 0;
  for (int64_t r = 0; r < number; r++) {
    queries[r] = query(call, tile, r);
    begin = std::min(begin, queries[r].begin);
    end = std::max(end, queries[r].end);
  }
  // From the first visible key on, in steps that do not depend on it.
  const int64_t from = std::max(start, begin / WIDTH * WIDTH), to = std::min(start + PART, end);
  const int64_t count = std::max<int64_t>(0, to - from);
  products(call, tile, slots<Number>(call.keys, call, tile, from), from, count, scratch);
  return {from, count};
}

template <class Number>
void attend_to(const Call& call, const Tile& tile, int64_t part, Partial out, Memory memory) {
  const int64_t number = tile.tokens * call.group;
  const Scratch scratch(call, number, memory);
  const auto [from, count] = products<Number>(call, tile, part, scratch);
  if (call.distance_keys) multiply_by_distance(call, tile, from, count, scratch);
  const Query* queries = scratch.queries;
  for (int64_t r = 0; r < number; r++)
    out.maximum[r] = weights(call, queries[r], scratch.scores + r * PART, from, count, out.sum[r]);
  const int64_t of_rows = Partial::table_rows(call);
  std::fill(out.rows, out.rows + number * of_rows, 0.0f);
  for (int64_t r = 0; of_rows && r < number; r++)
    add_weights(scratch.scores + r * PART, from, from + count, queries[r], call, out.rows + r * of_rows);
  std::fill(out.values, out.values + number * call.values.size, 0.0f);
  add_values(call, tile, slots<Number>(call.values, call, tile, from), from, count, scratch,
             out.values);
}

// Call a function with a number of the type that caches have.
template <class Function>
void with_number(const Call& call, Function function) {
  switch (call.format) {
    case FLOAT16: return function(Half{});
    case INT8: return function(int8_t{});
    default: return function(0.0f);
  }
}

void attend(const Call& call, const Tile& tile, int64_t part, Partial out, Memory memory) {
  with_number(call, [&](auto number) {
    attend_to<decltype(number)>(call, tile, part, out, memory);
  });
}

// Count the keys after each part, from the last one on while a query's count grows.
template <class Number>
void count_after(const Call& call, const Tile& tile, int64_t first, int64_t last, Memory memory) {
  const int64_t number = tile.tokens * call.group;
  const double largest = static_cast<double>(call.largest_count);
  const Scratch scratch(call, number, memory);
  for (int64_t r = 0; r < number; r++) query(call, tile, r).counted[last] = 0;
  bool grows = true;
  for (int64_t part = last; part > first; part--) {
    const Slots seen = grows ? products<Number>(call, tile, part, scratch) : Slots{0, 0};
    const bool counts = grows;
    grows = false;
    for (int64_t r = 0; r < number; r++) {
      const Query& query = scratch.queries[r];
      const int64_t begin = std::clamp(query.begin - seen.from, int64_t{0}, seen.count);
      const int64_t end = std::clamp(query.end - seen.from, begin, seen.count);
      double& count = query.counted[part - 1];
      count = counts ? count_keys<false>(scratch.scores + r * PART, begin, end, query,
                                         call.largest_count, query.counted[part])
                     : largest;
      grows = grows || count < largest;
    }
  }
}

void count(const Call& call, const Tile& tile, int64_t first, int64_t last, Memory memory) {
  with_number(call, [&](auto number) {
    count_after<decltype(number)>(call, tile, first, last, memory);
  });
}

size_t scratch_size(const Call& call, int64_t queries) {
  return Scratch::size(call, queries);
}

void clear(const Call& call, int64_t queries, Partial total) {
  std::fill(total.maximum, total.maximum + queries, LOWEST);
  std::fill(total.sum, total.sum + queries, 0.0f);
  std::fill(total.values, total.values + queries * call.values.size, 0.0f);
  std::fill(total.rows, total.rows + queries * Partial::table_rows(call), 0.0f);
}

void merge(const Call& call, int64_t queries, Partial total, Partial part) {
  const int64_t size = call.values.size, of_rows = Partial::table_rows(call);
  for (int64_t r = 0; r < queries; r++) {
    const float maximum = std::max(total.maximum[r], part.maximum[r]);
    const float before = exponential(total.maximum[r] - maximum);
    const float now = exponential(part.maximum[r] - maximum);
    total.maximum[r] = maximum;
    total.sum[r] = total.sum[r] * before + part.sum[r] * now;
    float* sums = total.values + r * size;
    for (int64_t d = 0; d < size; d += WIDTH)
      store(sums + d, load(sums + d) * before + load(part.values + r * size + d) * now);
    for (int64_t i = r * of_rows; i < (r + 1) * of_rows; i++)
      total.rows[i] = total.rows[i] * before + part.rows[i] * now;
  }
}

void finish(const Call& call, const Tile& tile, Partial total) {
  const int64_t size = call.values.size, of_rows = Partial::table_rows(call);
  for (int64_t r = 0; r < tile.tokens * call.group; r++) {
    const int64_t head = tile.kv_head * call.group + r % call.group;
    const int64_t token = tile.row * call.tokens + tile.first_token + r / call.group;
    float of_values = 1, sum = total.sum[r];
    if (call.sinks) {
      const float maximum = std::max(total.maximum[r], call.sinks[head]);
      of_values = exponential(total.maximum[r] - maximum);
      sum = sum * of_values + exponential(call.sinks[head] - maximum);
    }
    const float factor = sum != 0 ? of_values / sum : 0;
    const float* scales = call.values.scales ? call.values.scales + tile.kv_head * size : nullptr;
    float* output = call.output + (token * call.heads + head) * size;
    for (int64_t d = 0; d < size; d += WIDTH) {
      const Vector y = load(total.values + r * size + d) * factor;
      store(output + d, scales ? y * load(scales + d) : y);
    }
    if (!of_rows) continue;
    const int64_t row = tile.row * call.heads + head, of_row = tile.first_token + r / call.group;
    float* sums = call.row_weights + (row * call.tokens + of_row) * of_rows;
    for (int64_t i = 0; i < of_rows; i++) sums[i] = total.rows[r * of_rows + i] * factor;
  }
}

// Write a head of a new token to its slot.
inline void append(const Call& call, const Cache& cache, int64_t place, int64_t kv_head,
                   const float* head) {
  if (call.format == FLOAT32) {
    std::copy(head, head + cache.size, static_cast<float*>(cache.slots) + place * cache.size);
    return;
  }
  if (call.format == FLOAT16) {
    Half* halves = static_cast<Half*>(cache.slots) + place * cache.size;
    for (int64_t d = 0; d < cache.size; d += WIDTH) store(halves + d, load(head + d));
    return;
  }
  int8_t* codes = static_cast<int8_t*>(cache.slots) + place * cache.size;
  const float* scales = cache.scales + kv_head * cache.size;
  for (int64_t d = 0; d < cache.size; d++) {
    const float code = std::nearbyint(head[d] / scales[d]);  // to even at halves
    codes[d] = static_cast<int8_t>(code < 127 ? (code > -128 ? code : -128.0f) : 127.0f);
  }
}

void prepare(const Call& call, int64_t row, int64_t token) {
  const int64_t size = call.keys.size, of_call = row * call.tokens + token;
  const int64_t slot = call.first[row] + token;
  const int64_t at = std::max<int64_t>(0, call.positions ? call.positions[of_call] : slot);
  const float* q = call.q + of_call * call.q_stride;
  for (int64_t k = 0; k < call.kv_heads; k++) {
    const int64_t head = row * call.kv_heads + k;
    float* queries = call.queries + (head * call.tokens + token) * call.group * size;
    const bool scaled = call.keys.scales && !turns_keys(call, row, token);  // else keys are
    const float* scales = scaled ? call.keys.scales + k * size : nullptr;
    for (int64_t g = 0; g < call.group; g++, queries += size) {
      rotate(call.of_q.from_row(at), q + (k * call.group + g) * size, size, queries);
      for (int64_t d = 0; d < size; d++) queries[d] *= scales ? call.scale * scales[d] : call.scale;
    }
    const int64_t place = head * call.capacity + slot;
    const float* key = call.keys.heads + of_call * call.keys.stride + k * size;
    if (call.format == FLOAT32) {
      rotate(call.of_k.from_row(at), key, size, static_cast<float*>(call.keys.slots) + place * size);
    } else {
      float rotated[MOST_NUMBERS];
      rotate(call.of_k.from_row(at), key, size, rotated);
      append(call, call.keys, place, k, rotated);
    }
    append(call, call.values, place, k,
           call.values.heads + of_call * call.values.stride + k * call.values.size);
  }
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {POSENC_NAME, WIDTH, prepare, count, attend, scratch_size, clear, merge, finish};

}  // namespace POSENC_SET
}  // namespace posenc
