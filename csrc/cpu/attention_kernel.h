// Attention of a few query heads over one tile of tokens. Included once per instruction set.
//
//            tile: kTile row pointers                 per block of HB query heads (of one group)
//   keys[t] ->  [ D elements ]  --dots-->     scores [HB][kTile]   4 tokens x HB heads a step
//                                 softmax     weights = exp(score - maximum), sums
//   values[t] -> [ D elements ] --weigh-->    accumulator [HB][D]  2 vectors x HB heads a step
//
// A row is read where it lies, once per block of heads; the rows of the next tile are prefetched
// meanwhile, since they are scattered and no hardware prefetcher can guess them.
//
// Measured on Zen 1 with AVX2 (peak 20 GMAC/s a core), tiles in L2: 10.6 GMAC/s for 3 heads x 64,
// 12 for 4 x 128 in bf16, 6.5 for a single head, where each multiply-add needs a load of its own.
// Tried and lost:
//   * accumulators of several rows in an array that is passed on: g++ keeps it in memory, 0.78x
//     (dense, 4 heads x 128, bf16).
//   * two accumulators for each sum when there is one head: 1.0x; loads are the limit, not latency.
//   * a constant head_dim of 128: 1.02x for 40 % more code; 64 gains 1.06x to 1.15x and is kept.

template <class T>
CLUSTERKV_INLINE void prefetch_row(const T* row, int head_dim) {
  const char* begin = reinterpret_cast<const char*>(row);
  for (int at = 0; at < head_dim * static_cast<int>(sizeof(T)); at += 64)
    __builtin_prefetch(begin + at);
}

// acc[g][t] += keys[t] . query[g] over one pair of vectors.
template <int HB, int TB>
CLUSTERKV_INLINE void dot_step(const Vec (&a)[TB], const Vec (&b)[TB], const float* query,
                               int64_t stride, Vec (&acc)[HB][TB]) {
  for (int g = 0; g < HB; ++g) {
    const Vec q0 = load(query + g * stride), q1 = load(query + g * stride + W);
    for (int t = 0; t < TB; ++t) acc[g][t] = a[t] * q0 + acc[g][t];
    for (int t = 0; t < TB; ++t) acc[g][t] = b[t] * q1 + acc[g][t];
  }
}

#if CLUSTERKV_ISA == 3
// BF16 products in pairs, summed in float32: one instruction for two elements.
template <int HB, int TB>
CLUSTERKV_INLINE void dot_rows_bf16(const BF16* const* keys, const float* query, int head_dim,
                                    int64_t stride, Vec (&acc)[HB][TB]) {
  for (int d = 0; d < head_dim; d += 32) {
    const __mmask32 present = head_dim - d >= 32 ? ~0u : (1u << (head_dim - d)) - 1u;
    __m512bh k[TB];
    for (int t = 0; t < TB; ++t) k[t] = (__m512bh)_mm512_maskz_loadu_epi16(present, keys[t] + d);
    for (int g = 0; g < HB; ++g) {
      const BF16* packed = reinterpret_cast<const BF16*>(query + g * stride);
      const __m512bh q = (__m512bh)_mm512_loadu_si512(packed + d);
      for (int t = 0; t < TB; ++t) acc[g][t] = _mm512_dpbf16_ps(acc[g][t], q, k[t]);
    }
  }
}
#endif

// sums[g][first + t] = keys[t] times query[g], not yet summed over the lanes. The accumulators are
// an array of this function alone, or g++ keeps them in memory (measured: half the speed).
template <class T, int HB, int TB>
CLUSTERKV_INLINE void dot_rows(const T* const* keys, const float* query, int head_dim,
                               Vec (&sums)[HB][4], int first) {
  const int64_t stride = (head_dim + 31) / 32 * 32;
  Vec acc[HB][TB];
  for (int g = 0; g < HB; ++g)
    for (int t = 0; t < TB; ++t) acc[g][t] = Vec{};
#if CLUSTERKV_ISA == 3
  if constexpr (std::is_same<T, BF16>::value)
    dot_rows_bf16<HB, TB>(keys, query, head_dim, stride, acc);
  else
#endif
  {
    const int whole = head_dim / kPair * kPair;
    Vec a[TB], b[TB];
    for (int d = 0; d < whole; d += kPair) {
      for (int t = 0; t < TB; ++t) load_pair(keys[t] + d, a[t], b[t]);
      dot_step<HB, TB>(a, b, query + d, stride, acc);
    }
    if (whole < head_dim) {
      for (int t = 0; t < TB; ++t) load_pair(keys[t] + whole, head_dim - whole, a[t], b[t]);
      dot_step<HB, TB>(a, b, query + whole, stride, acc);
    }
  }
  for (int g = 0; g < HB; ++g)
    for (int t = 0; t < TB; ++t) sums[g][first + t] = acc[g][t];
}

