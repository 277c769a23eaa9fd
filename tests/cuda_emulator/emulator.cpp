// The scheduler behind emulator.h: fibres, barriers, meetings of warps, and their diagnosis.
//
// Always built without ThreadSanitizer's instrumentation (with EMULATOR_TSAN to drive its fibres),
// so that the scheduler's own bookkeeping is invisible to it.
#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// Saves the callee-saved registers and the stack pointer, and goes on with another stack.
#if !defined(__x86_64__)
#error "the emulator switches fibres with x86-64 code"
#endif
asm(R"(.text
.globl clusterkv_emulator_switch
.type clusterkv_emulator_switch,@function
clusterkv_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size clusterkv_emulator_switch,.-clusterkv_emulator_switch
)");
extern "C" void clusterkv_emulator_switch(void** save_stack_pointer, void* stack_pointer);

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;

enum class State { kReady, kAtBarrier, kAtMeeting, kExited };

struct Fibre : Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  State state = State::kExited;
  Place place{};
  unsigned barriers = 0;
  int value = 0;
  [[maybe_unused]] void* tsan = nullptr;
  [[maybe_unused]] void* asan = nullptr;
};

// A lane waits at one meeting at most, and has one at most that it hasn't read yet.
struct Warp {
  unsigned waiting = 0, exited = 0, num_meetings = 0;
  Meeting meetings[64];
};

// The one block that runs.
struct Block {
  const char* kernel = "";
  Body body = nullptr;
  void* argument = nullptr;
  std::vector<std::unique_ptr<Fibre>> fibres;
  Warp warps[kMaxThreads / 32];
  std::unique_ptr<char[]> shared;
  unsigned size = 0, running = 0, at_barrier = 0;
  Place barrier{};
  std::string error;
  void* scheduler_stack_pointer = nullptr;
  char barrier_sync[2] = {}, begin_sync = 0, end_sync = 0, fence_sync = 0;
  [[maybe_unused]] void* scheduler_tsan = nullptr;
  [[maybe_unused]] void* scheduler_asan = nullptr;
  [[maybe_unused]] const void* scheduler_stack = nullptr;
  [[maybe_unused]] size_t scheduler_stack_bytes = 0;
};

Block block;

Fibre* running_fibre() { return static_cast<Fibre*>(current); }

void happens_before([[maybe_unused]] char* sync) {
#if defined(EMULATOR_TSAN)
  __tsan_release(sync);
#endif
}

void happens_after([[maybe_unused]] char* sync) {
#if defined(EMULATOR_TSAN)
  __tsan_acquire(sync);
#endif
}

void switch_to_fibre(Fibre* fibre) {
  current = fibre;
#if defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(fibre->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(&block.scheduler_asan, fibre->stack, kStackBytes);
#endif
  clusterkv_emulator_switch(&block.scheduler_stack_pointer, fibre->stack_pointer);
#if defined(EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(block.scheduler_asan, nullptr, nullptr);
#endif
}

void switch_to_scheduler([[maybe_unused]] bool for_good) {
  Fibre* fibre = running_fibre();
#if defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(block.scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fibre->asan, block.scheduler_stack,
                                 block.scheduler_stack_bytes);
#endif
  clusterkv_emulator_switch(&fibre->stack_pointer, block.scheduler_stack_pointer);
#if defined(EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(fibre->asan, nullptr, nullptr);
#endif
}

void exit_thread() {
  Fibre* fibre = running_fibre();
  if (!fibre->copies.empty()) fail(fibre->place, "a thread exits before its copies have arrived");
  happens_before(&block.end_sync);
  fibre->state = State::kExited;
  block.warps[fibre->warp].exited |= 1u << fibre->lane;
  --block.running;
  if (block.at_barrier > 0) fail(block.barrier, "a thread exits while others wait at this barrier");
}

// The first frame of every fibre.
[[gnu::noinline]] void enter_thread() {
#if defined(EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
  happens_after(&block.begin_sync);
  block.body(block.argument);
  exit_thread();
  switch_to_scheduler(true);
  __builtin_trap();
}

std::string describe(Place place, const std::string& text, const Fibre& fibre) {
  char head[512], tail[256];
  std::snprintf(head, sizeof head, "%s:%d: ", place.file ? place.file : "?", place.line);
  std::snprintf(tail, sizeof tail, " [%s block (%u,%u,%u) thread (%u,%u,%u)]", block.kernel,
                fibre.block_index.x, fibre.block_index.y, fibre.block_index.z, fibre.thread_index.x,
                fibre.thread_index.y, fibre.thread_index.z);
  return head + text + tail;
}

