// Products of queries with keys that are rotated further for each query, by its distance to them.
//
// A query at slot s turns the key at slot t by -(s - t) w, with w of its own. That is the key turned by
// (t - b) w and the query by (s - b) w, where b is the first slot of a block of DIGITS: keys need the
// first DIGITS rows of a table alone, and queries a product of one row for each digit of s - b.
#pragma once

#include "products.h"

namespace posenc {
namespace POSENC_SET {
namespace {

// Rotate the first numbers of a head, and copy the others. Both may stand in the same place.
inline void rotate(Rotation by, const float* from, int64_t size, float* to) {
  const int64_t half = by.half, step = by.interleaved ? 2 : 1, other = by.interleaved ? 1 : half;
  int64_t i = 0;
  for (; !by.interleaved && i + WIDTH <= half; i += WIDTH) {
    const Vector x = load(from + i), y = load(from + half + i);
    const Vector cos = load(by.cos + i), sin = load(by.sin + i);
    store(to + i, x * cos - y * sin);
    store(to + half + i, y * cos + x * sin);
  }
  for (; i < half; i++) {
    const float x = from[i * step], y = from[i * step + other];
    to[i * step] = x * by.cos[i] - y * by.sin[i];
    to[i * step + other] = y * by.cos[i] + x * by.sin[i];
  }
  if (from != to) std::copy(from + 2 * half, from + size, to + 2 * half);
}

// The queries of a token, turned for one block of keys after the other.
struct TurnedQueries {
  const Call& call;
  const float* numbers;  // [group, size]
  Rotation turns;        // of the token
  float *far, *near;     // turned by all digits of a distance but the second, and by that too

  // Turn for keys at a number of slots before the token, and let the queries be read there.
  void turn(int64_t distance, Query* queries) {
    const int64_t size = call.keys.size, digit = distance / DIGITS % DIGITS;
    if (distance - digit * DIGITS != last) {
      last = distance - digit * DIGITS;
      turn_all(turns.from_row(distance % DIGITS), numbers, far);
      int64_t rest = distance / (DIGITS * DIGITS);
      for (int64_t row = 2 * DIGITS; rest; row += DIGITS, rest /= DIGITS)
        turn_all(turns.from_row(row + rest % DIGITS), far, far);
    }
    for (int64_t g = 0; g < call.group; g++) queries[g].numbers = near + g * size;
    if (call.turn_rows > DIGITS)
      turn_all(turns.from_row(DIGITS + digit), far, near);
    else
      std::copy(far, far + call.group * size, near);
  }

  int64_t last = -1;

