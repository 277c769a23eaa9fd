// Checks of operator arguments, and strided views of tensors that passed them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "../half.h"

namespace clusterkv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxHeadDim = 256;

// Rows of D neighbouring elements at [b, h, i]; a 3-dimensional tensor is one row at [b, h].
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_i = 0;

  T* at(int64_t b, int64_t h, int64_t i = 0) const {
    return data + b * stride_b + h * stride_h + i * stride_i;
  }
};

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

// `shape` with -1 for a size that is free.
inline void check_shape(const Tensor& tensor, const char* name,
                        std::initializer_list<int64_t> shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (int64_t size : shape) {
    if (!fits) break;
    fits = size < 0 || tensor.size(axis) == size;
    ++axis;
  }
  if (fits) return;
  std::string expected;
  for (int64_t size : shape)
    expected +=
        (expected.empty() ? "" : ", ") + (size < 0 ? std::string("*") : std::to_string(size));
  STD_TORCH_CHECK(false, name, ": expected shape [", expected, "], got ", shape_of(tensor));
}

inline void check_type(const Tensor& tensor, const char* name, ScalarType type,
                       const char* type_name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, ": expected a CPU tensor, got another device");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": expected dtype ", type_name,
                  ", got scalar type ", static_cast<int>(tensor.scalar_type()));
}

// A view of a tensor of 3 or 4 dimensions whose last one is contiguous.
template <class T>
Rows<T> rows_of(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1, name,
                  ": expected stride 1 in the last dimension, got ", tensor.stride(last));
  T* data = static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
  return {data, tensor.stride(0), last > 1 ? tensor.stride(1) : 0, last > 2 ? tensor.stride(2) : 0};
}

// An int32 tensor of a known shape, as rows.
inline Rows<int32_t> index_rows(const Tensor& tensor, const char* name,
                                std::initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_type(tensor, name, ScalarType::Int, "int32");
  return rows_of<int32_t>(tensor, name);
}

inline Rows<float> float_rows(const Tensor& tensor, const char* name,
                              std::initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_type(tensor, name, ScalarType::Float, "float32");
  return rows_of<float>(tensor, name);
}

inline void check_head_dim(int64_t head_dim) {
  STD_TORCH_CHECK(0 < head_dim && head_dim <= kMaxHeadDim, "head_dim: expected 1 to ", kMaxHeadDim,
                  ", got ", head_dim);
}

// Token positions are int32.
inline void check_kv_len(int64_t kv_len) {
  STD_TORCH_CHECK(kv_len < INT32_MAX, "keys: expected fewer than 2^31 tokens, got ", kv_len);
}

// Calls f with a null pointer of the element type: float, BF16 or FP16.
template <class F>
void dispatch_floating(const Tensor& tensor, const char* name, const F& f) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, ": expected a CPU tensor, got another device");
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<BF16*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<FP16*>(nullptr));
    default:
      STD_TORCH_CHECK(false, name,
                      ": expected dtype float32, bfloat16 or float16, got scalar type ",
                      static_cast<int>(tensor.scalar_type()));
  }
}

}  // namespace clusterkv
