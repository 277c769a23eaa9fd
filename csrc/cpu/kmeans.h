// Spherical k-means of one KV head, cut into steps whose items can run on any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "clustering_kernels.h"

namespace clusterkv {

constexpr int64_t kBlock = 240;    // tokens of an item of assignment; a multiple of every kRows
constexpr int64_t kChannels = 16;  // channels of an item of the update: one cache line of a key

// Directions of centroids as the assignment kernel reads them.
struct Panels {
  std::vector<float> directions, bias;  // [num_panels, D, width], [num_panels * width]
  std::vector<int32_t> ids;             // [num_panels * width], ascending
  int count = 0;

  // `members` are the clusters that take part, ascending; centroids are `stride` floats apart.
  void pack(const float* centroids, int64_t stride, const std::vector<int32_t>& members,
            int head_dim, int width) {
    const int64_t places = static_cast<int64_t>(members.size());
    count = static_cast<int>((places + width - 1) / width);
    directions.assign(count * width * static_cast<int64_t>(head_dim), 0.f);
    bias.assign(count * width, -INFINITY);
    ids.assign(count * width, places > 0 ? members[0] : -1);
    for (int64_t i = 0; i < places; ++i) {
      const float* centroid = centroids + members[i] * stride;
      double square = 0.;
      for (int d = 0; d < head_dim; ++d) square += static_cast<double>(centroid[d]) * centroid[d];
      const float inverse = square > 0. ? static_cast<float>(1. / std::sqrt(square)) : 0.f;
      float* place = directions.data() + i / width * width * head_dim + i % width;
      for (int d = 0; d < head_dim; ++d) place[d * width] = centroid[d] * inverse;
      bias[i] = 0.f;
      ids[i] = members[i];
    }
  }
};

inline std::vector<int32_t> all_clusters(int64_t count) {
  std::vector<int32_t> members(count);
  for (int64_t c = 0; c < count; ++c) members[c] = static_cast<int32_t>(c);
  return members;
}

// Sums and counts of the keys of each cluster.
struct ClusterSums {
  std::vector<double> sums;     // [C, D]
  std::vector<int64_t> counts;  // [C]

  void clear(int64_t num_clusters, int64_t head_dim) {
    sums.assign(num_clusters * head_dim, 0.);
    counts.assign(num_clusters, 0);
  }

  void count(const int32_t* labels, int64_t num_tokens) {
    const int64_t num_clusters = static_cast<int64_t>(counts.size());
    for (int64_t t = 0; t < num_tokens; ++t)
      if (labels[t] >= 0 && labels[t] < num_clusters) ++counts[labels[t]];
  }

  // Means of the clusters that have tokens; the others keep what is there.
  void write_means(float* centroids, int64_t stride, int64_t head_dim) const {
    for (size_t c = 0; c < counts.size(); ++c) {
      if (counts[c] == 0) continue;
      for (int64_t d = 0; d < head_dim; ++d)
        centroids[c * stride + d] = static_cast<float>(sums[c * head_dim + d] / counts[c]);
    }
  }
};

}  // namespace clusterkv
