// ONNX Runtime's custom operator posenc.kernels::CachedAttention: inputs, their checks, and the
// registration of the library (onnxruntime_c_api.h).
//
// Inputs 0 to 13 and outputs are those of com.microsoft::GroupQueryAttention.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "dispatch.h"
#include "onnxruntime_api.h"
#include "work.h"

namespace {

using posenc::Call;

constexpr const char* DOMAIN_NAME = "posenc.kernels";
constexpr const char* NAME = "CachedAttention";
constexpr int VERSION = 1;  // of the operator, as opset of its domain

enum Input {
  QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LAST_SLOTS, LONGEST, COS, SIN, POSITIONS, BIAS, SINKS,
  KEY_SCALES, VALUE_SCALES, BY_DISTANCE, SLOTS, KEY_COS, KEY_SIN, INPUTS
};
enum Output { RESULT, PRESENT_KEY, PRESENT_VALUE, OUTPUTS };

const OrtApi* api = nullptr;

// A call that breaks a rule. Its text becomes the error of the run.
struct Refused : std::exception {
  std::string text;
  explicit Refused(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

// An error of the runtime, which is returned to it.
struct Failed {
  OrtStatus* status;
};

void ok(OrtStatus* status) {
  if (status) throw Failed{status};
}

void expect(bool holds, const std::string& rule) {
  if (!holds) throw Refused(std::string(NAME) + ": expected " + rule);
}

std::string text(int64_t number) { return std::to_string(number); }

// Runs a function of the library, and returns what it throws as a status.
template <class Function>
OrtStatus* guarded(Function function) {
  try {
    function();
    return nullptr;
  } catch (const Failed& failed) {
    return failed.status;
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  }
}

// An input or output: its sizes and numbers. Without numbers if it is left out.
struct Tensor {
  const int64_t* sizes = nullptr;
  size_t rank = 0;
  void* data = nullptr;

  template <class Number>
  Number* numbers() const { return static_cast<Number*>(data); }

  bool has(std::initializer_list<int64_t> wanted) const {
    return rank == wanted.size() && std::equal(wanted.begin(), wanted.end(), sizes);
  }
};

Tensor opened(OrtValue* value, OrtElementType wanted, const char* name) {
  Tensor tensor;
  if (!value) return tensor;
  int element = 0;
  ok(api->GetTensorElementTypeAndShapeDataReference(value, &element, &tensor.sizes, &tensor.rank));
  expect(element == wanted, std::string(name) + " of the element type of the operator");
  ok(api->GetTensorMutableData(value, &tensor.data));
  return tensor;
}

struct Operator : OrtCustomOp {
  bool int8;
};

// A node: its attributes. `compute` runs it.
class Node {
 public:
  Node(const OrtKernelInfo* info, bool int8) : int8_(int8) {
    heads_ = integer(info, "num_heads", 0);
    kv_heads_ = integer(info, "kv_num_heads", 0);
    expect(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0,
           "num_heads to be a multiple of kv_num_heads, both above 0, got " + text(heads_) +
               " and " + text(kv_heads_));
    interleaved_ = integer(info, "rotary_interleaved", 0) != 0;
    window_ = std::max<int64_t>(0, integer(info, "local_window_size", 0));
    chunk_ = std::max<int64_t>(0, integer(info, "chunk_size", 0));
    scale_ = number(info, "scale", 0);
    softcap_ = number(info, "softcap", 0);
  }

  void compute(OrtKernelContext* context) const;

 private:
  static int64_t integer(const OrtKernelInfo* info, const char* name, int64_t otherwise) {
    int64_t value = otherwise;
    OrtStatus* status = api->KernelInfoGetAttribute_int64(info, name, &value);
    if (status) api->ReleaseStatus(status);
    return status ? otherwise : value;
  }

  static float number(const OrtKernelInfo* info, const char* name, float otherwise) {
    float value = otherwise;
    OrtStatus* status = api->KernelInfoGetAttribute_float(info, name, &value);
    if (status) api->ReleaseStatus(status);
    return status ? otherwise : value;
  }

  void read_heads(Call& call, const Tensor* in) const;
  void read_caches(Call& call, const Tensor* in) const;
  void read_rows(Call& call, const Tensor* in, std::vector<int64_t>& rows) const;
  void read_rotation(Call& call, const Tensor* in) const;
  void read_scores(Call& call, const Tensor* in) const;

  int64_t heads_, kv_heads_, window_, chunk_;
  float scale_, softcap_;
  bool int8_, interleaved_;
};

// Sizes of the caches and of the new heads, which are packed as one input or are three.
void Node::read_heads(Call& call, const Tensor* in) const {
  const Tensor &q = in[QUERY], &keys = in[PAST_KEY], &values = in[PAST_VALUE];
  expect(q.rank == 3, "query [B,S,n], got rank " + text(q.rank));
  expect(keys.rank == 4 && values.rank == 4, "caches [B,K,M,D]");
  call.rows = q.sizes[0];
  call.tokens = q.sizes[1];
  call.heads = heads_;
  call.kv_heads = kv_heads_;
  call.group = heads_ / kv_heads_;
  call.capacity = keys.sizes[2];
  call.keys.size = keys.sizes[3];
  call.values.size = values.sizes[3];
  expect(keys.has({call.rows, kv_heads_, call.capacity, call.keys.size}) &&
             values.has({call.rows, kv_heads_, call.capacity, call.values.size}),
         "caches with the rows of query, " + text(kv_heads_) + " heads and one capacity");
  for (int64_t size : {call.keys.size, call.values.size})
    expect(size > 0 && size % 8 == 0 && size <= posenc::MOST_NUMBERS,
           "head sizes that are multiples of 8 up to " + text(posenc::MOST_NUMBERS) + ", got " +
               text(size));
  const int64_t of_q = heads_ * call.keys.size, of_keys = kv_heads_ * call.keys.size;
  const int64_t of_values = kv_heads_ * call.values.size;
  call.q = q.numbers<float>();
  if (!in[KEY].data && !in[VALUE].data) {
    call.q_stride = call.keys.stride = call.values.stride = of_q + of_keys + of_values;
    call.keys.heads = call.q + of_q;
    call.values.heads = call.keys.heads + of_keys;
    expect(q.sizes[2] == call.q_stride,
           "packed query, key and value of " + text(call.q_stride) + " numbers, got " +
               text(q.sizes[2]));
    return;
  }
  expect(q.has({call.rows, call.tokens, of_q}) && in[KEY].has({call.rows, call.tokens, of_keys}) &&
             in[VALUE].has({call.rows, call.tokens, of_values}),
         "query, key and value [B,S,n] with the heads of the attributes and the head sizes of the "
         "caches");
  call.q_stride = of_q;
  call.keys.heads = in[KEY].numbers<float>();
  call.keys.stride = of_keys;
  call.values.heads = in[VALUE].numbers<float>();
  call.values.stride = of_values;
}

void Node::read_caches(Call& call, const Tensor* in) const {
  call.int8 = int8_;
  if (!int8_) return;
  expect(in[KEY_SCALES].has({kv_heads_ * call.keys.size}) &&
             in[VALUE_SCALES].has({kv_heads_ * call.values.size}),
         "k_scale and v_scale with one number for each channel of an int8 cache");
  call.keys.scales = in[KEY_SCALES].numbers<float>();
  call.values.scales = in[VALUE_SCALES].numbers<float>();
}

// First slot and number of new tokens of each row, all within the capacity.
void Node::read_rows(Call& call, const Tensor* in, std::vector<int64_t>& rows) const {
  const Tensor &last = in[LAST_SLOTS], &slots = in[SLOTS];
  expect(last.has({call.rows}), "seqlens_k [B]");
  expect(slots.rank == 2 && slots.sizes[0] == call.rows && (slots.sizes[1] > 0 || !call.tokens),
         "cache_position [B,S]");
  rows.assign(2 * call.rows, 0);
  for (int64_t row = 0; row < call.rows; row++) {
    if (!call.tokens) continue;
    const int64_t first = slots.numbers<int64_t>()[row * slots.sizes[1]];
    expect(first >= 0 && first <= call.capacity,
           "cache_position of row " + text(row) + " within 0 .. " + text(call.capacity) +
               ", got " + text(first));
    const int64_t count = int64_t{last.numbers<int32_t>()[row]} + 1 - first;
    expect(count >= 0 && count <= call.tokens && first + count <= call.capacity,
           "seqlens_k of row " + text(row) + " to end at most " + text(call.tokens) +
               " tokens after slot " + text(first) + " within " + text(call.capacity) +
               " slots, got " + text(last.numbers<int32_t>()[row]));
    rows[row] = first;
    rows[call.rows + row] = count;
  }
  call.first = rows.data();
  call.count = rows.data() + call.rows;
  if (in[POSITIONS].data) {
    expect(in[POSITIONS].has({call.rows, call.tokens}), "position_ids [B,S]");
    call.positions = in[POSITIONS].numbers<int64_t>();
  }
}

// Tables of rotations, and that the row of each token stands in them.
void Node::read_rotation(Call& call, const Tensor* in) const {
  if (!in[COS].data) return;
  const int64_t length = in[COS].rank == 2 ? in[COS].sizes[0] : 0;
  const int64_t half = in[COS].rank == 2 ? in[COS].sizes[1] : 0;
  const bool of_keys = in[KEY_COS].data != nullptr;
  expect(in[COS].rank == 2 && in[SIN].has({length, half}) && 2 * half <= call.keys.size &&
             (!of_keys || (in[KEY_COS].has({length, half}) && in[KEY_SIN].has({length, half}))),
         "tables of rotations of one shape [rows,r/2] with r up to the head size");
  call.rotary = 2 * half;
  call.interleaved = interleaved_;
  call.of_q = {in[COS].numbers<float>(), in[SIN].numbers<float>()};
  call.of_k = of_keys ? posenc::Rotation{in[KEY_COS].numbers<float>(), in[KEY_SIN].numbers<float>()}
                      : call.of_q;
  for (int64_t row = 0; row < call.rows; row++)
    for (int64_t s = 0; s < call.count[row]; s++) {
      const int64_t at =
          call.positions ? call.positions[row * call.tokens + s] : call.first[row] + s;
      expect(at < length, "a position of row " + text(row) + " within the " + text(length) +
                              " rows of the rotation tables, got " + text(at));
    }
}

void Node::read_scores(Call& call, const Tensor* in) const {
  call.scale = scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(call.keys.size));
  call.softcap = softcap_;
  call.window = window_;
  call.chunk = chunk_;
  expect(!chunk_ || call.positions, "position_ids for attention in chunks");
  if (in[SINKS].data) {
    expect(in[SINKS].has({heads_}), "head_sink [H]");
    call.sinks = in[SINKS].numbers<float>();
  }
  if (in[BY_DISTANCE].data) {
    const Tensor& table = in[BY_DISTANCE];
    expect(table.rank == 2 && table.sizes[0] == heads_ && table.sizes[1] > 0,
           "distance_bias [H,range]");
    call.by_distance = table.numbers<float>();
    call.range = table.sizes[1];
  }
  if (in[BIAS].data) {
    const Tensor& bias = in[BIAS];
    int64_t longest = 0;
    for (int64_t row = 0; row < call.rows; row++)
      longest = std::max(longest, call.first[row] + call.count[row]);
    expect(bias.rank == 4 && (bias.sizes[0] == call.rows || bias.sizes[0] == 1) &&
               (bias.sizes[1] == heads_ || bias.sizes[1] == 1) && bias.sizes[2] == call.tokens &&
               bias.sizes[3] >= longest,
           "attention_bias [B or 1,H or 1,S,T] with T of at least " + text(longest));
    const int64_t of_token = bias.sizes[3], of_head = of_token * bias.sizes[2];
    call.bias = bias.numbers<float>();
    call.bias_strides[0] = bias.sizes[0] == 1 ? 0 : of_head * bias.sizes[1];
    call.bias_strides[1] = bias.sizes[1] == 1 ? 0 : of_head;
    call.bias_strides[2] = of_token;
  }
}

OrtElementType element(size_t input, bool int8) {
  if (input == PAST_KEY || input == PAST_VALUE) return int8 ? ORT_INT8 : ORT_FLOAT;
  if (input == LAST_SLOTS || input == LONGEST) return ORT_INT32;
  return input == POSITIONS || input == SLOTS ? ORT_INT64 : ORT_FLOAT;
}

// Tasks for the threads of a session. Its threads must not see an exception.
struct Tasks {
  const std::function<void(size_t)>& task;
  std::atomic<bool> failed{false};

