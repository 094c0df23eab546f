// The cell that aten's LSTM is composed of on a device, forward and backward.
#include "host.h"

namespace npu_sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor biased(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// The gates in the order of the weights: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto gates = (biased(input_gates, input_bias) + biased(hidden_gates, hidden_bias)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor squashed = cy.tanh();
  Tensor dhy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor dcy = dhy * out * (1 - squashed * squashed);
  if (grad_cy && grad_cy->defined()) {
    dcy = dcy + *grad_cy;
  }
  Tensor dgates = at::cat({dcy * cell * in * (1 - in), dcy * cx * forget * (1 - forget), dcy * in * (1 - cell * cell),
                           dhy * squashed * out * (1 - out)},
                          1);
  return {dgates, dcy * forget, has_bias ? dgates.sum(0) : Tensor()};
}

}  // namespace

void register_recurrent() {
  torch::Library& aten = library("aten");
  aten.impl("_thnn_fused_lstm_cell", &lstm_cell);
  aten.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

}  // namespace npu_sim
