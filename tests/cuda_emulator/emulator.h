// Runs CUDA C++ on the host, for tests: one fibre is one CUDA thread.
//
// Kernel sources are compiled as plain C++20 with `-include emulator.h`. NVIDIA's own headers serve
// for types (dim3, __nv_bfloat16); this file replaces the keywords and the built-in functions.
//
//   * One OS thread. Fibres switch only at barriers and warp collectives, blocks run one after
//     the other. CLUSTERKV_EMULATOR_SEED shuffles the order of both.
//   * Dynamic shared memory is a heap block of exactly the size asked for, filled with NaN.
//   * Asynchronous copies reach shared memory only when they are waited for.
//   * Reported with file, line and thread: barriers that only some threads reach, collectives
//     whose lanes are missing or meet at different places, deadlocks.
//   * AddressSanitizer and ThreadSanitizer know the fibres. Threads are ordered by __syncthreads
//     and __syncwarp alone, so a missing one is a race.
//
// Not modelled: memory order between blocks, bank conflicts, occupancy, time, fast-math rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#define CLUSTERKV_EMULATED 1

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__

namespace emulator {

struct Place {
  const char* file;
  int line;
};

// What a lane hands to its warp: at most 16 bytes.
struct Word {
  uint64_t low = 0, high = 0;
};

struct AsyncCopy {
  void* target;
  Word value;
  int group;
};

// The built-in variables of the running CUDA thread.
struct Thread {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
  unsigned lane, warp;
  std::vector<AsyncCopy> copies;
  int copy_group = 0;
};

extern Thread* current;

[[noreturn]] void fail(Place place, const char* format, ...);
void* dynamic_shared();
void fence();
void block_barrier(Place place);
int block_sum(Place place, int value);
unsigned active_mask();

enum class Collective { kSync, kShuffle, kVote, kMatch, kReduce };

// Where the lanes of a mask meet: the words of all of them, until the last one has read them.
struct Meeting {
  unsigned mask = 0, arrived = 0, unread = 0;
  Collective kind{};
  unsigned width = 0;
  Place place{};
  Word words[32];
  char sync = 0;
};

Meeting* meet(Place place, Collective kind, unsigned mask, Word word, unsigned width);
void leave(Meeting* meeting);

// The words of a meeting while one lane reads them.
class Exchange {
 public:
  template <class T>
  Exchange(Place place, Collective kind, unsigned mask, const T& value, unsigned width = 32) {
    static_assert(sizeof(T) <= sizeof(Word) && std::is_trivially_copyable_v<T>);
    Word word;
    std::memcpy(static_cast<void*>(&word), &value, sizeof(T));
    meeting_ = meet(place, kind, mask, word, width);
  }
  ~Exchange() { leave(meeting_); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  template <class T>
  T of(unsigned lane) const {
    T value;
    std::memcpy(static_cast<void*>(&value), &meeting_->words[lane], sizeof(T));
    return value;
  }

 private:
  Meeting* meeting_;
};

using Body = void (*)(void*);
void run(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Body body, void* argument);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, cudaStream_t, Arguments&&... arguments) {
  std::tuple<std::decay_t<Parameters>...> bound(static_cast<Parameters>(arguments)...);
  auto call = [&] { std::apply(kernel, bound); };
  using Call = decltype(call);
  run(name, grid, block, shared_bytes, [](void* self) { (*static_cast<Call*>(self))(); }, &call);
}

// -- warp collectives --------------------------------------------------------------------------

inline void syncwarp(Place place, unsigned mask = 0xffffffffu) {
  Exchange(place, Collective::kSync, mask, 0);
}

template <class T>
T read_lane(Place place, unsigned mask, T value, int source, unsigned width) {
  const Exchange words(place, Collective::kShuffle, mask, value, width);
  if (!(mask >> source & 1)) fail(place, "shuffle reads lane %d, not in mask %08x", source, mask);
  return words.of<T>(unsigned(source));
}

template <class T>
T shuffle(Place place, unsigned mask, T value, int source, int width = 32) {
  const int first = int(current->lane) & ~(width - 1);
  return read_lane(place, mask, value, first + (source & (width - 1)), unsigned(width));
}

template <class T>
T shuffle_up(Place place, unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = int(current->lane), first = lane & ~(width - 1);
  const int source = lane - int(delta) < first ? lane : lane - int(delta);
  return read_lane(place, mask, value, source, unsigned(width));
}

template <class T>
T shuffle_down(Place place, unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = int(current->lane), end = (lane & ~(width - 1)) + width;
  const int source = lane + int(delta) >= end ? lane : lane + int(delta);
  return read_lane(place, mask, value, source, unsigned(width));
}

template <class T>
T shuffle_xor(Place place, unsigned mask, T value, int bits, int width = 32) {
  return read_lane(place, mask, value, int(current->lane) ^ bits, unsigned(width));
}

inline unsigned ballot(Place place, unsigned mask, int predicate) {
  const Exchange words(place, Collective::kVote, mask, predicate != 0 ? 1 : 0);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && words.of<int>(i)) result |= 1u << i;
  }
  return result;
}

