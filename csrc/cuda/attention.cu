// selected_attention and merge_states on CUDA: checks, workspace, launches, registration.
#include "attention.cuh"

#include "arguments.h"

namespace clusterkv {
namespace {

MaskKind kind_of(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
      return MaskKind::kBool;
    case ScalarType::Float:
      return MaskKind::kFloat;
    case ScalarType::Half:
      return MaskKind::kHalf;
    case ScalarType::BFloat16:
      return MaskKind::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "mask: expected bool or a floating type, got scalar type ",
                      int(mask.scalar_type()));
  }
  return MaskKind::kNone;
}

Mask view_mask(const std::optional<Tensor>& mask, int64_t batch, int64_t heads, int64_t kv_len) {
  if (!mask) return {nullptr, 0, 0, 0, MaskKind::kNone};
  check_shape(*mask, "mask", {batch, -1, 1, kv_len});
  STD_TORCH_CHECK(mask->size(1) == 1 || mask->size(1) == heads, "mask: expected 1 or ", heads,
                  " heads, got ", mask->size(1));
  const int64_t head_stride = mask->size(1) == 1 ? 0 : mask->stride(1);
  return {mask->const_data_ptr(), mask->stride(0), head_stride, mask->stride(3), kind_of(*mask)};
}

// The sizes of a call, checked against each other.
template <class T>
void set_sizes(AttentionProblem<T>& p, const Tensor& query, const Tensor& keys,
               const Tensor& values, const Tensor& indices) {
  check_shape(query, "query", {-1, -1, 1, -1});
  const int64_t batch = query.size(0), head_dim = query.size(3);
  check_shape(keys, "keys", {batch, -1, -1, head_dim});
  check_shape(values, "values", {batch, keys.size(1), keys.size(2), head_dim});
  check_shape(indices, "indices", {batch, -1, -1});
  check_type(keys, "keys", query.scalar_type());
  check_type(values, "values", query.scalar_type());
  check_head_dim(head_dim);
  check_fits_int(2 * keys.size(2) + indices.size(2), "twice the tokens plus the selection");
  const int64_t num_qo_heads = query.size(1), num_kv_heads = keys.size(1);
  STD_TORCH_CHECK(num_kv_heads > 0 && num_qo_heads % num_kv_heads == 0,
                  "query: expected a multiple of ", num_kv_heads, " heads, got ", num_qo_heads);
  STD_TORCH_CHECK(indices.size(1) == num_qo_heads || indices.size(1) == num_kv_heads,
                  "indices: expected ", num_qo_heads, " or ", num_kv_heads, " heads, got ",
                  indices.size(1));
  p.batch = int(batch);
  p.num_qo_heads = int(num_qo_heads);
  p.num_kv_heads = int(num_kv_heads);
  p.num_select_heads = int(indices.size(1));
  p.kv_len = int(keys.size(2));
  p.num_selected = int(indices.size(2));
  p.head_dim = int(head_dim);
  p.splits = attention_splits(p.kv_len, p.num_selected);
}

template <class T>
void set_slots(AttentionProblem<T>& p, const Tensor& slot_keys, const Tensor& slot_values) {
  check_shape(slot_keys, "slot_keys", {p.batch, p.num_kv_heads, -1, p.head_dim});
  check_shape(slot_values, "slot_values", {p.batch, p.num_kv_heads, slot_keys.size(2), p.head_dim});
  p.slot_keys = rows_of<const T>(slot_keys, "slot_keys");
  p.slot_values = rows_of<const T>(slot_values, "slot_values");
  p.num_slots = int(slot_keys.size(2));
}

