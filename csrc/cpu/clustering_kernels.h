// What the host side of clustering calls in its kernels. Free of torch headers.
#pragma once

#include <cstdint>

#include "../half.h"

namespace clusterkv {

struct ClusteringKernels {
  int panel_width;  // clusters of a panel
  void (*scan_panel)(const float* keys, const int32_t* list, int count, int head_dim,
                     const float* panel, const float* bias, float* scores, int32_t* places);
  void (*move_keys)(const float* keys, int64_t stride, int64_t count, const int32_t* labels,
                    const int32_t* before, int num_clusters, int width, int64_t head_dim,
                    double* sums);
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