// scores [HB][kTile] = keys . query; also prefetches the next keys.
template <class T, int HB, int D>
CLUSTERKV_INLINE void dots(const Tile<T>& tile, const Tile<T>* next, const float* query,
                           int head_dim, float (*scores)[kTile]) {
  constexpr int TB = CLUSTERKV_ISA >= 2 || HB <= 2 ? 4 : 2;  // what the registers hold
  for (int t = 0; t < tile.count; t += 4) {
    if (next != nullptr)
      for (int i = 0; i < 4; ++i) prefetch_row(next->keys[t + i], head_dim);
    Vec acc[HB][4];
    for (int i = 0; i < 4; i += TB) dot_rows<T, HB, TB>(tile.keys + t + i, query, head_dim, acc, i);
    for (int g = 0; g < HB; ++g)
      sums_of_four(acc[g][0], acc[g][1], acc[g][2], acc[g][3], scores[g] + t);
  }
}

// Turns scores of one head into weights and updates maximum and sum of its state. Returns the
// factor for what the accumulator holds.
template <class T>
CLUSTERKV_INLINE float softmax_step(const Tile<T>& tile, float scale, float* scores, float* state) {
  if (tile.has_bias) {
    for (int t = 0; t < kTile; t += W)
      store(scores + t, load(scores + t) * scale + load(tile.bias + t));
  } else {
    for (int t = 0; t < kTile; t += W) store(scores + t, load(scores + t) * scale);
  }
  for (int t = tile.count; t < kTile; ++t) scores[t] = -INFINITY;
  Vec largest = load(scores);
  for (int t = W; t < kTile; t += W) largest = maximum(largest, load(scores + t));
  const float before = state[0];
  const float now = std::fmax(before, max_of(largest));
  const float shift = now == -INFINITY ? 0.f : now;  // all scores -inf: all weights 0
  Vec sums = Vec{};
  for (int t = 0; t < kTile; t += W) {
    const Vec weight = exp_of_negative(load(scores + t) - shift);
    store(scores + t, weight);
    sums += weight;
  }
  const float factor = before == now ? 1.f : exp_of_negative(splat(before - shift))[0];
  state[0] = now;
  state[1] = state[1] * factor + sum_of(sums);
  return factor;
}

// out[g][d..d+2W) = factors[g] * out[g][d..d+2W) + weights . values[.][d..d+2W)
template <class T, int HB, bool kPartial>
CLUSTERKV_INLINE void weigh_pair(const Tile<T>& tile, const Tile<T>* next, int d, int head_dim,
                                 const float (*weights)[kTile], const float* factors, float* out,
                                 int64_t out_stride) {
  constexpr int kEach = sizeof(T) * kPair < 64 ? 64 / (sizeof(T) * kPair) : 1;  // steps a line
  Vec o[HB][2];
  for (int g = 0; g < HB; ++g) {
    o[g][0] = load(out + g * out_stride + d) * factors[g];
    o[g][1] = load(out + g * out_stride + d + W) * factors[g];
  }
  const bool has_prefetch = next != nullptr && (d / kPair) % kEach == 0;
  for (int t = 0; t < tile.count; ++t) {
    if (has_prefetch) __builtin_prefetch(next->values[t] + d);
    Vec a, b;
    if (kPartial)
      load_pair(tile.values[t] + d, head_dim - d, a, b);
    else
      load_pair(tile.values[t] + d, a, b);
    for (int g = 0; g < HB; ++g) {
      const Vec weight = splat(weights[g][t]);
      o[g][0] = a * weight + o[g][0];
      o[g][1] = b * weight + o[g][1];
    }
  }
  for (int g = 0; g < HB; ++g) {
    store(out + g * out_stride + d, o[g][0]);
    store(out + g * out_stride + d + W, o[g][1]);
  }
}

