# SPDX-License-Identifier: Apache-2.0
"""The transformer layer of a CPU rank: Megatron's local layers, with a norm and a core attention of our own.

In: a Bridge model provider. Out: the block specification it builds from. The norm is torch's, marked for sequence
parallelism; the attention also knows context parallelism and packed sequences, which Megatron has in Transformer
Engine only. It is dense: per layer it holds two [batch, heads, queries, keys] grids in fp32, which is meant for a few
hundred positions.

Shape legend: S query positions of this rank, T key positions of the whole sequence, B batch, N query heads of this
rank, G key/value groups of this rank, R = N / G, D channels of a head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from megatron_kd.dryrun.partition import packed_positions, padded_boundaries, positions, sequence_numbers
from megatron_kd.errors import UserError


class UnsupportedOnCpu(UserError, NotImplementedError):
    """The model asks for something that CPU ranks do not have."""


def cpu_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """What a Bridge provider takes as `transformer_layer_spec`: Megatron's local block with our modules."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    block.layer_norm = CpuNorm
    for layer in block.layer_specs:
        _use_our_modules(layer)
    return block


def _use_our_modules(layer: ModuleSpec) -> None:
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CpuAttention
    _use_our_norms(layer.submodules)
    _use_our_norms(attention)
    mlp = layer.submodules.mlp  # functools.partial of the dense or the mixture-of-experts layer
    if mlp.func is MoELayer:
        experts = mlp.keywords["submodules"].experts
        mlp.keywords["submodules"].experts = functools.partial(CpuExperts, *experts.args, **experts.keywords)


def _use_our_norms(submodules: Any) -> None:
    for name, module in vars(submodules).items():
        if module is WrappedTorchNorm:
            setattr(submodules, name, CpuNorm)


def with_local_modules(get_mtp_block_spec: Callable) -> Callable:
    """Megatron's `get_gpt_mtp_block_spec` (multi-token prediction) with local modules, whatever is asked."""

    @functools.wraps(get_mtp_block_spec)
    def get_local_mtp_block_spec(config: Any, spec: Any, use_transformer_engine: bool, **place: Any) -> Any:
        block = get_mtp_block_spec(config, spec, use_transformer_engine=False, **place)
        for layer in block.layer_specs if block else ():
            _use_our_norms(layer.submodules)
        return block

    return get_local_mtp_block_spec


