// Kernels of products for one instruction set: POSENC_SET names the namespace, and POSENC_LANES is the
// number of outputs of a tile. Every output is one chain of sums over the blocks of its row, so that
// its bits do not depend on the number of rows of a call, on threads or on tiles.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "product.h"

#if POSENC_LANES == 16 || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace posenc {
namespace POSENC_SET {
namespace {

constexpr int LANES = POSENC_LANES;
constexpr int VECTORS = STRIP / 4;  // of a strip, of 8 bits
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));

// Sums of products of codes: `add` adds those of a vector of codes with four activations.
#if POSENC_LANES == 16
constexpr int ROWS_TOGETHER = 6, TILES = 2;  // whose sums fit in registers

typedef __m512i Codes;

inline Codes bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Codes low(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Codes high(Codes x) { return low(_mm512_srli_epi16(x, 4)); }

template <int BITS>
struct Chain {
  __m512i total;

  void begin(Sums before) { total = (__m512i)before; }

  void add(Codes w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    total = _mm512_dpbusd_epi32(total, w, _mm512_set1_epi32(four));
  }

  Sums sums() const { return (Sums)total; }
};

inline Floats points(const uint8_t* from) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, codes));
}
#elif defined(__AVX2__)
constexpr int ROWS_TOGETHER = 4, TILES = 1;

typedef __m256i Codes;

inline Codes bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Codes low(Codes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Codes high(Codes x) { return low(_mm256_srli_epi16(x, 4)); }

// Products of 4 bits add up in 16 bits: 16 of them are at most 16 * 15 * 127. Codes of 8 bits are less
// 128, and two of their products are at most 2 * 128 * 127.
template <int BITS>
struct Chain {
  Sums before;
  __m256i total;

  void begin(Sums sums) {
    before = sums;
    total = _mm256_setzero_si256();
  }

  void add(Codes w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i a = _mm256_set1_epi32(four);
    if constexpr (BITS == 4) {
      total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w, a));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }

  Sums sums() const {
    return before + (Sums)(BITS == 4 ? _mm256_madd_epi16(total, _mm256_set1_epi16(1)) : total);
  }
};

inline Floats points(const uint8_t* from) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
}
#else
constexpr int TILES = 1;

typedef uint8_t Codes __attribute__((vector_size(16)));

inline Codes bytes(const uint8_t* from) {
  Codes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Codes low(Codes x) { return x & 15; }
inline Codes high(Codes x) { return x >> 4; }

inline Floats points(const uint8_t* from) {
  return Floats{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
}

#if defined(__ARM_FEATURE_DOTPROD)
constexpr int ROWS_TOGETHER = 4;

template <int BITS>
struct Chain {
  int32x4_t total;

  void begin(Sums before) { total = (int32x4_t)before; }

  void add(Codes w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    total = vdotq_s32(total, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four)));
  }

  Sums sums() const { return (Sums)total; }
};
#else
constexpr int ROWS_TOGETHER = 2;
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int16_t Fours __attribute__((vector_size(8)));
typedef uint8_t Bytes __attribute__((vector_size(8)));

// Sums of four neighbours of two vectors.
inline Sums fours(const Shorts (&x)[2]) {
  Sums parts[4], pairs[2];
  for (int i = 0; i < 4; i++) {
    Fours part;
    std::memcpy(&part, reinterpret_cast<const int16_t*>(x) + 4 * i, sizeof part);
    parts[i] = __builtin_convertvector(part, Sums);
  }
  for (int i = 0; i < 2; i++)
    pairs[i] = __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 0, 2, 4, 6) +
               __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 1, 3, 5, 7);
  return __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 4, 6) +
         __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 5, 7);
}

// Codes of 8 bits are multiplied by halves: 8 products of 4 bits are at most 8 * 15 * 127.
template <int BITS>
struct Chain {
  Sums before;
  Shorts lower[2], upper[2];

  void begin(Sums sums) {
    before = sums;
    lower[0] = lower[1] = upper[0] = upper[1] = Shorts{};
  }

