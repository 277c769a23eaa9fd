// selected_attention and merge_states on the CPU.
//
// One query token a row. Tokens come from two spans (sinks, recent) and from a list of positions a
// head; all of them become row pointers in tiles of kTile, so that one kernel serves a sparse step,
// a step through the recall cache and, with an empty list, dense decoding.
//
//   row b: [ list of head 0 | list of head 1 | ... ]  [ spans, for all heads ]
//            parts of kPart tokens                      parts of kPart tokens
//
// A part of a head is one softmax state in scratch memory; `finish` merges them in order. The cut
// into parts depends on the row's own tokens only, so neither threads nor neighbours change a bit.
// An item of work is one part of one unit (query heads that read the same tokens), or one part of
// the spans for all units: in a token-major store that is one contiguous stretch of memory.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <vector>

#include "attention_tile.h"
#include "checks.h"
#include "parallel.h"

#define CLUSTERKV_BF16_TEXT
#define CLUSTERKV_KERNEL_TEXT "attention_kernel.h"
#include "per_isa.h"

namespace clusterkv {
namespace {

constexpr int kPart = 256;

struct Mask {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  bool is_per_head = false;
  ScalarType type = ScalarType::Bool;

  float bias_at(int64_t offset) const {
    switch (type) {
      case ScalarType::Bool:
        return static_cast<const bool*>(data)[offset] ? 0.f : -INFINITY;
      case ScalarType::Float:
        return static_cast<const float*>(data)[offset];
      case ScalarType::BFloat16:
        return to_float(static_cast<const BF16*>(data)[offset]);
      default:
        return to_float(static_cast<const FP16*>(data)[offset]);
    }
  }
};

// The arguments of one call. Lengths in tokens, heads as in the schema.
template <class T>
struct Problem {
  Rows<T> query, keys, values, slot_keys, slot_values, out;
  Rows<int32_t> indices, slots, spans;
  Mask mask;
  float* lse;
  float scale;
  int64_t batch, num_qo_heads, num_kv_heads, group_size, head_dim, kv_len;
  int64_t num_selecting_heads, num_selected, num_slots;
  bool has_slots;
  std::atomic<bool> is_out_of_range{false};
};

struct Item {
  int32_t row, first_unit, end_unit, part;
  bool is_span;
};

struct Span {
  int64_t begin, length;
};

template <class T>
Span span_of(const Problem<T>& p, int64_t row, int which) {
  const int32_t* ends = p.spans.at(row, which);
  const int64_t begin = std::clamp<int64_t>(ends[0], 0, p.kv_len);
  const int64_t end = std::clamp<int64_t>(ends[1], 0, p.kv_len);
  return {begin, std::max<int64_t>(end - begin, 0)};
}

int64_t parts_of(int64_t tokens) { return (tokens + kPart - 1) / kPart; }

// Fills tiles from an item's tokens, one after another.
template <class T>
class TileReader {
 public:
  TileReader(Problem<T>& problem, const Item& item, int64_t heads_per_unit)
      : p_(problem), item_(item), heads_per_unit_(heads_per_unit), unit_(item.first_unit) {
    spans_[0] = span_of(p_, item.row, 0);
    spans_[1] = span_of(p_, item.row, 1);
    const int64_t tokens = item.is_span ? spans_[0].length + spans_[1].length : p_.num_selected;
    at_ = static_cast<int64_t>(item.part) * kPart;
    end_ = std::min<int64_t>(at_ + kPart, tokens);
  }

  // The next tile that has tokens; false behind the last.
  bool read(Tile<T>& tile, int64_t& unit) {
    while (at_ < end_) {
      const int64_t count = std::min<int64_t>(kTile, end_ - at_);
      unit = unit_;
      fill(tile, unit_ * heads_per_unit_, count);
      if (++unit_ == item_.end_unit) unit_ = item_.first_unit, at_ += kTile;
      if (tile.count > 0) return true;
    }
    return false;
  }

 private:
  void fill(Tile<T>& tile, int64_t head, int64_t count) {
    tile.count = 0;
    tile.kv_head = static_cast<int>(head / p_.group_size);
    if (item_.is_span)
      fill_from_spans(tile, count);
    else
      fill_from_list(tile, head, count);
    tile.has_bias = p_.mask.data != nullptr;
    if (tile.has_bias) apply_mask(tile, head);
    for (int i = tile.count; i < kTile && tile.count > 0; ++i) {
      tile.keys[i] = tile.keys[tile.count - 1];
      tile.values[i] = tile.values[tile.count - 1];
      tile.bias[i] = 0.f;
    }
  }

