# SPDX-License-Identifier: Apache-2.0
"""The forward step that Megatron-Bridge's loop calls for every micro-batch when it distils.

It is Bridge's own ``gpt_step.forward_step`` (batch, context-parallel slicing, timers, FLOPs), given an iterator that
keeps the teacher's key back and a model that passes the output processor on. What the last pipeline stage reports:
``lm loss``, ``kd loss``, ``total loss``, what watch.py adds, and the shares ``kd cut``, ``kd absent`` and, where bad
blocks may be masked, ``kd masked``, as (sum, tokens) pairs, which Bridge averages over data-parallel ranks and sends
to console, TensorBoard, W&B and MLflow.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from megatron.bridge.training import gpt_step
from megatron.bridge.training.losses import masked_next_token_loss
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model

from megatron_kd.bridge.config import KDConfig
from megatron_kd.bridge.dataset import KEY
from megatron_kd.bridge.output import DivergenceOutput
from megatron_kd.bridge.sft import BOUNDARIES
from megatron_kd.bridge.teacher_feed import LookAhead, TeacherFeed
from megatron_kd.bridge.watch import LossMeter
from megatron_kd.loss import LossSums


class KDForwardStep:
    """Forward step of a distillation run.

    Args:
        kd: Settings of the loss.
        feed: Where teacher rows come from.
        classes: Of tokens, by which agreement on held-out text is told; None: not told.
    """

    def __init__(self, kd: KDConfig, feed: TeacherFeed, classes: torch.Tensor | None = None):
        self.kd = kd
        self.feed = feed
        self.classes = classes
        self.meter = LossMeter()

    def __call__(
        self,
        state: GlobalState,
        data_iterator: RerunDataIterator,
        model: torch.nn.Module,
        return_schedule_plan: bool = False,
    ) -> tuple[torch.Tensor, Callable]:
        """Run the model on the next micro-batch.

        Returns:
            The model's output (on the last stage the summed loss, 0-dim) and the function that turns it into
            (loss sum, token count, report).
        """
        groups = get_pg_collection(model)
        output = DivergenceOutput(self.kd, self.feed.vocab_size, meter=self.meter, classes=self.classes)
        last_stage = is_pp_last_stage(groups.pp)
        last_chunk = last_stage and unwrap_model(model).post_process

        def keep_rows(batch: dict[str, Any]) -> None:
            output.teacher = self.feed.take(batch)

        if last_stage:
            self.feed.partition = partial(batch_positions, group=groups.cp, device=next(model.parameters()).device)
            look_ahead(data_iterator, self.feed)
        batches = WithoutKey(data_iterator, keep_rows if last_chunk else None)
        tensor, _ = gpt_step.forward_step(state, batches, self.processed(model, output), return_schedule_plan)
        rerun = state.cfg.rerun_state_machine
        return tensor, partial(
            reported_loss,
            output,
            check_for_nan_in_loss=rerun.check_for_nan_in_loss,
            check_for_spiky_loss=rerun.check_for_spiky_loss,
        )

    def processed(self, model: torch.nn.Module, output: DivergenceOutput) -> "WithProcessor":
        """The model as the stock forward step is to call it."""
        return WithProcessor(model, output)


class WithoutKey:
    """The batches of ``data_iterator`` without the teacher's key, which the stock code would trip over.

    ``on_batch`` receives each batch with its key first, on the host and whole.
    """

    def __init__(self, data_iterator: Iterator[dict[str, Any]], on_batch: Callable[[dict[str, Any]], None] | None):
        self._iterator = data_iterator
        self._on_batch = on_batch

    def __iter__(self) -> "WithoutKey":
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._iterator)
        if self._on_batch is not None:
            self._on_batch(batch)
        return {key: value for key, value in batch.items() if key != KEY}


class WithProcessor:
    """A model that is called with ``output_processor``; everything else is the model's own."""

    def __init__(self, model: torch.nn.Module, output: DivergenceOutput):
        self._model = model
        self._output = output

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._model(*args, **kwargs, output_processor=self._output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def reported_loss(
    output: DivergenceOutput, tensor: torch.Tensor, *, check_for_nan_in_loss: bool, check_for_spiky_loss: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Bridge's contract for a loss function, with its own checks for NaN, infinity and spikes.

    Returns:
        Loss sum (0-dim, carries the gradient), token count (int32), and per name a float32 [2]: sum, token count.
    """
    one = torch.ones(1, device=tensor.device)
    loss, _, _ = masked_next_token_loss(one, tensor, check_for_nan_in_loss, check_for_spiky_loss)
    sums: LossSums = output.sums
    teacher = output.teacher
    count = teacher.token_weight.sum().to(torch.int).to(tensor.device)
    named = {"lm loss": sums.ce, "kd loss": sums.kd, "total loss": sums.total}
    report = {name: torch.stack([value.detach().float(), count.float()]) for name, value in named.items()}
    for name, tokens in (("kd masked", teacher.masked), ("kd cut", teacher.cut), ("kd absent", teacher.absent)):
        if tokens is not None:  # a share of all tokens with loss, of which some may have been left out
            left_out = tokens & (teacher.token_weight == 0)
            report[name] = torch.stack([tokens.sum().to(count), left_out.sum().to(count) + count]).float()
    return loss, count, report | output.watched


def look_ahead(data_iterator: RerunDataIterator | Iterator[dict[str, Any]], feed: TeacherFeed) -> None:
    """Have rows read ahead: put the reader's look-ahead under Bridge's rerun iterator, once; where Bridge hands over a
    list of micro-batches (dataloader type batch), look at those that come next. The chunks of a stage share one
    iterator by a cache.
    """
    shared = getattr(data_iterator, "cache", None)
    data_iterator = data_iterator if shared is None else shared.iterator
    if not feed.read_ahead:
        return
    if not isinstance(data_iterator, RerunDataIterator):
        for batch in islice(copy(data_iterator), feed.read_ahead + 1):
            feed.prefetch(batch)
    elif not isinstance(data_iterator.iterable, LookAhead):
        data_iterator.iterable = LookAhead(data_iterator.iterable, feed)


def batch_positions(
    batch: dict[str, Any], *, group: torch.distributed.ProcessGroup, device: torch.device
) -> np.ndarray:
    """Positions of a batch's rows that this context-parallel rank computes, by Megatron's own partition: int64 [n].

    Of packed sequences each is cut by itself, by a kernel that wants them on the device.
    """
    length = batch["tokens"].shape[1]
    if group.size() == 1 or batch.get("cu_seqlens_q") is None:
        return cp_positions(length, group=group)
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with stream:  # of its own: what the model has queued need not be waited for
        packed = {name: batch[name] for name in BOUNDARIES if batch.get(name) is not None}
        packed["positions"] = torch.arange(length, device=device).unsqueeze(0)
        return gpt_step._partition_packed_batch_for_cp(packed, group)["positions"][0].cpu().numpy()


def cp_positions(length: int, *, group: torch.distributed.ProcessGroup) -> np.ndarray:
    """Positions of a sample that this context-parallel rank computes, by Megatron's own partition: int64 [n]."""
    positions = {"positions": torch.arange(length).unsqueeze(0)}
    return get_batch_on_this_cp_rank(positions, is_hybrid_cp=False, cp_group=group)["positions"][0].cpu().numpy()
