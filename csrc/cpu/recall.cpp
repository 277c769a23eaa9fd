// recall on the CPU: the cluster cache between two host buffers.
//
// Three passes. Placing (per row and KV head, nothing is changed yet): a table from token to slot
// finds hits and gives each miss the lowest free slot. Copying: the rows of all misses are one list
// that the threads share, because misses are few and spread unevenly. Ageing.
//
// The table is one int32 a cached token, kept between calls by each thread and cleared entry by
// entry, so a step costs O(wanted + slots) and not O(T).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace clusterkv {
namespace {

struct Miss {
  int64_t row, head;
  int32_t token, slot;
};

struct Cache {
  Rows<char> keys, values, slot_keys, slot_values;  // strides in bytes
  Rows<int32_t> slot_indices, slot_ages;
  int64_t num_kv_heads, kv_len, num_slots, row_bytes;
};

// What placing one head found out.
struct Placement {
  std::vector<Miss> misses;
  std::vector<uint8_t> is_wanted;  // [N]
  int32_t hits = 0;
  bool is_in_range = true, has_room = true;
};

// A view in bytes, so that one code serves all element types.
Rows<char> byte_rows(const Tensor& tensor, const char* name, int64_t element_bytes) {
  const Rows<char> rows = rows_of<char>(tensor, name);
  return {rows.data, rows.stride_b * element_bytes, rows.stride_h * element_bytes,
          rows.stride_i * element_bytes};
}

// slots [count] <- the slot of each wanted token.
void place(const Cache& cache, int64_t row, int64_t head, const int32_t* const* lists,
           int64_t num_lists, int64_t length, int32_t* slots, Placement& found) {
  static thread_local std::vector<int32_t> slot_of;  // -1 between calls
  if (static_cast<int64_t>(slot_of.size()) < cache.kv_len) slot_of.resize(cache.kv_len, -1);
  const int32_t* held = cache.slot_indices.at(row, head);
  found.is_wanted.assign(cache.num_slots, 0);
  for (int64_t n = 0; n < cache.num_slots; ++n)
    if (held[n] >= 0 && held[n] < cache.kv_len) slot_of[held[n]] = static_cast<int32_t>(n);
  int64_t free = 0;
  for (int64_t i = 0; i < num_lists * length; ++i) {
    const int32_t token = lists[i / length][i % length];
    slots[i] = -1;
    if (token < 0) continue;
    if (token >= cache.kv_len) {
      found.is_in_range = false;
      continue;
    }
    int32_t slot = slot_of[token];
    if (slot < 0) {
      while (free < cache.num_slots && held[free] >= 0) ++free;
      found.has_room &= free < cache.num_slots;
      if (!found.has_room) continue;
      slot = slot_of[token] = static_cast<int32_t>(free++);
      found.misses.push_back({row, head, token, slot});
      found.is_wanted[slot] = 1;
    } else if (!found.is_wanted[slot]) {
      found.is_wanted[slot] = 1;
      ++found.hits;
    }
    slots[i] = slot;
  }
  for (const Miss& miss : found.misses) slot_of[miss.token] = -1;
  for (int64_t n = 0; n < cache.num_slots; ++n)
    if (held[n] >= 0 && held[n] < cache.kv_len) slot_of[held[n]] = -1;
}

void fetch(const Cache& cache, const Miss& miss) {
  std::memcpy(cache.slot_keys.at(miss.row, miss.head, miss.slot),
              cache.keys.at(miss.row, miss.head, miss.token), cache.row_bytes);
  std::memcpy(cache.slot_values.at(miss.row, miss.head, miss.slot),
              cache.values.at(miss.row, miss.head, miss.token), cache.row_bytes);
}

void grow_older(const Cache& cache, int64_t row, int64_t head, const Placement& found,
                int64_t recall_steps) {
  int32_t* held = cache.slot_indices.at(row, head);
  int32_t* ages = cache.slot_ages.at(row, head);
  for (const Miss& miss : found.misses) held[miss.slot] = miss.token;
  for (int64_t n = 0; n < cache.num_slots; ++n) {
    ages[n] = found.is_wanted[n] ? 0 : ages[n] == INT32_MAX ? ages[n] : ages[n] + 1;
    if (ages[n] >= recall_steps) held[n] = -1;
  }
}

std::tuple<Tensor, Tensor, Tensor> recall(const Tensor& keys, const Tensor& values,
                                          const Tensor& indices, const Tensor& slot_keys,
                                          const Tensor& slot_values, const Tensor& slot_indices,
                                          const Tensor& slot_ages, int64_t recall_steps) {
  check_shape(keys, "keys", {-1, -1, -1, -1});
  const int64_t batch = keys.size(0), num_kv_heads = keys.size(1), kv_len = keys.size(2);
  const int64_t head_dim = keys.size(3);
  check_kv_len(kv_len);
  dispatch_floating(keys, "keys", [](auto*) {});
  check_shape(values, "values", {batch, num_kv_heads, kv_len, head_dim});
  check_shape(slot_keys, "slot_keys", {batch, num_kv_heads, -1, head_dim});
  const int64_t num_slots = slot_keys.size(2);
  check_shape(slot_values, "slot_values", {batch, num_kv_heads, num_slots, head_dim});
  for (const Tensor* tensor : {&values, &slot_keys, &slot_values})
    check_type(*tensor, "values and slots", keys.scalar_type(), "of keys");
  check_shape(indices, "indices", {batch, -1, -1});
  const int64_t lists = indices.size(1), length = indices.size(2);
  STD_TORCH_CHECK(num_kv_heads > 0 && lists % num_kv_heads == 0, "indices: expected a multiple of ",
                  num_kv_heads, " heads, got ", lists);
  const Rows<int32_t> wanted = index_rows(indices, "indices", {batch, lists, length});
  const int64_t bytes = static_cast<int64_t>(keys.element_size());
  const Cache cache{byte_rows(keys, "keys", bytes),
                    byte_rows(values, "values", bytes),
                    byte_rows(slot_keys, "slot_keys", bytes),
                    byte_rows(slot_values, "slot_values", bytes),
                    index_rows(slot_indices, "slot_indices", {batch, num_kv_heads, num_slots}),
                    index_rows(slot_ages, "slot_ages", {batch, num_kv_heads, num_slots}),
                    num_kv_heads,
                    kv_len,
                    num_slots,
                    head_dim * bytes};
  Tensor slots = torch::stable::new_empty(indices, {batch, lists, length});
  Tensor hits = torch::stable::new_empty(indices, {batch, num_kv_heads});
  Tensor misses = torch::stable::new_empty(indices, {batch, num_kv_heads});
  int32_t* slots_data = slots.mutable_data_ptr<int32_t>();
  int32_t* hits_data = hits.mutable_data_ptr<int32_t>();
  int32_t* misses_data = misses.mutable_data_ptr<int32_t>();

  const int64_t heads = batch * num_kv_heads, per_head = lists / num_kv_heads;
  std::vector<Placement> found(heads);
  const int64_t work = heads * (per_head * length * 4 + num_slots * 2);
  for_each_item(heads, work, [&](int64_t i) {
    const int64_t row = i / num_kv_heads, head = i % num_kv_heads;
    std::vector<const int32_t*> list_of(per_head);
    for (int64_t g = 0; g < per_head; ++g) list_of[g] = wanted.at(row, head * per_head + g);
    place(cache, row, head, list_of.data(), per_head, length, slots_data + i * per_head * length,
          found[i]);
  });
  std::vector<Miss> all;
  for (int64_t i = 0; i < heads; ++i) {
    STD_TORCH_CHECK(found[i].is_in_range, "indices: expected tokens below ", kv_len,
                    ", got a larger one");
    STD_TORCH_CHECK(found[i].has_room, "slot_indices: expected more free slots than ",
                    found[i].misses.size(), ", got no more");
    hits_data[i] = found[i].hits;
    misses_data[i] = static_cast<int32_t>(found[i].misses.size());
    all.insert(all.end(), found[i].misses.begin(), found[i].misses.end());
  }
  constexpr int64_t kAtOnce = 64;
  const int64_t count = static_cast<int64_t>(all.size());
  for_each_item((count + kAtOnce - 1) / kAtOnce, count * head_dim, [&](int64_t item) {
    const int64_t end = std::min(count, (item + 1) * kAtOnce);
    for (int64_t i = item * kAtOnce; i < end; ++i) {
      if (i + 4 < end) {
        __builtin_prefetch(cache.keys.at(all[i + 4].row, all[i + 4].head, all[i + 4].token));
        __builtin_prefetch(cache.values.at(all[i + 4].row, all[i + 4].head, all[i + 4].token));
      }
      fetch(cache, all[i]);
    }
  });
  for_each_item(heads, heads * num_slots, [&](int64_t i) {
    grow_older(cache, i / num_kv_heads, i % num_kv_heads, found[i], recall_steps);
  });
  return {slots, hits, misses};
}

}  // namespace
}  // namespace clusterkv

STABLE_TORCH_LIBRARY_IMPL(clusterkv, CPU, m) { m.impl("recall", TORCH_BOX(&clusterkv::recall)); }
