// Run model.onnx with the C API of ONNX Runtime alone. Written by `posenc inspect FOLDER --runtime c`.
//
// model: decoder for target ort, float32, signature positions
// encoding: rope in 5 of 5 layers
// sizes: layers 5, width 128, heads 4, kv heads 2, head size 32, vocabulary 256, a step reads 955904 weights
// positions: 0 .. 4095
// interface: 1
//
// R is the folder of a release of ONNX Runtime, with headers and library:
// gcc -O2 decode.c -o decode -I$R/include -L$R/lib -Wl,-rpath,$R/lib -lonnxruntime
// ./decode FOLDER 16 100 101 102   (16 tokens after a prompt of three)

#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CAPACITY 1024  // slots of the caches: the limit of a row's tokens; can be set up to 4096
#define POSITIONS 4096  // 0 .. POSITIONS - 1
#define VOCABULARY 256
#define SIZES(...) (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)
#define FLOAT ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
#define FLOAT16 ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
#define INT8 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
#define INT32 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
#define INT64 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
enum { FEEDS = 4, STATES = 10 };

// Inputs: those of the call, then the states. Outputs: logits, then the new states.
// The graph counts the tokens of a row, and its outputs depend on distances only: it takes no start.
static const char* const INPUTS[] = {
    "input_ids",
    "logits_index",
    "seqlens_k",
    "total_sequence_length",
    "past_key_values.0.key",
    "past_key_values.0.value",
    "past_key_values.1.key",
    "past_key_values.1.value",
    "past_key_values.2.key",
    "past_key_values.2.value",
    "past_key_values.3.key",
    "past_key_values.3.value",
    "past_key_values.4.key",
    "past_key_values.4.value",
};
static const char* const OUTPUTS[] = {
    "logits",
    "present.0.key",
    "present.0.value",
    "present.1.key",
    "present.1.value",
    "present.2.key",
    "present.2.value",
    "present.3.key",
    "present.3.value",
    "present.4.key",
    "present.4.value",
};

static const OrtApi* ort;
static OrtEnv* environment;

static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
  exit(1);
}

// Creates a tensor with `rank` sizes and all bytes 0.
static OrtValue* zeros(ONNXTensorElementDataType type, const int64_t* sizes, size_t rank) {
  const size_t width = type == INT64 ? 8 : type == FLOAT16 ? 2 : type == INT8 ? 1 : 4;
  size_t entries = 1;
  for (size_t i = 0; i < rank; ++i) entries *= (size_t)sizes[i];
  OrtAllocator* allocator;
  OrtValue* value;
  void* data;
  check(ort->GetAllocatorWithDefaultOptions(&allocator));
  check(ort->CreateTensorAsOrtValue(allocator, sizes, rank, type, &value));
  check(ort->GetTensorMutableData(value, &data));
  if (entries > 0) memset(data, 0, entries * width);
  return value;
}

static void* data_of(OrtValue* value) {
  void* data;
  check(ort->GetTensorMutableData(value, &data));
  return data;
}

static size_t entries_of(OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info;
  size_t entries;
  check(ort->GetTensorTypeAndShape(value, &info));
  check(ort->GetTensorShapeElementCount(info, &entries));
  ort->ReleaseTensorTypeAndShapeInfo(info);
  return entries;
}

// Creates a tensor of integers: first, first + step, first + 2 step, ...
static OrtValue* integers(ONNXTensorElementDataType type, int64_t first, int64_t step, const int64_t* sizes, size_t rank) {
  OrtValue* value = zeros(type, sizes, rank);
  for (size_t i = 0; i < entries_of(value); ++i) {
    const int64_t entry = first + step * (int64_t)i;
    if (type == INT64) ((int64_t*)data_of(value))[i] = entry;
    else ((int32_t*)data_of(value))[i] = (int32_t)entry;
  }
  return value;
}

static OrtValue* copied(ONNXTensorElementDataType type, const int64_t* entries, const int64_t* sizes, size_t rank) {
  OrtValue* value = zeros(type, sizes, rank);
  memcpy(data_of(value), entries, entries_of(value) * sizeof *entries);
  return value;
}

static float number(OrtValue* output, size_t index) {
  return (float)((const float*)data_of(output))[index];
}