// One tile for HB query heads; D is the head_dim, or 0 for any.
template <class T, int HB, int D>
void attend_block(const Tile<T>& tile, const Tile<T>* next, const float* query, int any_head_dim,
                  float scale, float* state, int64_t state_stride) {
  const int head_dim = D > 0 ? D : any_head_dim;
  alignas(64) float scores[HB][kTile];
  float factors[HB];
  dots<T, HB, D>(tile, next, query, head_dim, scores);
  for (int g = 0; g < HB; ++g)
    factors[g] = softmax_step(tile, scale, scores[g], state + g * state_stride);
  float* out = state + kStatePrefix;
  int d = 0;
  for (; d + kPair <= head_dim; d += kPair)
    weigh_pair<T, HB, false>(tile, next, d, head_dim, scores, factors, out, state_stride);
  if (d < head_dim)
    weigh_pair<T, HB, true>(tile, next, d, head_dim, scores, factors, out, state_stride);
}

template <class T, int D>
void attend_heads(const Tile<T>& tile, const Tile<T>* next, const float* query, int heads,
                  int head_dim, float scale, float* state, int64_t state_stride) {
  const int64_t stride = (head_dim + 31) / 32 * 32;
  while (heads > 0) {
    const int block = heads == 5 ? 3 : heads < 4 ? heads : 4;  // 5 = 3 + 2 rather than 4 + 1
    auto attend = block == 4   ? attend_block<T, 4, D>
                  : block == 3 ? attend_block<T, 3, D>
                  : block == 2 ? attend_block<T, 2, D>
                               : attend_block<T, 1, D>;
    attend(tile, next, query, head_dim, scale, state, state_stride);
    next = nullptr;  // it is prefetched once
    heads -= block, query += block * stride, state += block * state_stride;
  }
}

template <class T>
void attend(const Tile<T>& tile, const Tile<T>* next, const float* query, int heads, int head_dim,
            float scale, float* state, int64_t state_stride) {
  auto run = CLUSTERKV_ISA > 0 && head_dim == 64 ? attend_heads<T, 64> : attend_heads<T, 0>;
  run(tile, next, query, heads, head_dim, scale, state, state_stride);
}

template <class T>
void pack_query(const T* query, int head_dim, float* packed) {
  std::memset(packed, 0, (head_dim + 31) / 32 * 32 * sizeof(float));
  if (CLUSTERKV_ISA == 3 && std::is_same<T, BF16>::value) {
    std::memcpy(packed, query, head_dim * sizeof(T));
    return;
  }
  for (int d = 0; d < head_dim; ++d)
    packed[d / kPair * kPair + position_in_pair<T>(d % kPair)] = to_float(query[d]);
}

template <class T>
void finish(const float* states, int parts, int64_t stride, int head_dim, T* out, float* lse) {
  const int padded = (head_dim + kPair - 1) / kPair * kPair;
  alignas(64) float merged[256] = {};
  float largest = -INFINITY, sum = 0.f;
  for (int i = 0; i < parts; ++i) largest = std::fmax(largest, states[i * stride]);
  for (int i = 0; i < parts; ++i) {
    const float* state = states + i * stride;
    if (state[1] == 0.f) continue;
    const float weight = exp_of_negative(splat(state[0] - largest))[0];
    sum += state[1] * weight;
    for (int d = 0; d < padded; d += W)
      store(merged + d, load(state + kStatePrefix + d) * weight + load(merged + d));
  }
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  for (int d = 0; d < head_dim; ++d)
    out[d] = from_float<T>(merged[d / kPair * kPair + position_in_pair<T>(d % kPair)] * inverse);
  *lse = sum == 0.f ? -INFINITY : largest + std::log(sum);
}

template <class T>
AttentionKernels<T> attention_kernels() {
#if CLUSTERKV_ISA == 3
  if constexpr (!std::is_same<T, BF16>::value)
    return avx512::attention_kernels<T>();
  else
#endif
    return {pack_query<T>, attend<T>, finish<T>};
}
