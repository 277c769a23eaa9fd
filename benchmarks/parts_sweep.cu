// Times the centroid update for every number of channel parts, as the paper chose its P.
//
//   nvcc -O3 -std=c++17 -arch=native -I csrc/cuda -o parts_sweep benchmarks/parts_sweep.cu
//   ./parts_sweep [tokens] [clusters]        8 heads, 128 channels, bfloat16, labels at random
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sort_labels.cuh"
#include "update.cuh"

namespace {

using namespace clusterkv;
using Key = __nv_bfloat16;

template <class T>
T* on_device(size_t count) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, count * sizeof(T)) != cudaSuccess) {
    std::fprintf(stderr, "cudaMalloc: %s\n", cudaGetErrorString(cudaGetLastError()));
    std::exit(1);
  }
  cudaMemset(memory, 0, count * sizeof(T));
  return static_cast<T*>(memory);
}

ClusteringProblem<Key> problem(int tokens, int clusters) {
  constexpr int kHeads = 8, kHeadDim = 128;
  ClusteringProblem<Key> p{};
  p.batch = 1;
  p.heads = kHeads;
  p.kv_len = tokens;
  p.num_clusters = clusters;
  p.head_dim = kHeadDim;
  const int64_t token_stride = 2 * kHeads * kHeadDim;
  p.keys = {on_device<Key>(size_t(tokens * token_stride)), 0, 2 * kHeadDim, token_stride};
  const int64_t row = int64_t(clusters) * kHeadDim;
  p.centroids = {on_device<float>(size_t(kHeads * row)), kHeads * row, row, kHeadDim};
  p.labels = on_device<int>(size_t(kHeads) * tokens);
  p.counts = on_device<int>(size_t(kHeads) * p.sort_tiles() * clusters);
  p.starts = on_device<int>(size_t(kHeads) * (clusters + 1));
  p.order = on_device<int>(size_t(kHeads) * tokens);
  std::vector<int> labels(size_t(kHeads) * tokens);
  for (int& label : labels) label = std::rand() % clusters;
  cudaMemcpy(p.labels, labels.data(), labels.size() * sizeof(int), cudaMemcpyHostToDevice);
  return p;
}

template <int kParts>
void measure(const ClusteringProblem<Key>& p) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int round = 0; round < 12; ++round) {
    float ms = 0;
    cudaEventRecord(begin);
    launch_update<Key, kParts>(p, 0, nullptr);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    if (round >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  std::printf("{\"parts\": %d, \"ms\": %.4f}\n", kParts, double(times[times.size() / 2]));
}

}  // namespace

int main(int count, char** arguments) {
  const int tokens = count > 1 ? std::atoi(arguments[1]) : 32768;
  const int clusters = count > 2 ? std::atoi(arguments[2]) : tokens / 80;
  const ClusteringProblem<Key> p = problem(tokens, clusters);
  launch_sort(p, 0, nullptr);
  measure<4>(p);
  measure<8>(p);
  measure<16>(p);
  measure<32>(p);
  measure<64>(p);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
