# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself beside its losses: tail masses, agreement, and where its time goes.

In: hidden states and teacher rows of a micro-batch, at a few tokens of it. Out: (sum, count) pairs for the report.
Costs a product of WATCHED_TOKENS rows with the head, under a percent of the loss's at 8,192 tokens, and one all-gather
of 4 numbers a token; nobody waits for the device.

Legend: S positions of this context-parallel rank, B samples, H hidden size, K entries, n watched tokens, V columns of
this rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed

from megatron_kd.bridge.frequency import CLASSES
from megatron_kd.bridge.teacher_feed import TeacherBatch
from megatron_kd.loss import VocabShard
from megatron_kd.loss.matmul import logits_into
from megatron_kd.loss.vocab_parallel import gather_rows

WATCHED_TOKENS = 64
HELD_OUT_TOKENS = 256
"""While nothing is learned there is more time: a micro-batch of evaluation is watched at more tokens."""

AGREEMENT = "top-1 agreement"

Figures = dict[str, torch.Tensor]


@torch.no_grad()
def watch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    batch: TeacherBatch,
    keep: torch.Tensor,
    shard: VocabShard,
    *,
    sequence_parallel: bool,
    temperature: float,
    tokens: int,
    classes: torch.Tensor | None = None,
) -> Figures:
    """Figures of one micro-batch, each float32 [2]: a sum over tokens and how many.

    `teacher tail` is over all tokens with loss; `student tail`, the student's mass outside the teacher's entries, and
    `top-1 agreement`, whether both models' most likely token of the whole vocabulary is the same, are over `tokens` of
    them, spread evenly. All ranks of the shard's group make the same call and get the same figures.

    Args:
        hidden: [S, B, H], or [S / TP, B, H] under sequence parallelism.
        weight: [shard.size, H].
        batch: On the device of hidden.
        keep: bool [S, B] on the host: tokens with loss.
        shard: This rank's columns.
        sequence_parallel: Whether hidden is split over the shard's group.
        temperature: Of the batch's rows.
        tokens: n, at most.
        classes: uint8 [vocabulary], see `frequency_classes`: agreement also by the class of the teacher's choice.
    """
    kept = keep.flatten().nonzero()[:, 0]
    count = torch.tensor(float(len(kept)), device=hidden.device)
    mass = (batch.teacher.log_tail.exp() * (batch.token_weight != 0)).sum().float()
    if len(kept) > tokens:
        kept = kept[torch.linspace(0, len(kept) - 1, tokens).long()]
    kept = kept.to(hidden.device)
    rows = _rows(hidden.flatten(0, -2), kept, shard if sequence_parallel else None)
    ids, logprobs = (part.flatten(0, -2)[kept] for part in (batch.teacher.ids, batch.teacher.logprobs))
    present = (ids >= 0) & (logprobs > -torch.inf)
    best, outside = _student(rows, weight, ids.masked_fill(~present, -1), shard, temperature)
    favourite = ids.gather(1, logprobs.masked_fill(~present, -torch.inf).argmax(1, keepdim=True))[:, 0]
    watched = torch.tensor(float(len(kept)), device=hidden.device)
    agree = best == favourite
    figures = {
        "teacher tail": torch.stack([mass, count]),
        "student tail": torch.stack([outside.sum(), watched]),
        AGREEMENT: torch.stack([agree.sum().float(), watched]),
    }
    if classes is not None:
        found = classes.to(hidden.device)[favourite.clamp(min=0).long()]
        for number, name in enumerate(CLASSES):
            own = found == number
            figures[f"{AGREEMENT}, {name}"] = torch.stack([(agree & own).sum(), own.sum()]).float()
    return figures


def _rows(hidden: torch.Tensor, kept: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    """Rows [n, H] of the whole sequence. Under sequence parallelism (a shard) each rank adds those it has."""
    if shard is None or shard.world_size == 1:
        return hidden[kept]
    local = kept - shard.rank * len(hidden)
    own = (local >= 0) & (local < len(hidden))
    rows = torch.where(own[:, None], hidden[local.clamp(0, len(hidden) - 1)], 0)
    torch.distributed.all_reduce(rows, group=shard.group)
    return rows


def _student(
    rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, shard: VocabShard, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The student's most likely token [n], and its mass outside the ids [n, K]."""
    n, real = len(rows), shard.real
    logits = rows.new_empty(n, max(real, 1), dtype=torch.promote_types(rows.dtype, torch.float32)).fill_(-torch.inf)
    if real:
        logits_into(logits, rows, weight[:real], logits.dtype)
    logits = logits.float() / temperature
    top, place = logits.max(1)
    shift = top.clamp(min=torch.finfo(torch.float32).min)[:, None]
    columns = shard.local(ids)
    entries = (logits.gather(1, columns.clamp(min=0)) - shift).exp().masked_fill(columns < 0, 0)
    total = (logits - shift).exp().sum(1)
    own = torch.stack([top, (place + shard.start).float(), total, entries.sum(1)], dim=1)  # ids below 2^24 are exact
    ranks = gather_rows(own, shard).unflatten(0, (shard.world_size, n))
    first = ranks[..., 0].max(0)
    scale = (ranks[..., 0] - first.values).exp()
    total, inside = ((scale * ranks[..., field]).sum(0) for field in (2, 3))
    return ranks[..., 1].gather(0, first.indices[None])[0].long(), (1 - inside / total).clamp(min=0)


class LossMeter:
    """Adds up how long the calls of the loss take. On CUDA by events, read when the step is over.

    With `memory` it also notes, on CUDA, the most memory that was allocated up to the calls and during them.
    """

    def __init__(self, *, memory: bool = False):
        self.memory = memory
        self.peak_before = self.peak_inside = 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def call(self, device: torch.device) -> Iterator[None]:
        """Around one call of the loss."""
        on_cuda = device.type == "cuda"
        if on_cuda and self.memory:
            self.peak_before = max(self.peak_before, torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
        if on_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        begin = time.perf_counter()
        yield
        if on_cuda:
            events[1].record()
            self._events.append(events)
        else:
            self._seconds += time.perf_counter() - begin
        if on_cuda and self.memory:
            self.peak_inside = max(self.peak_inside, torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> float:
        """Seconds since the last time this was asked. On CUDA it waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._seconds, self._events = 0.0, []
        return seconds