void wait_as(State state) {
  running_fibre()->state = state;
  switch_to_scheduler(false);
}

bool is_same(Place a, Place b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

// The open meeting of these lanes, or a free one.
Meeting* find_meeting(Warp& warp, unsigned mask) {
  Meeting* unused = nullptr;
  for (unsigned i = 0; i < warp.num_meetings; ++i) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.arrived && meeting.mask == mask) return &meeting;
    if (!meeting.arrived && !meeting.unread) unused = &meeting;
  }
  return unused ? unused : &warp.meetings[warp.num_meetings++];
}

void check_meeting(const Meeting& meeting, const Warp& warp, Place place, Collective kind,
                   unsigned mask, unsigned width) {
  const Fibre* fibre = running_fibre();
  const unsigned lanes = std::min(32u, block.size - fibre->warp * 32);
  const unsigned existing = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  if (!(mask >> fibre->lane & 1)) fail(place, "the lane is not in its own mask %08x", mask);
  if (mask & ~existing) fail(place, "mask %08x names lanes that the block doesn't have", mask);
  if (mask & warp.exited) fail(place, "mask %08x names lanes that have exited", mask);
  if (mask & warp.waiting & ~meeting.arrived) {
    fail(place, "lanes %08x of mask %08x wait at another collective", mask & warp.waiting, mask);
  }
  if (!meeting.arrived) return;
  if (meeting.kind != kind || meeting.width != width || !is_same(meeting.place, place)) {
    fail(place, "the other lanes wait at %s:%d", meeting.place.file, meeting.place.line);
  }
}

void close_meeting(Meeting& meeting, Warp& warp, unsigned first_thread) {
  warp.waiting &= ~meeting.mask;
  meeting.unread = meeting.mask;
  meeting.arrived = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (meeting.mask >> i & 1) block.fibres[first_thread + i]->state = State::kReady;
  }
}

void release_barrier() {
  for (unsigned i = 0; i < block.size; ++i) {
    if (block.fibres[i]->state == State::kAtBarrier) block.fibres[i]->state = State::kReady;
  }
  block.at_barrier = 0;
}

}  // namespace

void fail(Place place, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (block.error.empty()) block.error = describe(place, text, *running_fibre());
  switch_to_scheduler(true);
  __builtin_unreachable();
}

void* dynamic_shared() { return block.shared.get(); }

void fence() {
  happens_before(&block.fence_sync);
  happens_after(&block.fence_sync);
}

unsigned active_mask() {
  const Fibre* fibre = running_fibre();
  const unsigned lanes = std::min(32u, block.size - fibre->warp * 32);
  return (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) & ~block.warps[fibre->warp].exited;
}

void block_barrier(Place place) {
  Fibre* fibre = running_fibre();
  fibre->place = place;
  if (block.running != block.size) {
    fail(place, "a barrier after %u threads have exited", block.size - block.running);
  }
  if (block.at_barrier == 0) {
    block.barrier = place;
  } else if (!is_same(block.barrier, place)) {
    fail(place, "divergent barrier: others wait at %s:%d", block.barrier.file, block.barrier.line);
  }
  char* sync = &block.barrier_sync[fibre->barriers++ % 2];
  happens_before(sync);
  if (++block.at_barrier == block.size) {
    release_barrier();
  } else {
    wait_as(State::kAtBarrier);
  }
  happens_after(sync);
}

int block_sum(Place place, int value) {
  running_fibre()->value = value;
  block_barrier(place);
  int sum = 0;
  for (unsigned i = 0; i < block.size; ++i) sum += block.fibres[i]->value;
  block_barrier(place);
  return sum;
}

Meeting* meet(Place place, Collective kind, unsigned mask, Word word, unsigned width) {
  Fibre* fibre = running_fibre();
  Warp& warp = block.warps[fibre->warp];
  Meeting* meeting = find_meeting(warp, mask);
  check_meeting(*meeting, warp, place, kind, mask, width);
  fibre->place = place;
  meeting->mask = mask;
  meeting->kind = kind;
  meeting->width = width;
  meeting->place = place;
  meeting->words[fibre->lane] = word;
  meeting->arrived |= 1u << fibre->lane;
  if (kind == Collective::kSync) happens_before(&meeting->sync);
  if (meeting->arrived == mask) {
    close_meeting(*meeting, warp, fibre->warp * 32);
  } else {
    warp.waiting |= 1u << fibre->lane;
    wait_as(State::kAtMeeting);
  }
  if (kind == Collective::kSync) happens_after(&meeting->sync);
  return meeting;
}

