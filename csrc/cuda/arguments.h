// Checks of operator arguments on the host, and what a launcher passes on: pointers, strides, the
// current stream. In the emulator's build the same launchers take CPU tensors.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <climits>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

#include "device.cuh"

#ifdef CLUSTERKV_EMULATED
#define CLUSTERKV_LIBRARY clusterkv_emulated
#define CLUSTERKV_DISPATCH_KEY CPU
#else
#define CLUSTERKV_LIBRARY clusterkv
#define CLUSTERKV_DISPATCH_KEY CUDA
#endif

namespace clusterkv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The tensor's device is current as long as this lives; `stream` is torch's current one there.
class Device {
 public:
#ifdef CLUSTERKV_EMULATED
  explicit Device(const Tensor&) {}
  void check_launch() const {}
#else
  explicit Device(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
  void check_launch() const { STD_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;

 public:
#endif
  cudaStream_t stream = nullptr;
};

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

// The tensor's shape and its device; -1 is a free size.
inline void check_shape(const Tensor& tensor, const char* name,
                        std::initializer_list<int64_t> shape) {
  bool is_good = tensor.dim() == int64_t(shape.size());
  std::string expected;
  int64_t axis = 0;
  for (const int64_t size : shape) {
    is_good = is_good && (size < 0 || tensor.size(axis) == size);
    expected += (axis > 0 ? ", " : "") + (size < 0 ? std::string("*") : std::to_string(size));
    ++axis;
  }
  STD_TORCH_CHECK(is_good, name, ": expected shape [", expected, "], got ", shape_of(tensor));
#ifndef CLUSTERKV_EMULATED
  STD_TORCH_CHECK(tensor.is_cuda(), name, ": expected a CUDA tensor, got another device");
#endif
}

inline void check_type(const Tensor& tensor, const char* name, ScalarType type) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": expected scalar type ", int(type),
                  ", got ", int(tensor.scalar_type()));
}

inline void check_head_dim(int64_t head_dim) {
  STD_TORCH_CHECK(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim: expected 1 to ", kMaxHeadDim,
                  ", got ", head_dim);
}

// Positions and counts are int32.
inline void check_fits_int(int64_t size, const char* name) {
  STD_TORCH_CHECK(size < INT_MAX, name, ": expected fewer than 2^31, got ", size);
}

// A view of [.., .., .., D] whose last dimension is contiguous; with three dimensions, of rows
// that are numbers or lists at [batch, head].
template <class T>
Rows<T> rows_of(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1, name,
                  ": expected stride 1 in the last dimension, got ", tensor.stride(last));
  auto* data =
      static_cast<T*>(const_cast<void*>(static_cast<const void*>(tensor.const_data_ptr())));
  return {data, tensor.stride(0), tensor.stride(1), last > 2 ? tensor.stride(2) : 0};
}

// Whether every row of the view starts at a multiple of 16 bytes.
template <class T>
bool is_aligned(const Rows<T>& rows) {
  const int64_t strides = rows.batch_stride | rows.head_stride | rows.token_stride;
  return (reinterpret_cast<uintptr_t>(rows.data) | uintptr_t(strides) * sizeof(T)) % 16 == 0;
}

// An int32 tensor of a shape, contiguous: a copy only where it wasn't.
inline Tensor int_tensor(const Tensor& tensor, const char* name,
                         std::initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_type(tensor, name, ScalarType::Int);
  return torch::stable::contiguous(tensor);
}

inline const int* int_data(const Tensor& tensor) {
  return static_cast<const int*>(tensor.const_data_ptr());
}

// New tensors on the device of `like`. The shape has its own variable: nvcc turns a braced list
// that is converted inside a call into host code that doesn't compile.
inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape,
                         ScalarType type) {
  const torch::headeronly::IntHeaderOnlyArrayRef sizes(shape.begin(), shape.size());
  return torch::stable::new_empty(like, sizes, type);
}

inline Tensor new_zeros(const Tensor& like, std::initializer_list<int64_t> shape) {
  const torch::headeronly::IntHeaderOnlyArrayRef sizes(shape.begin(), shape.size());
  return torch::stable::new_zeros(like, sizes, ScalarType::Int);
}

inline Tensor new_ints(const Tensor& like, std::initializer_list<int64_t> shape) {
  return new_tensor(like, shape, ScalarType::Int);
}

inline Tensor new_floats(const Tensor& like, std::initializer_list<int64_t> shape) {
  return new_tensor(like, shape, ScalarType::Float);
}

inline Tensor new_bytes(const Tensor& like, int64_t bytes) {
  return new_tensor(like, {bytes}, ScalarType::Byte);
}

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls f with a null pointer to the element type.
template <class F>
auto dispatch_floating(const Tensor& tensor, const char* name, const F& f) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<__half*>(nullptr));
    default:
      STD_TORCH_CHECK(false, name, ": expected float32, bfloat16 or float16, got scalar type ",
                      int(tensor.scalar_type()));
  }
  return f(static_cast<float*>(nullptr));
}

}  // namespace clusterkv
