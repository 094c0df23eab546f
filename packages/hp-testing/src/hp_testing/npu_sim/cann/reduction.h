// Data types and reductions of HCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hccl/hccl.h"

namespace npu_sim {

size_t element_size(HcclDataType type);

// output[i] = parts[0][i] op parts[1][i] op ..., in this order. Half precision is added up in float32.
void reduce(const std::vector<const char*>& parts, char* output, size_t count, HcclDataType type, HcclReduceOp op);

}  // namespace npu_sim
