// Inner products of a query with all centroids. Included once per instruction set.
//
//   scores[g][c] = query[g] . centroid[c]      4 centroids x 2 queries a step, lanes over channels
//
// A centroid is read once for two query heads of its group; with C x D of a few hundred kB in L2
// that is what bounds it.

template <int Heads>
CLUSTERKV_INLINE void score_block(const float* const* rows, const float* const* queries,
                                  int head_dim, float* const* scores, int64_t at) {
  Vec acc[Heads][4];
  for (int g = 0; g < Heads; ++g)
    for (int i = 0; i < 4; ++i) acc[g][i] = Vec{};
  int d = 0;
  for (; d + W <= head_dim; d += W) {
    for (int g = 0; g < Heads; ++g) {
      const Vec q = load(queries[g] + d);
      for (int i = 0; i < 4; ++i) acc[g][i] = load(rows[i] + d) * q + acc[g][i];
    }
  }
  for (int g = 0; g < Heads; ++g) {
    alignas(64) float sums[4];
    sums_of_four(acc[g][0], acc[g][1], acc[g][2], acc[g][3], sums);
    for (int i = 0; i < 4; ++i)
      for (int rest = d; rest < head_dim; ++rest) sums[i] += rows[i][rest] * queries[g][rest];
    std::memcpy(scores[g] + at, sums, sizeof sums);
  }
}

// centroids [C] rows of D floats, `stride` apart; queries [heads, D]; scores [heads, padded C],
// padded to a multiple of 4
inline void score_clusters(const float* centroids, int64_t stride, int64_t num_clusters,
                           const float* queries, int heads, int head_dim, float* scores,
                           int64_t scores_stride) {
  for (int64_t c = 0; c < num_clusters; c += 4) {
    const float* rows[4];
    for (int64_t i = 0; i < 4; ++i)
      rows[i] = centroids + (c + i < num_clusters ? c + i : num_clusters - 1) * stride;
    int g = 0;
    for (; g + 2 <= heads; g += 2) {
      const float* two[2] = {queries + g * head_dim, queries + (g + 1) * head_dim};
      float* to[2] = {scores + g * scores_stride, scores + (g + 1) * scores_stride};
      score_block<2>(rows, two, head_dim, to, c);
    }
    if (g < heads) {
      const float* one[1] = {queries + g * head_dim};
      float* to[1] = {scores + g * scores_stride};
      score_block<1>(rows, one, head_dim, to, c);
    }
  }
}

// mass[c] += softmax of (scale * scores[c] + log_sizes[c]) over the C clusters. Arrays are padded
// to `padded`, a multiple of 16; padding and empty clusters have log_sizes -inf. scores is scratch.
inline void add_softmax(float* scores, const float* log_sizes, int64_t padded, float scale,
                        float* mass) {
  Vec largest = splat(-INFINITY);
  for (int64_t c = 0; c < padded; c += W) {
    const Vec logit = load(scores + c) * scale + load(log_sizes + c);
    store(scores + c, logit);
    largest = maximum(largest, logit);
  }
  const float most = max_of(largest);
  if (most == -INFINITY) return;
  Vec sums = Vec{};
  for (int64_t c = 0; c < padded; c += W) {
    const Vec weight = exp_of_negative(load(scores + c) - most);
    store(scores + c, weight);
    sums += weight;
  }
  const float inverse = 1.f / sum_of(sums);
  for (int64_t c = 0; c < padded; c += W)
    store(mass + c, load(scores + c) * inverse + load(mass + c));
}

inline SelectionKernels selection_kernels() { return {score_clusters, add_softmax}; }
