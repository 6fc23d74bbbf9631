// Products of queries with keys of distances.
#pragma once

#include "products.h"

namespace posenc {
namespace POSENC_SET {
namespace {

// Multiply the other queries of a tile with the keys of their distances to `count` slots from one
// on. Neighbouring slots have neighbouring keys, and a query has those of the token before it, one
// key earlier: all queries of a head are multiplied with the same keys, in groups of PART.
inline void multiply_by_distance(const Call& call, const Tile& tile, int64_t from, int64_t count,
                                 Scratch scratch) {
  const int64_t size = call.keys.size, range = call.key_range, last = tile.tokens - 1;
  const int64_t number = tile.tokens * call.group;
  Query* others = scratch.queries + number;
  scratch.scores = scratch.by_key;
  // Key of the first slot for the first token.
  const int64_t at = range - 1 - (call.first[tile.row] + tile.first_token - from);
  const int64_t begin = std::clamp(at - last, int64_t{0}, range - 1);
  const int64_t end = std::clamp(at + count, begin + 1, range);
  for (int64_t g = 0; g < call.group; g++) {
    const int64_t head = tile.kv_head * call.group + g, of_row = tile.row * call.heads + head;
    const float* keys = call.distance_keys + head * range * size;
    for (int64_t s = 0; s < tile.tokens; s++) {
      const int64_t token = of_row * call.tokens + tile.first_token + s;
      others[s] = {};
      others[s].numbers = call.distance_queries + token * size;
      others[s].end = INT64_MAX;
      scratch.queries[s * call.group + g].added = scratch.added + (s * call.group + g) * PART;
    }
    for (int64_t first = begin; first < end; first += PART) {
      const int64_t some = std::min(PART, end - first);
      products(call, others, tile.tokens, keys + first * size, first, some, scratch);
      for (int64_t s = 0; s < tile.tokens; s++) {
        float* to = scratch.added + (s * call.group + g) * PART;
        const float* of_keys = scratch.by_key + s * PART;
        const int64_t far = std::clamp(s - at, int64_t{0}, count);  // slots beyond the range
        if (first == 0) std::fill(to, to + far, of_keys[0]);
        const int64_t t = std::clamp(first + s - at, far, count);
        const int64_t until = std::clamp(first + some + s - at, t, count);
        std::copy(of_keys + (at - s + t - first), of_keys + (at - s + until - first), to + t);
      }
    }
  }
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
