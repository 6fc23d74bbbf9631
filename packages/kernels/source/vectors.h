// Vectors of POSENC_WIDTH numbers in float32, in the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

#include "call.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace posenc {
namespace POSENC_SET {
namespace {

constexpr int WIDTH = POSENC_WIDTH;
typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));

inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// gcc 12 converts vectors of bytes one by one, unless it is told the instruction, and warns of
// instructions without a mask.
inline Vector load(const int8_t* from) {
#if POSENC_WIDTH == 16 && defined(__AVX512F__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const Integers integers = (Integers)_mm512_maskz_cvtepi8_epi32(0xffff, codes);
#elif POSENC_WIDTH == 8 && defined(__AVX2__)
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const Integers integers = (Integers)_mm256_cvtepi8_epi32(codes);
#else
  Integers integers;
  for (int i = 0; i < WIDTH; i++) integers[i] = from[i];
#endif
  return __builtin_convertvector(integers, Vector);
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

// Store x0, y0, x1, y1, ...
inline void store_alternating(float* to, Vector x, Vector y) {
#if POSENC_WIDTH == 4
  store(to, __builtin_shufflevector(x, y, 0, 4, 1, 5));
  store(to + 4, __builtin_shufflevector(x, y, 2, 6, 3, 7));
#elif POSENC_WIDTH == 8
  store(to, __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11));
  store(to + 8, __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15));
#else
  store(to, __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  store(to + 16, __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                         15, 31));
#endif
}

inline Vector all(float x) { return x - Vector{}; }

// Numbers of float16 in float32. Without an instruction, in integers: those below 2^-14 are counts
// of 2^-24. The process may flush subnormal numbers of float32 to zero, so that none is formed.
inline Vector widened(Shorts halves) {
#if POSENC_WIDTH == 16 && defined(__AVX512F__)
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif POSENC_WIDTH == 8 && defined(__F16C__)
  return (Vector)_mm256_cvtph_ps((__m128i)halves);
#else
  const Unsigned bits = __builtin_convertvector(halves, Unsigned);
  const Unsigned size = bits & 0x7fff, exponent = bits & 0x7c00;
  const Unsigned count = (Unsigned)(__builtin_convertvector((Integers)size, Vector) * 0x1p-24f);
  const Unsigned number = (size << 13) + (112u << 23), infinite = number + (112u << 23);
  const Unsigned result = exponent == 0 ? count : (exponent == 0x7c00 ? infinite : number);
  return (Vector)(result | (bits & 0x8000) << 16);
#endif
}

inline Vector load(const Half* from) {
  Shorts halves;
  std::memcpy(&halves, from, sizeof halves);
  return widened(halves);
}

// Round numbers to float16, to even at halves, and limit them to its largest number, 65504.
inline Shorts narrowed(Vector x) {
  constexpr float MOST = 65504.0f;
  x = x > MOST ? all(MOST) : (x < -MOST ? all(-MOST) : x);  // NaN stays NaN
#if POSENC_WIDTH == 16 && defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif POSENC_WIDTH == 8 && defined(__F16C__)
  return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Unsigned bits = (Unsigned)x, size = bits & 0x7fffffff;
  const Unsigned number = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10);
  // The unit of 0.5 .. 1 is 2^-24, so that a sum with 0.5 rounds to it.
  const Unsigned count = (Unsigned)((Vector)size + 0.5f) - 0x3f000000u;
  const Unsigned of_number = size < 0x38800000u ? count : number;  // 2^-14
  const Unsigned result = size > 0x7f800000u ? Unsigned{} + 0x7e00u : of_number;
  return __builtin_convertvector(result | (bits >> 16 & 0x8000), Shorts);
#endif
}

inline void store(Half* to, Vector x) {
  const Shorts halves = narrowed(x);
  std::memcpy(to, &halves, sizeof halves);
}

inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }

#if POSENC_WIDTH == 4
#define POSENC_PICK(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, 4 + a, 4 + b)
#elif POSENC_WIDTH == 8
#define POSENC_PICK(x, y, a, b, c, d) \
  __builtin_shufflevector(x, y, a, b, 8 + a, 8 + b, 4 + a, 4 + b, 12 + a, 12 + b)
#else
#define POSENC_PICK(x, y, a, b, c, d)                                                      \
  __builtin_shufflevector(x, y, a, b, 16 + a, 16 + b, 4 + a, 4 + b, 20 + a, 20 + b, 8 + a, \
                          8 + b, 24 + a, 24 + b, 12 + a, 12 + b, 28 + a, 28 + b)
#endif

// Join neighbours of x and of y, within lanes of four numbers: x0+x1, x2+x3, y0+y1, y2+y3.
template <class Join = std::plus<>>
inline Vector pairs(Vector x, Vector y, Join join = {}) {
  return join(POSENC_PICK(x, y, 0, 2, , ), POSENC_PICK(x, y, 1, 3, , ));
}

// Join neighbouring lanes of four numbers of x, then of y.
template <class Join = std::plus<>>
inline Vector lanes(Vector x, Vector y, Join join = {}) {
#if POSENC_WIDTH == 8
  return join(__builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11),
              __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15));
#elif POSENC_WIDTH == 16
  return join(
      __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
      __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#else
  return join(x, y);
#endif
}

// Join all numbers of a vector.
template <class Join>
inline float joined(Vector x, Join join) {
  for (int count = WIDTH; count > 4; count /= 2) x = lanes(x, x, join);
  x = pairs(x, x, join);
  return pairs(x, x, join)[0];
}

inline float sum(Vector x) { return joined(x, std::plus<>()); }

