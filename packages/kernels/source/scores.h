// Scores of a query, from products to weights: softcap, biases, visible keys, softmax. Each kind of
// score has one function here.
#pragma once

#include <algorithm>

#include "call.h"
#include "vectors.h"

namespace posenc {
namespace POSENC_SET {
namespace {

// Below every score; a query whose largest score is this one sees no key.
constexpr float LOWEST = -1e30f;

inline Query query(const Call& call, const Tile& tile, int64_t number) {
  const int64_t of_group = number % call.group, token = tile.first_token + number / call.group;
  const int64_t head = tile.kv_head * call.group + of_group;
  const int64_t place = (tile.row * call.kv_heads + tile.kv_head) * call.tokens + token;
  const int64_t of_head = tile.row * call.heads + head;
  const int64_t of_query = place * call.group + of_group, of_token = tile.row * call.tokens + token;
  const int64_t* strides = call.bias_strides;
  return {
      call.queries + of_query * call.keys.size,
      first_visible(call, tile.row, token),
      call.first[tile.row] + token + 1,
      call.by_distance ? call.by_distance + head * call.range : nullptr,
      call.bias ? call.bias + tile.row * strides[0] + head * strides[1] + token * strides[2]
                : nullptr,
      call.query_rows ? call.query_rows + (of_head * call.tokens + token) * call.table_rows
                      : nullptr,
      call.key_rows ? call.key_rows + of_head * call.of_head_rows : nullptr,
      call.decays ? call.decay_sums + of_head * call.slots : nullptr,
      call.count_rows ? call.count_rows +
                            (of_head * call.tokens + token) * (call.largest_count + 1)
                      : nullptr,
      call.count_rows ? call.counted + of_query * call.parts : nullptr,
      call.pieces ? call.pieces + head * call.of_head_pieces * 3 : nullptr,
      call.pieces ? call.factors[of_token] : 0,
      nullptr,
  };
}

// Limit scores to -softcap .. softcap: softcap tanh(score / softcap).
inline void cap(float* scores, int64_t count, float softcap) {
  for (int64_t i = 0; i < count; i += WIDTH)
    store(scores + i, softcap * hyperbolic_tangent(load(scores + i) / softcap));
}

// First slot of begin .. end whose distance a table of `range` distances has.
inline int64_t first_near(const Query& query, int64_t range, int64_t begin, int64_t end) {
  return std::clamp(query.end - range, begin, end);
}

// Add the entries of a table by distance to the scores of slots begin .. end - 1.
inline void add_by_distance(float* scores, int64_t begin, int64_t end, const Query& query,
                            int64_t range) {
  const int64_t own = query.end - 1, near = first_near(query, range, begin, end);
  const float* table = query.by_distance;
  for (int64_t t = begin; t < near; t++) scores[t - begin] += table[range - 1];
  for (int64_t t = near; t < end; t++) scores[t - begin] += table[own - t];
}

// Add numbers of the query, and of the keys, for the rows that distances pick.
inline void add_picked(float* scores, int64_t begin, int64_t end, const Query& query,
                       const Call& call) {
  const int64_t own = query.end - 1, range = call.row_range;
  const int64_t near = first_near(query, range, begin, end);
  const int32_t *row = call.row_of_distance, last = row[range - 1];
  if (query.rows) {
    for (int64_t t = begin; t < near; t++) scores[t - begin] += query.rows[last];
    for (int64_t t = near; t < end; t++) scores[t - begin] += query.rows[row[own - t]];
  }
  if (query.key_rows) {
    const float *keys = query.key_rows, scale = call.key_row_scale;
    const int64_t of_row = call.key_row_strides[0], of_slot = call.key_row_strides[1];
    const float* of_last = keys + last * of_row;
    for (int64_t t = begin; t < near; t++) scores[t - begin] += scale * of_last[t * of_slot];
    for (int64_t t = near; t < end; t++)
      scores[t - begin] += scale * keys[row[own - t] * of_row + t * of_slot];
  }
}

// Add the weights of slots begin .. end - 1 to the sums of the rows that distances pick. Sums do
// not depend on keys before `begin` that have no weight: it is a multiple of WIDTH.
inline void add_weights(const float* weights, int64_t begin, int64_t end, const Query& query,
                        const Call& call, float* sums) {
  const int32_t* row = call.row_of_distance;
  const int64_t range = call.row_range, near = first_near(query, range, begin, end);
  Vector far = {};
  int64_t t = begin;
  for (; t + WIDTH <= near; t += WIDTH) far += load(weights + t - begin);
  sums[row[range - 1]] += sum(far);
  for (; t < near; t++) sums[row[range - 1]] += weights[t - begin];
  for (; t < std::min(end, query.end); t++) sums[row[query.end - 1 - t]] += weights[t - begin];
}

// Add the decays of the keys after each of slots begin .. end - 1, up to the query's own. Sums are in
// double precision: the difference of two long ones is exact in float32.
inline void add_decays(float* scores, int64_t begin, int64_t end, const Query& query) {
  const double *sums = query.decay_sums, own = sums[query.end - 1];
  for (int64_t t = begin; t < end; t++) scores[t - begin] += static_cast<float>(own - sums[t]);
}

// Number of a row between the entries for whole counts.
inline float at_count(const float* row, double count, int64_t largest) {
  const double place = count < largest ? count : largest;  // also if it is no number
  const int64_t below = static_cast<int64_t>(place);
  const float step = row[std::min(below + 1, largest)] - row[below];
  return row[below] + static_cast<float>(place - below) * step;
}

// Count keys first .. end - 1, whose products with the query are given, on from the count of the keys
// after them, which is returned with them. ADDS: add the query's numbers at the counts to `scores`.
template <bool ADDS>
inline double count_keys(float* scores, int64_t first, int64_t end, const Query& query,
                         int64_t largest, double count) {
  int64_t t = end;
  while (t > first && count < largest) {
    const int64_t group = (t - 1) / WIDTH * WIDTH;
    float gates[WIDTH];
    store(gates, sigmoid(load(scores + group)));
    while (t > std::max(first, group) && count < largest) {
      count += gates[--t - group];
      if (ADDS) scores[t] += at_count(query.count_rows, count, largest);
    }
  }
  if (ADDS)
    for (int64_t i = first; i < t; i++) scores[i] += query.count_rows[largest];
  return count;
}

// Index of the piece that holds a number, sought from another one on.
inline int64_t piece_of(float number, const float* pieces, int64_t last, int64_t index) {
  while (index < last && number >= pieces[3 * index + 3]) index++;
  while (index > 0 && number < pieces[3 * index]) index--;
  return index;
}

// Add a bias that is linear in pieces of the numbers of slots begin .. end - 1, of which neighbours
// mostly have one piece.
inline void add_by_pieces(float* scores, int64_t begin, int64_t end, const Query& query,
                          const Call& call) {
  const int64_t own = query.end - 1, range = call.number_range, last = call.of_head_pieces - 1;
  const int64_t near = first_near(query, range, begin, end), count = end - begin;
  const float* pieces = query.pieces;
  float x[PART + WIDTH] = {};
  for (int64_t t = begin; t < near; t++) x[t - begin] = query.factor * call.numbers[range - 1];
  for (int64_t t = near; t < end; t++) x[t - begin] = query.factor * call.numbers[own - t];
  int64_t index = 0;
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Vector numbers = load(x + i);
    index = piece_of(x[i], pieces, last, index);
    Vector slope = all(pieces[3 * index + 1]), value = all(pieces[3 * index + 2]);
    const Integers before = numbers < (index > 0 ? pieces[3 * index] : LOWEST);
    const Integers after = numbers >= (index < last ? pieces[3 * index + 3] : -LOWEST);
    if (largest((before | after) ? all(1) : Vector{}) > 0) {
      float slopes[WIDTH], values[WIDTH];
      for (int64_t j = 0; j < WIDTH; j++) {
        index = piece_of(x[i + j], pieces, last, index);
        slopes[j] = pieces[3 * index + 1];
        values[j] = pieces[3 * index + 2];
      }
      slope = load(slopes);
      value = load(values);
    }
    store(x + i, slope * numbers + value);
  }
  for (int64_t i = 0; i < count; i++) scores[i] += x[i];
}

// Add numbers of consecutive slots.
inline void add_by_slot(float* scores, const float* numbers, int64_t count) {
  for (int64_t t = 0; t < count; t++) scores[t] += numbers[t];
}

// Turn products of a query with keys, of slots start .. start + count - 1, into exponentials of
// scores less the largest one, which is returned. `total` becomes their sum. Keys that the query
// does not see get 0, also those that fill the last vector.
inline float weights(const Call& call, const Query& query, float* scores, int64_t start,
                     int64_t count, float& total) {
  const int64_t filled = (count + WIDTH - 1) / WIDTH * WIDTH;
  const int64_t begin = std::clamp(query.begin, start, start + count);
  const int64_t end = std::clamp(query.end, begin, start + count);
  float* visible = scores + (begin - start);
  if (query.count_rows)
    count_keys<true>(scores, begin - start, end - start, query, call.largest_count,
                     query.counted[start / PART]);
  if (call.softcap > 0) cap(scores, filled, call.softcap);
  if (query.by_distance) add_by_distance(visible, begin, end, query, call.range);
  if (query.pieces) add_by_pieces(visible, begin, end, query, call);
  if (query.bias) add_by_slot(visible, query.bias + begin, end - begin);
  if (query.added) add_by_slot(visible, query.added + (begin - start), end - begin);
  if (call.row_of_distance) add_picked(visible, begin, end, query, call);
  if (query.decay_sums) add_decays(visible, begin, end, query);
  std::fill(scores, visible, 2 * LOWEST);
  std::fill(scores + (end - start), scores + filled, 2 * LOWEST);
  Vector most = all(LOWEST);
  for (int64_t i = 0; i < filled; i += WIDTH) most = larger(load(scores + i), most);
  const float maximum = largest(most);
  Vector parts = {};
  for (int64_t i = 0; i < filled; i += WIDTH) {
    const Vector weight = exponential(load(scores + i) - maximum);
    store(scores + i, weight);
    parts += weight;
  }
  total = sum(parts);
  return maximum;
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
