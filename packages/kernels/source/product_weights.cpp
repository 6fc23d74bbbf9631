#include "product.h"

namespace posenc {
namespace {

// Code k of packed codes.
uint8_t code_of(const uint8_t* row, int64_t k, int64_t bits) {
  return bits == 8 ? row[k] : row[k / 2] >> (k % 2 * 4) & 15;
}

}  // namespace

// Outputs behind the last have codes and scales 0.
void Weights::fill(const uint8_t* from_codes, const float* from_scales,
                   const uint8_t* from_zeros) {
  const int64_t count = blocks(), bytes = block * bits / 8, size = tiles() * count;
  const int64_t of_strip = STRIP * lanes * bits / 8, half = bits == 4 ? STRIP / 2 : STRIP;
  codes.assign(size * of_block(), 0);
  scales.assign(size * lanes, 0);
  if (from_zeros) zeros.assign(size * lanes, 0);
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t b = 0; b < count; b++) {
      const int64_t tile = n / lanes * count + b, lane = n % lanes;
      scales[tile * lanes + lane] = from_scales[n * count + b];
      if (from_zeros)
        zeros[tile * lanes + lane] = code_of(from_zeros + n * zero_bytes(), b, bits);
      const uint8_t* from = from_codes + (n * count + b) * bytes;
      uint8_t* to = codes.data() + tile * of_block() + 4 * lane;
      for (int64_t k = 0; k < block; k++) {
        const int64_t strip = k / STRIP, at = k % STRIP, vector = at % half / 4;
        to[strip * of_strip + vector * 4 * lanes + at % 4] |= code_of(from, k, bits)
                                                              << (at < half ? 0 : 4);
      }
    }
}

}  // namespace posenc
