// torch_npu's fused operators that HyperParallel uses, forward and backward, composed of aten's.
//
// They take what CANN's take and refuse the rest: float16, bfloat16 and float32, the layouts with a batch, no dropout.
#include <limits>

#include "host.h"

namespace npu_sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kCompressedMask = 2048;  // sides of the mask that the causal modes take
constexpr int64_t kStatisticsCopies = 8;  // softmax_max and softmax_sum repeat each number so often

void check_type(const char* name, const Tensor& tensor) {
  auto type = tensor.scalar_type();
  TORCH_CHECK(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, name,
              " takes float16, bfloat16 and float32 on an NPU, got ", type);
}

Tensor summed_to(const Tensor& tensor, at::IntArrayRef sizes) { return at::sum_to(tensor, sizes); }

// Layouts of memory that only NPUs have: everything stays as it is.
Tensor keep_format(const Tensor& input, int64_t, std::optional<int64_t>, std::optional<int64_t>) { return input; }

// --- RMS norm: y = x / rms(x) * gamma over the last dims, those of gamma

std::vector<int64_t> last_dims(const Tensor& gamma) {
  std::vector<int64_t> dims;
  for (int64_t dim = -gamma.dim(); dim < 0; ++dim) {
    dims.push_back(dim);
  }
  return dims;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  check_type("npu_rms_norm", input);
  TORCH_CHECK(gamma.dim() <= input.dim() && input.sizes().slice(input.dim() - gamma.dim()) == gamma.sizes(),
              "npu_rms_norm: gamma of shape ", gamma.sizes(), " is not the last dims of input of shape ",
              input.sizes());
  Tensor x = input.to(at::kFloat);
  Tensor rstd = x.square().mean(last_dims(gamma), true).add(epsilon).rsqrt();
  return {(x * rstd * gamma.to(at::kFloat)).to(input.scalar_type()), rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& gamma,
                                             const Tensor& rstd) {
  Tensor dy = grad.to(at::kFloat);
  Tensor normed = input.to(at::kFloat) * rstd;
  Tensor inner = dy * gamma.to(at::kFloat);
  Tensor dx = (inner - normed * (inner * normed).mean(last_dims(gamma), true)) * rstd;
  return {dx.to(input.scalar_type()), summed_to(dy * normed, gamma.sizes())};
}

// --- SwiGLU: y = silu(a) * b, the two halves of a dim

Tensor swiglu(const Tensor& input, int64_t dim) {
  check_type("npu_swiglu", input);
  TORCH_CHECK(input.size(dim) % 2 == 0, "npu_swiglu: dim ", dim, " of shape ", input.sizes(), " has no two halves");
  auto halves = input.to(at::kFloat).chunk(2, dim);
  return (at::silu(halves[0]) * halves[1]).to(input.scalar_type());
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& input, int64_t dim) {
  auto halves = input.to(at::kFloat).chunk(2, dim);
  Tensor dy = grad.to(at::kFloat);
  Tensor gate = halves[0].sigmoid();
  Tensor slope = gate * (1 + halves[0] * (1 - gate));
  return at::cat({dy * halves[1] * slope, dy * halves[0] * gate}, dim).to(input.scalar_type());
}

// --- Rotary embedding: y = x * r1 + rotated(x) * r2

Tensor rotated(const Tensor& x, c10::string_view mode) {
  if (mode == "half") {
    auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  TORCH_CHECK(mode == "interleave", "npu_rotary_mul: rotary_mode is half or interleave, got ", mode);
  auto pairs = x.unflatten(-1, {-1, 2}).unbind(-1);
  return at::stack({-pairs[1], pairs[0]}, -1).flatten(-2);
}

Tensor rotary(const Tensor& input, const Tensor& r1, const Tensor& r2, c10::string_view mode, const OptionalTensor&) {
  check_type("npu_rotary_mul", input);
  TORCH_CHECK(input.dim() == 4 && r1.dim() == 4 && r2.dim() == 4, "npu_rotary_mul takes tensors of 4 dims, got ",
              input.sizes(), ", ", r1.sizes(), ", ", r2.sizes());
  Tensor x = input.to(at::kFloat);
  return (x * r1 + rotated(x, mode) * r2).to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> rotary_backward(const Tensor& grad, const Tensor& input, const Tensor& r1,
                                                   const Tensor& r2, c10::string_view mode) {
  Tensor dy = grad.to(at::kFloat);
  Tensor x = input.to(at::kFloat);
  // The rotation is by a quarter turn: its transpose is its negative.
  Tensor dx = dy * r1 - rotated(dy * r2, mode);
  return {dx.to(input.scalar_type()), summed_to(dy * x, r1.sizes()).to(r1.scalar_type()),
          summed_to(dy * rotated(x, mode), r2.sizes()).to(r2.scalar_type())};
}

// --- Flash attention: softmax(scale * q k^T) v

// Batch, heads, sequence, head size, in float32.
Tensor heads_first(const Tensor& tensor, c10::string_view layout, int64_t heads) {
  Tensor wide = tensor.to(at::kFloat);
  if (layout == "BNSD") {
    return wide;
  }
  if (layout == "BSND") {
    return wide.transpose(1, 2);
  }
  if (layout == "BSH") {
    return wide.unflatten(-1, {heads, -1}).transpose(1, 2);
  }
  TORCH_CHECK(layout == "SBH", "npu_fusion_attention: input_layout ", layout, " is not simulated");
  return wide.unflatten(-1, {heads, -1}).permute({1, 2, 0, 3});
}

Tensor as_given(const Tensor& tensor, c10::string_view layout, at::ScalarType type) {
  Tensor narrow = tensor.to(type);
  if (layout == "BNSD") {
    return narrow.contiguous();
  }
  if (layout == "BSND") {
    return narrow.transpose(1, 2).contiguous();
  }
  return layout == "BSH" ? narrow.transpose(1, 2).flatten(-2).contiguous()
                         : narrow.permute({2, 0, 1, 3}).flatten(-2).contiguous();
}

struct Attention {
  Tensor query, key, value;  // heads first; the key's and value's heads repeated to the query's
  Tensor logits;             // scaled and masked
  int64_t groups;            // query heads for each key head

  Attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, c10::string_view layout, double scale,
            const OptionalTensor& mask, int64_t mode, int64_t before, int64_t after) {
    for (const Tensor* tensor : {&q, &k, &v}) {
      check_type("npu_fusion_attention", *tensor);
      TORCH_CHECK(tensor->dim() == (layout.size() == 3 ? 3 : 4), "npu_fusion_attention: shape ", tensor->sizes(),
                  " does not fit input_layout ", layout);
    }
    query = heads_first(q, layout, heads);
    TORCH_CHECK(query.size(1) == heads, "npu_fusion_attention: head_num is ", heads, ", query has ", query.size(1));
    int64_t key_heads = layout.size() == 3 ? k.size(-1) / query.size(3) : k.size(layout == "BNSD" ? 1 : 2);
    TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, "npu_fusion_attention: ", heads,
                " query heads do not divide over ", key_heads, " key heads");
    groups = heads / key_heads;
    key = heads_first(k, layout, key_heads).repeat_interleave(groups, 1);
    value = heads_first(v, layout, key_heads).repeat_interleave(groups, 1);
    logits = at::matmul(query, key.transpose(-1, -2)) * scale;
    Tensor hidden = hidden_places(mask, mode, before, after);
    if (hidden.defined()) {
      logits = logits.masked_fill(hidden, -std::numeric_limits<float>::infinity());
    }
  }

  // True where a query must not look, undefined where it may look at all.
  Tensor hidden_places(const OptionalTensor& mask, int64_t mode, int64_t before, int64_t after) const {
    int64_t rows = query.size(2);
    int64_t columns = key.size(2);
    bool given = mask && mask->defined();
    if (mode == 0 || mode == 1) {
      TORCH_CHECK(!given || (mask->size(-2) == rows && mask->size(-1) == columns),
                  "npu_fusion_attention: atten_mask of shape ", given ? mask->sizes() : at::IntArrayRef(),
                  " for a sequence of ", rows, " and ", columns);
      return given ? mask->to(at::kBool) : Tensor();
    }
    TORCH_CHECK(mode >= 2 && mode <= 4, "npu_fusion_attention: sparse_mode ", mode, " is not simulated");
    TORCH_CHECK(given && mask->size(-1) == kCompressedMask && mask->size(-2) == kCompressedMask,
                "npu_fusion_attention: sparse_mode ", mode, " takes the compressed atten_mask of 2048 x 2048");
    Tensor row = at::arange(rows, query.options().dtype(at::kLong)).unsqueeze(1);
    Tensor column = at::arange(columns, row.options()).unsqueeze(0);
    // How far a place is right of the diagonal; mode 2 starts it at the upper left corner, the others end it at the
    // lower right one.
    Tensor right = column - row - (mode == 2 ? 0 : columns - rows);
    return mode == 4 ? right.gt(after).logical_or(right.lt(-before)) : right.gt(0);
  }

  // Sums over the query heads that share a key head.
  Tensor grouped(const Tensor& grad) const {
    return groups == 1 ? grad : grad.unflatten(1, {-1, groups}).sum(2);
  }
};

void refuse_rest(const OptionalTensor& pse, const OptionalTensor& padding, const OptionalTensor& sink, double keep) {
  for (const OptionalTensor* tensor : {&pse, &padding, &sink}) {
    TORCH_CHECK(!*tensor || !(*tensor)->defined(),
                "npu_fusion_attention: pse, padding_mask and sink are not simulated");
  }
  TORCH_CHECK(keep == 1.0, "npu_fusion_attention: dropout is not simulated");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads, c10::string_view layout,
    const OptionalTensor& pse, const OptionalTensor& padding, const OptionalTensor& mask, double scale, double keep,
    int64_t before, int64_t after, int64_t, at::OptionalIntArrayRef, at::OptionalIntArrayRef, at::OptionalIntArrayRef,
    int64_t mode, bool, bool, c10::string_view, const OptionalTensor& sink, const OptionalTensor&, int64_t, int64_t) {
  refuse_rest(pse, padding, sink, keep);
  Attention parts(query, key, value, heads, layout, scale, mask, mode, before, after);
  Tensor largest = parts.logits.amax(-1, true).clamp_min(std::numeric_limits<float>::lowest());
  Tensor weights = (parts.logits - largest).exp();
  Tensor total = weights.sum(-1, true);
  // A query that may look at nothing gets zero.
  Tensor output = at::matmul(weights / total.clamp_min(std::numeric_limits<float>::min()), parts.value);
  auto repeated = [](const Tensor& tensor) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes.back() = kStatisticsCopies;
    return tensor.expand(sizes).contiguous();
  };
  Tensor unused = at::empty({0}, query.options());
  return {as_given(output, layout, query.scalar_type()), repeated(largest), repeated(total), unused, 0, 0, 0};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& grad, int64_t heads,
    c10::string_view layout, const OptionalTensor& pse, const OptionalTensor& padding, const OptionalTensor& mask,
    const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum, const OptionalTensor&,
    const OptionalTensor& attention_in, double scale, double keep, int64_t before, int64_t after, int64_t, int64_t,
    int64_t, int64_t, at::OptionalIntArrayRef, at::OptionalIntArrayRef, at::OptionalIntArrayRef, int64_t mode, bool,
    bool, c10::string_view, const OptionalTensor& sink) {
  refuse_rest(pse, padding, sink, keep);
  TORCH_CHECK(softmax_max && softmax_sum && attention_in,
              "npu_fusion_attention_grad takes softmax_max, softmax_sum and attention_in of the forward");
  Attention parts(query, key, value, heads, layout, scale, mask, mode, before, after);
  Tensor largest = softmax_max->slice(-1, 0, 1);
  Tensor total = softmax_sum->slice(-1, 0, 1).clamp_min(std::numeric_limits<float>::min());
  Tensor weights = (parts.logits - largest).exp() / total;
  Tensor dy = heads_first(grad, layout, heads);
  Tensor output = heads_first(*attention_in, layout, heads);
  Tensor dweights = at::matmul(dy, parts.value.transpose(-1, -2));
  Tensor dlogits = weights * (dweights - (dy * output).sum(-1, true)) * scale;
  Tensor dquery = at::matmul(dlogits, parts.key);
  Tensor dkey = parts.grouped(at::matmul(dlogits.transpose(-1, -2), parts.query));
  Tensor dvalue = parts.grouped(at::matmul(weights.transpose(-1, -2), dy));
  Tensor unused = at::empty({0}, query.options());
  return {as_given(dquery, layout, query.scalar_type()), as_given(dkey, layout, key.scalar_type()),
          as_given(dvalue, layout, value.scalar_type()), unused, unused};
}

}  // namespace

void register_fused() {
  torch::Library& npu = library("npu");
  npu.impl("npu_format_cast", &keep_format);
  npu.impl("npu_rms_norm", &rms_norm);
  npu.impl("npu_rms_norm_backward", &rms_norm_backward);
  npu.impl("npu_swiglu", &swiglu);
  npu.impl("npu_swiglu_backward", &swiglu_backward);
  npu.impl("npu_rotary_mul", &rotary);
  npu.impl("npu_rotary_mul_backward", &rotary_backward);
  npu.impl("npu_fusion_attention", &attention);
  npu.impl("npu_fusion_attention_grad", &attention_backward);
}

}  // namespace npu_sim
