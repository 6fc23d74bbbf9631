// Products of activations with weights in few bits: x [M, K] times W [N, K], with one scale for each
// block of a row of W. Activations are rounded to 8 bits by the same blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace posenc {

constexpr int64_t STRIP = 32;       // inputs of a block are a multiple of it
constexpr int64_t LARGEST_BLOCK = 256;  // but for one of all inputs of a row
constexpr int64_t LARGEST_ROW = 1 << 16;  // of one block, so that sums fit in 32 bits

// Memory that vectors of 64 bytes read without crossing lines of the cache.
struct alignas(64) Line {
  uint8_t bytes[64];
};

// Weights in the order in which kernels read them: by tiles of `lanes` outputs and blocks. A block
// has strips of 32 inputs, then the scales of the outputs. Byte 4 * lane + i of vector g of a strip
// has the code of input 4 g + i of that output: with 8 bits one of 8 vectors; with 4 bits one of 4,
// whose high halves are those of inputs 16 on.
struct Weights {
  int64_t inputs = 0, outputs = 0, block = 0, bits = 0, lanes = 0;
  std::vector<Line> lines;
  std::vector<uint8_t> zeros;  // [tiles, blocks, lanes]; empty if all are half the number of codes

  int64_t blocks() const { return (inputs + block - 1) / block; }
  int64_t tiles() const { return (outputs + lanes - 1) / lanes; }
  int64_t of_block() const { return lanes * (block * bits / 8 + int64_t{sizeof(float)}); }  // bytes
  int64_t zero_bytes() const { return (blocks() * bits + 7) / 8; }  // of a row of zero points
  const uint8_t* of_tile(int64_t tile) const {
    return reinterpret_cast<const uint8_t*>(lines.data()) + tile * blocks() * of_block();
  }

  // Fill lines and zeros from the inputs of MatMulNBits, whose sizes are known; no zeros: null.
  void fill(const uint8_t* from_codes, const float* from_scales, const uint8_t* from_zeros);
};

// What follows the codes of a block of activations.
struct Head {
  float scale;
  float sum;      // of the codes
  int32_t start;  // of sums of products with codes: subtracts half the number of codes from these
};

// One call.
struct Product {
  const Weights& weights;
  const float* x;   // [M, K]
  float* y;         // [M, N]
  int64_t rows;     // M
  int8_t* rounded;  // activations, as codes of [M, blocks], each with its Head

  static int64_t of_block(const Weights& w) { return w.block + int64_t{sizeof(Head)}; }  // bytes
  static int64_t of_row(const Weights& w) { return w.blocks() * of_block(w); }
};

struct ProductKernels {
  int64_t lanes;  // of a tile
  // Round a row of activations.
  void (*round)(const Product&, int64_t row);
  // Write the outputs of a tile, for rows first .. last - 1.
  void (*multiply)(const Product&, int64_t tile, int64_t first, int64_t last);
};

// Those of the widest instruction set of this processor (dispatch.h).
const ProductKernels& product_kernels();

}  // namespace posenc
