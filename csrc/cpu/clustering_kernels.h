// What the host side of clustering calls in its kernels. Free of torch headers.
#pragma once

#include <cstdint>

#include "../half.h"

namespace clusterkv {

struct ClusteringKernels {
  int panel_width;  // clusters of a panel
  void (*assign_block)(const float* keys, int64_t stride, int count, int head_dim,
                       const float* panels, const float* bias, const int32_t* ids, int num_panels,
                       int32_t* labels);
  void (*add_keys)(const float* keys, int64_t stride, int64_t count, const int32_t* labels,
                   int num_clusters, int width, int64_t head_dim, double* sums);
  void (*widen_float)(const float*, int64_t, float*, int64_t, int64_t, int);
  void (*widen_bf16)(const BF16*, int64_t, float*, int64_t, int64_t, int);
  void (*widen_fp16)(const FP16*, int64_t, float*, int64_t, int64_t, int);

  void widen(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t count,
             int head_dim) const {
    widen_float(from, from_stride, to, to_stride, count, head_dim);
  }
  void widen(const BF16* from, int64_t from_stride, float* to, int64_t to_stride, int64_t count,
             int head_dim) const {
    widen_bf16(from, from_stride, to, to_stride, count, head_dim);
  }
  void widen(const FP16* from, int64_t from_stride, float* to, int64_t to_stride, int64_t count,
             int head_dim) const {
    widen_fp16(from, from_stride, to, to_stride, count, head_dim);
  }
};

}  // namespace clusterkv
