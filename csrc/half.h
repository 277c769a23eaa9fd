// The two 16-bit float formats as plain structs, free of torch headers.
#pragma once

#include <cstdint>
#include <cstring>

namespace clusterkv {

struct BF16 {
  uint16_t bits;
};

struct FP16 {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(BF16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(FP16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return float_of_bits(sign | 0x70000000u | rest);  // infinity, NaN
  return float_of_bits(sign | bits_of_float(float_of_bits(rest) * 0x1p112f));
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even.
template <>
inline BF16 from_float<BF16>(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline FP16 from_float<FP16>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (rest >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa, the float adder does the rounding.
    half = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest + 0xc8000fffu + ((rest >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace clusterkv