  static void run(void* data, size_t number) {
    Tasks* tasks = static_cast<Tasks*>(data);
    try {
      tasks->task(number);
    } catch (const std::exception&) {
      tasks->failed = true;
    }
  }
};

void Node::compute(OrtKernelContext* context) const {
  static const char* const names[INPUTS] = {
      "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
      "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale",
      "v_scale", "distance_bias", "cache_position", "key_cos_cache", "key_sin_cache"};
  Tensor in[INPUTS];
  size_t count = 0;
  ok(api->KernelContext_GetInputCount(context, &count));
  for (size_t i = 0; i < std::min<size_t>(count, INPUTS); i++) {
    const OrtValue* value = nullptr;
    ok(api->KernelContext_GetInput(context, i, &value));
    in[i] = opened(const_cast<OrtValue*>(value), element(i, int8_), names[i]);
  }
  Call call;
  std::vector<int64_t> rows;
  read_heads(call, in);
  read_caches(call, in);
  read_rows(call, in, rows);
  read_rotation(call, in);
  read_scores(call, in);

  const int64_t result[3] = {call.rows, call.tokens, heads_ * call.values.size};
  const int64_t* sizes[OUTPUTS] = {result, in[PAST_KEY].sizes, in[PAST_VALUE].sizes};
  void* data[OUTPUTS];
  for (size_t i = 0; i < OUTPUTS; i++) {
    OrtValue* value = nullptr;
    ok(api->KernelContext_GetOutput(context, i, sizes[i], i == RESULT ? 3 : 4, &value));
    ok(api->GetTensorMutableData(value, &data[i]));
  }
  posenc::Cache* caches[] = {&call.keys, &call.values};
  for (size_t i = 0; i < 2; i++) {
    const size_t bytes = call.rows * kv_heads_ * call.capacity * caches[i]->size *
                         (int8_ ? sizeof(int8_t) : sizeof(float));
    caches[i]->slots = data[PRESENT_KEY + i];
    // Buffers that are bound to an input and its output are one.
    if (in[PAST_KEY + i].data != caches[i]->slots && bytes)
      std::memcpy(caches[i]->slots, in[PAST_KEY + i].data, bytes);
  }
  if (!call.rows || !call.tokens) return;
  call.output = static_cast<float*>(data[RESULT]);
  const auto parallel = [context](size_t total, const std::function<void(size_t)>& task) {
    Tasks tasks{task};
    ok(api->KernelContext_ParallelFor(context, Tasks::run, total, 0, &tasks));
    if (tasks.failed) throw std::bad_alloc();
  };
  posenc::run(call, posenc::kernels_for(std::gcd(call.keys.size, call.values.size)), parallel);
}

Operator described(bool int8) {
  Operator op{};
  op.int8 = int8;
  op.version = ORT_CUSTOM_OP_VERSION;
  op.GetName = [](const OrtCustomOp*) { return NAME; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return INPUTS; };
  op.GetInputType = [](const OrtCustomOp* self, size_t i) -> int {
    return element(i, static_cast<const Operator*>(self)->int8);
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    const bool required = i == QUERY || i == PAST_KEY || i == PAST_VALUE || i == LAST_SLOTS;
    return required ? ORT_REQUIRED : ORT_OPTIONAL;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return ORT_MEM_DEFAULT; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return OUTPUTS; };
  op.GetOutputType = [](const OrtCustomOp* self, size_t i) -> int {
    return i != RESULT && static_cast<const Operator*>(self)->int8 ? ORT_INT8 : ORT_FLOAT;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return ORT_REQUIRED; };
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
    return guarded([&] { *node = new Node(info, static_cast<const Operator*>(self)->int8); });
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

// Returns the domain with the operator for caches of either type. It lives as long as the process.
OrtCustomOpDomain* made_domain() {
  static const Operator operators[] = {described(false), described(true)};
  OrtCustomOpDomain* domain = nullptr;
  ok(api->CreateCustomOpDomain(DOMAIN_NAME, &domain));
  for (const Operator& op : operators) ok(api->CustomOpDomain_Add(domain, &op));
  return domain;
}

}  // namespace

#define POSENC_EXPORT extern "C" __attribute__((visibility("default")))

POSENC_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  api = base->GetApi(ORT_API_VERSION);
  if (!api) {
    const std::string text = std::string("posenc-export-kernels: expected ONNX Runtime 1.24 or "
                                         "later, got ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  return guarded([&] {
    static OrtCustomOpDomain* const domain = (check_table(base), made_domain());
    ok(api->AddCustomOpDomain(options, domain));
  });
}

// Name of the widest instruction set that kernels use here.
POSENC_EXPORT const char* posenc_instructions() { return posenc::kernels_for(64).name; }
