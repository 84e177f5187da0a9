# SPDX-License-Identifier: Apache-2.0
"""A recipe as the plain figures that a plan is made from.

In: what the command line asked for, as `train` takes it. Out: dictionaries of numbers, as report.plan_shape reads
them; nothing of Megatron's travels further. Nothing is built; costs a second after Megatron-Bridge is loaded.
"""

from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

from megatron_kd.bridge.config import load_config
from megatron_kd.bridge.preflight import check_layout, smallest_world_size
from megatron_kd.bridge.recipes import _ARCHITECTURES
from megatron_kd.errors import ConfigError


def describe(request: dict[str, Any], gpus: int | None, teacher: str | None) -> dict[str, Any]:
    """The run that was asked for.

    Args:
        request: arguments of load_config.
        gpus: world size; None: as few as the layout needs.
        teacher: a model our recipes know (openai/gpt-oss-120b) or a Hugging Face folder; None: not named.

    Raises:
        ConfigError: the recipe cannot be read, or has what a plan does not model.
    """
    cfg, _ = load_config(**request)
    gpus = gpus or smallest_world_size(cfg)
    check_layout(cfg, gpus)
    loss = describe_loss(cfg)
    if loss.get("online"):
        if teacher:
            raise ConfigError(
                f"--teacher {teacher} builds a cache, and kd.teacher={cfg.kd.teacher} runs beside the "
                "student instead. Give one of them."
            )
        teacher = cfg.kd.teacher
    model = _teacher(teacher) if teacher else None
    return {
        "model": describe_model(cfg.model),
        "layout": describe_layout(cfg, gpus, experts_of=model if loss.get("online") else None),
        "training": describe_training(cfg),
        "loss": loss,
        "teacher": describe_model(model) if model else None,
    }


def _teacher(name: str) -> GPTModelProvider:
    if name in _ARCHITECTURES:
        config = _ARCHITECTURES[name]()
        config.name_or_path = name
        bridge = AutoBridge.from_hf_config(config)
    else:
        try:
            bridge = AutoBridge.from_hf_pretrained(name)
        except (ValueError, OSError) as error:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigError(f"teacher {name} cannot be read: {error} Known without a folder: {known}.") from error
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.mtp_num_layers = None  # heads for later tokens: a teacher's are not run
    return provider


def describe_model(model: GPTModelProvider) -> dict[str, Any]:
    """The architecture.

    Raises:
        ConfigError: it has what a plan does not model.
    """
    for name in ("multi_latent_attention", "mtp_num_layers", "moe_latent_size", "experimental_attention_variant"):
        if getattr(model, name, None):
            raise ConfigError(f"a plan does not model model.{name}={getattr(model, name)}; expected none.")
    padded = model.vocab_size
    if model.should_pad_vocab:
        padded = calculate_padded_vocab_size(
            padded, model.make_vocab_size_divisible_by, model.tensor_model_parallel_size
        )
    learned = model.position_embedding_type == "learned_absolute"
    return {
        "name": str(getattr(model, "hf_model_id", None) or "model"),
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "groups": model.num_query_groups or model.num_attention_heads,
        "head_size": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "ffn": model.ffn_hidden_size,
        "vocabulary": model.vocab_size,
        "padded_vocabulary": padded,
        "windows": [_window(model, layer) for layer in range(model.num_layers)],
        "experts": model.num_moe_experts or 0,
        "moe": _expert_layers(model),
        "top_experts": model.moe_router_topk if model.num_moe_experts else 0,
        "expert_ffn": (model.moe_ffn_hidden_size or model.ffn_hidden_size) if model.num_moe_experts else 0,
        "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
        "tied": model.share_embeddings_and_output_weights,
        "gated": model.gated_linear_unit,
        "bias": model.add_bias_linear,
        "qkv_bias": model.add_bias_linear or model.add_qkv_bias,
        "norm_vectors": 1 if model.normalization == "RMSNorm" else 2,
        "qk_norm": model.qk_layernorm,
        "sinks": getattr(model, "softmax_type", "vanilla") == "learnable",
        "learned_positions": model.seq_length if learned else 0,
    }