  void fill_from_spans(Tile<T>& tile, int64_t count) {
    const T* keys = p_.keys.at(item_.row, tile.kv_head);
    const T* values = p_.values.at(item_.row, tile.kv_head);
    for (int64_t i = at_; i < at_ + count; ++i) {
      const int64_t token =
          i < spans_[0].length ? spans_[0].begin + i : spans_[1].begin + i - spans_[0].length;
      add(tile, keys + token * p_.keys.stride_i, values + token * p_.values.stride_i, token);
    }
  }

  void fill_from_list(Tile<T>& tile, int64_t head, int64_t count) {
    const int64_t list = head * p_.num_selecting_heads / p_.num_qo_heads;
    const int32_t* tokens = p_.indices.at(item_.row, list);
    const int32_t* places = p_.has_slots ? p_.slots.at(item_.row, list) : tokens;
    const Rows<T>& key_rows = p_.has_slots ? p_.slot_keys : p_.keys;
    const Rows<T>& value_rows = p_.has_slots ? p_.slot_values : p_.values;
    const int64_t num_places = p_.has_slots ? p_.num_slots : p_.kv_len;
    for (int64_t i = at_; i < at_ + count; ++i) {
      const int64_t token = tokens[i], place = places[i];
      if (token < 0 || place < 0) continue;
      if (token >= p_.kv_len || place >= num_places) {
        p_.is_out_of_range = true;
        continue;
      }
      add(tile, key_rows.at(item_.row, tile.kv_head, place),
          value_rows.at(item_.row, tile.kv_head, place), token);
    }
  }

  void add(Tile<T>& tile, const T* keys, const T* values, int64_t token) {
    tile.keys[tile.count] = keys;
    tile.values[tile.count] = values;
    tokens_[tile.count++] = token;
  }

  // Drops tokens that are masked out, so that what lies there is never read.
  void apply_mask(Tile<T>& tile, int64_t head) {
    const Mask& mask = p_.mask;
    const int64_t row = item_.row * mask.stride_b + (mask.is_per_head ? head * mask.stride_h : 0);
    int kept = 0;
    for (int i = 0; i < tile.count; ++i) {
      const float bias = mask.bias_at(row + tokens_[i] * mask.stride_t);
      tile.keys[kept] = tile.keys[i];
      tile.values[kept] = tile.values[i];
      tile.bias[kept] = bias;
      kept += bias != -INFINITY;
    }
    tile.count = kept;
  }

