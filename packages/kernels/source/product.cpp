// Operator posenc.kernels::MatMulNBits: com.microsoft::MatMulNBits with accuracy_level 4, constant
// weights, and blocks that are multiples of 32. Weights are reordered when the graph is loaded.
#include "product.h"

#include "operators.h"
#include "tensors.h"
#include "thread_memory.h"

namespace posenc {
namespace {

constexpr const char* PRODUCT = "MatMulNBits";
constexpr int64_t ROWS = 64;        // rows of a task
constexpr int64_t ALONE = 1 << 14;  // activations below which one thread rounds them faster
enum { X, CODES, SCALES, ZEROS, PRODUCT_INPUTS };

void check(bool holds, const std::string& rule) { expect(holds, rule, PRODUCT); }

int64_t attribute(const OrtKernelInfo* info, const char* name) {
  int64_t value = 0;
  ok(api->KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

// An input that is a constant of the graph. Raises Refused for another.
Tensor constant(const OrtKernelInfo* info, size_t input, OrtElementType element, const char* name) {
  int known = 0;
  const OrtValue* value = nullptr;
  ok(api->KernelInfoGetConstantInput_tensor(info, input, &known, &value));
  check(known && value, std::string(name) + " that is a constant of the graph");
  return opened(const_cast<OrtValue*>(value), element, name, PRODUCT);
}

int64_t count(const Tensor& tensor) {
  int64_t product = 1;
  for (size_t i = 0; i < tensor.rank; i++) product *= tensor.sizes[i];
  return product;
}

thread_local std::vector<int8_t> of_call;

class ProductNode {
 public:
  explicit ProductNode(const OrtKernelInfo* info) : kernels_(product_kernels()) {
    w_.inputs = attribute(info, "K");
    w_.outputs = attribute(info, "N");
    w_.bits = attribute(info, "bits");
    w_.block = attribute(info, "block_size");
    w_.lanes = kernels_.lanes;
    check(w_.bits == 4 || w_.bits == 8, "bits 4 or 8, got " + text(w_.bits));
    const bool of_row = w_.block == w_.inputs && w_.block <= LARGEST_ROW;
    check(w_.block > 0 && w_.block % STRIP == 0 && (w_.block <= LARGEST_BLOCK || of_row),
          "block_size to be a multiple of 32 up to " + text(LARGEST_BLOCK) + ", or K up to " +
              text(LARGEST_ROW) + ", got " + text(w_.block));
    check(w_.inputs > 0 && w_.inputs <= MOST_SIZE && w_.outputs > 0 && w_.outputs <= MOST_SIZE,
          "K and N from 1 to 2^31, got " + text(w_.inputs) + " and " + text(w_.outputs));
    const int64_t blocks = w_.blocks(), bytes = w_.block * w_.bits / 8;
    const Tensor codes = constant(info, CODES, ORT_UINT8, "B");
    const Tensor scales = constant(info, SCALES, ORT_FLOAT, "scales");
    check(count(codes) == w_.outputs * blocks * bytes, "B [N,blocks,bytes of a block]");
    check(count(scales) == w_.outputs * blocks, "scales [N,blocks]");
    size_t inputs = 0;
    ok(api->KernelInfo_GetInputCount(info, &inputs));
    Tensor zeros;
    if (inputs > ZEROS) zeros = constant(info, ZEROS, ORT_UINT8, "zero_points");
    check(!zeros.data || count(zeros) == w_.outputs * w_.zero_bytes(),
          "zero_points [N,bytes of blocks]");
    check(!zeros.data || w_.block <= LARGEST_BLOCK,
          "no zero_points of blocks above " + text(LARGEST_BLOCK) + " inputs, got " +
              text(w_.block));
    w_.fill(codes.numbers<uint8_t>(), scales.numbers<float>(), zeros.numbers<uint8_t>());
  }

  void compute(OrtKernelContext* context) const {
    const OrtValue* value = nullptr;
    ok(api->KernelContext_GetInput(context, X, &value));
    const Tensor x = opened(const_cast<OrtValue*>(value), ORT_FLOAT, "A", PRODUCT);
    check(x.rank > 0 && x.sizes[x.rank - 1] == w_.inputs, "A [...," + text(w_.inputs) + "]");
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.rank);
    sizes.back() = w_.outputs;
    OrtValue* result = nullptr;
    void* y = nullptr;
    ok(api->KernelContext_GetOutput(context, 0, sizes.data(), sizes.size(), &result));
    ok(api->GetTensorMutableData(result, &y));
    const int64_t rows = count(x) / w_.inputs;
    if (!rows) return;
    const Product product{w_, x.numbers<float>(), static_cast<float*>(y), rows,
                          memory(of_call, rows * Product::of_row(w_))};
    if (rows * w_.inputs < ALONE)
      for (int64_t row = 0; row < rows; row++) kernels_.round(product, row);
    else
      in_parallel(context, rows, [&](size_t row) { kernels_.round(product, row); });
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    in_parallel(context, w_.tiles() * parts, [&](size_t task) {
      const int64_t first = task % parts * ROWS;
      kernels_.multiply(product, task / parts, first, std::min(first + ROWS, rows));
    });
  }

 private:
  static constexpr int64_t MOST_SIZE = int64_t{1} << 31;

  const ProductKernels& kernels_;
  Weights w_;
};

}  // namespace

const OrtCustomOp* product_operator() {
  static const OrtCustomOp op = [] {
    OrtCustomOp op{};
    op.version = ORT_CUSTOM_OP_VERSION;
    op.GetName = [](const OrtCustomOp*) { return PRODUCT; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return PRODUCT_INPUTS; };
    op.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
      return i == CODES || i == ZEROS ? ORT_UINT8 : ORT_FLOAT;
    };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
      return i == ZEROS ? ORT_OPTIONAL : ORT_REQUIRED;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return ORT_MEM_DEFAULT; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return ORT_FLOAT; };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return ORT_REQUIRED; };
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                           void** node) -> OrtStatus* {
      return guarded([&] { *node = new ProductNode(info); });
    };
    op.KernelComputeV2 = [](void* node, OrtKernelContext* context) -> OrtStatus* {
      return guarded([&] { static_cast<const ProductNode*>(node)->compute(context); });
    };
    op.KernelDestroy = [](void* node) { delete static_cast<ProductNode*>(node); };
    return op;
  }();
  return &op;
}

}  // namespace posenc
