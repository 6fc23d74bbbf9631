// Products of queries with keys of distances.
#pragma once

#include <array>
#include <cmath>

#include "products.h"

namespace posenc {
namespace POSENC_SET {
namespace {

// Weights of the products with the neighbours of a distance between two keys, from the nearest on: a
// sinc under a Kaiser window. For products that are sums of waves of at most 1 radian per distance,
// the error is below 1e-7 of their amplitudes.
inline std::array<float, NEIGHBOURS> interpolation() {
  const auto bessel = [](double x) {
    double sum = 1, term = 1;
    for (int k = 1; k < 60; k++) sum += term *= x * x / (4.0 * k * k);
    return sum;
  };
  std::array<float, NEIGHBOURS> weights;
  for (int64_t i = 0; i < NEIGHBOURS; i++) {
    const double x = i + 0.5, part = x / NEIGHBOURS, beta = 18, pi = 3.141592653589793;
    const double window = bessel(beta * std::sqrt(1 - part * part)) / bessel(beta);
    weights[i] = static_cast<float>((i % 2 ? -window : window) / (pi * x));
  }
  return weights;
}

// Put products at the distances between `count` keys among those with the keys: key i of `products`
// goes to 2 i, and the distance after it to 2 i + 1, if it has all neighbours.
inline void interpolate(const float* products, int64_t count, float* all) {
  static const std::array<float, NEIGHBOURS> weights = interpolation();
  for (int64_t i = NEIGHBOURS - 1; i <= count - NEIGHBOURS; i += WIDTH) {
    Vector between = {};
    for (int64_t k = NEIGHBOURS - 1; k >= 0; k--)
      between += weights[k] * (load(products + i - k) + load(products + i + 1 + k));
    store_alternating(all + 2 * i, load(products + i), between);
  }
}

// Multiply the other queries of a tile with the keys of their distances to `count` slots from one
// on. Neighbouring slots have neighbouring distances, and a query those of the token before it and
// one more: all queries of a head are multiplied with the same keys.
inline void multiply_by_distance(const Call& call, const Tile& tile, int64_t from, int64_t count,
                                 Scratch scratch) {
  static_assert(PART / 2 + TILE / 2 + 2 * NEIGHBOURS + WIDTH <= PART, "keys of a part");
  const int64_t size = call.keys.size, number = tile.tokens * call.group;
  const int64_t largest = call.largest_distance(), first_key = largest + 2 * NEIGHBOURS - 1;
  Query* others = scratch.queries + number;
  scratch.scores = scratch.by_key;
  // Distances of the first token to the first slot, and of all tokens to all slots that they see.
  const int64_t own = call.first[tile.row] + tile.first_token - from;
  const int64_t most = std::clamp(own + tile.tokens - 1, int64_t{0}, largest);
  const int64_t least = std::clamp(own - count + 1, int64_t{0}, most);
  const int64_t begin = (largest - most) / 2, end = (first_key - least + 2 * NEIGHBOURS) / 2 + 1;
  for (int64_t g = 0; g < call.group; g++) {
    const int64_t head = tile.kv_head * call.group + g, of_row = tile.row * call.heads + head;
    for (int64_t s = 0; s < tile.tokens; s++) {
      others[s] = {};
      others[s].end = INT64_MAX;
      others[s].numbers =
          call.distance_queries + (of_row * call.tokens + tile.first_token + s) * size;
    }
    products(call, others, tile.tokens, call.distance_keys + (head * call.key_count + begin) * size,
             0, end - begin, scratch);
    for (int64_t s = 0; s < tile.tokens; s++) {
      const int64_t query = s * call.group + g;
      float* all = scratch.added + query * 2 * PART;
      interpolate(scratch.by_key + s * PART, end - begin, all);
      scratch.queries[query].added = all + (first_key - (own + s)) - 2 * begin;
    }
  }
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
