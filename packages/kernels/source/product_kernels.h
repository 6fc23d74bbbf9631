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
constexpr int AHEAD = 512 * LANES;  // bytes of weights that several rows fetch before their use
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));

template <class Value>
Value read(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

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
    total = _mm512_dpbusd_epi32(total, w, _mm512_set1_epi32(read<int32_t>(x)));
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
    const __m256i a = _mm256_set1_epi32(read<int32_t>(x));
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

inline Codes bytes(const uint8_t* from) { return read<Codes>(from); }
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
    const int8x16_t fours = vreinterpretq_s8_s32(vdupq_n_s32(read<int32_t>(x)));
    total = vdotq_s32(total, (int8x16_t)w, fours);
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

// Loops whose numbers of turns are constants, so that what they count stays in registers.
#define POSENC_EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < count; i++)

// Outputs of ROWS rows in a tile.
template <int BITS, int ROWS>
void multiply_rows(const Product& product, int64_t tile, int64_t first) {
  constexpr int PARTS = BITS == 4 ? 2 : 1;   // of a vector of codes in memory
  constexpr int LOADED = STRIP / 4 / PARTS;  // vectors of a strip
  constexpr bool FETCHES = ROWS > BITS / 2;  // fewer rows are as fast as processors read ahead
  const Weights& weights = product.weights;
  const int64_t blocks = weights.blocks(), block = weights.block;
  const int64_t of_row = Product::of_row(weights);
  const uint8_t* w = weights.of_tile(tile);
  const uint8_t* zeros =
      weights.zeros.empty() ? nullptr : weights.zeros.data() + tile * blocks * TILES * LANES;
  const int8_t* x = product.rounded + first * of_row;
  Floats totals[TILES][ROWS] = {};
  for (int64_t b = 0; b < blocks; b++) {
    const int8_t* head = x + block;
    Sums sums[TILES][ROWS];
    POSENC_EACH(t, TILES)
      POSENC_EACH(r, ROWS)
        sums[t][r] = Sums{} + read<int32_t>(head + r * of_row + offsetof(Head, start));
    for (; x < head; x += STRIP) {
      Chain<BITS> chains[TILES][ROWS];
      POSENC_EACH(t, TILES)
        POSENC_EACH(r, ROWS) chains[t][r].begin(sums[t][r]);
      POSENC_EACH(v, LOADED) {
        Codes parts[PARTS][TILES];
        POSENC_EACH(t, TILES) {
          if (FETCHES && 4 * LANES * (v * TILES + t) % sizeof(Line) == 0)
            __builtin_prefetch(w + AHEAD, 0, 2);
          const Codes both = bytes(w);
          parts[0][t] = BITS == 4 ? low(both) : moved(both);
          if constexpr (BITS == 4) parts[1][t] = high(both);
          w += 4 * LANES;
        }
        POSENC_EACH(p, PARTS)
          POSENC_EACH(r, ROWS)
            POSENC_EACH(t, TILES)
              chains[t][r].add(parts[p][t], x + r * of_row + 4 * v + p * STRIP / 2);
      }
      POSENC_EACH(t, TILES)
        POSENC_EACH(r, ROWS) sums[t][r] = chains[t][r].sums();
    }
    POSENC_EACH(t, TILES) {
      if (FETCHES && 4 * LANES * t % sizeof(Line) == 0) __builtin_prefetch(w + AHEAD, 0, 2);
      const Floats scale = read<Floats>(w);
      Floats zero = {};
      if (zeros) {
        zero = points(zeros) - static_cast<float>(BITS == 8 ? MOVED : 0);
        zeros += LANES;
      }
      POSENC_EACH(r, ROWS) {
        Floats exact = __builtin_convertvector(sums[t][r], Floats);
        if (zeros) exact -= zero * read<float>(head + r * of_row + offsetof(Head, sum));
        totals[t][r] += scale * read<float>(head + r * of_row + offsetof(Head, scale)) * exact;
      }
      w += 4 * LANES;
    }
    x += sizeof(Head);
  }
  POSENC_EACH(t, TILES) {
    const int64_t begin = (tile * TILES + t) * LANES, left = weights.outputs - begin;
    float* y = product.y + first * weights.outputs + begin;
    POSENC_EACH(r, ROWS) {
      const Floats total = totals[t][r];
      if (left >= LANES)
        std::memcpy(y + r * weights.outputs, &total, sizeof total);
      else if (left > 0)
        std::memcpy(y + r * weights.outputs, &total, 4 * left);
    }
  }
}

template <int BITS, int ROWS>
void multiply_up_to(const Product& product, int64_t tile, int64_t first, int64_t last) {
  for (; last - first >= ROWS; first += ROWS) multiply_rows<BITS, ROWS>(product, tile, first);
  if constexpr (ROWS > 1) multiply_up_to<BITS, ROWS - 1>(product, tile, first, last);
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

// All numbers of a vector, two of which `both` makes one.
template <class Vector, class Both>
auto across(Vector x, Both both) {
  for (int apart = LANES / 2; apart > 0; apart /= 2)
    POSENC_EACH(i, apart) x[i] = both(x[i], x[i + apart]);
  return x[0];
}

// Codes of a row: x / scale to the nearest integer, to even at halves, with the largest size of a
// block over 127 as scale, or NaN in a block with a NaN or an infinity.
void round(const Product& product, int64_t row) {
  constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23
  const Weights& weights = product.weights;
  const int64_t block = weights.block;
  int8_t* to = product.rounded + row * Product::of_row(weights);
  for (int64_t b = 0; b < weights.blocks(); b++, to += sizeof(Head)) {
    const int64_t count = std::min(block, weights.inputs - b * block);
    const float* x = product.x + row * weights.inputs + b * block;
    float filled[LARGEST_BLOCK];
    if (count < block) {
      std::fill(std::copy(x, x + count, filled), filled + block, 0.0f);
      x = filled;
    }
    Floats sum = {};
    Sums most = {};  // as bits, which are in the order of sizes; a NaN follows an infinity
    for (int64_t k = 0; k < block; k += LANES) {
      const Sums size = read<Sums>(x + k) & INT32_MAX;
      most = size > most ? size : most;
    }
    const int32_t bits = across(most, [](int32_t a, int32_t b) { return a > b ? a : b; });
    const float largest = read<float>(&bits);
    const float factor = largest > 0 ? 127 / largest : 0;
    for (int64_t k = 0; k < block; k += STRIP, to += STRIP) {
      Floats codes[STRIP / LANES];
      for (int v = 0; v < STRIP / LANES; v++) {
        const Floats part = read<Floats>(x + k + v * LANES) * factor + TO_INTEGER - TO_INTEGER;
        codes[v] = part < -127.0f ? Floats{} - 127.0f : (part > 127.0f ? Floats{} + 127.0f : part);
        sum += codes[v];
      }
      store_codes(to, codes);
    }
    const float total = across(sum, [](float a, float b) { return a + b; });
    const int32_t half = weights.bits == 4 ? HALF<4> : HALF<8>;
    const Head head{largest / 127 + largest * 0, total,
                    weights.zeros.empty() ? -half * static_cast<int32_t>(total) : 0};
    std::memcpy(to, &head, sizeof head);
  }
}

}  // namespace

extern const ProductKernels product_kernels;
const ProductKernels product_kernels = {TILES * LANES, round, multiply};

}  // namespace POSENC_SET
}  // namespace posenc
