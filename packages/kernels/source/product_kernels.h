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

#if POSENC_LANES == 16
constexpr int TOGETHER = 8;  // rows whose sums fit in registers

typedef __m512i Codes;

inline Codes bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Codes low(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Codes high(Codes x) { return low(_mm512_srli_epi16(x, 4)); }

template <int BITS>
inline Sums add_products(Sums sums, const Codes (&w)[VECTORS], const int8_t* x) {
  __m512i total = (__m512i)sums;
#pragma GCC unroll 8
  for (int g = 0; g < VECTORS; g++) {
    int32_t four;
    std::memcpy(&four, x + 4 * g, 4);
    total = _mm512_dpbusd_epi32(total, w[g], _mm512_set1_epi32(four));
  }
  return (Sums)total;
}

inline Floats points(const uint8_t* from) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, codes));
}
#elif defined(__AVX2__)
constexpr int TOGETHER = 4;

typedef __m256i Codes;

inline Codes bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Codes low(Codes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Codes high(Codes x) { return low(_mm256_srli_epi16(x, 4)); }

// Products of 4 bits add up in 16 bits: 16 of them are at most 16 * 15 * 127. Codes of 8 bits are less
// 128, and two of their products are at most 2 * 128 * 127.
template <int BITS>
inline Sums add_products(Sums sums, const Codes (&w)[VECTORS], const int8_t* x) {
  const __m256i one = _mm256_set1_epi16(1);
  __m256i total = BITS == 4 ? _mm256_setzero_si256() : (__m256i)sums;
#pragma GCC unroll 8
  for (int g = 0; g < VECTORS; g++) {
    int32_t four;
    std::memcpy(&four, x + 4 * g, 4);
    const __m256i a = _mm256_set1_epi32(four);
    if constexpr (BITS == 4) {
      total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w[g], a));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(a, w[g]));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, one));
    }
  }
  return BITS == 4 ? sums + (Sums)_mm256_madd_epi16(total, one) : (Sums)total;
}

inline Floats points(const uint8_t* from) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
}
#else
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
constexpr int TOGETHER = 4;

template <int BITS>
inline Sums add_products(Sums sums, const Codes (&w)[VECTORS], const int8_t* x) {
  int32x4_t total = (int32x4_t)sums;
#pragma GCC unroll 8
  for (int g = 0; g < VECTORS; g++) {
    int32_t four;
    std::memcpy(&four, x + 4 * g, 4);
    total = vdotq_s32(total, (int8x16_t)w[g], vreinterpretq_s8_s32(vdupq_n_s32(four)));
  }
  return (Sums)total;
}
#else
constexpr int TOGETHER = 2;
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
inline Sums add_products(Sums sums, const Codes (&w)[VECTORS], const int8_t* x) {
  Shorts lower[2] = {}, upper[2] = {};
#pragma GCC unroll 8
  for (int g = 0; g < VECTORS; g++) {
    const int16_t a = x[4 * g], b = x[4 * g + 1], c = x[4 * g + 2], d = x[4 * g + 3];
    const Shorts numbers = {a, b, c, d, a, b, c, d};
    for (int h = 0; h < 2; h++) {
      Bytes half;
      std::memcpy(&half, reinterpret_cast<const uint8_t*>(&w[g]) + 8 * h, sizeof half);
      const Shorts codes = __builtin_convertvector(half, Shorts);
      lower[h] += (BITS == 4 ? codes : codes & 15) * numbers;
      if constexpr (BITS == 8) upper[h] += (codes >> 4) * numbers;
    }
  }
  return sums + fours(lower) + (BITS == 8 ? 16 * fours(upper) : Sums{});
}
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

template <int BITS>
inline void load_strip(const uint8_t* from, Codes (&w)[VECTORS]) {
  constexpr int LOADED = BITS == 4 ? VECTORS / 2 : VECTORS;
#pragma GCC unroll 8
  for (int g = 0; g < LOADED; g++) {
    const Codes x = bytes(from + 4 * LANES * g);
    if constexpr (BITS == 4) {
      w[g] = low(x);
      w[g + LOADED] = high(x);
    } else {
      w[g] = moved(x);
    }
  }
}

template <int BITS, int ROWS>
void multiply_rows(const Product& product, int64_t tile, int64_t first) {
  const Weights& weights = product.weights;
  const int64_t blocks = weights.blocks(), block = weights.block, width = blocks * block;
  const int64_t bytes_of_block = weights.of_block(), strips = block / STRIP;
  const uint8_t* codes = weights.codes.data() + tile * blocks * bytes_of_block;
  const float* scales = weights.scales.data() + tile * blocks * LANES;
  const uint8_t* zeros = weights.zeros.empty() ? nullptr : weights.zeros.data() + tile * blocks * LANES;
  constexpr int32_t HALF = (1 << (BITS - 1)) - (BITS == 8 ? MOVED : 0);
  const Rounded& x = product.rounded;
  Floats totals[ROWS] = {};
  for (int64_t b = 0; b < blocks; b++) {
    Sums sums[ROWS] = {};
    for (int64_t s = 0; s < strips; s++) {
      Codes w[VECTORS];
      load_strip<BITS>(codes + b * bytes_of_block + s * STRIP * LANES * BITS / 8, w);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[r] = add_products<BITS>(sums[r], w,
                                     x.codes + (first + r) * width + b * block + s * STRIP);
    }
    Floats scale;
    std::memcpy(&scale, scales + b * LANES, sizeof scale);
    // Of zero points, what they differ from HALF by. Its product is subtracted from the integers.
    Floats zero = {};
    if (zeros) zero = points(zeros + b * LANES) - static_cast<float>(1 << (BITS - 1));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const int64_t at = (first + r) * blocks + b;
      const Sums whole = sums[r] - HALF * static_cast<int32_t>(x.sums[at]);
      Floats exact = __builtin_convertvector(whole, Floats);
      if (zeros) exact -= zero * x.sums[at];
      totals[r] += scale * x.scales[at] * exact;
    }
  }
  const int64_t begin = tile * LANES, count = std::min<int64_t>(LANES, weights.outputs - begin);
  for (int r = 0; r < ROWS; r++)
    std::memcpy(product.y + (first + r) * weights.outputs + begin, &totals[r], 4 * count);
}

template <int BITS, int ROWS>
void multiply_up_to(const Product& product, int64_t tile, int64_t first, int64_t last) {
  for (; last - first >= ROWS; first += ROWS) multiply_rows<BITS, ROWS>(product, tile, first);
  if constexpr (ROWS > 1) multiply_up_to<BITS, ROWS / 2>(product, tile, first, last);
}

void multiply(const Product& product, int64_t tile, int64_t first, int64_t last) {
  if (product.weights.bits == 4)
    multiply_up_to<4, TOGETHER>(product, tile, first, last);
  else
    multiply_up_to<8, TOGETHER>(product, tile, first, last);
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
    product.rounded.scales[at] = largest / 127 + end;
    product.rounded.sums[at] = total;
  }
}

}  // namespace

extern const ProductKernels product_kernels;
const ProductKernels product_kernels = {LANES, round, multiply};

}  // namespace POSENC_SET
}  // namespace posenc
