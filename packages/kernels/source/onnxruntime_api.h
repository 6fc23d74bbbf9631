// The part of ONNX Runtime's C API that a custom operator of the CPU needs (onnxruntime_c_api.h).
//
// OrtApi is a table of functions to which every release appends; slots never move. Each function
// is declared with the number of its slot, and the slots between are left out.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtCustomOpDomain;
struct OrtSessionOptions;
struct OrtCustomOp;

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtElementType { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT8 = 3, ORT_INT32 = 6, ORT_INT64 = 7, ORT_FLOAT16 = 10 };
enum OrtCharacteristic { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };
enum OrtMemType { ORT_MEM_DEFAULT = 0 };

constexpr uint32_t ORT_API_VERSION = 24;  // of ONNX Runtime 1.24, with the last slot below

struct OrtApi {
  OrtStatus* (*CreateStatus)(int code, const char* message);                       // 0
  int (*GetErrorCode)(const OrtStatus*);                                           // 1
  const char* (*GetErrorMessage)(const OrtStatus*);                                // 2
  void* slots_3_25[23];
  OrtStatus* (*CreateCustomOpDomain)(const char* name, OrtCustomOpDomain**);       // 26
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const OrtCustomOp*);        // 27
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);         // 28
  void* slots_29_50[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);                           // 51
  void* slots_52_84[33];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo*, const char*, float*);      // 85
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo*, const char*, int64_t*);    // 86
  void* slot_87;
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext*, size_t*);                // 88
  OrtStatus* (*KernelContext_GetOutputCount)(const OrtKernelContext*, size_t*);               // 89
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t, const OrtValue**);    // 90
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t, const int64_t* sizes,
                                        size_t rank, OrtValue**);                             // 91
  void* slot_92;
  void (*ReleaseStatus)(OrtStatus*);                                                          // 93
  void* slots_94_229[136];
  OrtStatus* (*KernelInfo_GetInputCount)(const OrtKernelInfo*, size_t*);                      // 230
  void* slots_231_248[18];
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo*, size_t index,
                                                  int* is_constant, const OrtValue**);        // 249
  void* slots_250_273[24];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext*, void (*)(void*, size_t),
                                          size_t total, size_t batches, void* data);          // 274
  void* slots_275_413[139];
  OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(const OrtValue*, int* element,
                                                          const int64_t** sizes,
                                                          size_t* rank);                      // 414
};

#define POSENC_SLOT(function, number) \
  static_assert(offsetof(OrtApi, function) == (number) * sizeof(void*), #function)
POSENC_SLOT(CreateCustomOpDomain, 26);
POSENC_SLOT(AddCustomOpDomain, 28);
POSENC_SLOT(GetTensorMutableData, 51);
POSENC_SLOT(KernelInfoGetAttribute_float, 85);
POSENC_SLOT(KernelContext_GetInputCount, 88);
POSENC_SLOT(KernelContext_GetInput, 90);
POSENC_SLOT(ReleaseStatus, 93);
POSENC_SLOT(KernelInfo_GetInputCount, 230);
POSENC_SLOT(KernelInfoGetConstantInput_tensor, 249);
POSENC_SLOT(KernelContext_ParallelFor, 274);
POSENC_SLOT(GetTensorElementTypeAndShapeDataReference, 414);
#undef POSENC_SLOT

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null for a version that this release lacks
  const char* (*GetVersionString)();
};

constexpr uint32_t ORT_CUSTOM_OP_VERSION = 18;  // the release that added the last field used below

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  void* variadic[4];
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  void* InferOutputShapeFn;
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  void* alias[2];
};
static_assert(sizeof(OrtCustomOp) == 26 * sizeof(void*), "OrtCustomOp");

}  // extern "C"
