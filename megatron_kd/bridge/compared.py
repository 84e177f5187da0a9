# SPDX-License-Identifier: Apache-2.0
"""One run of a comparison, on this process's rank: trained its own way, measured the way all are.

In: a recipe with one method's settings. Out: `result.json` in the run's folder, written when it is through: each
step's figures, and in sum speed, memory and held-out figures. The held-out ones are the same for every method: forward
KL at temperature 1 over all entries of the cache, by the fused loss. Costs the run; no checkpoint is written.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training import gpt_step
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.core.utils import unwrap_model

from megatron_kd.bridge.callbacks import FinalValues
from megatron_kd.bridge.config import KDConfig, KDConfigContainer, UserValues
from megatron_kd.bridge.dataset import KeyedDataset, keyed_datasets
from megatron_kd.bridge.frequency import CLASSES, frequency_classes
from megatron_kd.bridge.online import Prepare, teacher_provider
from megatron_kd.bridge.preflight import refuse_unsupported
from megatron_kd.bridge.settings import SYNTHETIC
from megatron_kd.bridge.step import KDForwardStep, WithoutKey
from megatron_kd.bridge.train import distilling, open_feed
from megatron_kd.bridge.watch import AGREEMENT, LossMeter

WARM_UP = 1
"""First steps that the step time leaves out."""


def run_method(
    cfg: KDConfigContainer,
    values: UserValues | None,
    *,
    method: str,
    measure: KDConfig | None,
    teacher: str | None,
    prepare_teacher: Prepare | None = None,
) -> dict[str, Any] | None:
    """Train and measure.

    Args:
        cfg: Not yet finalised, with the method's settings in it.
        values: What the user set.
        method: A name of compare.methods.
        measure: Where held-out figures come from, a cache; None: there are none but the method's own.
        teacher: What `modelopt` distils from.
        prepare_teacher: See `train`.

    Returns:
        On the last rank: {"steps": [...], "summary": {...}}; None on others.
    """
    if cfg.kd is not None:
        cfg.kd.finalize()
    cfg.checkpoint.save = cfg.checkpoint.load = None
    if method == "modelopt":
        _distil_by_modelopt(cfg, teacher, prepare_teacher)
    refuse_unsupported(cfg)
    meter = LossMeter(memory=True)
    step, watching, binds = _training(cfg, method, prepare_teacher, meter)
    held_out = None
    if measure is not None and cfg.validation.eval_iters:
        feed = open_feed(_with_kd(cfg, measure))
        readers = getattr(feed, "readers", None)  # a dry run's made-up rows have none
        classes = readers and frequency_classes(readers, feed.vocab_size)
        held_out = KDForwardStep(measure, feed, classes)
        binds.append(feed.bind)
    record = Record(meter)
    callbacks = [*watching, record, *([FinalValues(values)] if values else [])]
    with ExitStack() as stack:
        if binds:
            stack.enter_context(keyed_datasets(lambda datasets: _bind(binds, datasets)))
        pretrain(cfg, ComparedStep(step, held_out), callbacks=callbacks)
    return record.result


def _with_kd(cfg: KDConfigContainer, kd: KDConfig) -> KDConfigContainer:
    changed = copy.copy(cfg)
    changed.kd = kd
    return changed


def _bind(binds: Sequence[Callable], datasets: list[KeyedDataset | None]) -> None:
    for bind in binds:
        bind(datasets)


def _training(
    cfg: KDConfigContainer, method: str, prepare_teacher: Prepare | None, meter: LossMeter
) -> tuple[Callable, list[Callback], list[Callable]]:
    """The forward step of a method, what watches it, and what wants to know the datasets."""
    if cfg.kd is None:
        stock = gpt_step.forward_step_modelopt if method == "modelopt" else gpt_step.forward_step
        return _without_key(stock), [], []
    feed = open_feed(cfg, prepare_teacher)
    step, watching = distilling(cfg, feed, meter)
    return step, watching, [feed.bind]


def _without_key(stock: Callable) -> Callable:
    def step(
        state: GlobalState, data_iterator: Any, model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> Any:
        return stock(state, WithoutKey(data_iterator, None), model, return_schedule_plan)

    return step


def _distil_by_modelopt(cfg: KDConfigContainer, teacher: str, prepare: Prepare | None) -> None:
    """Bridge's own conversion: the student's provider becomes one that builds both models. Pure distillation."""
    from megatron.bridge.models.distillation_provider import convert_to_distillation_provider
    from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig

    provider = teacher_provider(_with_kd(cfg, KDConfig(teacher=teacher)), prepare)
    provider.pipeline_model_parallel_size = cfg.model.pipeline_model_parallel_size
    cfg.model = convert_to_distillation_provider(cfg.model, provider, ModelOptDistillConfig())


class ComparedStep:
    """A forward step that trains one way and, while nothing is learned, measures another."""

    def __init__(self, train: Callable, held_out: KDForwardStep | None):
        self.train, self.held_out = train, held_out

    def __call__(
        self,
        state: GlobalState,
        data_iterator: Any,
        model: torch.nn.Module,
        return_schedule_plan: bool = False,
    ) -> Any:
        """See KDForwardStep."""
        if self.held_out is None or torch.is_grad_enabled():
            return self.train(state, data_iterator, model, return_schedule_plan)
        if hasattr(unwrap_model(model), "only_student_forward"):
            model = StudentAlone(unwrap_model(model))
        return self.held_out(state, data_iterator, model, return_schedule_plan)


class StudentAlone:
    """ModelOpt's pair of models, called as the student that it is."""

    def __init__(self, pair: torch.nn.Module):
        self._pair = pair

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._pair.only_student_forward():
            return type(self._pair).forward(self._pair, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


class Record(Callback):
    """Collects a run's figures; `result` is there when it is through."""

    def __init__(self, meter: LossMeter):
        self.meter = meter
        self.result: dict[str, Any] | None = None
        self._steps: list[dict[str, float]] = []
        self._held_out: dict[str, float] = {}
        self._started = 0.0
        self._peak = 0

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the step's clock."""
        self._started = time.monotonic()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Keep the step's figures."""
        losses = {name: float(value) for name, value in (context.loss_dict or {}).items()}
        losses["kd loss"] = losses.pop("logits distillation loss", losses.get("kd loss"))  # ModelOpt's name for it
        norm = {} if context.grad_norm is None else {"grad norm": float(context.grad_norm)}
        seconds = {"seconds": time.monotonic() - self._started}
        step = {"step": context.state.train_state.step + 1, **losses, **norm, **seconds}
        self._steps.append({name: value for name, value in step.items() if value is not None})
        if torch.cuda.is_available() and _on_cuda(context):
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())

    def on_eval_end(self, context: CallbackContext) -> None:
        """Keep the newest held-out figures."""
        self._held_out = {name: float(value) for name, value in (context.total_loss_dict or {}).items()}
        if self.result is not None:
            self.result["summary"] |= held_out_summary(self._held_out)

    def on_train_end(self, context: CallbackContext) -> None:
        """Put it together; memory is that of the fullest rank."""
        memory = _most([self._peak, self.meter.peak_before, self.meter.peak_inside], _on_cuda(context))
        if dist.get_rank() != dist.get_world_size() - 1 or not self._steps:
            return
        seconds = statistics.median(step["seconds"] for step in self._steps[WARM_UP:] or self._steps)
        summary = {
            **{name: value for name, value in self._steps[-1].items() if name not in ("step", "seconds")},
            "step seconds": seconds,
            **speed(context.state.cfg, seconds, dist.get_world_size()),
            **held_out_summary(self._held_out),
        }
        if memory[0]:
            summary |= {"peak bytes": max(memory)}
        if memory[2]:
            summary |= {"peak bytes before loss": memory[1], "peak bytes in loss": memory[2]}
        self.result = {"steps": self._steps, "summary": summary}


