// torch_npu's operators that multiply and communicate (MC2), composed of aten's product and of HCCL's collectives.
//
// They take what CANN's take on an Atlas A2 and refuse the rest: two dims, float16 and bfloat16, 256 to 65534 input
// features, an input that is not transposed, 2, 4 or 8 ranks, no bias, no scales.
#include "hccl/hccl.h"
#include "host.h"

extern "C" HcclComm npu_sim_communicator(const char* name);

namespace npu_sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

HcclDataType hccl_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? HCCL_DATA_TYPE_FP16 : HCCL_DATA_TYPE_BFP16;
}

// Checks a call against the operators' limits, and finds its communicator.
HcclComm checked(const char* name, const Tensor& input, const Tensor& x2, c10::string_view hcom, int64_t ranks,
                 const OptionalTensor& bias, const OptionalTensor& x1_scale, const OptionalTensor& x2_scale,
                 int64_t comm_turn, const std::optional<at::ScalarType>& output_dtype) {
  TORCH_CHECK(input.dim() == 2 && x2.dim() == 2, name, " takes tensors of two dims, got ", input.sizes(), ", ",
              x2.sizes());
  TORCH_CHECK(input.scalar_type() == x2.scalar_type() &&
                  (input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16),
              name, " takes float16 and bfloat16, got ", input.scalar_type(), ", ", x2.scalar_type());
  TORCH_CHECK(input.size(1) == x2.size(0), name, ": ", input.sizes(), " and ", x2.sizes(), " have no product");
  TORCH_CHECK(input.size(1) >= 256 && input.size(1) < 65535, name, " takes 256 to 65534 input features, got ",
              input.size(1));
  TORCH_CHECK(input.numel() > 0 && x2.numel() > 0, name, " takes no product without elements");
  TORCH_CHECK(input.is_contiguous(), name, " takes no transposed input");
  TORCH_CHECK(x2.is_contiguous() || x2.t().is_contiguous(), name, " takes x2 contiguous or transposed");
  TORCH_CHECK(ranks == 2 || ranks == 4 || ranks == 8, name, " takes 2, 4 or 8 ranks, got ", ranks);
  for (const OptionalTensor* tensor : {&bias, &x1_scale, &x2_scale}) {
    TORCH_CHECK(!*tensor || !(*tensor)->defined(), name, ": a bias and scales are not simulated");
  }
  TORCH_CHECK(comm_turn == 0, name, " takes comm_turn 0, got ", comm_turn);
  TORCH_CHECK(!output_dtype || *output_dtype == input.scalar_type(), name, ": output_dtype is not simulated");
  HcclComm communicator = npu_sim_communicator(std::string(hcom).c_str());
  TORCH_CHECK(communicator != nullptr, name, ": there is no communicator ", hcom);
  return communicator;
}

std::tuple<Tensor, Tensor> all_gather_mm(const Tensor& input, const Tensor& x2, c10::string_view hcom, int64_t ranks,
                                         const OptionalTensor& bias, const OptionalTensor& x1_scale,
                                         const OptionalTensor& x2_scale, int64_t gather_index, bool gather_output,
                                         int64_t comm_turn, std::optional<at::ScalarType> output_dtype,
                                         std::optional<c10::string_view>) {
  const char* name = "npu_all_gather_base_mm";
  HcclComm communicator = checked(name, input, x2, hcom, ranks, bias, x1_scale, x2_scale, comm_turn, output_dtype);
  TORCH_CHECK(gather_index == 0, name, " gathers input (gather_index 0), got ", gather_index);
  Tensor gathered = at::empty({input.size(0) * ranks, input.size(1)}, input.options());
  HcclResult result = HcclAllGather(input.data_ptr(), gathered.data_ptr(), static_cast<uint64_t>(input.numel()),
                                    hccl_type(input), communicator, nullptr);
  TORCH_CHECK(result == HCCL_SUCCESS, name, ": ", HcclGetErrorString(result));
  Tensor output = at::matmul(gathered, x2);
  return {output, gather_output ? gathered : at::empty({0}, input.options())};
}

Tensor mm_reduce_scatter(const Tensor& input, const Tensor& x2, c10::string_view hcom, int64_t ranks,
                         c10::string_view reduce_op, const OptionalTensor& bias, const OptionalTensor& x1_scale,
                         const OptionalTensor& x2_scale, int64_t comm_turn, std::optional<at::ScalarType> output_dtype,
                         std::optional<c10::string_view>) {
  const char* name = "npu_mm_reduce_scatter_base";
  HcclComm communicator = checked(name, input, x2, hcom, ranks, bias, x1_scale, x2_scale, comm_turn, output_dtype);
  TORCH_CHECK(reduce_op == "sum", name, " sums, got reduce_op ", reduce_op);
  TORCH_CHECK(input.size(0) % ranks == 0, name, ": ", ranks, " ranks do not divide ", input.size(0), " rows");
  Tensor product = at::matmul(input, x2).contiguous();
  Tensor output = at::empty({input.size(0) / ranks, x2.size(1)}, input.options());
  HcclResult result = HcclReduceScatter(product.data_ptr(), output.data_ptr(), static_cast<uint64_t>(output.numel()),
                                        hccl_type(input), HCCL_REDUCE_SUM, communicator, nullptr);
  TORCH_CHECK(result == HCCL_SUCCESS, name, ": ", HcclGetErrorString(result));
  return output;
}

}  // namespace

void register_communicating() {
  torch::Library& npu = library("npu");
  npu.impl("npu_all_gather_base_mm", &all_gather_mm);
  npu.impl("npu_mm_reduce_scatter_base", &mm_reduce_scatter);
}

}  // namespace npu_sim