template <class T>
unsigned match_any(Place place, unsigned mask, T value) {
  const Exchange words(place, Collective::kMatch, mask, value);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && words.of<T>(i) == value) result |= 1u << i;
  }
  return result;
}

// The words of the whole warp, for device functions whose PTX needs other lanes' registers.
template <class T>
Exchange all_lanes(Place place, const T& value) {
  return Exchange(place, Collective::kShuffle, 0xffffffffu, value);
}

// -- asynchronous copies -----------------------------------------------------------------------

inline void copy_async(void* target, const void* source) {
  AsyncCopy copy{target, {}, current->copy_group};
  std::memcpy(static_cast<void*>(&copy.value), source, sizeof(Word));
  current->copies.push_back(copy);
}

// Completes every group but the last `pending` ones.
inline void copy_async_wait(int pending) {
  std::vector<AsyncCopy> later;
  for (const AsyncCopy& copy : current->copies) {
    if (copy.group < current->copy_group - pending) {
      std::memcpy(copy.target, &copy.value, sizeof(Word));
    } else {
      later.push_back(copy);
    }
  }
  current->copies.swap(later);
}

// -- atomics: relaxed, so that they order nothing for ThreadSanitizer ---------------------------

template <class T, class F>
T read_modify_write(T* address, F change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  Bits* bits = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  T value;
  do {
    std::memcpy(&value, &before, sizeof(T));
    const T changed = change(value);
    std::memcpy(&after, &changed, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return value;
}

}  // namespace emulator

#define EMULATOR_PLACE (::emulator::Place{__FILE__, __LINE__})
#define threadIdx (::emulator::current->thread_index)
#define blockIdx (::emulator::current->block_index)
#define blockDim (::emulator::current->block_size)
#define gridDim (::emulator::current->grid_size)
#define __syncthreads() ::emulator::block_barrier(EMULATOR_PLACE)
#define __syncthreads_count(p) ::emulator::block_sum(EMULATOR_PLACE, (p) ? 1 : 0)
#define __syncthreads_or(p) (::emulator::block_sum(EMULATOR_PLACE, (p) ? 1 : 0) != 0)
#define __syncwarp(...) ::emulator::syncwarp(EMULATOR_PLACE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) ::emulator::shuffle(EMULATOR_PLACE, __VA_ARGS__)
#define __shfl_up_sync(...) ::emulator::shuffle_up(EMULATOR_PLACE, __VA_ARGS__)
#define __shfl_down_sync(...) ::emulator::shuffle_down(EMULATOR_PLACE, __VA_ARGS__)
#define __shfl_xor_sync(...) ::emulator::shuffle_xor(EMULATOR_PLACE, __VA_ARGS__)
#define __ballot_sync(mask, p) ::emulator::ballot(EMULATOR_PLACE, mask, p)
#define __any_sync(mask, p) (::emulator::ballot(EMULATOR_PLACE, mask, p) != 0)
#define __all_sync(mask, p) (::emulator::ballot(EMULATOR_PLACE, mask, p) == (mask))
#define __match_any_sync(mask, v) ::emulator::match_any(EMULATOR_PLACE, mask, v)
#define __activemask() ::emulator::active_mask()

inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() { emulator::fence(); }

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return T(old + v); });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return old > v ? old : v; });
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return old < v ? old : v; });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return T(old | v); });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [=](T old) { return old == expected ? v : old; });
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a < b ? b : a; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
