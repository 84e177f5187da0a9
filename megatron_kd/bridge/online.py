# SPDX-License-Identifier: Apache-2.0
"""Distillation without a cache: the teacher runs forward on the student's own batch, at the student's layout.

In: what Megatron's forward step hands to the student, batch by batch. Out: the teacher's top K of the same positions,
made strip by strip on each vocabulary shard, on the device. Both models share the process groups; the teacher is in no
gradient buffer, optimizer or checkpoint. Costs the teacher's weights and one forward pass of it a micro-batch.

Legend: S positions of this context-parallel rank, B samples, K entries.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.bridge import AutoBridge
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch.utils.data import Dataset

from megatron_kd.bridge.config import KDConfigContainer
from megatron_kd.bridge.output import DivergenceOutput
from megatron_kd.bridge.settings import SYNTHETIC
from megatron_kd.bridge.step import KDForwardStep, WithProcessor
from megatron_kd.bridge.teacher_feed import TeacherBatch, every_position
from megatron_kd.bridge.teacher_output import Probe, Selector
from megatron_kd.errors import ConfigError
from megatron_kd.loss import TeacherRows, TopK
from megatron_kd.teacher.errors import TeacherError, implausible_if_not_finite
from megatron_kd.teacher.huggingface import load_tokenizer_identity

logger = logging.getLogger(__name__)

DEFAULT_TOP_K = 100
_PROBE_TOKENS = 32

Prepare = Callable[[Any], Any]

# What the teacher's provider has from the student's: all that two models in the same process groups must share.
_SHARED = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "expert_tensor_parallel_size",
    "seq_length",
    "fp16",
    "bf16",
    "params_dtype",
    "pipeline_dtype",
)

_OF_TRAINING = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func")
"""What Bridge has put into the student's provider by the time the teacher is built."""
_LATER_TOKENS = "mtp_num_layers"
"""Heads for later tokens, which say nothing of the next."""


class OnlineFeed:
    """A teacher in this process; takes the place of a cache's feed.

    Args:
        cfg: The run's configuration, whose ``kd.teacher`` names the teacher.
        tokenizer: Identity of the run's tokenizer; None where the run has none.
        prepare: Called with the teacher's provider before it is finalised (CPU ranks).

    Raises:
        ConfigError: The teacher cannot be read, or has another tokenizer.
    """

    read_ahead = 0
    wait_seconds = 0.0

    def __init__(self, cfg: KDConfigContainer, *, tokenizer: dict[str, Any] | None, prepare: Prepare | None = None):
        self.cfg, self.prepare = cfg, prepare
        self.name = cfg.kd.teacher
        self.vocab_size = cfg.model.vocab_size if self.name == SYNTHETIC else _vocabulary(self.name, tokenizer)
        self.top_k = min(cfg.kd.top_k or DEFAULT_TOP_K, self.vocab_size)
        options = {
            "top_k": self.top_k,
            "temperatures": () if cfg.kd.temperature == 1 else (cfg.kd.temperature,),
            "strip_tokens": cfg.kd.strip_tokens,
        }
        self._select = partial(Selector(self.vocab_size, options), None)
        self._model: MegatronModule | None = None
        self.partition: Callable[[dict[str, Any]], np.ndarray] = every_position
        """Which positions of a batch's rows this context-parallel rank computes; set by the step."""

    def bind(self, datasets: list[Dataset | None]) -> None:
        """Build the teacher. All ranks come here when the student is built and before the first batch."""
        with _unchanged_random_numbers():
            (self._model,) = teacher_provider(self.cfg, self.prepare).provide_distributed_model(wrap_with_ddp=False)
        self._model.eval().requires_grad_(False)
        where = torch.arange(_PROBE_TOKENS, device=next(self._model.parameters()).device)[None]
        self._run(
            partial(Probe(self.name, self.vocab_size), None),
            input_ids=where * 7919 % self.vocab_size,
            position_ids=where,
            attention_mask=None,
        )
        logger.info("kd.teacher: %s is loaded, its top %d a token", self.name, self.top_k)

    def take(self, batch: dict[str, Any]) -> TeacherBatch:
        """The weights of a host batch's tokens; the teacher's rows follow in `see`."""
        mask = batch["loss_mask"]
        positions = torch.from_numpy(self.partition(batch))
        return TeacherBatch(None, mask[:, positions].T.float().contiguous(), distinct=True)

    def see(self, batch: dict[str, Any]) -> TopK:
        """The teacher's rows [S, B, K] of what the student is about to be called with."""
        return at_temperature(self._run(self._select, **batch), self.cfg.kd.temperature)

    @torch.no_grad()
    def _run(self, processor: Callable, *, input_ids: torch.Tensor, **batch: Any) -> Any:
        """What the processor makes of the teacher's hidden states."""
        found = []

        def process(**given: Any) -> torch.Tensor:
            found.append(processor(**given))
            return input_ids.new_zeros((), dtype=torch.float32)

        with implausible_if_not_finite(self.name, str(self.cfg.model.params_dtype)):
            self._model(input_ids, output_processor=process, **batch)
        return found[0]


