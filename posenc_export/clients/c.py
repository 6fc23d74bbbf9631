"""Write a program in C for greedy decoding with the C API of ONNX Runtime."""

from string import Template
from typing import Dict, List

from posenc_export.clients.states import capacity, heading
from posenc_export.runtime.artefact.manifest import Manifest, State

# By graph input: its value for a call with `count` tokens on one row that holds `held` tokens, the first of them at position 0.
FEEDS: Dict[str, str] = {
    "input_ids": "copied(tokens, SIZES(1, count))",
    "position_ids": "integers(INT64, held, 1, SIZES(1, count))",
    "attention_mask": "integers(INT64, 1, 0, SIZES(1, held + count))",
    "logits_index": "integers(INT64, count - 1, 0, SIZES(1, 1))",
    "cache_position": "integers(INT64, held, 1, SIZES(1, count))",
    "first_position": "integers(INT64, 0, 0, SIZES(1, 1))",
    "seqlens_k": "integers(INT32, held + count - 1, 0, SIZES(1))",
    "total_sequence_length": "integers(INT32, held + count, 0, NULL, 0)",
    "slots": "integers(INT64, 0, 1, SIZES(held + count))",
}
DTYPES = {"float32": "FLOAT", "float16": "FLOAT16", "int64": "INT64", "int32": "INT32", "int8": "INT8"}
PROGRAM = Template("""// Run model.onnx with the C API of ONNX Runtime alone. Written by `posenc inspect FOLDER --runtime c`.
//
$heading
//
// R is the folder of a release of ONNX Runtime, with headers and library:
// gcc -O2 decode.c -o decode -I$$R/include -L$$R/lib -Wl,-rpath,$$R/lib -lonnxruntime
// ./decode FOLDER 16 100 101 102   (16 tokens after a prompt of three)

#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

$constants#define SIZES(...) (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)
#define FLOAT ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
#define FLOAT16 ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
#define INT8 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
#define INT32 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
#define INT64 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
enum { FEEDS = $feed_count, STATES = $state_count };

// Inputs: those of the call, then the states. Outputs: the logits, then the new states.
static const char* const INPUTS[] = {
$inputs};
static const char* const OUTPUTS[] = {
$outputs};

static const OrtApi* ort;

static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\\n", ort->GetErrorMessage(status));
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

static OrtValue* copied(const int64_t* tokens, const int64_t* sizes, size_t rank) {
  OrtValue* value = zeros(INT64, sizes, rank);
  memcpy(data_of(value), tokens, entries_of(value) * sizeof *tokens);
  return value;
}

static float number(const void* logits, size_t index) {
$number}

int main(int count_of_arguments, char** arguments) {
  if (count_of_arguments < 4) {
    fprintf(stderr, "decode FOLDER COUNT TOKEN...\\n");
    return 2;
  }
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  OrtEnv* environment;
  OrtSessionOptions* options;
  OrtSession* session;
  char path[4096];
  snprintf(path, sizeof path, "%s/model.onnx", arguments[1]);
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "decode", &environment));
  check(ort->CreateSessionOptions(&options));
  check(ort->AddSessionConfigEntry(options, "session.set_denormal_as_zero", "1"));  // subnormal numbers are slow
  check(ort->CreateSession(environment, path, options, &session));

  int64_t count = count_of_arguments - 3, held = 0;
  int64_t* tokens = malloc(sizeof(int64_t) * (size_t)count);
  for (int64_t i = 0; i < count; ++i) tokens[i] = atoll(arguments[3 + i]);
  OrtValue *inputs[FEEDS + STATES], *outputs[1 + STATES];
$states
  for (int remaining = atoi(arguments[2]); remaining > 0; --remaining) {
$feeds    memset(outputs, 0, sizeof outputs);
    check(ort->Run(session, NULL, INPUTS, (const OrtValue* const*)inputs, FEEDS + STATES, OUTPUTS, 1 + STATES, outputs));
    const size_t words = entries_of(outputs[0]) / (size_t)$rows, last = entries_of(outputs[0]) - words;
    int64_t best = 0;
    for (size_t word = 1; word < words; ++word)
      if (number(data_of(outputs[0]), last + word) > number(data_of(outputs[0]), last + (size_t)best)) best = (int64_t)word;
    printf("%lld ", (long long)best);
    for (int i = 0; i < FEEDS + STATES; ++i) ort->ReleaseValue(inputs[i]);
    ort->ReleaseValue(outputs[0]);
    memcpy(inputs + FEEDS, outputs + 1, sizeof(OrtValue*) * STATES);
    held += count;
    count = 1;
    tokens[0] = best;
$stop  }
  printf("\\n");
  for (int i = FEEDS; i < FEEDS + STATES; ++i) ort->ReleaseValue(inputs[i]);
  free(tokens);
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  ort->ReleaseEnv(environment);
}
""")
NUMBERS = {
    "float32": "  return ((const float*)logits)[index];\n",
    "float16": "  return (float)((const _Float16*)logits)[index];\n",
}


def program(manifest: Manifest) -> str:
    """Return the text of the program.

    Raises:
        ValueError: the model is not a decoder.
    """
    if manifest.kind != "decoder":
        raise ValueError(f"inspect: expected a decoder for --runtime c, got a model of kind {manifest.kind}; print it for python or libtorch")
    names = [value.name for value in manifest.inputs]
    slots = capacity(manifest)
    return PROGRAM.substitute(
        heading="\n".join(f"// {line}" for line in heading(manifest)),
        constants=f"#define CAPACITY {slots}  // slots of the caches: the limit of a row's tokens; can be set up to {manifest.max_positions}\n" if slots else "",
        feed_count=len(names),
        state_count=len(manifest.states),
        inputs=_quoted([*names, *(state.past for state in manifest.states)]),
        outputs=_quoted([manifest.outputs[0].name, *(state.present for state in manifest.states)]),
        number=NUMBERS[manifest.dtype],
        rows="1" if manifest.input("logits_index") else "count",
        states="".join(f"  {_state(state, len(names) + index)}\n" for index, state in enumerate(manifest.states)),
        feeds="".join(f"    inputs[{index}] = {FEEDS[name]};\n" for index, name in enumerate(names)),
        stop="".join(f"    if (best == {stop}) break;\n" for stop in manifest.stop_ids),
    )


def _quoted(names: List[str]) -> str:
    return "".join(f'    "{name}",\n' for name in names)


def _state(state: State, index: int) -> str:
    slots = {"append": "0", "in_place": "CAPACITY", "replace": "1"}[state.update]
    sizes = ", ".join(["1", *(slots if isinstance(axis, str) else str(axis) for axis in state.axes[1:])])
    if state.fill:
        return f"inputs[{index}] = integers({DTYPES[state.dtype]}, {state.fill}, 0, SIZES({sizes}));"
    return f"inputs[{index}] = zeros({DTYPES[state.dtype]}, SIZES({sizes}));"