def _window(model: GPTModelProvider, layer: int) -> int | None:
    """Positions that a layer's attention sees, itself included."""
    if model.window_size is None:
        return None
    size, skip = model.window_size, model.window_attn_skip_freq
    width = size[0] + size[1] + 1 if isinstance(size, list | tuple) else size
    if skip is None:
        return width
    return width if (skip[layer] if isinstance(skip, list) else (layer + 1) % skip) else None


def _expert_layers(model: GPTModelProvider) -> list[bool]:
    if not model.num_moe_experts:
        return [False] * model.num_layers
    often = model.moe_layer_freq
    return [bool(often[layer] if isinstance(often, list) else layer % often == 0) for layer in range(model.num_layers)]


def describe_layout(cfg: ConfigContainer, gpus: int, *, experts_of: GPTModelProvider | None = None) -> dict[str, Any]:
    """Parallel sizes; those of experts also where only `experts_of`, a teacher beside the student, has some."""
    model = cfg.model
    experts = model.num_moe_experts or (experts_of and experts_of.num_moe_experts)
    for name in (
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(model, name, None):
            raise ConfigError(f"a plan does not model model.{name}={getattr(model, name)}; expected none.")
    tensor = model.tensor_model_parallel_size
    return {
        "gpus": gpus,
        "tensor": tensor,
        "pipeline": model.pipeline_model_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size or 1,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size or 1,
        "expert_tensor": (model.expert_tensor_parallel_size or tensor) if experts else 1,
        "sequence_parallel": bool(model.sequence_parallel),
        "first_stage_layers": model.num_layers_in_first_pipeline_stage,
        "last_stage_layers": model.num_layers_in_last_pipeline_stage,
    }


def describe_training(cfg: ConfigContainer) -> dict[str, Any]:
    """Batch, precision, recomputation.

    Raises:
        ConfigError: the weights are kept in fp8.
    """
    model, train, ddp, optimizer = cfg.model, cfg.train, cfg.ddp, cfg.optimizer
    precision = cfg.mixed_precision
    precision = get_mixed_precision_config(precision) if isinstance(precision, str) else precision
    if getattr(precision, "fp8_param_gather", False) or getattr(precision, "fp8_param", False):
        raise ConfigError(
            "a plan does not model weights kept in fp8 (mixed_precision.fp8_param_gather=true); set it to false: "
            "what is planned then is an upper bound."
        )
    half = bool(precision and (precision.bf16 or precision.fp16)) or model.params_dtype != torch.float32
    reduced = precision.grad_reduce_in_fp32 if precision else ddp.grad_reduce_in_fp32
    moments = 8
    if optimizer.use_precision_aware_optimizer:
        moments = optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize
    overlap = cfg.comm_overlap
    return {
        "seq_length": model.seq_length,
        "micro_batch": train.micro_batch_size,
        "global_batch": train.global_batch_size,
        "steps": train.train_iters or -(-(train.train_samples or 0) // train.global_batch_size),
        "weight_bytes": 2 if half else 4,
        "gradient_bytes": 4 if reduced or not half else 2,
        "optimizer_bytes": moments + (4 if half else 0),
        "distributed_optimizer": bool(optimizer.use_distributed_optimizer),
        "recompute": model.recompute_granularity,
        "recompute_modules": list(model.recompute_modules or ["core_attn"]),
        "recompute_method": model.recompute_method or "uniform",
        "recompute_layers": model.recompute_num_layers or 1,
        "overlap_gradients": bool(ddp.overlap_grad_reduce or (overlap and overlap.overlap_grad_reduce)),
        "overlap_tensor": bool(overlap and overlap.tp_comm_overlap),
    }


def describe_loss(cfg: ConfigContainer) -> dict[str, Any]:
    """The settings of the loss; a recipe without `kd` is planned as if it distilled as `kd` does by default."""
    kd = getattr(cfg, "kd", None)
    if kd is None:
        return {}
    if kd.teacher and cfg.model.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"kd.teacher={kd.teacher} runs beside a student without a pipeline alone; expected "
            "model.pipeline_model_parallel_size=1, or kd.cache."
        )
    if kd.loss not in ("dense", "forward_chunked", "fused"):
        raise ConfigError(f"a plan does not model kd.loss={kd.loss}; expected dense, forward_chunked or fused.")
    return {
        "method": kd.loss,
        "gradient": kd.gradient,
        "top_k": kd.top_k or 100,
        "strip_tokens": kd.strip_tokens,
        "online": bool(kd.teacher),
    }
