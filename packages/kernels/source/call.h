// One call of the operator, as its kernels read it. Shapes: B rows, S new tokens, H query heads, K
// key and value heads, G = H / K, M capacity in slots, D size of keys, E size of values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace posenc {

// Keys of one part. Parts begin at multiples of it, whatever a call holds, and their results are
// added up in order: a query has the same output, bit for bit, in every division of work.
constexpr int64_t PART = 256;
constexpr int64_t TILE = 48;            // queries computed together, if a token has not more
constexpr int64_t MOST_NUMBERS = 1024;  // of a head
constexpr int64_t MOST_HEADS = 1 << 16;
constexpr int64_t NEIGHBOURS = 16;      // keys of distances on each side of one between them
constexpr int64_t DIGITS = 16;          // numbers of a digit of a distance

// Numbers of caches, and their sizes in bytes.
enum Format { FLOAT32, FLOAT16, INT8, FORMATS };
constexpr size_t BYTES[FORMATS] = {4, 2, 1};

// A number in float16.
struct Half {
  uint16_t bits;
};

// A table of rotations of pairs of numbers of a head: cosines and sines [rows, half] each. Pair i is
// the numbers i and half + i, or with `interleaved` 2 i and 2 i + 1.
struct Rotation {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;  // 0 for no rotation
  bool interleaved = false;

  Rotation from_row(int64_t row) const {
    return {cos + row * half, sin + row * half, half, interleaved};
  }
};

// Keys or values: the new heads, and the cache that they are appended to.
struct Cache {
  const float* heads = nullptr;   // new heads of token (b, s) at heads + (b * S + s) * stride
  int64_t stride = 0;
  int64_t size = 0;               // D or E
  void* slots = nullptr;          // [B, K, M, size] of float, Half or int8_t
  const float* scales = nullptr;  // [K, size] of an int8 cache: number = code * scale; or null
};

struct Call {
  int64_t rows = 0, tokens = 0, heads = 0, kv_heads = 0, group = 0, capacity = 0;
  const int64_t* first = nullptr;      // slot of the first new token of each row [B]
  const int64_t* count = nullptr;      // number of new tokens of each row [B]; others are padding
  const int64_t* positions = nullptr;  // of new tokens [B, S]; null if they are their slots
  const float* q = nullptr;            // heads of token (b, s) at q + (b * S + s) * q_stride
  int64_t q_stride = 0;
  Cache keys, values;
  Format format = FLOAT32;  // of caches

  Rotation of_q, of_k;
  // Rotations of keys further for each query, against its distance to them: for each token, row
  // d + 16 l has the angles of d * 16^l slots [B, S, turn_rows, half].
  Rotation turns;
  int64_t turn_rows = 0;

  float scale = 1, softcap = 0;
  int64_t window = 0;                 // keys that a query sees, its own included; 0 for all
  int64_t chunk = 0;                  // positions of a chunk, beyond which no key is seen; 0 for all
  const float* by_distance = nullptr; // bias [H, range]; larger distances have the last entry
  int64_t range = 0;
  const float* bias = nullptr;        // bias of (b, h, s, t) at these strides, t contiguous
  int64_t bias_strides[3] = {0, 0, 0};

  // Scores that are picked by distance: entries of the row that a table gives to it, one of the
  // query and one of the key.
  const int32_t* row_of_distance = nullptr;  // [row_range]; larger distances have the last entry
  int64_t row_range = 0, table_rows = 0;     // R
  const float* query_rows = nullptr;         // [B, H, S, R]
  const float* key_rows = nullptr;           // [B, H, R * slots] at these strides of a row, a slot
  int64_t key_row_strides[2] = {0, 0}, of_head_rows = 0;
  float key_row_scale = 1;
  float* row_weights = nullptr;  // output: sums of weights by row [B, H, S, R]

  // Keys of every second distance, and other queries whose products with them are added to scores.
  // Key n has distance 2 (key_count - 1 - n - NEIGHBOURS): keys stand in the order of slots.
  const float* distance_queries = nullptr;  // [B, H, S, D]
  const float* distance_keys = nullptr;     // [H, key_count, D]
  int64_t key_count = 0;
  int64_t largest_distance() const { return 2 * key_count - 4 * NEIGHBOURS - 1; }

  // A number of each key, such as the logarithm of a gate. Those of the keys after a key, up to the
  // query's own, are added to a score.
  const float* decays = nullptr;  // [B, H, decay_slots]
  int64_t decay_slots = 0;
  double* decay_sums = nullptr;   // of all keys up to each slot [B, H, slots], written by `run`
  int64_t slots = 0;              // of the longest row after the call

