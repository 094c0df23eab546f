#include "host.h"

#include <ATen/CPUGeneratorImpl.h>

#include <memory>
#include <mutex>
#include <vector>

namespace npu_sim {

namespace {

// A random operation takes at most this many numbers of the generator's sequence, for all that it matters here.
constexpr uint64_t kOffsetStep = 12;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // spreads the offsets over the seeds

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  at::Tensor view = tensor.numel() == 0
                        ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                        : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) {
    view = view.conj();
  }
  return tensor.is_neg() ? view._neg_view() : view;
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) {
    return tensor;
  }
  at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel() != 0) {
    host_view(copy).copy_(tensor);
  }
  return copy;
}

DeviceRandomness::DeviceRandomness(const std::optional<at::Generator>& given, c10::Device device)
    : host_(at::detail::getDefaultCPUGenerator()), saved_(host_.get_state()) {
  at::Generator generator = given ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  host_.set_current_seed(generator.current_seed() + kGolden * offset);
  generator.set_offset(offset + kOffsetStep);
}

DeviceRandomness::~DeviceRandomness() { host_.set_state(saved_); }

torch::Library& library(const char* ns, c10::DispatchKey key) {
  static auto* kept = new std::vector<std::unique_ptr<torch::Library>>;
  kept->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__));
  return *kept->back();
}

}  // namespace npu_sim

namespace {

// The dispatcher warns of kernels that replace others, which is what this library is for.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

extern "C" void npu_sim_install() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  npu_sim::register_aten();
  npu_sim::register_recurrent();
  npu_sim::register_fused();
  npu_sim::register_communicating();
}
