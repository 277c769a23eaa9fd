// Work shared among torch's threads, in an order that no result depends on.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace clusterkv {

// Below this many multiply-adds, waking threads costs more than they save.
constexpr int64_t kSerialWork = 40000;

// Calls f(i) for each i in [0, count); whoever is free takes the next one, so that items may differ
// in cost and a busy core delays nobody. f must write only what belongs to i, and not throw. `work`
// is the cost of all items together, in multiply-adds.
template <class F>
void for_each_item(int64_t count, int64_t work, const F& f) {
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  if (threads <= 1 || work < kSerialWork) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) f(i);
  });
}

}  // namespace clusterkv