static OrtSession* load(const char* folder) {
  OrtSessionOptions* options;
  OrtSession* session;
  char path[4096];
  snprintf(path, sizeof path, "%s/model.onnx", folder);
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (ort == NULL) {
    fprintf(stderr, "expected a library of ONNX Runtime 1.%d or later, as its headers, got %s\n", ORT_API_VERSION, OrtGetApiBase()->GetVersionString());
    exit(1);
  }
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "decode", &environment));
  check(ort->CreateSessionOptions(&options));
  check(ort->AddSessionConfigEntry(options, "session.set_denormal_as_zero", "1"));  // subnormal numbers are slow
  check(ort->CreateSession(environment, path, options, &session));
  ort->ReleaseSessionOptions(options);
  return session;
}

// Creates the states of a row without tokens.
static void empty(OrtValue** states) {
  states[0] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[1] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[2] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[3] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[4] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[5] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[6] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[7] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[8] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
  states[9] = zeros(FLOAT, SIZES(1, 2, CAPACITY, 32));
}

// Feeds x [count], new tokens of a row that holds `held` tokens. Replaces `states`, and returns the logits of the last token: the caller releases it.
static OrtValue* call(OrtSession* session, OrtValue** states, const int64_t* x, int64_t count, int64_t held) {
  if (count < 1) {
    fprintf(stderr, "expected at least one token, got none\n");
    exit(1);
  }
  if (held + count > POSITIONS) {
    fprintf(stderr, "expected positions 0 .. %d, got %lld .. %lld\n", POSITIONS - 1, (long long)(held), (long long)(held + count - 1));
    exit(1);
  }
  for (int64_t i = 0; i < count; ++i)
    if (x[i] < 0 || x[i] >= VOCABULARY) {
      fprintf(stderr, "expected token ids 0 .. %d, got %lld\n", VOCABULARY - 1, (long long)x[i]);
      exit(1);
    }
  if (held + count > CAPACITY) {
    fprintf(stderr, "expected at most %d tokens in a row (CAPACITY), got %lld\n", CAPACITY, (long long)(held + count));
    exit(1);
  }
  OrtValue *inputs[FEEDS + STATES], *outputs[1 + STATES] = {NULL};
  inputs[0] = copied(INT64, x, SIZES(1, count));
  inputs[1] = integers(INT64, count - 1, 0, SIZES(1, 1));
  inputs[2] = integers(INT32, held + count - 1, 0, SIZES(1));
  inputs[3] = integers(INT32, held + count, 0, NULL, 0);
  memcpy(inputs + FEEDS, states, sizeof(OrtValue*) * STATES);
  check(ort->Run(session, NULL, INPUTS, (const OrtValue* const*)inputs, FEEDS + STATES, OUTPUTS, 1 + STATES, outputs));
  for (int i = 0; i < FEEDS + STATES; ++i) ort->ReleaseValue(inputs[i]);
  memcpy(states, outputs + 1, sizeof(OrtValue*) * STATES);
  return outputs[0];
}

// Returns the token id that an argument gives; -1, which calls refuse, for other text.
static int64_t token_of(const char* text) {
  char* end;
  const long long token = strtoll(text, &end, 10);
  return end == text || *end ? -1 : token;
}

// Greedy decoding.
int main(int count_of_arguments, char** arguments) {
  if (count_of_arguments < 4) {
    fprintf(stderr, "decode FOLDER COUNT TOKEN...\n");
    return 2;
  }
  OrtSession* session = load(arguments[1]);
  OrtValue* states[STATES];
  int64_t count = count_of_arguments - 3, held = 0;
  int64_t* tokens = malloc(sizeof(int64_t) * (size_t)count);
  for (int64_t i = 0; i < count; ++i) tokens[i] = token_of(arguments[3 + i]);
  empty(states);
  for (int remaining = atoi(arguments[2]); remaining > 0; --remaining) {
    OrtValue* logits = call(session, states, tokens, count, held);
    const size_t words = entries_of(logits) / (size_t)1, last = entries_of(logits) - words;
    int64_t best = 0;
    for (size_t word = 1; word < words; ++word)
      if (number(logits, last + word) > number(logits, last + (size_t)best)) best = (int64_t)word;
    printf("%lld ", (long long)best);
    ort->ReleaseValue(logits);
    held += count;
    count = 1;
    tokens[0] = best;
  }
  printf("\n");
  free(tokens);
  for (int i = 0; i < STATES; ++i) ort->ReleaseValue(states[i]);
  ort->ReleaseSession(session);
  ort->ReleaseEnv(environment);
}
