// ONNX Runtime's custom operator posenc.kernels::CachedAttention: its runs, and the registration of
// all operators of the library (onnxruntime_c_api.h).
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "dispatch.h"
#include "node.h"
#include "operators.h"
#include "work.h"

namespace posenc {

const OrtApi* api = nullptr;

namespace {

constexpr const char* DOMAIN_NAME = "posenc.kernels";
constexpr int VERSION = 1;  // of the operator, as opset of its domain

}  // namespace

void Node::compute(OrtKernelContext* context) const {
  static const char* const names[INPUTS] = {
      "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
      "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale",
      "v_scale", "distance_bias", "cache_position", "key_cos_cache", "key_sin_cache", "query_rows",
      "key_rows", "row_of_distance", "key_decays", "count_rows", "number_of_distance",
      "query_factors", "pieces", "distance_queries", "distance_keys", "turn_cos", "turn_sin"};
  Tensor in[INPUTS];
  size_t count = 0;
  ok(api->KernelContext_GetInputCount(context, &count));
  for (size_t i = 0; i < std::min<size_t>(count, INPUTS); i++) {
    const OrtValue* value = nullptr;
    ok(api->KernelContext_GetInput(context, i, &value));
    in[i] = opened(const_cast<OrtValue*>(value), element(i, format_), names[i]);
  }
  Call call;
  std::vector<int64_t> rows;
  read_heads(call, in);
  read_caches(call, in);
  read_rows(call, in, rows);
  read_rotation(call, in);
  read_turns(call, in);
  read_scores(call, in);

  const int64_t result[3] = {call.rows, call.tokens, heads_ * call.values.size};
  const int64_t by_row[4] = {call.rows, heads_, call.tokens, call.table_rows};
  const int64_t* sizes[OUTPUTS] = {result, in[PAST_KEY].sizes, in[PAST_VALUE].sizes, by_row};
  void* data[OUTPUTS] = {};
  ok(api->KernelContext_GetOutputCount(context, &count));
  for (size_t i = 0; i < std::min<size_t>(count, OUTPUTS); i++) {
    OrtValue* value = nullptr;
    ok(api->KernelContext_GetOutput(context, i, sizes[i], i == RESULT ? 3 : 4, &value));
    ok(api->GetTensorMutableData(value, &data[i]));
  }
  Cache* caches[] = {&call.keys, &call.values};
  for (size_t i = 0; i < 2; i++) {
    const size_t bytes = call.rows * kv_heads_ * call.capacity * caches[i]->size *
                         BYTES[format_];
    caches[i]->slots = data[PRESENT_KEY + i];
    // Buffers that are bound to an input and its output are one.
    if (in[PAST_KEY + i].data != caches[i]->slots && bytes)
      std::memcpy(caches[i]->slots, in[PAST_KEY + i].data, bytes);
  }
  if (!call.rows || !call.tokens) return;
  call.output = static_cast<float*>(data[RESULT]);
  call.row_weights = static_cast<float*>(data[ROW_WEIGHTS]);
  const auto parallel = [context](size_t total, const std::function<void(size_t)>& task) {
    in_parallel(context, total, task);
  };
  run(call, kernels_for(std::gcd(call.keys.size, call.values.size)), parallel);
}

namespace {

struct Operator : OrtCustomOp {
  Format format;  // of its caches
};

Operator described(Format format) {
  Operator op{};
  op.format = format;
  op.version = ORT_CUSTOM_OP_VERSION;
  op.GetName = [](const OrtCustomOp*) { return NAME; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return INPUTS; };
  op.GetInputType = [](const OrtCustomOp* self, size_t i) -> int {
    return element(i, static_cast<const Operator*>(self)->format);
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    const bool required = i == QUERY || i == PAST_KEY || i == PAST_VALUE || i == LAST_SLOTS;
    return required ? ORT_REQUIRED : ORT_OPTIONAL;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return ORT_MEM_DEFAULT; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return OUTPUTS; };
  op.GetOutputType = [](const OrtCustomOp* self, size_t i) -> int {
    const bool cache = i == PRESENT_KEY || i == PRESENT_VALUE;
    return cache ? OF_CACHES[static_cast<const Operator*>(self)->format] : ORT_FLOAT;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i == ROW_WEIGHTS ? ORT_OPTIONAL : ORT_REQUIRED;
  };
  op.GetStartVersion = [](const OrtCustomOp*) { return VERSION; };
  op.GetMayInplace = [](int** inputs, int** outputs) -> size_t {
    *inputs = static_cast<int*>(std::malloc(2 * sizeof(int)));
    *outputs = static_cast<int*>(std::malloc(2 * sizeof(int)));
    if (!*inputs || !*outputs) return 0;
    for (int i = 0; i < 2; i++) {
      (*inputs)[i] = PAST_KEY + i;
      (*outputs)[i] = PRESENT_KEY + i;
    }
    return 2;
  };
  op.ReleaseMayInplace = [](int* inputs, int* outputs) {
    std::free(inputs);
    std::free(outputs);
  };
  op.CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi*, const OrtKernelInfo* info,
                         void** node) -> OrtStatus* {
    return guarded([&] { *node = new Node(info, static_cast<const Operator*>(self)->format); });
  };
  op.KernelComputeV2 = [](void* node, OrtKernelContext* context) -> OrtStatus* {
    return guarded([&] { static_cast<const Node*>(node)->compute(context); });
  };
  op.KernelDestroy = [](void* node) { delete static_cast<Node*>(node); };
  return op;
}

// Raises if a function of the table is not what its slot says. The others are called when a graph
// runs, and posenc_export runs one before it opens an artefact.
void check_table(const OrtApiBase* base) {
  const std::string version = base->GetVersionString();
  OrtStatus* status = api->CreateStatus(ORT_FAIL, NAME);
  const bool same = api->GetErrorCode(status) == ORT_FAIL &&
                    std::strcmp(api->GetErrorMessage(status), NAME) == 0;
  api->ReleaseStatus(status);
  expect(same, "the C API of ONNX Runtime, got another table of functions in " + version);
}

// Returns the domain with the operators, one for caches of each format. It lives as long as the process.
OrtCustomOpDomain* made_domain() {
  static const Operator operators[FORMATS] = {described(FLOAT32), described(FLOAT16),
                                              described(INT8)};
  OrtCustomOpDomain* domain = nullptr;
  ok(api->CreateCustomOpDomain(DOMAIN_NAME, &domain));
  for (const Operator& op : operators) ok(api->CustomOpDomain_Add(domain, &op));
  ok(api->CustomOpDomain_Add(domain, product_operator()));
  return domain;
}

}  // namespace
}  // namespace posenc

using namespace posenc;

#define POSENC_EXPORT extern "C" __attribute__((visibility("default")))

POSENC_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  api = base->GetApi(ORT_API_VERSION);
  if (!api) {
    const std::string text = std::string("posenc-export-kernels: expected ONNX Runtime 1.24 or "
                                         "later, got ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  return guarded([&] {
    kernels_for(64);  // raises for an instruction set that cannot be used
    static OrtCustomOpDomain* const domain = (check_table(base), made_domain());
    ok(api->AddCustomOpDomain(options, domain));
  });
}

// Name of the widest instruction set that kernels use here; null if it is refused.
POSENC_EXPORT const char* posenc_instructions() {
  try {
    return posenc::kernels_for(64).name;
  } catch (const std::exception&) {
    return nullptr;
  }
}
