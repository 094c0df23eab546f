"""Qwen3 as plain MindSpore Cells, written for one device: nothing in it knows of ranks.

Parameters have the names that transformers gives them, so a safetensors file of either loads into the other.

    plan: [model] function = "mindspore_qwen3:qwen3"
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import mindspore
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer


def qwen3(
    *,
    vocab_size: int = 256,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    max_position_embeddings: int = 128,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-6,
    initializer_range: float = 0.02,
    tie_word_embeddings: bool = False,
) -> Qwen3ForCausalLM:
    """A Qwen3; the arguments are those of transformers' `Qwen3Config`."""
    return Qwen3ForCausalLM(SimpleNamespace(model_type="qwen3", **locals()))


class Qwen3ForCausalLM(nn.Cell):
    """Qwen3 with a head for the next token."""

    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config)
        self.lm_head = linear(config, config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def construct(self, input_ids, labels=None):
        """`logits`, and with `labels` the mean `loss` of predicting each of them from the tokens before it."""
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return {"logits": logits}
        log_probabilities = ops.log_softmax(logits[:, :-1], -1)
        chosen = ops.gather_elements(log_probabilities, 2, ops.expand_dims(labels[:, 1:], -1))
        return {"loss": -ops.mean(chosen), "logits": logits}


class Qwen3Model(nn.Cell):
    """Embedding, blocks, norm."""

    def __init__(self, config):
        super().__init__()
        weight = initializer(Normal(config.initializer_range), [config.vocab_size, config.hidden_size])
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.CellList([Qwen3DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.inverse_frequencies = 1.0 / config.rope_theta ** (ops.arange(0, config.head_dim, 2) / config.head_dim)

    def construct(self, input_ids):
        length = input_ids.shape[1]
        angles = ops.arange(length).astype(mindspore.float32).reshape(-1, 1) * self.inverse_frequencies
        angles = ops.concat([angles, angles], -1)
        future = ops.arange(length).reshape(1, -1) > ops.arange(length).reshape(-1, 1)
        hidden = self.embed_tokens(input_ids)
        rotation = ops.cos(angles).astype(hidden.dtype), ops.sin(angles).astype(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, future)
        return self.norm(hidden)


class Qwen3DecoderLayer(nn.Cell):
    """Attention and MLP, each on a normalised residual stream."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Qwen3Attention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, hidden, rotation, future):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, future)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3Attention(nn.Cell):
    """Grouped-query attention with normalised heads and rotary positions."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = linear(config, config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = linear(config, config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = linear(config, config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = linear(config, config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)

    def construct(self, hidden, rotation, future):
        batch, length, _ = hidden.shape
        query = rotate(self.q_norm(self.heads(self.q_proj(hidden))), rotation)
        key = rotate(self.k_norm(self.heads(self.k_proj(hidden))), rotation)
        value = self.heads(self.v_proj(hidden))
        # Each key and value serves a group of queries: (batch, key-value heads, group, length, head_dim).
        query = ops.reshape(query, (batch, -1, self.groups, length, self.head_dim))
        key, value = ops.expand_dims(key, 2), ops.expand_dims(value, 2)
        scores = mint.matmul(query, ops.transpose(key, (0, 1, 2, 4, 3))) / math.sqrt(self.head_dim)
        weights = ops.softmax(ops.masked_fill(scores, future, -math.inf), -1)
        attended = ops.reshape(mint.matmul(weights, value), (batch, -1, length, self.head_dim))
        return self.o_proj(ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (batch, length, -1)))

    def heads(self, features):
        """(batch, length, features) as (batch, heads, length, head_dim)."""
        batch, length, _ = features.shape
        return ops.transpose(ops.reshape(features, (batch, length, -1, self.head_dim)), (0, 2, 1, 3))


class Qwen3MLP(nn.Cell):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = linear(config, config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config, config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config, config.intermediate_size, config.hidden_size)

    def construct(self, hidden):
        return self.down_proj(ops.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Qwen3RMSNorm(nn.Cell):
    """Scales by the root of the mean square over the last dim."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = Parameter(initializer("ones", [size]), name="weight")
        self.eps = eps

    def construct(self, hidden):
        return self.weight * (hidden * ops.rsqrt(mint.mean(hidden * hidden, -1, keepdim=True) + self.eps))


class Embedding(mint.nn.Embedding):
    """MindSpore's, by a kernel that CPUs have."""

    def construct(self, input):
        return ops.gather(self.weight, input, 0)


def linear(config, inputs: int, outputs: int) -> mint.nn.Linear:
    """A layer without bias."""
    return mint.nn.Linear(inputs, outputs, bias=False, weight_init=Normal(config.initializer_range))


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair of features by the angle of its position."""
    cosine, sine = rotation
    first, second = ops.split(heads, heads.shape[-1] // 2, -1)
    return heads * cosine + ops.concat([-second, first], -1) * sine
