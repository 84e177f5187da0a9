# SPDX-License-Identifier: Apache-2.0
"""Distillation from a sample cache of the whole vocabulary against the teacher's logits in memory, inside a rank."""

from pathlib import Path
from typing import Any

from tests.bridge.corpora import VOCABULARY
from tests.bridge.loop import distil_config
from tests.dryrun.tiny import Recorder, write_tiny_gpt_oss


def memory_feed(teacher: Any) -> Any:
    """A feed that runs the teacher on each batch and hands over its whole distribution, without any cache."""
    import torch

    from megatron_kd.bridge.teacher_feed import TeacherBatch
    from megatron_kd.loss import TopK

    class MemoryFeed:
        read_ahead = 0
        vocab_size = VOCABULARY

        def bind(self, datasets: list) -> None:
            """Nothing to match."""

        def take(self, batch: dict[str, Any]) -> TeacherBatch:
            with torch.no_grad():
                logits = teacher(batch["tokens"]).logits[..., :VOCABULARY].float()
            logprobs = logits.log_softmax(-1).transpose(0, 1).contiguous()
            ids = torch.arange(VOCABULARY).expand(logprobs.shape)
            nothing = torch.full(logprobs.shape[:2], -torch.inf)
            return TeacherBatch(TopK(ids, logprobs, nothing), batch["loss_mask"].T.contiguous())

    return MemoryFeed()


def sample_parity(hf: Path, corpus: Path, index_cache: Path, root: Path) -> tuple[list[dict], list[dict]]:
    """Losses and gradient norms of 5 steps: from the cache with the fused loss, and from memory with the dense one."""
    from megatron.bridge.training.pretrain import pretrain
    from transformers import AutoModelForCausalLM

    from megatron_kd.bridge.config import KDConfig
    from megatron_kd.bridge.dataset import SampleUnits, build_datasets, keyed_datasets
    from megatron_kd.bridge.step import KDForwardStep
    from megatron_kd.bridge.train import train
    from megatron_kd.teacher.build import build_cache

    write_tiny_gpt_oss(root / "teacher", seed=5)
    plain = distil_config(hf, corpus, index_cache, kd=None)
    plain.validate()
    units = SampleUnits(build_datasets(plain)[0])
    build_cache(
        root / "teacher", units, root / "cache", top_k=VOCABULARY, vocab_size=VOCABULARY, values="f32",
        tile_tokens=500, accept_teacher_loss=True, progress=False,
    )  # fmt: skip

    cached, memory = Recorder(), Recorder()
    train(distil_config(hf, corpus, index_cache, kd={"cache": str(root / "cache")}), callbacks=[cached])

    teacher = AutoModelForCausalLM.from_pretrained(root / "teacher", attn_implementation="eager").eval()
    feed = memory_feed(teacher)
    with keyed_datasets(feed.bind):
        kd = KDConfig(cache="memory", loss="dense")
        pretrain(distil_config(hf, corpus, index_cache, kd=None), KDForwardStep(kd, feed), callbacks=[memory])
    return cached.steps, memory.steps
