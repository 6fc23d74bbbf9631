// Kernels of products without ONNX Runtime, beside sums of whole numbers: of the instruction set for
// which product_SET.cpp is linked. Prints the largest error relative to the sum of sizes.
#include <cmath>
#include <cstdio>
#include <random>

#include "product.h"

namespace posenc {
namespace SET { extern const ProductKernels product_kernels; }
}  // namespace posenc

using namespace posenc;

int main() {
  const ProductKernels& kernels = SET::product_kernels;
  std::mt19937 random(0);
  double worst = 0;
  for (int64_t bits : {4, 8})
    for (int64_t block : {32, 128})
      for (int64_t inputs : {32, 100, 576})
        for (bool with_zeros : {false, true}) {
          Weights w;
          w.inputs = inputs, w.outputs = 21, w.block = block, w.bits = bits, w.lanes = kernels.lanes;
          const int64_t blocks = w.blocks(), rows = 7, width = blocks * block;
          std::vector<uint8_t> codes(w.outputs * width * bits / 8), zeros(w.outputs * w.zero_bytes());
          std::vector<float> scales(w.outputs * blocks), x(rows * inputs), y(rows * w.outputs);
          for (auto* bytes : {&codes, &zeros})
            for (uint8_t& byte : *bytes) byte = random();
          for (float& scale : scales) scale = 0.01f + random() % 100 / 1e3f;
          for (int64_t i = 0; i < rows * inputs; i++)  // whole numbers, the first of a block 127
            x[i] = i % inputs % block ? static_cast<float>(random() % 255) - 127 : 127;
          w.fill(codes.data(), scales.data(), with_zeros ? zeros.data() : nullptr);
          std::vector<int8_t> rounded(rows * Product::of_row(w));
          const Product product{w, x.data(), y.data(), rows, rounded.data()};
          for (int64_t row = 0; row < rows; row++) kernels.round(product, row);
          for (int64_t tile = 0; tile < w.tiles(); tile++) kernels.multiply(product, tile, 0, rows);
          const auto code = [bits](const uint8_t* from, int64_t k) {
            return bits == 8 ? from[k] : from[k / 2] >> (k % 2 * 4) & 15;
          };
          for (int64_t m = 0; m < rows; m++)
            for (int64_t n = 0; n < w.outputs; n++) {
              double sum = 0, sizes = 0;
              for (int64_t k = 0; k < inputs; k++) {
                const int64_t b = k / block, half = 1 << (bits - 1);
                const int64_t zero = with_zeros ? code(&zeros[n * w.zero_bytes()], b) : half;
                const int64_t whole = code(&codes[n * width * bits / 8], k) - zero;
                const double one = double(scales[n * blocks + b]) * whole * x[m * inputs + k];
                sum += one, sizes += std::fabs(one);
              }
              worst = std::fmax(worst, std::fabs(y[m * w.outputs + n] - sum) / sizes);
            }
        }
  std::printf("%g\n", worst);
}