  void add(Codes w, const int8_t* x) {
    const int16_t a = x[0], b = x[1], c = x[2], d = x[3];
    const Shorts numbers = {a, b, c, d, a, b, c, d};
    for (int h = 0; h < 2; h++) {
      Bytes half;
      std::memcpy(&half, reinterpret_cast<const uint8_t*>(&w) + 8 * h, sizeof half);
      const Shorts codes = __builtin_convertvector(half, Shorts);
      lower[h] += (BITS == 4 ? codes : codes & 15) * numbers;
      if constexpr (BITS == 8) upper[h] += (codes >> 4) * numbers;
    }
  }

  Sums sums() const { return before + fours(lower) + (BITS == 8 ? 16 * fours(upper) : Sums{}); }
};
#endif
#endif

// Codes of 8 bits are less 128 where vectors of signed ones are multiplied.
#if POSENC_LANES != 16 && defined(__AVX2__)
constexpr int MOVED = 128;
inline Codes moved(Codes x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int MOVED = 128;
inline Codes moved(Codes x) { return x ^ 128; }
#else
constexpr int MOVED = 0;
inline Codes moved(Codes x) { return x; }
#endif

// What is subtracted from codes that have no zero points.
template <int BITS>
constexpr int HALF = (1 << (BITS - 1)) - (BITS == 8 ? MOVED : 0);

// Outputs of ROWS rows in COUNT tiles.
template <int BITS, int ROWS, int COUNT>
void multiply_rows(const Product& product, int64_t tile, int64_t first) {
  constexpr int LOADED = BITS == 4 ? VECTORS / 2 : VECTORS;  // vectors of a strip in memory
  const Weights& weights = product.weights;
  const int64_t blocks = weights.blocks(), block = weights.block, width = blocks * block;
  const int64_t of_block = weights.of_block(), of_tile = blocks * of_block;
  const uint8_t* codes = weights.codes.data() + tile * of_tile;
  const float* scales = weights.scales.data() + tile * blocks * LANES;
  const uint8_t* zeros = weights.zeros.empty() ? nullptr : weights.zeros.data() + tile * blocks * LANES;
  const Rounded& x = product.rounded;
  Floats totals[COUNT][ROWS] = {};
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t of_row = first * blocks + b;  // scale, start and sum of the first row
    Sums sums[COUNT][ROWS];
    for (int t = 0; t < COUNT; t++)
      for (int r = 0; r < ROWS; r++) sums[t][r] = Sums{} + x.starts[of_row + r * blocks];
    for (int64_t s = 0; s < block / STRIP; s++) {
      const uint8_t* from = codes + b * of_block + s * STRIP * LANES * BITS / 8;
      const int8_t* activations = x.codes + first * width + b * block + s * STRIP;
      Chain<BITS> chains[COUNT][ROWS];
      for (int t = 0; t < COUNT; t++)
        for (int r = 0; r < ROWS; r++) chains[t][r].begin(sums[t][r]);
#pragma GCC unroll 8
      for (int v = 0; v < LOADED; v++) {
        Codes one[COUNT], other[COUNT];
        for (int t = 0; t < COUNT; t++) {
          const Codes w = bytes(from + t * of_tile + 4 * LANES * v);
          one[t] = BITS == 4 ? low(w) : moved(w);
          if constexpr (BITS == 4) other[t] = high(w);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const int8_t* row = activations + r * width + 4 * v;
          for (int t = 0; t < COUNT; t++) chains[t][r].add(one[t], row);
          if constexpr (BITS == 4)
            for (int t = 0; t < COUNT; t++) chains[t][r].add(other[t], row + STRIP / 2);
        }
      }
      for (int t = 0; t < COUNT; t++)
        for (int r = 0; r < ROWS; r++) sums[t][r] = chains[t][r].sums();
    }
    for (int t = 0; t < COUNT; t++) {
      const int64_t at = (t * blocks + b) * LANES;
      Floats scale, zero = {};
      std::memcpy(&scale, scales + at, sizeof scale);
      if (zeros) zero = points(zeros + at) - static_cast<float>(BITS == 8 ? MOVED : 0);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Floats exact = __builtin_convertvector(sums[t][r], Floats);
        if (zeros) exact -= zero * x.sums[of_row + r * blocks];
        totals[t][r] += scale * x.scales[of_row + r * blocks] * exact;
      }
    }
  }
  for (int t = 0; t < COUNT; t++) {
    const int64_t begin = (tile + t) * LANES;
    const int64_t count = std::min<int64_t>(LANES, weights.outputs - begin);
    for (int r = 0; r < ROWS; r++)
      std::memcpy(product.y + (first + r) * weights.outputs + begin, &totals[t][r], 4 * count);
  }
}

