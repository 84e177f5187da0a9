# SPDX-License-Identifier: Apache-2.0
"""What a run's model takes on its fullest GPU, counted from the configuration: the figures that recipes argue with.

In: a configuration, a world size. Out: bytes. Counted by hand, not measured: the sum leaves out CUDA's context, NCCL's
buffers, fragments, and the loss, whose own count is in `megatron_kd.report`. Nothing is built.
"""

from typing import Any, NamedTuple

_WEIGHT, _MAIN_GRAD, _ADAM = 2, 4, 12  # bf16; fp32; fp32 weight and both moments, split over the data-parallel ranks


class Parameters(NamedTuple):
    """Numbers of parameters, of the whole model."""

    embedding: int
    head: int
    dense: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def count_parameters(model: Any) -> Parameters:
    """Counts a GPT provider's parameters: attention, gated MLPs or experts, norms, biases, sinks."""
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    qkv_bias = model.add_bias_linear or model.add_qkv_bias
    attention = hidden * (queries + 2 * keys) + queries * hidden + 2 * hidden
    attention += (queries + 2 * keys) * qkv_bias + hidden * model.add_bias_linear
    attention += model.num_attention_heads * (getattr(model, "softmax_type", "") == "learnable")
    up = 2 if model.gated_linear_unit else 1

    def mlp(width: int) -> int:
        return (up + 1) * hidden * width + (up * width + hidden) * model.add_bias_linear

    vocabulary = model.vocab_size * hidden
    head = 0 if model.share_embeddings_and_output_weights else vocabulary
    if not model.num_moe_experts:
        return Parameters(vocabulary, head, layers * (attention + mlp(model.ffn_hidden_size)) + hidden, 0)
    router = model.num_moe_experts * (hidden + model.add_bias_linear)
    experts = layers * model.num_moe_experts * mlp(model.moe_ffn_hidden_size)
    return Parameters(vocabulary, head, layers * (attention + router) + hidden, experts)


def state_bytes(cfg: Any, world_size: int) -> int:
    """Weights, gradients and Adam's state on the first pipeline stage, with the distributed optimizer."""
    model, count = cfg.model, count_parameters(cfg.model)
    tensor, stages = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    expert_ways = (model.expert_model_parallel_size or 1) * (model.expert_tensor_parallel_size or tensor)
    ends = count.embedding if stages > 1 else count.embedding + count.head
    dense = (count.dense / stages + ends) / tensor
    experts = count.experts / stages / expert_ways
    replicas, expert_replicas = world_size / (tensor * stages), world_size / (expert_ways * stages)
    fixed = (_WEIGHT + _MAIN_GRAD) * (dense + experts)
    return round(fixed + _ADAM * (dense / replicas + experts / expert_replicas))


def activation_bytes(cfg: Any) -> int:
    """What the layers of a rank keep for backward, in bf16, without recomputation and with evenly routed tokens.

    A pipeline's first stage keeps as many micro-batches as there are stages, so its number cancels out.
    """
    model = cfg.model
    if model.recompute_granularity == "full":
        per_layer = model.hidden_size  # a layer's input alone; the working set of one layer comes on top
    else:
        attention = (model.num_attention_heads * 2 + model.num_query_groups * 2) * model.kv_channels
        if model.num_moe_experts:
            mlp = model.moe_router_topk * (2 * model.hidden_size + 3 * model.moe_ffn_hidden_size)
        else:
            mlp = model.hidden_size + 3 * model.ffn_hidden_size
        per_layer = 4 * model.hidden_size + attention + mlp
    shards = model.context_parallel_size * (model.tensor_model_parallel_size if model.sequence_parallel else 1)
    tokens = cfg.train.micro_batch_size * model.seq_length / shards
    return round(2 * tokens * per_layer * model.num_layers)
