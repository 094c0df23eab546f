// What the environment says about the simulated machine.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace npu_sim {

inline uint64_t number_of_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Devices that this machine claims to have.
inline uint32_t device_count() {
  static const auto count = static_cast<uint32_t>(number_of_environment("HYPER_PARALLEL_NPU_SIM_DEVICES", 8));
  return count;
}

// Memory of each device in MiB; every process has this much on each device to itself.
inline uint64_t device_memory() {
  static const uint64_t bytes = number_of_environment("HYPER_PARALLEL_NPU_SIM_MEMORY", 4096) << 20;
  return bytes;
}

}  // namespace npu_sim