  Problem<T>& p_;
  const Item item_;
  const int64_t heads_per_unit_;
  Span spans_[2];
  int64_t unit_, at_, end_;
  int64_t tokens_[kTile];
};

// How a call is cut into items, and where states lie.
template <class T>
struct Plan {
  int64_t list_heads, span_heads;  // query heads of a unit
  int64_t list_parts, max_parts, padded, stride;
  std::vector<Item>& items;  // of the calling thread: workers must not name the thread_local itself
  float* packed;             // [B * Hq, padded]
  float* states;             // [B * Hq, max_parts, stride]
};

template <class T>
void add_items(const Problem<T>& p, Plan<T>& plan) {
  int64_t span_parts = 0, longest = 0;
  for (int64_t row = 0; row < p.batch; ++row) {
    const int64_t parts = parts_of(span_of(p, row, 0).length + span_of(p, row, 1).length);
    span_parts += parts;
    longest = std::max(longest, parts);
  }
  plan.max_parts = plan.list_parts + longest;
  plan.items.clear();
  const auto add = [&](int64_t row, int64_t units, int64_t part, bool is_span, int64_t step) {
    for (int64_t unit = 0; unit < units; unit += step)
      plan.items.push_back({static_cast<int32_t>(row), static_cast<int32_t>(unit),
                            static_cast<int32_t>(unit + step), static_cast<int32_t>(part),
                            is_span});
  };
  const int64_t span_units = p.num_qo_heads / plan.span_heads;
  const bool is_long = span_parts >= 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  for (int64_t row = 0; row < p.batch; ++row) {
    for (int64_t part = 0; part < plan.list_parts; ++part)
      add(row, p.num_qo_heads / plan.list_heads, part, false, 1);
    const int64_t parts = parts_of(span_of(p, row, 0).length + span_of(p, row, 1).length);
    for (int64_t part = 0; part < parts; ++part)
      add(row, span_units, part, true, is_long ? span_units : 1);
  }
}

template <class T>
void run_item(Problem<T>& p, const Plan<T>& plan, const AttentionKernels<T>& kernels,
              const Item& item) {
  const int64_t heads = item.is_span ? plan.span_heads : plan.list_heads;
  const int64_t part = item.part + (item.is_span ? plan.list_parts : 0);
  const auto state_of = [&](int64_t head) {
    return plan.states + ((item.row * p.num_qo_heads + head) * plan.max_parts + part) * plan.stride;
  };
  for (int64_t head = item.first_unit * heads; head < item.end_unit * heads; ++head) {
    float* state = state_of(head);
    state[0] = -INFINITY, state[1] = 0.f;
    std::fill_n(state + kStatePrefix, plan.padded, 0.f);
  }
  TileReader<T> reader(p, item, heads);
  Tile<T> tiles[2];
  int64_t unit = 0, next_unit = 0;
  bool has_tile = reader.read(tiles[0], unit);
  for (int now = 0; has_tile; now ^= 1, unit = next_unit) {
    has_tile = reader.read(tiles[now ^ 1], next_unit);
    const int64_t head = unit * heads;
    kernels.attend(tiles[now], has_tile ? &tiles[now ^ 1] : nullptr,
                   plan.packed + (item.row * p.num_qo_heads + head) * plan.padded,
                   static_cast<int>(heads), static_cast<int>(p.head_dim), p.scale, state_of(head),
                   plan.max_parts * plan.stride);
  }
}

template <class T>
void run(Problem<T>& p) {
  static const AttentionKernels<T> kernels = CLUSTERKV_PICK(attention_kernels<T>)();
  static thread_local std::vector<Item> items;
  static thread_local std::vector<float> scratch;
  const bool is_shared = p.num_selecting_heads == p.num_kv_heads && !p.mask.is_per_head;
  const int64_t padded = padded_head_dim(p.head_dim);
  Plan<T> plan{is_shared ? p.group_size : 1,
               p.mask.is_per_head ? 1 : p.group_size,
               parts_of(p.num_selected),
               0,
               padded,
               padded + kStatePrefix,
               items,
               nullptr,
               nullptr};
  add_items(p, plan);
  const int64_t num_heads = p.batch * p.num_qo_heads;
  scratch.resize(num_heads * (padded + plan.max_parts * plan.stride));
  plan.packed = scratch.data();
  plan.states = plan.packed + num_heads * padded;
  const int head_dim = static_cast<int>(p.head_dim);
  for (int64_t i = 0; i < num_heads; ++i)
    kernels.pack_query(p.query.at(i / p.num_qo_heads, i % p.num_qo_heads), head_dim,
                       plan.packed + i * padded);
  const int64_t count = plan.items.size(), work = count * kPart * p.head_dim;
  for_each_item(count, work, [&](int64_t i) { run_item(p, plan, kernels, plan.items[i]); });
  for_each_item(num_heads, num_heads * plan.max_parts * padded, [&](int64_t i) {
    const int64_t row = i / p.num_qo_heads, head = i % p.num_qo_heads;
    const int64_t parts =
        plan.list_parts + parts_of(span_of(p, row, 0).length + span_of(p, row, 1).length);
    kernels.finish(plan.states + i * plan.max_parts * plan.stride, static_cast<int>(parts),
                   plan.stride, head_dim, p.out.at(row, head), p.lse + i);
  });
}

Mask mask_of(const Tensor& mask, int64_t batch, int64_t num_qo_heads, int64_t kv_len) {
  const bool is_per_head = mask.dim() == 4 && mask.size(1) != 1;
  check_shape(mask, "mask", {batch, is_per_head ? num_qo_heads : 1, 1, kv_len});
  STD_TORCH_CHECK(mask.is_cpu(), "mask: expected a CPU tensor, got another device");
  if (mask.scalar_type() != ScalarType::Bool) dispatch_floating(mask, "mask", [](auto*) {});
  return {mask.const_data_ptr(), mask.stride(0), mask.stride(1),
          mask.stride(3),        is_per_head,    mask.scalar_type()};
}

template <class T>
Rows<T> rows_like(const Tensor& tensor, const char* name, const Tensor& query, int64_t batch,
                  int64_t heads, int64_t count, int64_t head_dim) {
  check_shape(tensor, name, {batch, heads, count, head_dim});
  check_type(tensor, name, query.scalar_type(), "of query");
  return rows_of<T>(tensor, name);
}

std::tuple<Tensor, Tensor> selected_attention(
    const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& indices,
    const Tensor& spans, const std::optional<Tensor>& mask, const std::optional<Tensor>& slots,
    const std::optional<Tensor>& slot_keys, const std::optional<Tensor>& slot_values,
    double scale) {
  check_shape(query, "query", {-1, -1, 1, -1});
  check_shape(keys, "keys", {query.size(0), -1, -1, query.size(3)});
  const int64_t batch = query.size(0), num_qo_heads = query.size(1), head_dim = query.size(3);
  const int64_t num_kv_heads = keys.size(1), kv_len = keys.size(2);
  check_head_dim(head_dim);
  check_kv_len(kv_len);
  STD_TORCH_CHECK(num_kv_heads > 0 && num_qo_heads % num_kv_heads == 0,
                  "query: expected a multiple of ", num_kv_heads, " heads, got ", num_qo_heads);
  check_shape(indices, "indices", {batch, -1, -1});
  const int64_t lists = indices.size(1), num_selected = indices.size(2);
  STD_TORCH_CHECK(lists == num_qo_heads || lists == num_kv_heads, "indices: expected ",
                  num_qo_heads, " or ", num_kv_heads, " heads, got ", lists);
  STD_TORCH_CHECK(
      slots.has_value() == slot_keys.has_value() && slots.has_value() == slot_values.has_value(),
      "slots: expected slots, slot_keys and slot_values together");
  Tensor out = torch::stable::new_empty(query, {batch, num_qo_heads, 1, head_dim});
  Tensor lse = torch::stable::new_empty(query, {batch, num_qo_heads, 1}, ScalarType::Float);
  dispatch_floating(query, "query", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Problem<T> p;
    p.query = rows_of<T>(query, "query");
    p.keys = rows_like<T>(keys, "keys", query, batch, num_kv_heads, kv_len, head_dim);
    p.values = rows_like<T>(values, "values", query, batch, num_kv_heads, kv_len, head_dim);
    p.indices = index_rows(indices, "indices", {batch, lists, num_selected});
    p.spans = index_rows(spans, "spans", {batch, 2, 2});
    p.has_slots = slots.has_value();
    p.num_slots = p.has_slots ? slot_keys->size(2) : 0;
    if (p.has_slots) {
      p.slots = index_rows(*slots, "slots", {batch, lists, num_selected});
      p.slot_keys = rows_like<T>(*slot_keys, "slot_keys", query, batch, num_kv_heads, -1, head_dim);
      p.slot_values = rows_like<T>(*slot_values, "slot_values", query, batch, num_kv_heads,
                                   p.num_slots, head_dim);
    }
    if (mask.has_value()) p.mask = mask_of(*mask, batch, num_qo_heads, kv_len);
    p.out = rows_of<T>(out, "out");
    p.lse = lse.mutable_data_ptr<float>();
    p.scale = static_cast<float>(scale);
    p.batch = batch, p.num_qo_heads = num_qo_heads, p.num_kv_heads = num_kv_heads;
    p.group_size = num_qo_heads / num_kv_heads, p.head_dim = head_dim, p.kv_len = kv_len;
    p.num_selecting_heads = lists, p.num_selected = num_selected;
    run(p);
    STD_TORCH_CHECK(!p.is_out_of_range, "indices: expected tokens below ", kv_len,
                    " and slots below ", p.num_slots, ", got a larger one");
  });
  return {out, lse};
}

// out [B, Hq, 1, D] of the union of two disjoint parts; a part without tokens has lse -inf.
std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  check_shape(out_a, "out_a", {-1, -1, 1, -1});
  const int64_t batch = out_a.size(0), heads = out_a.size(1), head_dim = out_a.size(3);
  Tensor out = torch::stable::new_empty(out_a, {batch, heads, 1, head_dim});
  Tensor lse = torch::stable::new_empty(lse_a, {batch, heads, 1}, ScalarType::Float);
  const Rows<float> a = float_rows(lse_a, "lse_a", {batch, heads, 1});
  const Rows<float> b = float_rows(lse_b, "lse_b", {batch, heads, 1});
  float* merged_lse = lse.mutable_data_ptr<float>();
  dispatch_floating(out_a, "out_a", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows<T> rows_a = rows_of<T>(out_a, "out_a"), merged = rows_of<T>(out, "out");
    const Rows<T> rows_b = rows_like<T>(out_b, "out_b", out_a, batch, heads, 1, head_dim);
    for (int64_t i = 0; i < batch * heads; ++i) {
      const int64_t row = i / heads, head = i % heads;
      const float lse_of_a = *a.at(row, head), lse_of_b = *b.at(row, head);
      const float largest = std::fmax(lse_of_a, lse_of_b);
      const float shift = largest == -INFINITY ? 0.f : largest;
      const float weight_a = std::exp(lse_of_a - shift), weight_b = std::exp(lse_of_b - shift);
      const float sum = weight_a + weight_b, inverse = sum == 0.f ? 0.f : 1.f / sum;
      for (int64_t d = 0; d < head_dim; ++d)
        merged.at(row, head)[d] =
            from_float<T>(weight_a * inverse * to_float(rows_a.at(row, head)[d]) +
                          weight_b * inverse * to_float(rows_b.at(row, head)[d]));
      merged_lse[i] = sum == 0.f ? -INFINITY : shift + std::log(sum);
    }
  });
  return {out, lse};
}

}  // namespace
}  // namespace clusterkv

STABLE_TORCH_LIBRARY_IMPL(clusterkv, CPU, m) {
  m.impl("selected_attention", TORCH_BOX(&clusterkv::selected_attention));
  m.impl("merge_states", TORCH_BOX(&clusterkv::merge_states));
}
