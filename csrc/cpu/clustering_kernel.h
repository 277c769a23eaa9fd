// The three inner loops of k-means. Included once per instruction set.
//
// assign: scores = keys . directions, a matrix product whose result is reduced on the spot.
//
//              one panel: kPair clusters            kRows tokens x 1 panel = 2 kRows accumulators
//   d = 0    [ c0 c1 ... c(2W-1) ]    key[0][d] ->  [ acc acc ]
//   d = 1    [ c0 c1 ... c(2W-1) ]    key[1][d] ->  [ acc acc ]   then: best = max(best, acc +
//   bias)
//   ...                               ...                         lane by lane, ids beside it
//
// A panel holds 2W clusters at each channel, so that a step is 2 loads, kRows broadcasts and
// 2 kRows multiply-adds. Unused places of the last panel have bias -inf.

#if CLUSTERKV_ISA >= 2
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

// Best cluster of `Count` rows among all panels.
// keys: rows of D floats, `stride` apart; panels [num_panels, D, kPair]; bias, ids
// [num_panels * kPair]; labels [Count]
template <int Count>
CLUSTERKV_INLINE void assign_rows(const float* keys, int64_t stride, int head_dim,
                                  const float* panels, const float* bias, const int32_t* ids,
                                  int num_panels, int32_t* labels) {
  Vec best[Count];
  VecInt place[Count];
  for (int t = 0; t < Count; ++t) best[t] = splat(-INFINITY), place[t] = VecInt{};
  for (int panel = 0; panel < num_panels; ++panel) {
    Vec acc[Count][2];
    for (int t = 0; t < Count; ++t) {
      acc[t][0] = load(bias + panel * kPair);
      acc[t][1] = load(bias + panel * kPair + W);
    }
    const float* at = panels + static_cast<int64_t>(panel) * head_dim * kPair;
    for (int d = 0; d < head_dim; ++d, at += kPair) {
      const Vec c0 = load(at), c1 = load(at + W);
      for (int t = 0; t < Count; ++t) {
        const Vec key = splat(keys[t * stride + d]);
        acc[t][0] = key * c0 + acc[t][0];
        acc[t][1] = key * c1 + acc[t][1];
      }
    }
    for (int half = 0; half < 2; ++half) {
      const VecInt here = VecInt{} + (2 * panel + half);
      for (int t = 0; t < Count; ++t) {
        const VecInt is_better = (VecInt)(acc[t][half] > best[t]);
        place[t] = is_better ? here : place[t];
        best[t] = is_better ? acc[t][half] : best[t];
      }
    }
  }
  for (int t = 0; t < Count; ++t) {
    // Of equal scores the lowest place wins; places ascend with ids.
    alignas(64) int32_t halves[W];
    std::memcpy(halves, &place[t], sizeof halves);
    int32_t first = INT32_MAX;
    for (uint32_t lanes = lanes_equal(best[t], splat(max_of(best[t]))); lanes != 0;
         lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      first = std::min(first, halves[lane] * W + lane);
    }
    labels[t] = ids[first == INT32_MAX ? 0 : first];  // a key that is not a number: the first
  }
}

inline void assign_block(const float* keys, int64_t stride, int count, int head_dim,
                         const float* panels, const float* bias, const int32_t* ids, int num_panels,
                         int32_t* labels) {
  int t = 0;
  for (; t + kRows <= count; t += kRows)
    assign_rows<kRows>(keys + t * stride, stride, head_dim, panels, bias, ids, num_panels,
                       labels + t);
  for (; t < count; ++t)
    assign_rows<1>(keys + t * stride, stride, head_dim, panels, bias, ids, num_panels, labels + t);
}

// sums[label] += key over the channels [first, first + width). Double, so that the order in which
// a device adds does not show in the float32 mean.
// keys [count, stride]; sums [C, head_dim]
template <int kWidth>
CLUSTERKV_INLINE void add_channels(const float* keys, int64_t stride, int64_t count,
                                   const int32_t* labels, int num_clusters, int width,
                                   int64_t head_dim, double* sums) {
  for (int64_t t = 0; t < count; ++t) {
    const int32_t label = labels[t];
    if (label < 0 || label >= num_clusters) continue;
    const float* key = keys + t * stride;
    double* sum = sums + label * head_dim;
    for (int d = 0; d < (kWidth > 0 ? kWidth : width); ++d) sum[d] += static_cast<double>(key[d]);
  }
}

inline void add_keys(const float* keys, int64_t stride, int64_t count, const int32_t* labels,
                     int num_clusters, int width, int64_t head_dim, double* sums) {
  if (width == 16)
    add_channels<16>(keys, stride, count, labels, num_clusters, width, head_dim, sums);
  else
    add_channels<0>(keys, stride, count, labels, num_clusters, width, head_dim, sums);
}

// rows of T -> rows of float
template <class T>
void widen(const T* from, int64_t from_stride, float* to, int64_t to_stride, int64_t count,
           int head_dim) {
  for (int64_t t = 0; t < count; ++t)
    for (int d = 0; d < head_dim; ++d) to[t * to_stride + d] = to_float(from[t * from_stride + d]);
}

inline ClusteringKernels clustering_kernels() {
  return {kPair, assign_block, add_keys, widen<float>, widen<BF16>, widen<FP16>};
}
