// Device tensors as host tensors. The simulation's device memory is host memory, so a host tensor can be a view of
// the same bytes.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

namespace npu_sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A host tensor over the same memory; host tensors are returned as they are.
at::Tensor host_view(const at::Tensor& tensor);

// A copy on a device, with the same strides; device tensors are returned as they are.
at::Tensor to_device(const at::Tensor& tensor, c10::Device device);

// Draws that a host kernel makes now come from the device's generator, which moves on.
//
// Note [Random numbers]: a device's generator is a seed and an offset, as on an NPU. A random operation seeds the
// host's generator from both, draws, and puts the host's generator back, so that states which are saved and restored
// give the same numbers again, and draws on the host are not disturbed.
class DeviceRandomness {
 public:
  DeviceRandomness(const std::optional<at::Generator>& given, c10::Device device);
  ~DeviceRandomness();
  DeviceRandomness(const DeviceRandomness&) = delete;
  DeviceRandomness& operator=(const DeviceRandomness&) = delete;

 private:
  at::Generator host_;
  at::Tensor saved_;
};

void register_aten();
void register_recurrent();
void register_fused();
void register_communicating();

// Kernels that stay registered as long as the process runs.
torch::Library& library(const char* ns, c10::DispatchKey key = c10::DispatchKey::PrivateUse1);

}  // namespace npu_sim