class CpuExperts(SequentialMLP):
    """Megatron's experts one after another, with a right gradient for the bias of their second layer.

    RowParallelLinear marks its bias as replicated over sequence shards, and Megatron sums the gradients of such
    parameters over tensor parallelism. Experts are data parallel over those ranks: their gradients are summed already.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            if expert.linear_fc2.bias is not None:
                expert.linear_fc2.bias.sequence_parallel = False


class CpuNorm:
    """torch's RMSNorm or LayerNorm, marked so that Megatron sums its gradients over sequence shards."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norms = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in norms or config.layernorm_zero_centered_gamma:
            raise UnsupportedOnCpu(
                f"model.normalization={config.normalization!r} with layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma}: CPU ranks have {' and '.join(norms)}, not zero-centred"
            )
        norm = norms[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class CpuAttention(MegatronModule):
    """Core attention softmax(Q K^T scale) V in fp32, keys and values gathered over the context-parallel group.

    `softmax_offset`: a learnable logit per head that joins the denominator only (GPT-OSS's sink), or a constant 0 for
    softmax_type "off-by-one". Sharded over tensor parallelism as the heads are.

    Collectives: one all-gather of keys and one of values forward, a reduce-scatter of each backward; none at CP=1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.attn_mask_type = attn_mask_type
        self.heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._build_softmax_offset()

    def _build_softmax_offset(self) -> None:
        kind = self.config.softmax_type
        if kind == "vanilla":
            self.softmax_offset = None
        elif kind == "off-by-one":
            self.softmax_offset = torch.zeros(self.heads, dtype=self.config.params_dtype)
        elif kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(self.heads, dtype=self.config.params_dtype))
            # Without this mark the gradient norm would count tensor-parallel rank 0's heads only.
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if self.config.perform_initialization:
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    self.config.init_method(self.softmax_offset)
        else:
            raise UnsupportedOnCpu(f"model.softmax_type={kind!r}: CPU ranks have vanilla, off-by-one and learnable")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [S, B, N, D], key and value [S, B, G, D] of this rank's positions -> [S, B, N * D].

        attention_mask: True where a query must not look, broadcastable to [B, N, S, T], T in the sequence's order.
            Packed sequences have none.
        packed_seq_params: with it the tensors are one row of packed sequences, [S, N, D] and [S, G, D]. Each sees
            itself alone, padding nothing but itself. They come as `packed_positions` has them.
        """
        if attention_bias is not None:
            raise UnsupportedOnCpu("attention_bias is not implemented on CPU ranks")
        if packed_seq_params is not None:
            if packed_seq_params.qkv_format != "thd":
                raise UnsupportedOnCpu(f"packed sequences as {packed_seq_params.qkv_format!r}: CPU ranks have 'thd'")
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        hidden = self._blocked(query, key, attention_mask, attn_mask_type or self.attn_mask_type, packed_seq_params)
        context = attend(
            query,
            _GatherSequence.apply(_at_least_fp32(key), self.cp_group),
            _GatherSequence.apply(_at_least_fp32(value), self.cp_group),
            hidden,
            scale=self.softmax_scale,
            softmax_offset=self.softmax_offset,
            dropout=self.dropout if self.training else 0.0,
        )
        return context.flatten(2)

    def _blocked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        mask_type: AttnMaskType,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor | None:
        """[.., S, T], True where a query must not look; T in the order of the gathered keys."""
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        total = cp_size * key.size(0)
        if packed is None:
            of_ranks = [positions(key.size(0), rank, cp_size) for rank in range(cp_size)]
        else:
            of_ranks = [packed_positions(padded_boundaries(packed), total, cp_size, rank) for rank in range(cp_size)]
        rows, columns = of_ranks[cp_rank][:, None], torch.cat(of_ranks)
        blocked = torch.zeros(rows.numel(), columns.numel(), dtype=torch.bool)
        if mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal):
            blocked |= columns > rows
        if self.window is not None:
            back, ahead = self.window
            blocked |= (rows - columns > back) if back >= 0 else False
            blocked |= (columns - rows > ahead) if ahead >= 0 else False
        if packed is not None:
            sequence = sequence_numbers(packed, total)
            return blocked | (sequence[columns] != sequence[rows])
        return blocked if attention_mask is None else blocked | attention_mask[..., columns]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The softmax offset as a checkpoint entry, sharded over tensor parallelism as Megatron's own."""
        state = self.state_dict(prefix="", keep_vars=True) if self.config.softmax_type == "learnable" else {}
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocked: torch.Tensor | None,
    *,
    scale: float,
    softmax_offset: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Dense grouped-query attention in fp32 (fp64 for fp64 inputs), result in the dtype of `query`.

    Args:
        query: [S, B, N, D].
        key: [T, B, G, D], N a multiple of G.
        value: [T, B, G, Dv].
        blocked: broadcastable to [B, N, S, T], True where a query must not look. Each row must leave one position
            open unless there is a `softmax_offset`.
        scale: factor of the scores.
        softmax_offset: [N], a logit per head that joins the denominator only.
        dropout: probability of dropping an attention weight.

    Returns:
        [S, B, N, Dv].
    """
    repeats = query.size(2) // key.size(2)
    q, k, v = (_at_least_fp32(tensor) for tensor in (query, key, value))
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    if blocked is not None:
        scores = scores.masked_fill(blocked, -math.inf)
    if softmax_offset is not None:
        sink = softmax_offset.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if dropout:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            weights = torch.nn.functional.dropout(weights, dropout)
    return torch.einsum("bnst,tbnd->sbnd", weights, v).to(query.dtype)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _GatherSequence(torch.autograd.Function):
    """All ranks' shards after one another along dimension 0; backward sums each rank's share over the group."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        if group.size() == 1:
            return shard.view_as(shard)
        whole = shard.new_empty(group.size() * shard.size(0), *shard.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, shard.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        if size == 1:
            return gradient, None
        share = gradient.new_empty(gradient.size(0) // size, *gradient.shape[1:])
        torch.distributed.reduce_scatter_tensor(share, gradient.contiguous(), group=ctx.group)
        return share, None
