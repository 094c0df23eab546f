#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "failure.h"

namespace npu_sim {

namespace {

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// How an element is stored, and the type that it is added up in.
template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum load(Stored value) { return as_float(static_cast<uint32_t>(value) << 16); }
  static Stored store(Sum value) {
    if (std::isnan(value)) {
      return 0x7fc0;
    }
    uint32_t bits = as_bits(value);
    return static_cast<Stored>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Sum = float;

  static Sum load(Stored value) {
    float sign = (value & 0x8000) != 0 ? -1.0f : 1.0f;
    int exponent = (value >> 10) & 0x1f;
    int fraction = value & 0x3ff;
    if (exponent == 0x1f) {
      return fraction != 0 ? NAN : sign * INFINITY;
    }
    return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                 : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25));
  }

  static Stored store(Sum value) {
    auto sign = static_cast<Stored>((as_bits(value) >> 16) & 0x8000);
    float size = std::fabs(value);
    if (std::isnan(value)) {
      return sign | 0x7e00;
    }
    if (size >= 65520.0f) {  // half way between the largest number and the one that would follow
      return sign | 0x7c00;
    }
    // The spacing of the numbers around `size`; nearbyint rounds ties to even.
    int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
    auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return static_cast<Stored>(sign + ((exponent + 14) << 10) + steps);
  }
};

template <class T>
T combine(T left, T right, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return static_cast<T>(left + right);
    case HCCL_REDUCE_PROD:
      return static_cast<T>(left * right);
    case HCCL_REDUCE_MAX:
      return std::max(left, right);
    case HCCL_REDUCE_MIN:
      return std::min(left, right);
    default:
      throw Failure(HCCL_E_NOT_SUPPORT, "unknown reduction " + std::to_string(op));
  }
}

template <class Element>
void reduce_as(const std::vector<const char*>& parts, char* output, size_t count, HcclReduceOp op) {
  using Stored = typename Element::Stored;
  auto* target = reinterpret_cast<Stored*>(output);
  for (size_t i = 0; i < count; ++i) {
    typename Element::Sum value = Element::load(reinterpret_cast<const Stored*>(parts[0])[i]);
    for (size_t part = 1; part < parts.size(); ++part) {
      value = combine(value, Element::load(reinterpret_cast<const Stored*>(parts[part])[i]), op);
    }
    target[i] = Element::store(value);
  }
}

}  // namespace

size_t element_size(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      throw Failure(HCCL_E_NOT_SUPPORT, "unknown data type " + std::to_string(type));
  }
}

void reduce(const std::vector<const char*>& parts, char* output, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<Plain<int8_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_UINT8:
      return reduce_as<Plain<uint8_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<Plain<int16_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_UINT16:
      return reduce_as<Plain<uint16_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<Plain<int32_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_UINT32:
      return reduce_as<Plain<uint32_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<Plain<int64_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_UINT64:
      return reduce_as<Plain<uint64_t>>(parts, output, count, op);
    case HCCL_DATA_TYPE_FP32:
      return reduce_as<Plain<float>>(parts, output, count, op);
    case HCCL_DATA_TYPE_FP64:
      return reduce_as<Plain<double>>(parts, output, count, op);
    case HCCL_DATA_TYPE_FP16:
      return reduce_as<Float16>(parts, output, count, op);
    case HCCL_DATA_TYPE_BFP16:
      return reduce_as<BFloat16>(parts, output, count, op);
    default:
      throw Failure(HCCL_E_NOT_SUPPORT, "no reduction of data type " + std::to_string(type));
  }
}

}  // namespace npu_sim
