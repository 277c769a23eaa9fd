// Vectors of W floats. Included once per instruction set by per_isa.h: no `#pragma once`.
//
// A row of T is read two vectors at a time, in "packed order": load_pair(p) turns 2W elements into
// (a, b). For float and FP16 that is (first W, last W). For BF16 it is (even, odd): one load and
// one instruction a vector instead of two, because a BF16 is the upper half of a float. Whoever
// reads rows in packed order keeps its other operand packed (see position_in_pair).

#if CLUSTERKV_ISA >= 2
constexpr int W = 16;
using Vec = __m512;
#elif CLUSTERKV_ISA == 1
constexpr int W = 8;
using Vec = __m256;
#else
constexpr int W = 4;
typedef float Vec __attribute__((vector_size(16), may_alias));
#endif
constexpr int kPair = 2 * W;

typedef float VecLoad __attribute__((vector_size(4 * W), may_alias, aligned(4)));
typedef int32_t VecInt __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t VecBits __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t VecBitsLoad __attribute__((vector_size(4 * W), may_alias, aligned(1)));

CLUSTERKV_INLINE Vec splat(float x) {
#if CLUSTERKV_ISA >= 2
  return _mm512_set1_ps(x);
#elif CLUSTERKV_ISA == 1
  return _mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}
CLUSTERKV_INLINE Vec load(const float* p) { return (Vec) * reinterpret_cast<const VecLoad*>(p); }
CLUSTERKV_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecLoad*>(p) = (VecLoad)v; }

// The larger one; b where one of them is not a number.
CLUSTERKV_INLINE Vec maximum(Vec a, Vec b) {
#if CLUSTERKV_ISA >= 2
  return _mm512_max_ps(a, b);
#elif CLUSTERKV_ISA == 1
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The largest lane.
CLUSTERKV_INLINE float max_of(Vec v) {
#if CLUSTERKV_ISA >= 2
  return _mm512_reduce_max_ps(v);
#elif CLUSTERKV_ISA == 1
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float best = v[0];
  for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// Bit i: whether the lanes i are equal.
CLUSTERKV_INLINE uint32_t lanes_equal(Vec a, Vec b) {
#if CLUSTERKV_ISA >= 2
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#elif CLUSTERKV_ISA == 1
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return bits;
#endif
}

CLUSTERKV_INLINE float sum_of(Vec v) {
  alignas(64) float x[W];
  store(x, v);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

#if CLUSTERKV_ISA >= 1
CLUSTERKV_INLINE __m128 fold_to_128(__m256 v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
#endif
#if CLUSTERKV_ISA >= 2
CLUSTERKV_INLINE __m128 fold_to_128(__m512 v) {
  return fold_to_128(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
#endif

// out[i] = sum of the i-th vector.
CLUSTERKV_INLINE void sums_of_four(Vec v0, Vec v1, Vec v2, Vec v3, float* out) {
#if CLUSTERKV_ISA >= 1
  const __m128 a = fold_to_128(v0), b = fold_to_128(v1), c = fold_to_128(v2), d = fold_to_128(v3);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
#else
  out[0] = sum_of(v0), out[1] = sum_of(v1), out[2] = sum_of(v2), out[3] = sum_of(v3);
#endif
}

// exp(x) for x <= 0, relative error about 1e-7; exactly 0 below -87.3 (Cephes' polynomial). NaN
// stays NaN.
CLUSTERKV_INLINE Vec exp_of_negative(Vec x) {
  const Vec low = splat(-87.3f);
  const Vec clamped = maximum(low, x);
  const Vec shifted = clamped * 1.44269504f + 12582912.f;  // rounds to an integer in the low bits
  const Vec n = shifted - 12582912.f;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.f;
  const VecBits power = ((VecBits)shifted << 23) + 0x3f800000u;
  return (Vec)((VecBits)(y * (Vec)power) & ~(VecBits)(x <= low));
}

CLUSTERKV_INLINE void load_pair(const float* p, Vec& a, Vec& b) { a = load(p), b = load(p + W); }

CLUSTERKV_INLINE void load_pair(const BF16* p, Vec& a, Vec& b) {
  const VecBits bits = (VecBits) * reinterpret_cast<const VecBitsLoad*>(p);
  a = (Vec)(bits << 16);
  b = (Vec)(bits & 0xffff0000u);
}

CLUSTERKV_INLINE void load_pair(const FP16* p, Vec& a, Vec& b) {
#if CLUSTERKV_ISA >= 2
  a = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  b = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + W)));
#elif CLUSTERKV_ISA == 1
  a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + W)));
#else
  for (int i = 0; i < W; ++i) a[i] = to_float(p[i]), b[i] = to_float(p[i + W]);
#endif
}

// The same for the last `count` < 2W elements of a row; zero behind them. Reads nothing beyond.
template <class T>
CLUSTERKV_INLINE void load_pair(const T* p, int count, Vec& a, Vec& b) {
  T padded[kPair] = {};
  std::memcpy(padded, p, count * sizeof(T));
  load_pair(padded, a, b);
}

// Where element i of 2W consecutive ones lies in the packed order of T.
template <class T>
CLUSTERKV_INLINE int position_in_pair(int i) {
  if (std::is_same<T, BF16>::value) return i / 2 + (i % 2) * W;
  return i;
}
