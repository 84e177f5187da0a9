# SPDX-License-Identifier: Apache-2.0
"""Counts of what Megatron itself builds and estimates for a recipe; the functions run inside a CPU rank."""

import os
import re
from pathlib import Path
from typing import Any


def gpus_of(path: Path) -> int | None:
    found = re.search(r"_(\d+)gpu_", path.name)
    return int(found[1]) if found else None


def of_recipes(paths: list[Path]) -> dict[str, Any]:
    """By file name: the plan's description, the parameters of the model that Megatron builds for the first and the
    last rank, and Bridge's own estimates of memory and FLOPs."""
    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.planning import describe
    from megatron_kd.bridge.preflight import smallest_world_size

    found = {}
    for path in paths:
        request = dict(recipe=None, student=None, config_file=path, overrides=())
        cfg, _ = load_config(**request)
        gpus = gpus_of(path) or smallest_world_size(cfg)
        found[path.name] = {
            "run": describe(request, gpus, None),
            "built": {rank: built_parameters(cfg, rank, gpus) for rank in (0, gpus - 1)},
            "bridge": estimates(cfg, gpus),
        }
    return found


def estimates(cfg: Any, gpus: int) -> dict[str, float]:
    import torch
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    model = cfg.model
    ways = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    cfg.data_parallel_size = gpus // ways
    model.expert_tensor_parallel_size = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    batches = cfg.train.global_batch_size // cfg.train.micro_batch_size // cfg.data_parallel_size
    estimate = estimate_training_memory(cfg, num_microbatches=batches)
    model.activation_func = torch.nn.functional.silu  # the one that Bridge's estimate knows as gated
    gated = estimate_training_memory(cfg, include_activation=False)
    return {
        "state, gated": gated.weight_and_optimizer_bytes,
        "state": estimate.weight_and_optimizer_bytes,
        "activations": estimate.activation.memory_bytes,
        "flops": num_floating_point_operations(cfg, cfg.train.global_batch_size),
    }


def built_parameters(cfg: Any, rank: int, gpus: int) -> int:
    """Parameters of the model of one rank of `gpus`, built on the meta device in a made-up process group."""
    import copy

    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_kd import dryrun

    model = copy.deepcopy(cfg.model)
    dryrun.prepare_model(model)
    model.perform_initialization = False
    torch.distributed.init_process_group("fake", rank=rank, world_size=gpus, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            context_parallel_size=model.context_parallel_size,
            expert_model_parallel_size=model.expert_model_parallel_size or 1,
            expert_tensor_parallel_size=model.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model.finalize()
        with torch.device("meta"):
            built = model.provide(
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        return sum(parameter.numel() for parameter in built.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def measured(folder: Path, dtype: str, world_size: int, **sizes: int) -> dict[str, Any]:
    """Bytes that this rank really holds after a step of the tiny GPT-OSS, and the plan's description of the run."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.bridge import planning
    from tests.dryrun.tiny import tiny_gpt_oss, write_tiny_gpt_oss

    found: dict[str, Any] = {}

    class Count(Callback):
        def on_train_step_end(self, context: Any) -> None:
            parameters = [p for chunk in context.model for p in chunk.parameters()]
            found["weights"] = sum(p.numel() * p.element_size() for p in parameters)
            buffers = {
                storage.data_ptr(): storage.nbytes() for storage in (p.main_grad.untyped_storage() for p in parameters)
            }
            found["gradients"] = sum(buffers.values())
            found["optimizer"] = optimizer_bytes(context.optimizer, parameters)

    hf = write_tiny_gpt_oss(folder / f"student-{os.environ['RANK']}")
    cfg = tiny_gpt_oss(hf, steps=1, dtype=dtype, load_weights=False, **sizes)
    found["run"] = {
        "model": planning.describe_model(cfg.model),
        "layout": planning.describe_layout(cfg, world_size),
        "training": planning.describe_training(cfg),
        "loss": {},
        "teacher": None,
    }
    pretrain(cfg, forward_step, callbacks=[Count()])
    return found


def optimizer_bytes(optimizer: Any, parameters: list) -> int:
    """Adam's moments and the copies in fp32, without what shares its memory with the model's own weights."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in parameters}
    tensors = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        tensors += [p for group in inner.param_groups for p in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in own
    }
    return sum(storages.values())
