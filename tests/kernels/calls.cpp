// Runs calls of the operator from a file without ONNX Runtime: `calls IN OUT`. For builds with
// sanitizers, since each tensor is an allocation of its own, and for other processors.
//
// Numbers of the files are of 8 bytes. IN has for each call: the element type of the caches; a count
// and for each attribute its name in 32 bytes, 1 for an integer or 0 for a double, and its value; a
// count and for each input its rank, or -1 if it is left out, element type, sizes and numbers. OUT
// has for each call: -1, a length and the text of an error; or for each of 4 outputs its rank, sizes
// and numbers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "node.h"

struct OrtStatus { int code; std::string text; };
struct OrtValue {
  int element = 0;
  std::vector<int64_t> sizes;
  void* data = nullptr;
  size_t bytes = 0;
};
struct Attribute { std::string name; bool integer; int64_t whole; double number; };
struct OrtKernelInfo { std::vector<Attribute> attributes; };
struct OrtKernelContext { std::vector<OrtValue> inputs, outputs; bool in_place; };
struct OrtCustomOpDomain { std::vector<const OrtCustomOp*> operators; };

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*);

namespace {

constexpr int64_t MOST_BYTES = int64_t{1} << 30;  // of an output
OrtCustomOpDomain domain;
FILE *in, *out;

// Returns whether there was room. Tensors without numbers have memory, as in ONNX Runtime.
bool allocate(OrtValue& value) {
  const int64_t size = value.element == ORT_INT8 ? 1 : value.element == ORT_FLOAT16 ? 2
                     : value.element == ORT_INT64 ? 8 : 4;
  int64_t count = size;
  bool empty = false;
  for (int64_t n : value.sizes) empty = empty || n == 0;
  for (int64_t n : value.sizes)
    if (!empty && (__builtin_mul_overflow(count, n, &count) || count > MOST_BYTES)) return false;
  value.bytes = empty ? 0 : count;
  value.data = std::malloc(value.bytes ? value.bytes : 1);
  return true;
}

OrtStatus* missing() { return new OrtStatus{ORT_FAIL, "no such attribute"}; }

const Attribute* found(const OrtKernelInfo* info, const char* name, bool integer) {
  for (const Attribute& known : info->attributes)
    if (known.name == name && known.integer == integer) return &known;
  return nullptr;
}

OrtApi table() {
  OrtApi api{};
  api.CreateStatus = [](int code, const char* text) { return new OrtStatus{code, text}; };
  api.GetErrorCode = [](const OrtStatus* status) { return status->code; };
  api.GetErrorMessage = [](const OrtStatus* status) { return status->text.c_str(); };
  api.ReleaseStatus = [](OrtStatus* status) { delete status; };
  api.CreateCustomOpDomain = [](const char*, OrtCustomOpDomain** created) -> OrtStatus* {
    *created = &domain;
    return nullptr;
  };
  api.CustomOpDomain_Add = [](OrtCustomOpDomain* to, const OrtCustomOp* op) -> OrtStatus* {
    to->operators.push_back(op);
    return nullptr;
  };
  api.AddCustomOpDomain = [](OrtSessionOptions*, OrtCustomOpDomain*) -> OrtStatus* {
    return nullptr;
  };
  api.GetTensorMutableData = [](OrtValue* value, void** data) -> OrtStatus* {
    *data = value->data;
    return nullptr;
  };
  api.GetTensorElementTypeAndShapeDataReference =
      [](const OrtValue* value, int* element, const int64_t** sizes, size_t* rank) -> OrtStatus* {
    *element = value->element;
    *sizes = value->sizes.data();
    *rank = value->sizes.size();
    return nullptr;
  };
  api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name, float* value) {
    const Attribute* attribute = found(info, name, false);
    if (attribute) *value = static_cast<float>(attribute->number);
    return attribute ? nullptr : missing();
  };
  api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name,
                                        int64_t* value) {
    const Attribute* attribute = found(info, name, true);
    if (attribute) *value = attribute->whole;
    return attribute ? nullptr : missing();
  };
  api.KernelContext_GetInputCount = [](const OrtKernelContext* context, size_t* count) {
    *count = context->inputs.size();
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_GetOutputCount = [](const OrtKernelContext* context, size_t* count) {
    *count = context->outputs.size();
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_GetInput = [](const OrtKernelContext* context, size_t i,
                                  const OrtValue** value) -> OrtStatus* {
    *value = context->inputs[i].data ? &context->inputs[i] : nullptr;
    return nullptr;
  };
  api.KernelContext_GetOutput = [](OrtKernelContext* context, size_t i, const int64_t* sizes,
                                   size_t rank, OrtValue** value) -> OrtStatus* {
    OrtValue& output = context->outputs[i];
    const OrtValue& past = context->inputs[posenc::PAST_KEY + i - posenc::PRESENT_KEY];
    const bool cache = i == posenc::PRESENT_KEY || i == posenc::PRESENT_VALUE;
    output.element = cache ? past.element : int{ORT_FLOAT};
    output.sizes.assign(sizes, sizes + rank);
    *value = &output;
    if (cache && context->in_place)
      output = past;
    else if (!allocate(output))
      return new OrtStatus{ORT_FAIL, "an output is too large"};
    return nullptr;
  };
  api.KernelContext_ParallelFor = [](const OrtKernelContext*, void (*task)(void*, size_t),
                                     size_t total, size_t, void* data) -> OrtStatus* {
    for (size_t number = total; number-- > 0;) task(data, number);
    return nullptr;
  };
  return api;
}

const OrtApi functions = table();

void read(void* to, size_t bytes) {
  if (bytes && std::fread(to, bytes, 1, in) != 1) std::abort();
}

int64_t word() {
  int64_t value;
  read(&value, sizeof value);
  return value;
}

void write(const void* from, size_t bytes) { std::fwrite(from, 1, bytes, out); }

void write(int64_t value) { write(&value, sizeof value); }

OrtStatus* run(int64_t element, const OrtKernelInfo& info, OrtKernelContext& context) {
  int format = 0;
  while (posenc::OF_CACHES[format] != element) format++;
  const OrtCustomOp* op = domain.operators[format];
  void* node = nullptr;
  OrtStatus* status = op->CreateKernelV2(op, &functions, &info, &node);
  if (!status) status = op->KernelComputeV2(node, &context);
  if (node) op->KernelDestroy(node);
  return status;
}

void call(int64_t element, bool in_place) {
  OrtKernelInfo info;
  for (int64_t count = word(); count > 0; count--) {
    char name[33] = {};
    read(name, 32);
    Attribute attribute{name, word() == 1, 0, 0};
    attribute.integer ? read(&attribute.whole, 8) : read(&attribute.number, 8);
    info.attributes.push_back(attribute);
  }
  OrtKernelContext context{std::vector<OrtValue>(word()), std::vector<OrtValue>(4), in_place};
  for (OrtValue& input : context.inputs) {
    const int64_t rank = word();
    if (rank < 0) continue;
    input.element = static_cast<int>(word());
    for (int64_t i = 0; i < rank; i++) input.sizes.push_back(word());
    if (!allocate(input)) std::abort();
    read(input.data, input.bytes);
  }
  OrtStatus* status = run(element, info, context);
  if (status) {
    write(-1);
    write(status->text.size());
    write(status->text.data(), status->text.size());
    delete status;
  }
  for (OrtValue& output : context.outputs) {
    if (!status) {
      write(output.sizes.size());
      for (int64_t size : output.sizes) write(size);
      write(output.data, output.bytes);
    }
    for (OrtValue& input : context.inputs)
      if (input.data == output.data) input.data = nullptr;
    std::free(output.data);
  }
  for (OrtValue& input : context.inputs) std::free(input.data);
}

}  // namespace

int main(int, char** names) {
  const OrtApiBase base{[](uint32_t) { return &functions; }, [] { return "of tests"; }};
  in = std::fopen(names[1], "rb");
  out = std::fopen(names[2], "wb");
  if (!in || !out) return 2;
  if (OrtStatus* status = RegisterCustomOps(nullptr, &base)) {
    std::fprintf(stderr, "%s\n", status->text.c_str());
    return 2;
  }
  int64_t element;
  for (int64_t number = 0; std::fread(&element, sizeof element, 1, in) == 1; number++)
    call(element, number % 2);
  return std::fclose(out);
}
