// What the kernels need beyond plain C++: launches, shared memory, element types, asynchronous
// copies and warp reductions. No torch header, so a kernel compiles in seconds. The same text also
// runs on the host, in the emulator of tests/cuda_emulator (CLUSTERKV_EMULATED).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef CLUSTERKV_EMULATED
#define CLUSTERKV_SHARED(name) \
  unsigned char* const name = static_cast<unsigned char*>(::emulator::dynamic_shared())
#define CLUSTERKV_LAUNCH(kernel, ...) ::emulator::launch(#kernel, kernel, __VA_ARGS__)
#else
#define CLUSTERKV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define CLUSTERKV_LAUNCH(kernel, ...) ::clusterkv::launch(kernel, __VA_ARGS__)
#endif

namespace clusterkv {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kMaxHeadDim = 256;
// Dynamic shared memory that every architecture gives to a block (sm_120 has the least).
constexpr size_t kMaxSharedBytes = 96 << 10;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

#ifndef CLUSTERKV_EMULATED
// A kernel that wants more than 48 KiB has to say so before its launch.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > (48 << 10)) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                         cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  }
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
}
#endif

// Rows of `head_dim` contiguous elements at [batch, head, token]; strides in elements.
template <class T>
struct Rows {
  T* data;
  int64_t batch_stride, head_stride, token_stride;

  __device__ T* at(int batch, int head, int64_t token) const {
    return data + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// 16 bytes: what one thread loads, stores or copies at once.
template <class T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// -- asynchronous copies from global to shared memory (sm_80 and later) -------------------------

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#ifdef CLUSTERKV_EMULATED
  emulator::copy_async(shared, global);
#else
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void copy_async_commit() {
#ifdef CLUSTERKV_EMULATED
  ++emulator::current->copy_group;
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for the calling thread's groups, but for the `kPending` youngest. A barrier must follow
// before other threads' copies are read.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#ifdef CLUSTERKV_EMULATED
  emulator::copy_async_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// -- reductions and scans ------------------------------------------------------------------------

// The sum over groups of `kWidth` neighbouring lanes, in every lane. The order of additions is
// fixed.
template <int kWidth = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kFullMask, x, distance);
  }
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, distance));
  }
  return x;
}

// The sum over the block, in every thread. Every thread of a block of whole warps must call it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warp[32];
  x = warp_sum(x);
  __syncthreads();  // readers of an earlier call have finished
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += of_warp[i];
  return sum;
}

__device__ __forceinline__ float block_max(float x) {
  __shared__ float of_warp[32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float largest = of_warp[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) largest = fmaxf(largest, of_warp[i]);
  return largest;
}

// The sum of `x` over the threads before this one; `*total` is the sum over the block.
__device__ __forceinline__ int block_exclusive_sum(int x, int* total) {
  __shared__ int of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kFullMask, inclusive, distance);
    if (lane >= distance) inclusive += below;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  int before = 0, sum = 0;
  for (int i = 0; i < int(blockDim.x / 32); ++i) {
    before += i < warp ? of_warp[i] : 0;
    sum += of_warp[i];
  }
  *total = sum;
  return before + inclusive - x;
}

}  // namespace clusterkv
