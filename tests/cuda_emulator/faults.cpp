// Faulty kernels, one a name: the emulator or a sanitizer must report each of them.
#include <cstdio>
#include <stdexcept>
#include <string>

#include "device.cuh"

namespace {

__global__ void divergent_barrier() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void barrier_after_exit() {
  if (threadIdx.x < 16) return;
  __syncthreads();
}

__global__ void missing_lane(int* out) {
  if (threadIdx.x != 3) out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 0);
}

__global__ void lane_at_a_barrier(int* out) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 0);
    __syncthreads();
  }
}

__global__ void lane_outside_its_mask(int* out) {
  out[threadIdx.x] = __shfl_sync(0x0000ffffu, int(threadIdx.x), 0);
}

__global__ void shuffle_from_outside_the_mask(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, int(threadIdx.x), 20);
}

__global__ void different_collectives(int* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 0);
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 1);
  }
}

__global__ void copy_that_nobody_waits_for(const float* in) {
  CLUSTERKV_SHARED(memory);
  if (threadIdx.x == 0) clusterkv::copy_async(memory, in);
}

__global__ void out_of_shared_memory() {
  CLUSTERKV_SHARED(memory);
  memory[threadIdx.x + 1] = 0;
}

__global__ void out_of_global_memory(int* out) { out[threadIdx.x + 1] = 0; }

__global__ void race(int* out) {
  CLUSTERKV_SHARED(memory);
  int* numbers = reinterpret_cast<int*>(memory);
  numbers[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = numbers[63 - threadIdx.x];
}

__global__ void race_inside_a_warp(int* out) {
  CLUSTERKV_SHARED(memory);
  int* numbers = reinterpret_cast<int*>(memory);
  numbers[threadIdx.x] = int(threadIdx.x);
  __shfl_sync(0xffffffffu, 0, 0);  // orders nothing
  out[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

__global__ void no_fault(int* out) {
  CLUSTERKV_SHARED(memory);
  int* numbers = reinterpret_cast<int*>(memory);
  numbers[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  const int value = numbers[63 - threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, value, 1);
}

void run(const std::string& fault) {
  int* out = new int[64];
  float in[4] = {};
  const auto with_out = [&](void (*kernel)(int*), unsigned threads, size_t shared) {
    emulator::launch(fault.c_str(), kernel, dim3(1), dim3(threads), shared, nullptr, out);
  };
  if (fault == "divergent_barrier") CLUSTERKV_LAUNCH(divergent_barrier, 1, 32, 0, nullptr);
  if (fault == "barrier_after_exit") CLUSTERKV_LAUNCH(barrier_after_exit, 1, 32, 0, nullptr);
  if (fault == "missing_lane") with_out(missing_lane, 32, 0);
  if (fault == "lane_at_a_barrier") with_out(lane_at_a_barrier, 32, 0);
  if (fault == "lane_outside_its_mask") with_out(lane_outside_its_mask, 32, 0);
  if (fault == "shuffle_from_outside_the_mask") with_out(shuffle_from_outside_the_mask, 32, 0);
  if (fault == "different_collectives") with_out(different_collectives, 32, 0);
  if (fault == "copy_that_nobody_waits_for") {
    CLUSTERKV_LAUNCH(copy_that_nobody_waits_for, 1, 32, 16, nullptr, in);
  }
  if (fault == "out_of_shared_memory") CLUSTERKV_LAUNCH(out_of_shared_memory, 1, 32, 32, nullptr);
  if (fault == "out_of_global_memory") with_out(out_of_global_memory, 64, 0);
  if (fault == "race") with_out(race, 64, 256);
  if (fault == "race_inside_a_warp") with_out(race_inside_a_warp, 64, 256);
  if (fault == "no_fault") with_out(no_fault, 64, 256);
  delete[] out;
}

}  // namespace

int main(int, char** arguments) {
  try {
    run(arguments[1]);
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 3;
  }
}
