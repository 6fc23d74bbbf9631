// Products of queries with the keys of a part, and the memory that a part needs.
#pragma once

#include <type_traits>

#include "scores.h"

namespace posenc {
namespace POSENC_SET {
namespace {

constexpr int64_t GROUP = 32;     // values that all queries of a tile take in turn
constexpr int64_t AHEAD = 8192;   // bytes of a cache that are asked for before they are read
constexpr int64_t LINE = 64;      // bytes that memory is read in
constexpr int TOGETHER = WIDTH == 16 ? 4 : 2;  // queries of a product: sums fit in registers
constexpr int IN_COLUMNS = 10;    // queries that are faster as columns, although lanes are empty

// Memory for a part.
struct Scratch {
  float* scores;   // products, then weights [queries, PART]
  float* copy;     // keys or values in float32 [GROUP, D or E]
  float* columns;  // queries as columns of blocks [queries / WIDTH, D, WIDTH], or turned
  float* added;    // products with keys of distances, if there are some [queries, 2 * PART],
  float* by_key;   // and those of a head with every second distance [queries / G, PART]
  Query* queries;  // and other ones of a head [queries / G]

  Scratch(const Call& call, int64_t number, Memory memory)
      : scores(memory.numbers),
        copy(scores + number * PART),
        columns(copy + of_copy(call)),
        added(columns + of_columns(call, number)),
        by_key(added + (call.distance_keys ? 2 * number * PART : 0)),
        queries(memory.queries) {}

  // Numbers of all of it.
  static size_t size(const Call& call, int64_t number) {
    const int64_t others = of_head(call, number);
    return (number + (others ? 2 * number + others : 0)) * PART + of_copy(call) +
           of_columns(call, number);
  }

 private:
  static int64_t of_copy(const Call& call) {
    return GROUP * std::max(call.keys.size, call.values.size);
  }

  static int64_t of_head(const Call& call, int64_t number) {
    return call.distance_keys ? number / call.group : 0;
  }

  static int64_t of_columns(const Call& call, int64_t number) {
    const int64_t turned = call.turns.half ? 2 * call.group : 0;
    return std::max((number + WIDTH - 1) / WIDTH * WIDTH, turned) * call.keys.size;
  }
};

// The slots of one part: of a head, from the first on.
template <class Number>
inline const Number* slots(const Cache& cache, const Call& call, const Tile& tile, int64_t start) {
  const int64_t head = tile.row * call.kv_heads + tile.kv_head;
  return static_cast<const Number*>(cache.slots) + (head * call.capacity + start) * cache.size;
}

// Return count rows of a cache as float32 with zeros up to `filled` rows: where they stand if that
// is possible, otherwise in `copy`.
inline const float* rows(const float* from, int64_t count, int64_t filled, int64_t size,
                         float* copy) {
  if (count == filled) return from;
  std::copy(from, from + count * size, copy);
  std::fill(copy + count * size, copy + filled * size, 0.0f);
  return copy;
}

template <class Number>
inline const float* rows(const Number* from, int64_t count, int64_t filled, int64_t size,
                         float* copy) {
  for (int64_t i = 0; i < count * size; i += WIDTH) store(copy + i, load(from + i));
  std::fill(copy + count * size, copy + filled * size, 0.0f);
  return copy;
}

// Numbers of a head, begin .. end - 1, that some query of a tile has not as zero: the only ones that
// are read. LongRoPE caches two rotations of a key side by side, and a query has zeros for one.
struct Columns {
  int64_t begin, end;

  Columns(const Query* queries, int64_t number, int64_t size) : begin(size), end(0) {
    for (int64_t r = 0; r < number && end - begin < size; r++) {
      const float* query = queries[r].numbers;
      int64_t first = 0, last = size;
      while (first < last && query[first] == 0) first++;
      while (last > first && query[last - 1] == 0) last--;
      begin = std::min(begin, first / CHAINS * CHAINS);
      end = std::max(end, (last + CHAINS - 1) / CHAINS * CHAINS);
    }
  }
};

// Asks for the memory of later rows, of which the processor foresees too few. In parts between
// products: a processor waits if it is asked for too many lines at once.
struct Ahead {
  const char* next;
  int64_t rows, stride, used;  // rows that are asked for together, and bytes of a row

  template <class Number>
  Ahead(const Number* from, int64_t count, int64_t size, int64_t parts)
      : next(reinterpret_cast<const char*>(from) + AHEAD), rows(1) {
    used = (count * size * int64_t{sizeof(Number)} + parts * LINE - 1) / (parts * LINE) * LINE;
    stride = used;
  }

  // The columns of keys that products read.
  template <class Number>
  Ahead(const Number* from, int64_t count, int64_t size, Columns columns, int64_t parts) {
    stride = size * int64_t{sizeof(Number)};
    next = reinterpret_cast<const char*>(from + columns.begin) + AHEAD / stride * stride;
    used = (columns.end - columns.begin) * int64_t{sizeof(Number)};
    rows = (count + parts - 1) / parts;
    if (columns.end - columns.begin == size) {
      used = (rows * stride + LINE - 1) / LINE * LINE;
      stride = used;
      rows = 1;
    }
  }

