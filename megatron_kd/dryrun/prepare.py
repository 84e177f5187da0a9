# SPDX-License-Identifier: Apache-2.0
"""Turns a recipe for GPUs into one for CPU ranks with the same mathematics.

In: a Bridge ConfigContainer, before it is validated. Out: the same object, changed, and the list of changes. What is
changed is the implementation (kernels, fusions, backends, helpers that need a driver), never sizes, parallel layout,
optimizer or data; `shrink` does that. Costs nothing.
"""

import dataclasses
from typing import Any, NamedTuple

from megatron_kd.stages import ONE_AT_A_TIME, mix_up_messages


class Change(NamedTuple):
    """One setting that was changed: its full key, both values, and the reason."""

    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.old)} -> {_short(self.new)}  ({self.why})"


def _short(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)


_TRANSFORMER_ENGINE = "needs Transformer Engine"
_FUSED = "fused kernel for GPUs"
_CUDA_GRAPH = "needs CUDA graphs"
_OFFLOAD = "moves tensors between GPU and CPU"
_NCCL = "needs NCCL"

_MODEL = {
    "transformer_impl": ("local", _TRANSFORMER_ENGINE),
    "use_transformer_engine_full_layer_spec": (False, _TRANSFORMER_ENGINE),
    "use_transformer_engine_op_fuser": (False, _TRANSFORMER_ENGINE),
    "use_te_activation_func": (False, _TRANSFORMER_ENGINE),
    "use_te_rng_tracker": (False, _TRANSFORMER_ENGINE),
    "use_kitchen": (False, _FUSED),
    "tp_comm_overlap": (False, _TRANSFORMER_ENGINE),
    "fp8": (None, _TRANSFORMER_ENGINE),
    "fp4": (None, _TRANSFORMER_ENGINE),
    "fp8_param": (False, _TRANSFORMER_ENGINE),
    "moe_router_padding_for_fp8": (False, _TRANSFORMER_ENGINE),
    "moe_router_padding_for_quantization": (False, _TRANSFORMER_ENGINE),
    "delay_wgrad_compute": (False, _TRANSFORMER_ENGINE),
    "overlap_moe_expert_parallel_comm": (False, _TRANSFORMER_ENGINE),
    "overlap_dispatch_backward_with_experts_wgrad": (False, _TRANSFORMER_ENGINE),
    "fused_residual_rmsnorm": (False, _TRANSFORMER_ENGINE),
    "mla_down_proj_fusion": (False, _TRANSFORMER_ENGINE),
    "moe_grouped_gemm": (False, "grouped GEMM is a GPU kernel; experts run one after another"),
    "dense_grouped_gemm": (False, "grouped GEMM is a GPU kernel"),
    "moe_permute_fusion": (False, _FUSED),
    "moe_router_fusion": (False, _FUSED),
    "apply_rope_fusion": (False, _FUSED),
    "fused_single_qkv_rope": (False, _FUSED),
    "masked_softmax_fusion": (False, _FUSED),
    "bias_activation_fusion": (False, _FUSED),
    "bias_dropout_fusion": (False, _FUSED),
    "cross_entropy_loss_fusion": (False, _FUSED),
    "cross_entropy_fusion_impl": ("native", _FUSED),
    "gradient_accumulation_fusion": (False, "weight gradients go into main_grad by a kernel of NVIDIA's apex"),
    "persist_layer_norm": (False, _FUSED),
    "memory_efficient_layer_norm": (False, _FUSED),
    "attention_softmax_in_fp32": (True, "as the fused attention kernels compute it"),
    "moe_shared_expert_overlap": (False, "overlaps on a second CUDA stream"),
    "enable_cuda_graph": (False, _CUDA_GRAPH),
    "external_cuda_graph": (False, _CUDA_GRAPH),
    "cuda_graph_impl": ("none", _CUDA_GRAPH),
    "cpu_offloading": (False, _OFFLOAD),
    "fine_grained_activation_offloading": (False, _OFFLOAD),
    "hierarchical_context_parallel_sizes": (None, "CPU ranks gather keys and values over the whole group"),
}
_DDP = {
    "use_megatron_fsdp": (False, _NCCL),
    "nccl_ub": (False, _NCCL),
    "fp8_param_gather": (False, _TRANSFORMER_ENGINE),
    "fp4_param_gather": (False, _TRANSFORMER_ENGINE),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, _TRANSFORMER_ENGINE),
    "delay_wgrad_compute": (False, _TRANSFORMER_ENGINE),
}
_OPTIMIZER = {
    "use_precision_aware_optimizer": (False, "needs Transformer Engine's fused Adam"),
    "optimizer_cpu_offload": (False, _OFFLOAD),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, _TRANSFORMER_ENGINE),
}
_DIST = {
    "distributed_backend": ("gloo", _NCCL),
    "disable_jit_fuser": (True, "its warm-up compiles for the GPU"),
    "use_decentralized_pg": (False, _NCCL),
    "use_megatron_fsdp": (False, _NCCL),
    "use_torch_fsdp2": (False, _NCCL),
    "use_sharp": (False, _NCCL),
    "nccl_communicator_config_path": (None, _NCCL),
    "high_priority_stream_groups": (None, _NCCL),
    "sharp_enabled_group": (None, _NCCL),
}
_WHOLE = {
    "comm_overlap": (None, "overlap of tensor-parallel GEMMs needs Transformer Engine; cfg.ddp decides the rest"),
    "straggler": (None, "times the GPU"),
    "nvrx_straggler": (None, "times the GPU"),
    "tensor_inspect": (None, _TRANSFORMER_ENGINE),
    "ft": (None, "watches over a Slurm allocation"),
    "inprocess_restart": (None, _NCCL),
}
_SECTIONS = {
    "model": _MODEL,
    "ddp": _DDP,
    "optimizer": _OPTIMIZER,
    "dist": _DIST,
    "profiling": {
        "use_nsys_profiler": (False, "profiles the GPU"),
        "use_pytorch_profiler": (False, "profiles the GPU"),
    },
    "rng": {"te_rng_tracker": (False, _TRANSFORMER_ENGINE)},
    "checkpoint": {
        "async_save": (False, "copies from the GPU in a second process"),
        "use_persistent_ckpt_worker": (False, "copies from the GPU in a second process"),
    },
    "dataset": {
        "num_workers": (0, "worker processes of several ranks would crowd out the ranks"),
        "persistent_workers": (False, "there are no workers"),
        "pin_memory": (False, "no copy to a GPU follows"),
    },
}