inline float largest(Vector x) { return joined(x, larger); }

// Products of a query and a key add up in this many chains, of every CHAINS-th number, and the
// chains in pairs of neighbours: the same order whether a vector holds numbers of a head or of
// several queries. A vector of numbers of heads holds those of PAIR keys.
constexpr int CHAINS = WIDTH < 8 ? WIDTH : 8;
constexpr int PAIR = WIDTH / CHAINS;

typedef float Chains __attribute__((vector_size(4 * CHAINS)));

// The same numbers for each key of a vector.
inline Vector repeated(const float* from) {
#if POSENC_WIDTH == 16
  const __m256d numbers = _mm256_loadu_pd(reinterpret_cast<const double*>(from));
  return (Vector)_mm512_maskz_broadcast_f64x4(0xff, numbers);
#else
  return load(from);
#endif
}

// Numbers of one key, or of two: at `from` and `step` numbers further.
inline Vector load_parts(const float* from, int64_t step) {
#if POSENC_WIDTH == 16
  Chains x, y;
  std::memcpy(&x, from, sizeof x);
  std::memcpy(&y, from + step, sizeof y);
  return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  (void)step;
  return load(from);
#endif
}

inline Vector load_parts(const int8_t* from, int64_t step) {
#if POSENC_WIDTH == 16
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128 both = _mm_loadh_pi((__m128)first, reinterpret_cast<const __m64*>(from + step));
  const __m512i integers = _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)both);
  return __builtin_convertvector((Integers)integers, Vector);
#else
  (void)step;
  return load(from);
#endif
}

inline Vector load_parts(const Half* from, int64_t step) {
#if POSENC_WIDTH == 16
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + step));
  return widened((Shorts)_mm256_inserti128_si256(_mm256_castsi128_si256(x), y, 1));
#else
  (void)step;
  return load(from);
#endif
}

// Sums of neighbours of four vectors, within lanes of four numbers.
inline Vector fours(const Vector (&x)[4]) { return pairs(pairs(x[0], x[1]), pairs(x[2], x[3])); }

#if POSENC_WIDTH == 16
#define POSENC_LANE(a) 4 * (a), 4 * (a) + 1, 4 * (a) + 2, 4 * (a) + 3
#define POSENC_LANES(x, y, a, b)                                               \
  __builtin_shufflevector(x, y, POSENC_LANE(a), POSENC_LANE(b), POSENC_LANE(4 + a), \
                          POSENC_LANE(4 + b))

// Number j of vector i and number i of vector j change places.
inline void transpose(Vector (&x)[16]) {
  Vector y[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const Vector a = POSENC_PICK(x[i], x[i + 1], 0, 1, , );
    const Vector b = POSENC_PICK(x[i + 2], x[i + 3], 0, 1, , );
    const Vector c = POSENC_PICK(x[i], x[i + 1], 2, 3, , );
    const Vector d = POSENC_PICK(x[i + 2], x[i + 3], 2, 3, , );
    y[i] = POSENC_PICK(a, b, 0, 2, , );
    y[i + 1] = POSENC_PICK(a, b, 1, 3, , );
    y[i + 2] = POSENC_PICK(c, d, 0, 2, , );
    y[i + 3] = POSENC_PICK(c, d, 1, 3, , );
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vector a = POSENC_LANES(y[i], y[i + 4], 0, 1);
    const Vector b = POSENC_LANES(y[i + 8], y[i + 12], 0, 1);
    const Vector c = POSENC_LANES(y[i], y[i + 4], 2, 3);
    const Vector d = POSENC_LANES(y[i + 8], y[i + 12], 2, 3);
    x[i] = POSENC_LANES(a, b, 0, 2);
    x[i + 4] = POSENC_LANES(a, b, 1, 3);
    x[i + 8] = POSENC_LANES(c, d, 0, 2);
    x[i + 12] = POSENC_LANES(c, d, 1, 3);
  }
}
#undef POSENC_LANES
#undef POSENC_LANE
#endif
#undef POSENC_PICK

// e^x of x <= 88; 0 below -87, so that no result is subnormal. Relative error below 2e-7.
inline Vector exponential(Vector x) {
  const Vector rounded = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to integers
  const Vector count = rounded - 12582912.0f;
  const Vector rest = x - count * 0.693145751953125f - count * 1.428606820309417e-6f;
  Vector y = rest * (1.0f / 5040) + 1.0f / 720;
  y = y * rest + 1.0f / 120;
  y = y * rest + 1.0f / 24;
  y = y * rest + 1.0f / 6;
  y = y * rest + 0.5f;
  y = y * rest + 1.0f;
  y = y * rest + 1.0f;
  const Unsigned power = ((Unsigned)rounded - 0x4b400000 + 127) << 23;
  return x < -87.0f ? Vector{} : y * (Vector)power;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

// 1 / (1 + e^-x).
inline Vector sigmoid(Vector x) {
  const Vector power = exponential(x < 0.0f ? x : -x);
  return (x < 0.0f ? power : all(1)) / (1.0f + power);
}

// tanh x: x (1 + x^2 p(x^2)) below 0.625 (Cephes), elsewhere 1 - 2 / (e^2x + 1).
inline Vector hyperbolic_tangent(Vector x) {
  const Vector size = x < 0.0f ? -x : x, square = x * x;
  Vector p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vector near = x + x * square * p;
  const Vector twice = 2 * size > 40.0f ? all(40.0f) : 2 * size;
  const Vector far = 1.0f - 2.0f / (exponential(twice) + 1.0f);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace
}  // namespace POSENC_SET
}  // namespace posenc