void leave(Meeting* meeting) { meeting->unread &= ~(1u << running_fibre()->lane); }

namespace {

void allocate_stack(Fibre* fibre) {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) throw std::runtime_error("emulator: no memory for a stack");
  fibre->stack = static_cast<char*>(stack);
#if defined(EMULATOR_TSAN)
  fibre->tsan = __tsan_create_fiber(0);
#endif
}

// A stack on which `clusterkv_emulator_switch` returns into `enter_thread`.
void prepare_stack(Fibre* fibre) {
#if defined(EMULATOR_ASAN)
  __asan_unpoison_memory_region(fibre->stack, kStackBytes);
#endif
  void** top = reinterpret_cast<void**>(fibre->stack + kStackBytes) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&enter_thread);
  fibre->stack_pointer = top - 6;
}

void prepare_thread(unsigned i, dim3 grid, dim3 size, uint3 block_index) {
  Fibre* fibre = block.fibres[i].get();
  fibre->thread_index = uint3{i % size.x, i / size.x % size.y, i / (size.x * size.y)};
  fibre->block_index = block_index;
  fibre->block_size = size;
  fibre->grid_size = grid;
  fibre->lane = i % 32;
  fibre->warp = i / 32;
  fibre->state = State::kReady;
  fibre->place = Place{};
  fibre->barriers = 0;
  fibre->copies.clear();
  fibre->copy_group = 0;
  prepare_stack(fibre);
}

void prepare_block(dim3 grid, dim3 size, uint3 index, size_t shared_bytes) {
  block.shared.reset(shared_bytes ? new char[shared_bytes] : nullptr);
  if (shared_bytes) std::memset(block.shared.get(), 0xff, shared_bytes);
  block.size = block.running = size.x * size.y * size.z;
  block.at_barrier = 0;
  for (Warp& warp : block.warps) {
    warp.waiting = warp.exited = 0;
    for (Meeting& meeting : warp.meetings) meeting.arrived = meeting.unread = 0;
  }
  for (unsigned i = 0; i < block.size; ++i) prepare_thread(i, grid, size, index);
}

void report_deadlock() {
  for (unsigned i = 0; i < block.size; ++i) {
    const Fibre& fibre = *block.fibres[i];
    if (fibre.state == State::kExited) continue;
    const char* where = fibre.state == State::kAtBarrier ? "a barrier" : "a warp collective";
    block.error = describe(fibre.place, std::string("deadlock: waits at ") + where, fibre);
    return;
  }
}

void run_block(const std::vector<unsigned>& order) {
  happens_before(&block.begin_sync);
  while (block.running > 0 && block.error.empty()) {
    bool has_progress = false;
    for (const unsigned i : order) {
      if (block.fibres[i]->state != State::kReady) continue;
      has_progress = true;
      switch_to_fibre(block.fibres[i].get());
      if (!block.error.empty()) break;
    }
    if (!has_progress) report_deadlock();
  }
  happens_after(&block.end_sync);
  current = nullptr;
}

// 0, 1, 2, ... in the order that the seed gives; as they are without one.
std::vector<unsigned> visiting_order(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (const char* seed = std::getenv("CLUSTERKV_EMULATOR_SEED")) {
    std::mt19937 random(unsigned(std::atoi(seed)));
    std::shuffle(order.begin(), order.end(), random);
  }
  return order;
}

}  // namespace

void run(const char* name, dim3 grid, dim3 size, size_t shared_bytes, Body body, void* argument) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const unsigned threads = size.x * size.y * size.z, blocks = grid.x * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || blocks == 0 || grid.y > 65535 || grid.z > 65535) {
    throw std::runtime_error(std::string("emulator: invalid launch of ") + name);
  }
  block.kernel = name;
  block.body = body;
  block.argument = argument;
  block.error.clear();
#if defined(EMULATOR_TSAN)
  block.scheduler_tsan = __tsan_get_current_fiber();
#endif
  while (block.fibres.size() < threads) {
    allocate_stack(block.fibres.emplace_back(std::make_unique<Fibre>()).get());
  }
  const std::vector<unsigned> thread_order = visiting_order(threads);
  for (const unsigned i : visiting_order(blocks)) {
    const uint3 index{i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
    prepare_block(grid, size, index, shared_bytes);
    run_block(thread_order);
    if (!block.error.empty()) break;
  }
  block.shared.reset();
  if (!block.error.empty()) throw std::runtime_error("emulator: " + block.error);
}

}  // namespace emulator