def prepare(cfg: Any) -> list[Change]:
    """Make a Bridge ConfigContainer runnable on CPU ranks, in place. Its mathematics stay.

    Args:
        cfg: a ConfigContainer that has not been validated yet. Its model is a GPT provider of Bridge.

    Returns:
        What was changed, in order. A second call returns an empty list.
    """
    changes = prepare_model(cfg.model) + _prepare_stages(cfg)
    for section, rules in _SECTIONS.items():
        if section != "model":
            changes += _apply(getattr(cfg, section), rules, f"{section}.")
    changes += _apply(cfg, _WHOLE, "")
    changes += _prepare_precision(cfg)
    if cfg.checkpoint.ckpt_format == "fsdp_dtensor":
        changes += _apply(cfg.checkpoint, {"ckpt_format": ("torch_dist", "fsdp_dtensor " + _NCCL)}, "checkpoint.")
    return changes


def prepare_model(model: Any) -> list[Change]:
    """The part of `prepare` that concerns the model provider, for use with `AutoBridge.to_megatron_provider`."""
    from megatron_kd.dryrun.layers import cpu_layer_spec

    rules = dict(_MODEL)
    rules["transformer_layer_spec"] = (cpu_layer_spec, _TRANSFORMER_ENGINE)
    if getattr(model, "moe_token_dispatcher_type", None) == "flex":
        rules["moe_token_dispatcher_type"] = ("alltoall", "DeepEP and HybridEP are GPU libraries")
    if getattr(model, "cp_comm_type", None) is not None:
        rules["cp_comm_type"] = ("all_gather", "the one way CPU ranks have")
    return _apply(model, rules, "model.")


def _apply(section: Any, rules: dict[str, tuple[Any, str]], prefix: str) -> list[Change]:
    changes = []
    for name, (new, why) in rules.items():
        if not hasattr(section, name):
            continue  # not every provider and dataset has every setting
        old = getattr(section, name)
        if old != new and (old or new):  # None, False and [] say the same
            setattr(section, name, new)
            changes.append(Change(prefix + name, old, new, why))
    return changes


def _prepare_stages(cfg: Any) -> list[Change]:
    """What comm_overlap would do for interleaved stages, and what two of them need."""
    interleaved = cfg.model.virtual_pipeline_model_parallel_size
    if not (interleaved and cfg.comm_overlap is not None) and not mix_up_messages(cfg.model):
        return []
    why = "interleaved stages exchange one message at a time"
    return _apply(cfg.model, {name: (value, why) for name, value in ONE_AT_A_TIME.items()}, "model.")


def _prepare_precision(cfg: Any) -> list[Change]:
    """fp8 and fp4 mixtures become the 16-bit mixture they are built on."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    if cfg.mixed_precision is None:
        return []
    mixture = get_mixed_precision_config(cfg.mixed_precision)
    if not (mixture.fp8 or getattr(mixture, "fp4", None)):
        return []
    plain = "fp16_mixed" if mixture.fp16 else "bf16_mixed"
    return _apply(cfg, {"mixed_precision": (plain, _TRANSFORMER_ENGINE)}, "")
