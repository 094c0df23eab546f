// aten's operators on the simulated device: each runs the host's kernel over the same memory.
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "host.h"

namespace npu_sim {

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::OperatorName kAttention{"aten::scaled_dot_product_attention", ""};

// What torch_npu does by itself: making tensors, and views of them. Nothing is computed there.
const std::set<std::string>& kept() {
  static const std::set<std::string> names{
      "_copy_from_and_resize", "_has_compatible_shallow_copy_type", "_pin_memory", "_reshape_alias",
      "_resize_output_", "alias", "as_strided", "as_strided_", "detach", "empty", "empty_strided", "expand", "is_pinned",
      "is_set_to", "lift", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "pin_memory",
      "record_stream", "reshape", "resize_", "select", "set_", "slice", "squeeze", "storage", "t", "to", "transpose",
      "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real"};
  return names;
}

// A call's arguments on the host.
struct Call {
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  std::vector<c10::IValue> given;
  std::optional<c10::Device> device;
  std::optional<at::Generator> generator;

  at::Tensor host(const at::Tensor& tensor) {
    if (on_device(tensor) && !device) {
      device = tensor.device();
    }
    return host_view(tensor);
  }

  void to_host(c10::IValue& value) {
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(host(tensor));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<at::Tensor>(host(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      device = device ? device : value.toDevice();
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();  // see Note [Random numbers]
    }
  }

  // The argument that a result is written to, -1 if the result is new.
  int written_argument(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      return -1;
    }
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* argument = schema.arguments()[i].alias_info();
      if (argument != nullptr && *argument == *alias) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void to_device_again(c10::IValue& value, int written) {
    if (written >= 0) {
      if (value.isTensor() && given[written].isTensor()) {
        // The kernel wrote into the memory of the argument, unless it had to resize it.
        at::Tensor target = given[written].toTensor();
        const at::Tensor& result = value.toTensor();
        if (on_device(target) && target.sizes() != result.sizes()) {
          target.resize_(result.sizes());
        }
        if (on_device(target) && result.numel() != 0 && result.data_ptr() != target.data_ptr()) {
          host_view(target).copy_(result);
        }
      }
      value = given[written];
    } else if (value.isTensor()) {
      value = to_device(value.toTensor(), *device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(to_device(tensor, *device));
      }
      value = list;
    }
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t arguments = schema.arguments().size();
  size_t base = stack->size() - arguments;
  Call call{schema, *stack, {stack->begin() + static_cast<long>(base), stack->end()}, std::nullopt, std::nullopt};
  for (size_t i = 0; i < arguments; ++i) {
    call.to_host((*stack)[base + i]);
  }
  if (!call.device) {
    call.device = c10::Device(kDevice, 0);
  }
  constexpr auto host = c10::DispatchKeySet(c10::DispatchKey::CPU);
  if (op.hasTag(at::Tag::nondeterministic_seeded) || call.generator) {
    DeviceRandomness randomness(call.generator, *call.device);
    op.redispatchBoxed(host, stack);
  } else {
    op.redispatchBoxed(host, stack);
  }
  size_t results = schema.returns().size();
  base = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    call.to_device_again((*stack)[base + i], call.written_argument(i));
  }
}

// torch's own composition of an operator out of others: its kernel is where a device without kernels of its own for
// the operator finds it.
void run_composed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
}

// Note [Composed operators]: torch_npu gives some operators that torch composes (matmul, lstm, l1_loss) kernels and
// gradients of its own. Their gradients are operators that the host doesn't have, so they are composed again.
bool composed(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && op.operator_name() != kAttention;
}

// torch_npu calls CANN here, past the dispatcher: plain math instead.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  std::optional<at::Tensor> added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) {  // true where a query may look
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    added = at::zeros(mask->sizes(), query.options()).masked_fill(mask->logical_not(), kHidden);
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, added, dropout, causal, {}, scale, grouped));
}

at::Tensor& copy_into(at::Tensor& self, const at::Tensor& source, bool) {
  host_view(self).copy_(host_view(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  host_view(target).copy_(host_view(self));
  return target;
}

at::Scalar item(const at::Tensor& self) { return at::_local_scalar_dense(host_view(self)); }

}  // namespace

void register_aten() {
  auto before = [](const c10::OperatorName& left, const c10::OperatorName& right) {
    return std::tie(left.name, left.overload_name) < std::tie(right.name, right.overload_name);
  };
  torch::Library& aten = library("aten");
  // Copies cross the border between host and device.
  aten.impl("copy_", &copy_into);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_local_scalar_dense", &item);
  // Composed of the above, as for any device.
  aten.impl("clone", &at::native::clone);
  aten.impl("contiguous", &at::native::contiguous);
  aten.impl("_to_copy", &at::native::_to_copy);
  aten.impl("empty_like", &at::native::empty_like);
  const std::set<std::string> own{"copy_", "_copy_from", "_local_scalar_dense", "clone", "contiguous", "_to_copy", "empty_like",
                                  "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"};

  auto& dispatcher = c10::Dispatcher::singleton();
  auto registered = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::PrivateUse1);
  for (const auto& name : registered) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    std::string base = name.name.substr(6);
    std::string full = name.overload_name.empty() ? base : base + "." + name.overload_name;
    if (own.count(full) == 0 && kept().count(base) == 0) {
      aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }

  torch::Library& gradients = library("aten", c10::DispatchKey::AutogradPrivateUse1);
  gradients.impl("scaled_dot_product_attention", &attention);
  auto differentiated = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::AutogradPrivateUse1);
  std::set<c10::OperatorName, decltype(before)> names(registered.begin(), registered.end(), before);
  names.insert(differentiated.begin(), differentiated.end());
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) == 0 && op && composed(*op)) {
      std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      gradients.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_composed>());
    }
  }
}

}  // namespace npu_sim
