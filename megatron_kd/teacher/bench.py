# SPDX-License-Identifier: Apache-2.0
"""How fast a Hugging Face teacher fills a cache, beside the same model's bare forward pass.

In: a loaded teacher and a corpus, or documents made up of random ids, 1,000 tokens long on average. Out: tokens a
second of both, measured in turn on the same padded batches. The bare pass is `model(input_ids, attention_mask).logits`
without gradients, which computes the logits of all positions and keeps them; the cache's pass computes them strip by
strip, selects, encodes, writes and commits, as `cache build` does. Wall time; of each the best of the rounds.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.corpus import Corpus, DocumentUnits, FirstUnits, UnitSource
from megatron_kd.teacher.build import prepare_build
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from megatron_kd.teacher.passes import batches, cut_pieces

_DOCUMENT = 1000
_TOKENS = 4096
_ROUNDS = 3


class MadeUp:
    """Documents of random ids."""

    kind = "document"

    def __init__(self, tokens: int, vocab: int, longest: int):
        rng = np.random.default_rng(0)
        ends = np.cumsum(1 + rng.exponential(_DOCUMENT, tokens).astype(np.int64).clip(max=longest - 1)).clip(
            max=tokens
        )
        self.lengths = np.diff(np.unique(ends), prepend=0)
        self._vocab = vocab

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one document."""
        return np.random.default_rng(unit + 1).integers(0, self._vocab, self.lengths[unit])

    def identity(self) -> dict[str, Any]:
        """Nothing to pin."""
        return {}


def measure(
    teacher: HuggingFaceTeacher, units: UnitSource, folder: Path, *, batch_tokens: int = 8192, top_k: int = 100
) -> dict[str, float]:
    """Tokens a second, without padding, of the bare forward pass (`forward`) and of a build in `folder` (`build`)."""
    tokens = int(units.lengths.sum())
    pieces = batches(cut_pieces(units.lengths, range(len(units.lengths)), {}), batch_tokens)
    best = {"forward": float("inf"), "build": float("inf")}
    for round_ in range(_ROUNDS):
        build = prepare_build(
            teacher,
            units,
            folder / str(round_),
            top_k=top_k,
            batch_tokens=batch_tokens,
            accept_teacher_loss=True,
        )
        best["build"] = min(best["build"], _seconds(lambda build=build: build.run(progress=False), teacher))
        best["forward"] = min(best["forward"], _seconds(lambda: _forward(teacher, units, pieces), teacher))
    return {name: tokens / seconds for name, seconds in best.items()}


@torch.no_grad()
def _forward(teacher: HuggingFaceTeacher, units: UnitSource, pieces: list) -> None:
    for batch in pieces:
        tokens, mask = teacher.padded([units.tokens(piece.unit) for piece in batch])
        teacher.model(input_ids=tokens, attention_mask=mask, use_cache=False)


def _seconds(work: Any, teacher: HuggingFaceTeacher) -> float:
    synchronize = torch.cuda.synchronize if teacher.device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def run(
    model: str, corpus: str | None, tokens: int | None, folder: Path | None, *, batch_tokens: int, **loading: Any
) -> dict[str, float]:
    """Load a teacher and measure it on a corpus, or on made-up documents of so many tokens; see `measure`."""
    teacher = HuggingFaceTeacher.load(model, **loading)
    if corpus is None:
        units: UnitSource = MadeUp(tokens or _TOKENS, teacher.vocab_real, teacher.max_context or _DOCUMENT)
    else:
        units = DocumentUnits(Corpus(corpus))
        if tokens is not None:
            units = FirstUnits(units, int(np.searchsorted(np.cumsum(units.lengths), tokens)) + 1)
    with tempfile.TemporaryDirectory(dir=folder, prefix="teacher-bench-") as made:
        return measure(teacher, units, Path(made), batch_tokens=batch_tokens)