template <int BITS, int ROWS>
void multiply_up_to(const Product& product, int64_t tile, int64_t first, int64_t last) {
  // One row reads each tile to its end, so that memory is read in order.
  constexpr int COUNT = ROWS == 1 ? 1 : TILES;
  const int64_t end = std::min(tile + TILES, product.weights.tiles());
  for (; last - first >= ROWS; first += ROWS) {
    int64_t t = tile;
    for (; t + COUNT <= end; t += COUNT) multiply_rows<BITS, ROWS, COUNT>(product, t, first);
    for (; t < end; t++) multiply_rows<BITS, ROWS, 1>(product, t, first);
  }
  if constexpr (ROWS > 1)
    multiply_up_to<BITS, (ROWS > 4 ? 4 : ROWS / 2)>(product, tile, first, last);
}

void multiply(const Product& product, int64_t tile, int64_t first, int64_t last) {
  if (product.weights.bits == 4)
    multiply_up_to<4, ROWS_TOGETHER>(product, tile, first, last);
  else
    multiply_up_to<8, ROWS_TOGETHER>(product, tile, first, last);
}

// Store the codes of a strip, whole numbers from -127 to 127.
inline void store_codes(int8_t* to, const Floats (&x)[STRIP / LANES]) {
  Sums codes[STRIP / LANES];
  for (int v = 0; v < STRIP / LANES; v++) codes[v] = __builtin_convertvector(x[v], Sums);
#if POSENC_LANES == 16
  for (int v = 0; v < 2; v++)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * v),
                     _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)codes[v]));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // of two 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
  for (int k = 0; k < STRIP; k++) to[k] = static_cast<int8_t>(codes[k / LANES][k % LANES]);
#endif
}

// Codes of a row: x / scale to the nearest integer, to even at halves, with the largest size of a
// block over 127 as scale. A block with a NaN or an infinity has one of these as scale.
void round(const Product& product, int64_t row) {
  constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23
  const Weights& weights = product.weights;
  const int64_t blocks = weights.blocks(), block = weights.block;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t at = row * blocks + b, count = std::min(block, weights.inputs - b * block);
    const float* x = product.x + row * weights.inputs + b * block;
    float filled[LARGEST_BLOCK];
    if (count < block) {
      std::fill(std::copy(x, x + count, filled), filled + block, 0.0f);
      x = filled;
    }
    Floats most = {}, ends = {}, sum = {};
    for (int64_t k = 0; k < block; k += LANES) {
      Floats part;
      std::memcpy(&part, x + k, sizeof part);
      const Floats size = part < 0.0f ? -part : part;
      most = size > most ? size : most;
      ends += part * 0.0f;
    }
    float largest = 0, end = 0;
    for (int lane = 0; lane < LANES; lane++) {
      largest = std::max(largest, most[lane]);
      end += ends[lane];
    }
    const float factor = largest > 0 ? 127 / largest : 0;
    for (int64_t k = 0; k < block; k += STRIP) {
      Floats codes[STRIP / LANES];
      for (int v = 0; v < STRIP / LANES; v++) {
        Floats part;
        std::memcpy(&part, x + k + v * LANES, sizeof part);
        part = part * factor + TO_INTEGER - TO_INTEGER;
        codes[v] = part < -127.0f ? Floats{} - 127.0f : (part > 127.0f ? Floats{} + 127.0f : part);
        sum += codes[v];
      }
      store_codes(product.rounded.codes + at * block + k, codes);
    }
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    const int32_t half = weights.bits == 4 ? HALF<4> : HALF<8>;
    product.rounded.scales[at] = largest / 127 + end;
    product.rounded.sums[at] = total;
    product.rounded.starts[at] = weights.zeros.empty() ? -half * static_cast<int32_t>(total) : 0;
  }
}

}  // namespace

extern const ProductKernels product_kernels;
const ProductKernels product_kernels = {LANES, TILES, round, multiply};

}  // namespace POSENC_SET
}  // namespace posenc