  void ask() {
    for (int64_t r = 0; r < rows; r++, next += stride)
      for (int64_t i = 0; i < used; i += LINE) __builtin_prefetch(next + i);
  }
};

// Products of N queries with WIDTH keys. Vector i of a block holds numbers of key i, or of keys a
// and a + 4 with a = i + 4 * block, in an order that `lanes` makes that of the keys.
template <int N, class Number>
inline void products(const Query* queries, const Number* keys, int64_t size, Columns columns,
                     float* scores) {
  Vector of_fours[N][2];
  for (int64_t block = 0; block < CHAINS / 4; block++) {
    Vector parts[N][4] = {};
    const Number* some = keys + block * 4 * PAIR * size;
    for (int64_t d = columns.begin; d < columns.end; d += CHAINS) {
      Vector numbers[N];
#pragma GCC unroll 4
      for (int r = 0; r < N; r++) numbers[r] = repeated(queries[r].numbers + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const Vector key = load_parts(some + i * size + d, 4 * size);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) parts[r][i] += numbers[r] * key;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) of_fours[r][block] = fours(parts[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
    store(scores + r * PART, CHAINS == 4 ? of_fours[r][0] : lanes(of_fours[r][0], of_fours[r][1]));
}

#if POSENC_WIDTH == 16
// Sums of two neighbouring chains of 8 keys, for WIDTH queries whose numbers stand in columns.
inline void add_chains(const float* columns, const float* keys, int64_t size, Vector (&total)[8]) {
  Vector first[8] = {}, second[8] = {};
  for (int64_t d = 0; d < size; d += CHAINS) {
    const Vector x = load(columns + d * WIDTH), y = load(columns + (d + 1) * WIDTH);
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
      const float* key = keys + t * size + d;
      first[t] += x * key[0];
      second[t] += y * key[1];
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < 8; t++) total[t] = first[t] + second[t];
}

// Products of WIDTH queries with WIDTH keys: vectors hold queries, not numbers of a head.
inline void products_of_columns(const float* columns, const float* keys, int64_t size,
                                float* scores, int64_t number, Ahead& ahead) {
  Vector y[WIDTH];
  for (int64_t of = 0; of < WIDTH; of += 8) {
    Vector quarters[4][8];
    for (int i = 0; i < 4; i++) {
      ahead.ask();
      add_chains(columns + 2 * i * WIDTH, keys + of * size + 2 * i, size, quarters[i]);
    }
    for (int t = 0; t < 8; t++)
      y[of + t] = (quarters[0][t] + quarters[1][t]) + (quarters[2][t] + quarters[3][t]);
  }
  transpose(y);
  for (int64_t r = 0; r < number; r++) store(scores + r * PART, y[r]);
}

// Write the numbers of up to WIDTH queries as columns [size, WIDTH].
inline void write_columns(const Query* queries, int64_t number, int64_t size, float* columns) {
  for (int64_t d = 0; d < size; d += WIDTH) {
    Vector x[WIDTH] = {};
    for (int64_t r = 0; r < number; r++) x[r] = load(queries[r].numbers + d);
    transpose(x);
    for (int64_t i = 0; i < WIDTH; i++) store(columns + (d + i) * WIDTH, x[i]);
  }
}
#endif

inline bool in_columns(int64_t number) { return WIDTH == 16 && number >= IN_COLUMNS; }

// Parts in which later keys are asked for during the products of some neighbouring queries.
inline int64_t parts(int64_t number) {
  return in_columns(number) ? WIDTH / 2 : (number + TOGETHER - 1) / TOGETHER;
}

// Call a function with the first of some neighbouring queries, and their number as a constant.
template <class Function>
inline void together(int64_t number, Ahead& ahead, Function function) {
  for (int64_t r = 0; r < number; r += TOGETHER) {
    ahead.ask();
    switch (std::min<int64_t>(TOGETHER, number - r)) {
      case 1: function(r, std::integral_constant<int, 1>{}); break;
      case 2: function(r, std::integral_constant<int, 2>{}); break;
      case 3: function(r, std::integral_constant<int, std::min(3, TOGETHER)>{}); break;
      default: function(r, std::integral_constant<int, TOGETHER>{});
    }
  }
}

// Products of some neighbouring queries with WIDTH keys.
template <class Number>
inline void products(const Query* queries, int64_t number, const Number* keys, int64_t size,
                     Columns columns, float* scores, Ahead& ahead) {
  together(number, ahead, [&](int64_t r, auto some) {
    products<decltype(some)::value>(queries + r, keys, size, columns, scores + r * PART);
  });
}

// Products of all queries with the keys of a part, [queries, PART]. Numbers are converted once for
// many queries.
template <class Number>
void products(const Call& call, const Query* queries, int64_t number, const Number* keys,
              int64_t start, int64_t count, const Scratch& scratch) {
  const int64_t size = call.keys.size, last = number % WIDTH;
  const Columns columns(queries, number, size);
#if POSENC_WIDTH == 16
  for (int64_t r = 0; r + IN_COLUMNS <= number; r += WIDTH)
    write_columns(queries + r, std::min<int64_t>(WIDTH, number - r), size,
                  scratch.columns + r * size);
#endif
  for (int64_t t = 0; t < count; t += WIDTH) {
    const int64_t some = std::min<int64_t>(WIDTH, count - t), slot = start + t;
    Ahead ahead(keys + t * size, some, size, columns, number / WIDTH * parts(WIDTH) + parts(last));
    if (number <= TOGETHER && some == WIDTH) {  // read once, where they stand
      products(queries, number, keys + t * size, size, columns, scratch.scores + t, ahead);
      continue;
    }
    const float* group = rows(keys + t * size, some, WIDTH, size, scratch.copy);
    for (int64_t r = 0; r < number; r += WIDTH) {
      const int64_t of_block = std::min<int64_t>(WIDTH, number - r);
      float* scores = scratch.scores + r * PART + t;
      if (slot >= queries[r + of_block - 1].end || slot + some <= queries[r].begin) continue;
#if POSENC_WIDTH == 16
      if (in_columns(of_block)) {
        products_of_columns(scratch.columns + r * size, group, size, scores, of_block, ahead);
        continue;
      }
#endif
      products(queries + r, of_block, group, size, columns, scores, ahead);
    }
  }
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
