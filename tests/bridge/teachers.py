# SPDX-License-Identifier: Apache-2.0
"""Caches of one corpus by a Megatron teacher at several layouts, in the same four CPU ranks; runs inside a rank."""

from pathlib import Path

LAYOUTS = {
    "DP=4": {},
    "TP=2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP=2": {"pipeline_model_parallel_size": 2},
    "PP=2 VP=2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "EP=2": {"expert_model_parallel_size": 2},
    "CP=2": {"context_parallel_size": 2},
    "TP=2 PP=2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
    "PP=2, of a checkpoint": {"pipeline_model_parallel_size": 2},
    "TP=2 CP=2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
}
OPTIONS = {"top_k": 20, "temperatures": (2.0,), "values": "f32", "tile_tokens": 300, "batch_tokens": 256}


def build_all(hf: Path, corpus: Path, root: Path) -> None:
    """A cache for every layout, at root/NAME; one from a Megatron checkpoint that the first layout leaves."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    from megatron_kd.bridge.teacher import MegatronTeacher
    from megatron_kd.cache import Corpus, DocumentUnits
    from megatron_kd.dryrun import prepare_model
    from megatron_kd.teacher.build import build_cache

    torch.distributed.init_process_group("gloo")
    for name, sizes in LAYOUTS.items():
        checkpoint = root / "checkpoint" if "checkpoint" in name else None
        teacher = MegatronTeacher.load(
            hf, checkpoint=checkpoint, dtype="float32", settings=sizes, prepare=prepare_model
        )
        if name == next(iter(LAYOUTS)):
            AutoBridge.from_hf_pretrained(str(hf)).save_megatron_model(teacher.model, root / "checkpoint")
        build_cache(
            teacher,
            DocumentUnits(Corpus(corpus)),
            root / name,
            accept_teacher_loss=True,
            progress=False,
            **OPTIONS,
        )
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