class OnlineForwardStep(KDForwardStep):
    """A forward step in which the teacher sees each micro-batch before the student does."""

    def processed(self, model: torch.nn.Module, output: DivergenceOutput) -> "WithTeacher":
        """The model as the stock forward step is to call it."""
        return WithTeacher(model, output, self.feed)


class WithTeacher(WithProcessor):
    """A model that is called after its teacher, with the same arguments."""

    def __init__(self, model: torch.nn.Module, output: DivergenceOutput, feed: OnlineFeed):
        super().__init__(model, output)
        self._feed = feed

    def __call__(self, **batch: Any) -> torch.Tensor:
        unlabelled = {name: value for name, value in batch.items() if name not in ("labels", "loss_mask")}
        self._output.teacher = dataclasses.replace(self._output.teacher, teacher=self._feed.see(unlabelled))
        return super().__call__(**batch)


def teacher_provider(cfg: KDConfigContainer, prepare: Prepare | None = None) -> Any:
    """The teacher's Bridge provider, finalised, at the student's layout and precision; the weights come with it.

    Raises:
        ConfigError: Bridge knows no such model, or Megatron refuses it at this layout.
    """
    name = cfg.kd.teacher
    if name == SYNTHETIC:
        provider = copy.copy(cfg.model)
        for name in (*_OF_TRAINING, _LATER_TOKENS):
            setattr(provider, name, None)
        return provider
    try:
        provider = AutoBridge.from_hf_pretrained(str(name)).to_megatron_provider(load_weights=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"kd.teacher={name} cannot be read: {error}") from error
    for key in _SHARED:
        setattr(provider, key, getattr(cfg.model, key))
    setattr(provider, _LATER_TOKENS, None)
    if provider.num_moe_experts:
        provider.expert_model_parallel_size = cfg.model.expert_model_parallel_size
    if prepare is not None:
        prepare(provider)
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"kd.teacher={name}: Megatron refuses the teacher at the student's layout: {error} Teacher and student "
            "share model.*_parallel_size; a cache of the teacher (kd.cache) does not depend on them."
        ) from error
    return provider


def at_temperature(rows: TeacherRows, temperature: float) -> TopK:
    """The distribution of the teacher's logits divided by `temperature`, whose tail the rows carry."""
    if temperature == 1:
        return TopK(rows.ids, rows.logprobs, rows.log_tail)
    entries, tail = rows.logprobs / temperature, rows.tail_T[..., 0]
    total = torch.logaddexp(entries.logsumexp(-1), tail)
    return TopK(rows.ids, entries - total[..., None], tail - total)


def _vocabulary(teacher: str, tokenizer: dict[str, Any] | None) -> int:
    """The real vocabulary, by the teacher's tokenizer, which must be the run's."""
    try:
        known = load_tokenizer_identity(teacher)
    except TeacherError as error:
        raise ConfigError(
            f"kd.teacher={teacher}: expected a Hugging Face model with its tokenizer; {error.__cause__ or error}"
        ) from error
    if tokenizer is not None and known["digest"] != tokenizer["digest"]:
        raise ConfigError(
            f"kd.teacher={teacher} has a tokenizer of {known['vocab_size']} tokens with digest {known['digest']}, the "
            f"run's (tokenizer.tokenizer_model) has {tokenizer['vocab_size']} and {tokenizer['digest']}. Teacher and "
            "student must share a tokenizer."
        )
    return known["vocab_size"]


@contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    """Building a model draws random numbers; the student's go on as if it had not."""
    tracker = get_cuda_rng_tracker()
    host, device, states = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        tracker.set_states(states)
