# SPDX-License-Identifier: Apache-2.0
"""Healing the pruned student: the real Megatron-Bridge loop on three CPU ranks, watched from outside.

In: the student's folder, the corpus, and the teacher's cache or none. Out: a Megatron checkpoint, the run's curve, and
the healed student as a Hugging Face folder. The functions named `*_on_rank` run inside a rank; only they touch
Megatron. Costs the run itself and about ten seconds to start and export.
"""

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd import dryrun

RECIPE = "smollm2_135m_pretrain_3cpu_fp32_kd_config"
RANKS = 3
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Recipe:
    """What both runs share. Only the loss differs between them."""

    steps: int
    seq_length: int
    global_batch: int
    lr: float
    strip_tokens: int
    seed: int = 1234

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.steps * self.global_batch * self.seq_length

    def overrides(self) -> list[str]:
        """As arguments of `megatron-kd train`."""
        return [
            f"model.seq_length={self.seq_length}",
            f"dataset.seq_length={self.seq_length}",
            f"train.train_iters={self.steps}",
            f"train.global_batch_size={self.global_batch}",
            f"optimizer.lr={self.lr}",
            f"optimizer.min_lr={self.lr / 10}",
            f"scheduler.lr_warmup_iters={max(1, self.steps // 10)}",
            f"dataset.random_seed={self.seed}",
            f"rng.seed={self.seed}",
            "validation.eval_iters=0",
            "logger.log_interval=1",
            f"checkpoint.save_interval={self.steps}",
            "checkpoint.save_optim=false",
        ]

    def settings(self) -> dict[str, Any]:
        """For the record of a stage."""
        return asdict(self)


def warm_up() -> threading.Thread:
    """Start importing Megatron, in a process of its own, while other work goes on."""
    thread = threading.Thread(target=dryrun.run_ranks, args=(_nothing_on_rank, 1), daemon=True)
    thread.start()
    return thread


def write_corpora(documents: dict[str, list[np.ndarray]]) -> None:
    """Write Megatron indexed datasets: prefix -> documents."""
    dryrun.run_ranks(_write_corpora_on_rank, 1, args=(documents,))


def heal(
    folder: Path, *, student: Path, corpus: Path, recipe: Recipe, losses: list[str], label: str
) -> dict[str, Any]:
    """Train the student and export it to `folder/hf`.

    Args:
        folder: where the run goes.
        student: Hugging Face folder to start from.
        corpus: prefix of the training data.
        recipe: what both runs share.
        losses: further overrides, which choose the loss.
        label: of the progress bar.

    Returns:
        The run's curve: a list of steps.
    """
    history = folder / "history.jsonl"
    overrides = [*recipe.overrides(), f"dataset.data_path={corpus.absolute()}", "dataset.split='100,0,0'", *losses]
    kwargs = {"student": student.absolute(), "folder": folder.absolute(), "overrides": overrides}
    with _Progress(history, recipe.steps, label):
        dryrun.run_ranks(_train_on_rank, RANKS, kwargs=kwargs, log_dir=folder / "logs", timeout_s=TIMEOUT_S)
    export = (folder.absolute() / "checkpoints", student.absolute(), folder.absolute() / "hf")
    dryrun.run_ranks(_export_on_rank, 1, args=export, log_dir=folder / "logs" / "export")
    return {"curve": [json.loads(line) for line in history.read_text().splitlines()]}


class _Progress:
    """A progress bar that follows a run's history file."""

    def __init__(self, history: Path, steps: int, label: str):
        from tqdm import tqdm

        self._history = history
        self._bar = tqdm(total=steps, desc=f"      {label}", unit="step", mininterval=0.5)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._finished.set()
        self._thread.join()
        self._update()
        self._bar.close()

    def _follow(self) -> None:
        while not self._finished.wait(0.5):
            self._update()

    def _update(self) -> None:
        if not self._history.exists():
            return
        lines = self._history.read_text().splitlines()[self._bar.n :]
        for line in lines:
            step = json.loads(line)
            self._bar.set_postfix({name: f"{step[name]:.3f}" for name in ("lm loss", "kd loss") if name in step})
        self._bar.update(len(lines))


def _nothing_on_rank() -> None:
    """Runs where Megatron has been imported."""


def _write_corpora_on_rank(documents: dict[str, list[np.ndarray]]) -> None:
    from megatron_kd.bridge.corpus import write_indexed_dataset

    for prefix, parts in documents.items():
        write_indexed_dataset(prefix, parts, np.uint16)


def _train_on_rank(*, student: Path, folder: Path, overrides: list[str]) -> None:
    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.history import StepHistory
    from megatron_kd.bridge.train import train

    cfg, user_values = load_config(RECIPE, student=str(student), run_dir=folder, overrides=overrides)
    dryrun.prepare(cfg)
    train(cfg, user_values, callbacks=[StepHistory(folder / "history.jsonl")])


def _export_on_rank(checkpoint: Path, reference: Path, out: Path) -> None:
    from megatron_kd.bridge.export import export_hf

    export_hf(checkpoint, reference, out)