def speed(cfg: ConfigContainer, seconds: float, ranks: int) -> dict[str, float]:
    """Tokens a second of all ranks, and the student's TFLOP/s on each; a teacher's own work does not count."""
    batch = cfg.train.global_batch_size
    flops = num_floating_point_operations(cfg, batch)
    return {
        "tokens per second": batch * cfg.model.seq_length / seconds,
        "tflops per rank": flops / seconds / ranks / 1e12,
    }


def held_out_summary(found: dict[str, float]) -> dict[str, float]:
    """Bridge's validation figures under the comparison's names."""
    names = {"kd loss": "held-out kl", "top-1 agreement": "held-out agreement", "lm loss": "held-out lm loss"}
    summary = {new: found[old] for old, new in names.items() if old in found}
    if "lm loss" in found:
        summary["held-out perplexity"] = math.exp(min(found["lm loss"], 700.0))
    classes = {name: found.get(f"{AGREEMENT}, {name}", math.nan) for name in CLASSES}
    if seen := {
        name: share for name, share in classes.items() if not math.isnan(share)
    }:  # not a number: no such token
        summary["agreement by token frequency"] = seen
    return summary


def measuring(kd: KDConfig | None) -> KDConfig | None:
    """How held-out text is measured with the recipe's cache; None without one, or if it is of the training samples."""
    if kd is None or not kd.cache:
        return None
    if kd.cache != SYNTHETIC:
        from megatron_kd.cache import CacheReader

        paths = [kd.cache] if isinstance(kd.cache, str) else kd.cache
        if any(CacheReader(path).manifest.units["kind"] == "sample" for path in paths):
            return None
    keep = {name: getattr(kd, name) for name in ("cache", "cache_weights", "check_blocks", "bad_blocks", "read_ahead")}
    return KDConfig(**keep, bad_blocks_limit=kd.bad_blocks_limit)


def _on_cuda(context: CallbackContext) -> bool:
    return next(context.model[0].parameters()).device.type == "cuda"


def _most(values: list[int], on_cuda: bool) -> list[int]:
    """The largest of all ranks, one by one."""
    found = torch.tensor(values, dtype=torch.int64, device="cuda" if on_cuda else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()