  // Rows of queries, read at the count of a key: the sum of the sigmoids of products over the key
  // and all later ones that the query sees, at most R - 1. Between two counts, rows are linear.
  const float* count_rows = nullptr;  // [B, H, S, R]
  int64_t largest_count = 0;          // R - 1
  double* counted = nullptr;  // of the keys after each part [B, K, S, G, parts], written by `count`
  int64_t parts = 0;

  // A bias that is linear in pieces of a number, which is one of the distance times one of the query.
  const float* numbers = nullptr;  // [number_range]; larger distances have the last entry
  int64_t number_range = 0;
  const float* factors = nullptr;  // [B, S]
  const float* pieces = nullptr;   // [H, of_head_pieces, 3]: least number, slope, value at 0
  int64_t of_head_pieces = 0;

  const float* sinks = nullptr;       // one score per head, which has no value [H]

  float* queries = nullptr;  // rotated and scaled queries [B, K, S, G, D], written by `prepare`
  float* output = nullptr;   // [B, S, H, E]
};

// Queries that are computed together: those of some tokens of a row, of the heads that share a key
// head. Query number r is token first_token + r / G and head kv_head * G + r % G.
struct Tile {
  int64_t row, kv_head, first_token, tokens;
};

// A query of a tile, with what its scores are computed from.
struct Query {
  const float* numbers;      // rotated and scaled [D]
  int64_t begin, end;        // slots that it sees: begin .. end - 1; its own is the last
  const float* by_distance;  // bias of its head by distance, or null
  const float* bias;         // bias by slot, or null
  const float* rows;         // its numbers for the rows of a table [R], or null
  const float* key_rows;     // those of the keys of its head [R, slots], or null
  const double* decay_sums;  // sums of the decays of its head by slot, or null
  const float* count_rows;   // its numbers by count [R], or null
  double* counted;           // counts of the keys after each part
  const float* pieces;       // pieces of the bias of its head, or null
  float factor;              // of the numbers that they are a function of
  const float* added;        // scores that are added, by slot of the part, or null
};

// Memory for one part: numbers, and queries of a tile followed by other queries of it.
struct Memory {
  float* numbers;
  Query* queries;
};

// Softmax and weighted values of the queries of a tile over a part of the keys.
struct Partial {
  float* maximum;  // largest score [queries]
  float* sum;      // of the exponentials of scores less the largest [queries]
  float* values;   // sum of values with these exponentials as weights [queries, E]
  float* rows;     // sums of these exponentials by row [queries, R], if the call has row_weights

  static int64_t table_rows(const Call& call) { return call.row_weights ? call.table_rows : 0; }
  static size_t size(const Call& call, int64_t queries) {
    return queries * (call.values.size + 2 + table_rows(call));
  }
  Partial(const Call& call, int64_t queries, float* memory)
      : maximum(memory),
        sum(memory + queries),
        values(memory + 2 * queries),
        rows(values + queries * call.values.size) {}
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  int64_t width;  // numbers of a vector, of which head sizes are multiples

  // Rotate and scale the queries of a token, and append its key and value to the caches.
  void (*prepare)(const Call&, int64_t row, int64_t token);
  // Count the keys after each of the parts first .. last, for the queries of a tile.
  void (*count)(const Call&, const Tile&, int64_t first, int64_t last, Memory);
  // Attend to the slots of one part, from part * PART on.
  void (*attend)(const Call&, const Tile&, int64_t part, Partial, Memory);
  // Numbers of the memory of a tile; it has twice as many queries as the tile.
  size_t (*scratch_size)(const Call&, int64_t queries);
  void (*clear)(const Call&, int64_t queries, Partial);
  // Add a part to the parts before it.
  void (*merge)(const Call&, int64_t queries, Partial total, Partial part);
  // Write the output of a tile from the sum over all parts.
  void (*finish)(const Call&, const Tile&, Partial total);
};

// Slots that a query at a slot sees: begin .. slot.
inline int64_t first_visible(const Call& call, int64_t row, int64_t token) {
  const int64_t slot = call.first[row] + token;
  int64_t begin = 0;
  if (call.window > 0 && slot - call.window + 1 > begin) begin = slot - call.window + 1;
  if (call.chunk > 0) {
    const int64_t position = call.positions[row * call.tokens + token];
    const int64_t in_chunk = position > 0 ? position % call.chunk : 0;  // below 0 is padding
    if (slot - in_chunk > begin) begin = slot - in_chunk;
  }
  return begin;
}

}  // namespace posenc
