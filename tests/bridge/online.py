# SPDX-License-Identifier: Apache-2.0
"""Distillation from a teacher that runs beside the student, inside CPU ranks."""

from pathlib import Path
from typing import Any

from tests.bridge.loop import distil_config
from tests.dryrun.tiny import VOCABULARY, Recorder, write_tiny_gpt_oss


def distil_online(*inputs: Any, kd: dict[str, Any], watch: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Train with `kd`, online or from a cache.

    Args:
        inputs: Student, corpus and index cache.
        kd: Settings; `teacher` or `cache` says from what.
        watch: Also look at what the teacher's weights are part of.

    Returns:
        `steps`: losses and gradient norm of each step. `gradient`: this rank's gradient of the last step, one vector,
        before it was clipped only if it was not. With `watch`: see Watch.
    """
    from megatron_kd.bridge.train import train
    from megatron_kd.dryrun import prepare_model

    recorder, watch_run = Recorder(), Watch(watch)
    cfg = distil_config(*inputs, kd=kd, tokenizer__vocab_size=VOCABULARY, **kwargs)
    train(cfg, callbacks=[recorder, watch_run], prepare_teacher=prepare_model)
    return {"steps": recorder.steps, **watch_run.found}


def Watch(closely: bool) -> Any:
    """A callback; `found` has the last step's gradient and, if asked for, counts of parameters, a digest of every
    model's weights before and after, and the random numbers' state."""
    import gc

    import torch
    from megatron.bridge.training.callbacks import Callback
    from megatron.core.models.gpt import GPTModel

    def models() -> list[GPTModel]:
        return [module for module in gc.get_objects() if isinstance(module, GPTModel)]

    def digest(module: torch.nn.Module) -> float:
        return float(sum(parameter.detach().double().abs().sum() for parameter in module.parameters()))

    class WatchRun(Callback):
        def __init__(self) -> None:
            self.found: dict[str, Any] = {}

        def on_train_start(self, context: Any) -> None:
            self.found["random"] = torch.get_rng_state().numpy().tobytes()
            if closely:
                self.found["before"] = {id(module): digest(module) for module in models()}

        def on_train_step_end(self, context: Any) -> None:
            grads = [p.main_grad.detach().double().flatten() for p in context.model[0].parameters() if p.requires_grad]
            self.found["gradient"] = torch.cat(grads).numpy().copy()

        def on_train_end(self, context: Any) -> None:
            if not closely:
                return
            student = context.model[0].module
            own = {id(parameter) for parameter in student.parameters()}
            others = [module for module in models() if id(module) != id(student)]
            self.found["student"] = sum(p.numel() for p in student.parameters())
            self.found["buffered"] = sum(
                buffer.numel_unpadded
                for buffer in (*context.model[0].buffers, *context.model[0].expert_parallel_buffers)
            )
            self.found["teacher requires grad"] = [p.requires_grad for m in others for p in m.parameters()].count(True)
            self.found["teacher has grad"] = [
                p.grad is not None or hasattr(p, "main_grad") for m in others for p in m.parameters()
            ].count(True)
            self.found["teachers"] = len(others)
            self.found["teacher"] = sum(p.numel() for m in others for p in m.parameters())
            self.found["teacher moved"] = [
                digest(module) - self.found["before"][id(module)]
                for module in others
                if id(module) in self.found["before"]
            ]
            self.found["shared"] = sum(id(p) in own for m in others for p in m.parameters())

    return WatchRun()


def write_sharp_teacher(folder: Path) -> Path:
    """A tiny GPT-OSS whose head is five times as large."""
    from safetensors.torch import load_file, save_file

    write_tiny_gpt_oss(folder, seed=5)
    weights = load_file(folder / "model.safetensors")
    save_file({n: w * 5 if n == "lm_head.weight" else w for n, w in weights.items()}, folder / "model.safetensors")
    return folder


def sample_cache(*inputs: Any, teacher: Path, out: Path, top_k: int, temperatures: tuple = (), **kwargs: Any) -> None:
    """A cache of exactly the training samples, by transformers, with values as they are."""
    from megatron_kd.bridge.dataset import SampleUnits, build_datasets
    from megatron_kd.teacher.build import build_cache

    cfg = distil_config(*inputs, kd=None, tokenizer__vocab_size=VOCABULARY, **kwargs)
    cfg.validate()
    build_cache(
        teacher, SampleUnits(build_datasets(cfg)[0]), out, top_k=top_k, temperatures=temperatures, values="f32",
        tile_tokens=500, accept_teacher_loss=True, progress=False,
    )  # fmt: skip


def saved_names(run_dir: Path) -> list[str]:
    """The names of what the newest checkpoint of a run holds."""
    from torch.distributed.checkpoint import FileSystemReader

    newest = max(Path(run_dir).glob("iter_*"))
    return sorted(FileSystemReader(newest).read_metadata().state_dict_metadata)