template <class T>
std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& keys, const Tensor& values,
                                  const Tensor& indices, const Tensor& spans,
                                  const std::optional<Tensor>& mask,
                                  const std::optional<Tensor>& slots,
                                  const std::optional<Tensor>& slot_keys,
                                  const std::optional<Tensor>& slot_values, double scale) {
  AttentionProblem<T> p{};
  set_sizes(p, query, keys, values, indices);
  STD_TORCH_CHECK(
      slots.has_value() == slot_keys.has_value() && slots.has_value() == slot_values.has_value(),
      "slots, slot_keys, slot_values: expected all or none");
  const Tensor list = int_tensor(indices, "indices", {p.batch, p.num_select_heads, p.num_selected});
  const Tensor ranges = int_tensor(spans, "spans", {p.batch, 2, 2});
  Tensor places = list;
  p.query = rows_of<const T>(query, "query");
  p.keys = rows_of<const T>(keys, "keys");
  p.values = rows_of<const T>(values, "values");
  p.is_aligned = p.head_dim % Chunk<T>::kSize == 0 && is_aligned(p.keys) && is_aligned(p.values);
  if (slots) {
    places = int_tensor(*slots, "slots", {p.batch, p.num_select_heads, p.num_selected});
    check_type(*slot_keys, "slot_keys", query.scalar_type());
    check_type(*slot_values, "slot_values", query.scalar_type());
    set_slots(p, *slot_keys, *slot_values);
    p.slots = int_data(places);
    p.is_aligned = p.is_aligned && is_aligned(p.slot_keys) && is_aligned(p.slot_values);
  }
  p.indices = int_data(list);
  p.spans = int_data(ranges);
  p.mask = view_mask(mask, p.batch, p.num_qo_heads, p.kv_len);
  p.scale = float(scale);

  const Tensor out =
      new_tensor(query, {p.batch, p.num_qo_heads, 1, p.head_dim}, query.scalar_type());
  const Tensor lse = new_floats(query, {p.batch, p.num_qo_heads, 1});
  const Tensor part_out = new_floats(query, {p.batch, p.num_qo_heads, p.splits, p.head_dim});
  const Tensor part_lse = new_floats(query, {p.batch, p.num_qo_heads, p.splits});
  p.out = data_of<T>(out);
  p.lse = data_of<float>(lse);
  p.partial_out = data_of<float>(part_out);
  p.partial_lse = data_of<float>(part_lse);
  const Device device(query);
  launch_selected_attention(p, device.stream);
  device.check_launch();
  return {out, lse};
}

std::tuple<Tensor, Tensor> selected_attention(const Tensor& query, const Tensor& keys,
                                              const Tensor& values, const Tensor& indices,
                                              const Tensor& spans, std::optional<Tensor> mask,
                                              std::optional<Tensor> slots,
                                              std::optional<Tensor> slot_keys,
                                              std::optional<Tensor> slot_values, double scale) {
  return dispatch_floating(query, "query", [&](auto* type) {
    return attend<std::remove_pointer_t<decltype(type)>>(query, keys, values, indices, spans, mask,
                                                         slots, slot_keys, slot_values, scale);
  });
}

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  check_shape(out_a, "out_a", {-1, -1, 1, -1});
  const int64_t batch = out_a.size(0), heads = out_a.size(1), head_dim = out_a.size(3);
  check_shape(lse_a, "lse_a", {batch, heads, 1});
  check_shape(out_b, "out_b", {batch, heads, 1, head_dim});
  check_shape(lse_b, "lse_b", {batch, heads, 1});
  check_type(out_b, "out_b", out_a.scalar_type());
  check_type(lse_a, "lse_a", ScalarType::Float);
  check_type(lse_b, "lse_b", ScalarType::Float);
  const Tensor a = torch::stable::contiguous(out_a), b = torch::stable::contiguous(out_b);
  const Tensor la = torch::stable::contiguous(lse_a), lb = torch::stable::contiguous(lse_b);
  const Tensor out = new_tensor(a, {batch, heads, 1, head_dim}, a.scalar_type());
  const Tensor lse = new_floats(a, {batch, heads, 1});
  const Device device(out_a);
  dispatch_floating(out_a, "out_a", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch_merge_states(static_cast<const T*>(a.const_data_ptr()), data_of<float>(la),
                        static_cast<const T*>(b.const_data_ptr()), data_of<float>(lb),
                        data_of<T>(out), data_of<float>(lse), batch * heads, int(head_dim),
                        device.stream);
  });
  device.check_launch();
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(CLUSTERKV_LIBRARY, CLUSTERKV_DISPATCH_KEY, m) {
  m.impl("selected_attention", TORCH_BOX(&selected_attention));
  m.impl("merge_states", TORCH_BOX(&merge_states));
}

}  // namespace clusterkv
