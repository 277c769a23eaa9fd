// recall on CUDA: checks, workspace, launches, registration.
#include "recall.cuh"

#include "arguments.h"

namespace clusterkv {
namespace {

// State that is changed in place must be the caller's memory, never a copy.
int* state_data(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_type(tensor, name, ScalarType::Int);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor");
  return data_of<int>(tensor);
}

void check_shapes(const Tensor& keys, const Tensor& values, const Tensor& indices,
                  const Tensor& slot_keys, const Tensor& slot_values) {
  check_shape(keys, "keys", {-1, -1, -1, -1});
  const int64_t batch = keys.size(0), heads = keys.size(1), head_dim = keys.size(3);
  check_shape(values, "values", {batch, heads, keys.size(2), head_dim});
  check_shape(indices, "indices", {batch, -1, -1});
  check_shape(slot_keys, "slot_keys", {batch, heads, -1, head_dim});
  check_shape(slot_values, "slot_values", {batch, heads, slot_keys.size(2), head_dim});
  check_type(values, "values", keys.scalar_type());
  check_type(slot_keys, "slot_keys", keys.scalar_type());
  check_type(slot_values, "slot_values", keys.scalar_type());
  check_head_dim(head_dim);
  check_fits_int(keys.size(2), "keys");
  check_fits_int(slot_keys.size(2), "slot_keys");
  STD_TORCH_CHECK(heads > 0 && indices.size(1) % heads == 0, "indices: expected a multiple of ",
                  heads, " heads, got ", indices.size(1));
  check_fits_int(4 * (indices.size(1) / heads) * indices.size(2), "indices");
}

template <class T>
FetchProblem<T> fetch_problem(const Tensor& keys, const Tensor& values, const Tensor& slot_keys,
                              const Tensor& slot_values, const RecallProblem& place) {
  FetchProblem<T> p{};
  p.keys = rows_of<const T>(keys, "keys");
  p.values = rows_of<const T>(values, "values");
  p.slot_keys = rows_of<T>(slot_keys, "slot_keys");
  p.slot_values = rows_of<T>(slot_values, "slot_values");
  p.fetches = place.fetches;
  p.misses = place.misses;
  p.heads = int(keys.size(1));
  p.wanted = place.wanted;
  p.head_dim = int(keys.size(3));
  p.is_aligned = p.head_dim % Chunk<T>::kSize == 0 && is_aligned(p.keys) && is_aligned(p.values) &&
                 is_aligned(p.slot_keys) && is_aligned(p.slot_values);
  return p;
}

std::tuple<Tensor, Tensor, Tensor> recall(const Tensor& keys, const Tensor& values,
                                          const Tensor& indices, Tensor slot_keys,
                                          Tensor slot_values, Tensor slot_indices, Tensor slot_ages,
                                          int64_t recall_steps) {
  check_shapes(keys, values, indices, slot_keys, slot_values);
  check_fits_int(recall_steps, "recall_steps");
  const int64_t batch = keys.size(0), heads = keys.size(1), num_slots = slot_keys.size(2);
  const Tensor list = int_tensor(indices, "indices", {batch, indices.size(1), indices.size(2)});
  const Tensor slots = new_ints(list, {batch, indices.size(1), indices.size(2)});
  const Tensor hits = new_ints(list, {batch, heads}), misses = new_ints(list, {batch, heads});

  RecallProblem p{};
  p.lists = int(batch * heads);
  p.wanted = int(indices.size(1) / heads * indices.size(2));
  p.num_slots = int(num_slots);
  p.kv_len = int(keys.size(2));
  p.table_size = int(table_size_for(p.wanted));
  p.recall_steps = int(recall_steps);
  const int64_t entries = fits_shared(p.table_size) ? 0 : int64_t(p.lists) * p.table_size;
  const Tensor table = new_bytes(list, entries * int64_t(sizeof(TokenEntry)));
  const Tensor fetches = new_ints(list, {p.lists, p.wanted, 2});
  const Tensor free_slots = new_ints(list, {p.lists, num_slots});
  p.indices = int_data(list);
  p.slot_indices = state_data(slot_indices, "slot_indices", {batch, heads, num_slots});
  p.slot_ages = state_data(slot_ages, "slot_ages", {batch, heads, num_slots});
  p.slots = data_of<int>(slots);
  p.hits = data_of<int>(hits);
  p.misses = data_of<int>(misses);
  p.table = entries > 0 ? data_of<TokenEntry>(table) : nullptr;
  p.fetches = data_of<Fetch>(fetches);
  p.free_slots = data_of<int>(free_slots);

  const Device device(keys);
  dispatch_floating(keys, "keys", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch_recall(p, fetch_problem<T>(keys, values, slot_keys, slot_values, p), device.stream);
  });
  device.check_launch();
  return {slots, hits, misses};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(CLUSTERKV_LIBRARY, CLUSTERKV_DISPATCH_KEY, m) {
  m.impl("recall", TORCH_BOX(&recall));
}

}  // namespace clusterkv
