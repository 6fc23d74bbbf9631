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

// Weights in the order in which kernels read them: by tiles of `lanes` outputs, blocks, and strips of
// 32 inputs. Byte 4 * lane + i of vector g of a strip has the code of input 4 g + i of that output:
// with 8 bits one of 8 vectors; with 4 bits one of 4, whose high halves are those of inputs 16 on.
struct Weights {
  int64_t inputs = 0, outputs = 0, block = 0, bits = 0, lanes = 0;
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // [tiles, blocks, lanes]
  std::vector<uint8_t> zeros;  // as scales; empty if all are half the number of codes

  int64_t blocks() const { return (inputs + block - 1) / block; }
  int64_t tiles() const { return (outputs + lanes - 1) / lanes; }
  int64_t of_block() const { return block * lanes * bits / 8; }  // bytes
  int64_t zero_bytes() const { return (blocks() * bits + 7) / 8; }  // of a row of zero points

  // Fill codes, scales and zeros from those of MatMulNBits, whose sizes are known; no zeros: null.
  void fill(const uint8_t* from_codes, const float* from_scales, const uint8_t* from_zeros);
};

// Activations of all rows: codes, and for each block the scale, the sum of the codes, and the number
// at which sums of its products with codes begin, which subtracts half the number of codes from these.
struct Rounded {
  int8_t* codes;
  float* scales;
  float* sums;
  int32_t* starts;
};

// One call. Row m of the codes is at m * blocks * block, that of scales, sums, starts at m * blocks.
struct Product {
  const Weights& weights;
  const float* x;  // [M, K]
  float* y;        // [M, N]
  int64_t rows;    // M
  Rounded rounded;
};

struct ProductKernels {
  int64_t lanes;
  int64_t tiles;  // that are multiplied together
  // Round a row of activations.
  void (*round)(const Product&, int64_t row);
  // Write the outputs of the tiles from a multiple of `tiles` on, for rows first .. last - 1.
  void (*multiply)(const Product&, int64_t tile, int64_t first, int64_t last);
};

// Those of the widest instruction set of this processor (dispatch.h).
const ProductKernels& product_kernels();

}  // namespace posenc
