// The inner loops of k-means. Included once per instruction set.
//
// scan_panel: scores = keys . directions, a matrix product whose result is reduced on the spot.
//
//              one panel: kAcross x W clusters      kRows tokens x 1 panel = kRows x kAcross sums
//   d = 0    [ c0 c1 ... c(2W-1) ]    key[0][d] ->  [ acc acc ]
//   d = 1    [ c0 c1 ... c(2W-1) ]    key[1][d] ->  [ acc acc ]     then: max over acc + bias
//   ...                               ...
//
// A panel holds its clusters side by side at each channel, so that a step is kAcross loads, kRows
// broadcasts and kRows x kAcross multiply-adds. Unused places of the last panel have bias -inf.

#if CLUSTERKV_ISA >= 2
constexpr int kRows = 14, kAcross = 1;  // a broadcast is part of the multiply-add there
#else
constexpr int kRows = 6, kAcross = 2;
#endif

// Best place in a panel for rows[i], i < kRows.
CLUSTERKV_INLINE void scan_rows(const float* const* rows, int head_dim, const float* panel,
                                const float* bias, float* scores, int32_t* places) {
  Vec acc[kRows][kAcross];
  for (int t = 0; t < kRows; ++t)
    for (int i = 0; i < kAcross; ++i) acc[t][i] = load(bias + i * W);
  for (int d = 0; d < head_dim; ++d) {
    Vec direction[kAcross];
    for (int i = 0; i < kAcross; ++i) direction[i] = load(panel + (d * kAcross + i) * W);
    for (int t = 0; t < kRows; ++t) {
      const Vec key = splat(rows[t][d]);
      for (int i = 0; i < kAcross; ++i) acc[t][i] = key * direction[i] + acc[t][i];
    }
  }
  for (int t = 0; t < kRows; ++t) {
    Vec largest = acc[t][0];
    for (int i = 1; i < kAcross; ++i) largest = maximum(largest, acc[t][i]);
    scores[t] = max_of(largest);
    const Vec best = splat(scores[t]);
    uint32_t lanes = 1u << (kAcross * W - 1);  // what is not a number equals nothing
    for (int i = 0; i < kAcross; ++i) lanes |= lanes_equal(acc[t][i], best) << (i * W);
    places[t] = __builtin_ctz(lanes);  // the lowest of equal ones
  }
}

// The same for any number of tokens of `keys`, whose rows of D floats are neighbours.
// list [count]; panel [D, kAcross * W]; bias [kAcross * W]; scores, places [count]
inline void scan_panel(const float* keys, const int32_t* list, int count, int head_dim,
                       const float* panel, const float* bias, float* scores, int32_t* places) {
  for (int first = 0; first < count; first += kRows) {
    const float* rows[kRows];
    for (int t = 0; t < kRows; ++t)
      rows[t] = keys + static_cast<int64_t>(list[std::min(first + t, count - 1)]) * head_dim;
    if (first + kRows <= count) {
      scan_rows(rows, head_dim, panel, bias, scores + first, places + first);
    } else {
      float some_scores[kRows];
      int32_t some_places[kRows];
      scan_rows(rows, head_dim, panel, bias, some_scores, some_places);
      std::copy_n(some_scores, count - first, scores + first);
      std::copy_n(some_places, count - first, places + first);
    }
  }
}

// Moves keys from the sums of the clusters they were in to those they are in, some channels of
// them. Double, so that the order of additions does not show in the float32 mean. keys [count,
// stride]; labels, before [count], no cluster outside [0, C); sums [C, head_dim]
template <int kWidth>
CLUSTERKV_INLINE void move_channels(const float* keys, int64_t stride, int64_t count,
                                    const int32_t* labels, const int32_t* before, int num_clusters,
                                    int any_width, int64_t head_dim, double* sums) {
  const int width = kWidth > 0 ? kWidth : any_width;
  for (int64_t t = 0; t < count; ++t) {
    const int32_t now = labels[t], old = before[t];
    if (now == old) continue;
    const float* key = keys + t * stride;
    if (now >= 0 && now < num_clusters) {
      double* sum = sums + now * head_dim;
      for (int d = 0; d < width; ++d) sum[d] += static_cast<double>(key[d]);
    }
    if (old >= 0 && old < num_clusters) {
      double* sum = sums + old * head_dim;
      for (int d = 0; d < width; ++d) sum[d] -= static_cast<double>(key[d]);
    }
  }
}

inline void move_keys(const float* keys, int64_t stride, int64_t count, const int32_t* labels,
                      const int32_t* before, int num_clusters, int width, int64_t head_dim,
                      double* sums) {
  if (width == 16)
    move_channels<16>(keys, stride, count, labels, before, num_clusters, width, head_dim, sums);
  else
    move_channels<0>(keys, stride, count, labels, before, num_clusters, width, head_dim, sums);
}

// rows of T -> rows of float
template <class T>
void widen(const T* from, int64_t from_stride, float* to, int64_t to_stride, int64_t count,
           int head_dim) {
  for (int64_t t = 0; t < count; ++t)
    for (int d = 0; d < head_dim; ++d) to[t * to_stride + d] = to_float(from[t * from_stride + d]);
}

inline ClusteringKernels clustering_kernels() {
  return {kAcross * W, scan_panel, move_keys, widen<float>, widen<BF16>, widen<FP16>};
}
