// Errors of the operator, and tensors of ONNX Runtime as sizes and numbers.
#pragma once

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>

#include "onnxruntime_api.h"

namespace posenc {

extern const OrtApi* api;  // of the runtime that registered the library

constexpr const char* NAME = "CachedAttention";
constexpr int64_t MOST = int64_t{1} << 48;  // product of the sizes of a tensor, zeros left out

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

inline void ok(OrtStatus* status) {
  if (status) throw Failed{status};
}

inline void expect(bool holds, const std::string& rule, const char* op = NAME) {
  if (!holds) throw Refused(std::string(op) + ": expected " + rule);
}

inline std::string text(int64_t number) { return std::to_string(number); }

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

// An input or output: its sizes and numbers. Without numbers if it is left out. No product of some of
// its sizes overflows.
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

inline Tensor opened(OrtValue* value, OrtElementType wanted, const char* name,
                     const char* op = NAME) {
  Tensor tensor;
  if (!value) return tensor;
  int element = 0;
  ok(api->GetTensorElementTypeAndShapeDataReference(value, &element, &tensor.sizes, &tensor.rank));
  expect(element == wanted, std::string(name) + " of the element type of the operator", op);
  int64_t product = 1;
  for (size_t i = 0; i < tensor.rank; i++)
    if (__builtin_mul_overflow(product, std::max<int64_t>(1, tensor.sizes[i]), &product) ||
        product > MOST)
      expect(false, std::string(name) + " with sizes of a product up to 2^48", op);
  ok(api->GetTensorMutableData(value, &tensor.data));
  return tensor;
}

}  // namespace posenc