  void turn_all(Rotation by, const float* from, float* to) const {
    const int64_t size = call.keys.size;
    for (int64_t g = 0; g < call.group; g++) rotate(by, from + g * size, size, to + g * size);
  }
};

// The scales of an int8 cache differ within a pair, so that keys have them before they are turned.
template <class Number>
constexpr bool SCALED = std::is_same_v<Number, int8_t>;

// `rows` of a cache, times its scales.
template <class Number>
inline const float* scaled_rows(const Number* from, int64_t count, int64_t size,
                                const float* scales, float* copy) {
  const float* numbers = rows(from, count, WIDTH, size, copy);
  for (int64_t i = 0; SCALED<Number> && i < count; i++)
    for (int64_t d = 0; d < size; d += WIDTH)
      store(copy + i * size + d, load(copy + i * size + d) * load(scales + d));
  return numbers;
}

// Products of N queries with WIDTH keys, each turned by a row of a table, as `products`. Pairs are
// half a rotation apart.
template <int N, int HALF, class Number>
inline void turned_products(const Query* queries, const Number* keys, int64_t size,
                            const Rotation& turns, const float* scales, float* scores) {
  const int64_t half = HALF ? HALF : turns.half;
  Vector of_fours[N][2];
  for (int64_t block = 0; block < CHAINS / 4; block++) {
    Vector parts[N][4] = {};
    const Number* some = keys + block * 4 * PAIR * size;
    const Rotation of_some = turns.from_row(block * 4 * PAIR);
    for (int64_t d = 0; d < half; d += CHAINS) {
      Vector first[N], second[N];
#pragma GCC unroll 4
      for (int r = 0; r < N; r++) {
        first[r] = repeated(queries[r].numbers + d);
        second[r] = repeated(queries[r].numbers + half + d);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Vector x = load_parts(some + i * size + d, 4 * size);
        Vector y = load_parts(some + i * size + half + d, 4 * size);
        if (SCALED<Number>) {
          x *= repeated(scales + d);
          y *= repeated(scales + half + d);
        }
        const Vector cos = load_parts(of_some.cos + i * half + d, 4 * half);
        const Vector sin = load_parts(of_some.sin + i * half + d, 4 * half);
        const Vector u = x * cos - y * sin, v = y * cos + x * sin;
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) parts[r][i] += first[r] * u + second[r] * v;
      }
    }
    for (int64_t d = 2 * half; d < size; d += CHAINS)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Vector key = load_parts(some + i * size + d, 4 * size);
        if (SCALED<Number>) key *= repeated(scales + d);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) parts[r][i] += repeated(queries[r].numbers + d) * key;
      }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) of_fours[r][block] = fours(parts[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
    store(scores + r * PART, CHAINS == 4 ? of_fours[r][0] : lanes(of_fours[r][0], of_fours[r][1]));
}

// Products of the queries of a token with WIDTH keys, each turned by a row of a table. copy: memory
// for twice as many keys.
template <class Number>
inline void turned_products(const Query* queries, int64_t group, const Number* keys, int64_t size,
                            const Rotation& turns, const float* scales, float* scores,
                            float* copy, Ahead& ahead) {
  if (!turns.interleaved && turns.half % CHAINS == 0)
    return together(group, ahead, [&](int64_t r, auto some) {
      constexpr int N = decltype(some)::value;
      const Query* first = queries + r;
      float* to = scores + r * PART;
      switch (turns.half) {
        case 16: return turned_products<N, 16>(first, keys, size, turns, scales, to);
        case 32: return turned_products<N, 32>(first, keys, size, turns, scales, to);
        case 64: return turned_products<N, 64>(first, keys, size, turns, scales, to);
        default: return turned_products<N, 0>(first, keys, size, turns, scales, to);
      }
    });
  const float* numbers = scaled_rows(keys, WIDTH, size, scales, copy);
  float* turned = copy + WIDTH * size;
  for (int64_t i = 0; i < WIDTH; i++)
    rotate(turns.from_row(i), numbers + i * size, size, turned + i * size);
  products(queries, group, turned, size, Columns(queries, group, size), scores, ahead);
}

// Products of the queries of a token with the keys of a part, which are turned for it.
template <class Number>
void turned_products(const Call& call, const Tile& tile, int64_t of_tile, const Number* keys,
                     int64_t start, int64_t count, const Scratch& scratch) {
  const int64_t size = call.keys.size, group = call.group;
  const float* scales = call.keys.scales ? call.keys.scales + tile.kv_head * size : nullptr;
  Query* queries = scratch.queries + of_tile * group;
  const Query own = queries[0];
  const int64_t token = tile.row * call.tokens + tile.first_token + of_tile;
  const Rotation turns = call.turns.from_row(token * call.turn_rows);
  TurnedQueries turned{call, own.numbers, turns, scratch.columns, scratch.columns + group * size};
  int64_t last_block = -1;
  for (int64_t t = 0; t < count; t += WIDTH) {
    const int64_t some = std::min<int64_t>(WIDTH, count - t), slot = start + t;
    if (slot >= own.end || slot + some <= own.begin) continue;
    const int64_t block = slot / DIGITS * DIGITS;
    if (block != last_block) turned.turn(own.end - 1 - block, queries);
    last_block = block;
    const Rotation by_slot = turns.from_row(slot - block);
    float *scores = scratch.scores + of_tile * group * PART + t, *copy = scratch.copy;
    Ahead ahead(keys + t * size, some, size, parts(group));
    if (some == WIDTH) {
      turned_products(queries, group, keys + t * size, size, by_slot, scales, scores, copy, ahead);
      continue;
    }
    const float* numbers = scaled_rows(keys + t * size, some, size, scales, copy);
    turned_products(queries, group, numbers, size, by_slot, scales, scores, copy, ahead);
  }
}

// Whether keys are turned for a token: row 1 has the angles of one slot.
inline bool turns_keys(const Call& call, int64_t row, int64_t token) {
  const Rotation turns = call.turns.from_row((row * call.tokens + token) * call.turn_rows + 1);
  for (int64_t i = 0; i < turns.half; i++)
    if (turns.cos[i] != 1 || turns.sin[i] != 0) return true;
  return false;
}

// Products of the queries of a tile with the keys of a part, [queries, PART].
template <class Number>
void products(const Call& call, const Tile& tile, const Number* keys, int64_t start, int64_t count,
              const Scratch& scratch) {
  for (int64_t s = 0, first = 0; s < tile.tokens; first = ++s) {
    while (s < tile.tokens && !turns_keys(call, tile.row, tile.first_token + s)) s++;
    if (s > first) {
      Scratch plain = scratch;
      plain.scores += first * call.group * PART;
      products(call, scratch.queries + first * call.group, (s - first) * call.group, keys, start,
               count, plain);
    }
    if (s < tile.tokens) turned_products(call, tile, s, keys, start, count, scratch);
  }
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
