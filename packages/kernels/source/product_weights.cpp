#include "product.h"

#include <cstring>

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
  lines.assign((size * of_block() + sizeof(Line) - 1) / sizeof(Line), {});
  if (from_zeros) zeros.assign(size * lanes, 0);
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t b = 0; b < count; b++) {
      const int64_t at = n / lanes * count + b, lane = n % lanes;
      if (from_zeros) zeros[at * lanes + lane] = code_of(from_zeros + n * zero_bytes(), b, bits);
      uint8_t* to = reinterpret_cast<uint8_t*>(lines.data()) + at * of_block() + 4 * lane;
      std::memcpy(to + bytes * lanes, from_scales + n * count + b, sizeof(float));
      const uint8_t* from = from_codes + (n * count + b) * bytes;
      for (int64_t k = 0; k < block; k++) {
        const int64_t strip = k / STRIP, at = k % STRIP, vector = at % half / 4;
        to[strip * of_strip + vector * 4 * lanes + at % 4] |= code_of(from, k, bits)
                                                              << (at < half ? 0 : 4);
      }
    }
}

}  // namespace posenc
