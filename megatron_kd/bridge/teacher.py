# SPDX-License-Identifier: Apache-2.0
"""A Megatron model as the teacher: any model that Bridge imports, at any parallel layout.

In: token sequences, the same on all ranks of a replica. Out: teacher rows, the same on all of them. The model runs
forward through Megatron's own pipeline schedule; instead of the output layer the last stage runs `fused_linear_topk`
on its vocabulary shard, so no rank ever holds the grid [tokens, vocabulary]. Costs the weights of a rank, one forward
pass, and 12 * K bytes a token that travel from the last stage to the others.

Sequences are padded on the right: under causal attention no position sees what comes after it.

Legend: S padded length, B sequences of a micro-batch, H hidden size, K entries, V columns of this rank.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import megatron.bridge
import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint, _resolve_checkpoint_iteration
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists, get_checkpoint_name
from megatron.core import parallel_state as groups
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from megatron_kd.bridge.overrides import apply_settings
from megatron_kd.bridge.settings import Settings
from megatron_kd.bridge.step import cp_positions
from megatron_kd.bridge.targets import check_checkpoint
from megatron_kd.bridge.teacher_output import Probe, Selector
from megatron_kd.errors import ConfigError
from megatron_kd.loss import TeacherRows
from megatron_kd.stages import ONE_AT_A_TIME, mix_up_messages
from megatron_kd.teacher.errors import TeacherError, implausible_if_not_finite
from megatron_kd.teacher.huggingface import load_tokenizer_identity, weights_digest

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32
_DTYPES = ("float32", "bfloat16")


class MegatronTeacher:
    """A `Teacher` whose ranks hold parts of the model. Use `load`, on all ranks."""

    alone = False

    def __init__(
        self,
        model: list[MegatronModule],
        *,
        vocab_real: int,
        vocab_padded: int,
        max_context: int | None,
        tokenizer: dict[str, Any] | None,
        identity: dict[str, Any],
    ):
        self.model = [chunk.eval() for chunk in model]
        self.vocab_real, self.vocab_padded, self.max_context = vocab_real, vocab_padded, max_context
        self.tokenizer, self.identity = tokenizer, identity
        self.name = f"{identity['repo']} (Megatron-Bridge)"
        self._config = model[0].config
        self.replica = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
        self.writes = (
            groups.get_tensor_model_parallel_rank() == 0
            and groups.get_context_parallel_rank() == 0
            and groups.is_pipeline_first_stage()
        )
        self._run([np.arange(_PROBE_TOKENS) * 7919 % vocab_real], Probe(self.name, vocab_real))

    @classmethod
    def load(
        cls,
        teacher: str | Path,
        *,
        checkpoint: str | Path | None = None,
        dtype: str = "bfloat16",
        settings: dict[str, Any] | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> "MegatronTeacher":
        """Build the model on all ranks and load its weights.

        Args:
            teacher: Hugging Face folder or hub name: architecture, tokenizer, weights.
            checkpoint: Megatron checkpoint with the weights, instead of the folder's.
            dtype: of weights and forward pass, `float32` or `bfloat16`.
            settings: of the model provider, such as parallel sizes. Experts are not split
                (`expert_tensor_parallel_size=1`) unless that is set.
            tokenizer: folder, name, or tokenizer object; default the teacher's own.
            vocab_size: real vocabulary; only needed when there is no tokenizer.
            prepare: called with the provider before it is finalised.

        Raises:
            ConfigError: a setting that the provider does not have, or of another type, or the dtype's; settings that
                Megatron refuses.
            TeacherError: missing files, a vocabulary that does not fit.
        """
        if dtype not in _DTYPES:
            raise TeacherError(f"dtype {dtype!r} is not one that Megatron teachers have; use {' or '.join(_DTYPES)}")
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        bridge = AutoBridge.from_hf_pretrained(str(teacher))
        provider = bridge.to_megatron_provider(load_weights=checkpoint is None)
        provider.mtp_num_layers = None  # its heads for later tokens have nothing to say of the next
        if provider.num_moe_experts:
            provider.expert_tensor_parallel_size = 1  # Megatron's own default is TP, which many experts do not allow
        settings = settings or {}
        if taken := sorted(_precision(dtype).keys() & settings):
            raise ConfigError(f"model.{taken[0]}: the dtype of a teacher is set by --dtype, here {dtype}.")
        apply_settings(_Settings(provider), [Settings({"model": settings}, {("model",): "the teacher"})])
        vars(provider).update(_precision(dtype))
        if mix_up_messages(provider):
            vars(provider).update(ONE_AT_A_TIME)
        if prepare is not None:
            prepare(provider)
        try:
            provider.finalize()
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"Megatron refuses the teacher {teacher} with these settings of model.*: {error}"
            ) from error
        if not dist.is_initialized():
            on_gpu = torch.cuda.is_available() and prepare is None
            dist.init_process_group("nccl" if on_gpu else "gloo")
        provider.initialize_model_parallel(seed=0)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        if checkpoint is not None:
            _load_model_weights_from_checkpoint(_weights_folder(checkpoint), model)
        known = load_tokenizer_identity(str(teacher) if tokenizer is None and vocab_size is None else tokenizer)
        real = vocab_size if vocab_size is not None else known["vocab_size"]
        if real > provider.vocab_size:
            raise TeacherError(
                f"the tokenizer has ids up to {real - 1}, {teacher} has a vocabulary of {provider.vocab_size}; they "
                "do not belong together"
            )
        config = bridge.hf_pretrained.config.get_text_config()
        identity = {
            "repo": Path(str(teacher)).name if Path(str(teacher)).is_dir() else str(teacher),
            "revision": None,
            "weights": _first_rank(lambda: _digest(teacher, checkpoint)),
            "dtype": dtype,
            "engine": "megatron-bridge",
            "version": f"{megatron.bridge.__version__}, megatron-core {megatron.core.__version__}, "
            f"torch {torch.__version__}",
        }
        return cls(
            model,
            vocab_real=real,
            vocab_padded=provider.vocab_size,
            max_context=getattr(config, "max_position_embeddings", None),
            tokenizer=known,
            identity=identity,
        )

    def rows(
        self,
        sequences: Sequence[np.ndarray],
        *,
        top_k: int,
        wanted: Sequence[np.ndarray] | None = None,
        temperatures: Sequence[float] = (),
        strip_tokens: int | None = None,
        labels: Sequence[np.ndarray] | None = None,
    ) -> TeacherRows:
        """See `Teacher.rows`."""
        masks = [np.ones(len(s), bool) for s in sequences] if wanted is None else wanted
        select = Selector(
            self.vocab_real, {"top_k": top_k, "temperatures": tuple(temperatures), "strip_tokens": strip_tokens}
        )
        if labels is not None:
            given, labels = labels, [np.full(len(mask), -1) for mask in masks]
            for whole, mask, own in zip(labels, masks, given, strict=True):
                whole[mask] = own
        with implausible_if_not_finite(self.name, self.identity["dtype"]):
            found = self._run(sequences, select, labels)
        micro_batches = [self._of_all_ranks(rows, select, labels is not None) for rows in found]
        per_batch = micro_batches[0].log_tail.shape[1]

        def of(field: int) -> torch.Tensor | None:
            if micro_batches[0][field] is None:
                return None
            return torch.cat(
                [
                    micro_batches[i // per_batch][field][: len(mask), i % per_batch][torch.from_numpy(mask)]
                    for i, mask in enumerate(masks)
                ]
            )

        return TeacherRows(*map(of, range(len(TeacherRows._fields))))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Teacher`."""
        return chain.from_iterable(chunk.named_parameters() for chunk in self.model)

    def agree(self, value: Any) -> Any:
        """See `Teacher`."""
        return _first_rank(lambda: value)

    def anyone(self, flag: bool) -> bool:
        """See `Teacher`."""
        flags = torch.tensor(int(flag), device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    @property
    def _device(self) -> torch.device:
        return next(self.model[0].parameters()).device

    @torch.no_grad()
    def _run(
        self, sequences: Sequence[np.ndarray], processor: "Selector | Probe", labels: Sequence | None = None
    ) -> list[TeacherRows | None]:
        """One pass of the pipeline: what the processor returns for each micro-batch; None but on the last stage.

        Each stage has a micro-batch to work on, if there are as many sequences.
        """
        config, cp = self._config, groups.get_context_parallel_world_size()
        count = config.pipeline_model_parallel_size
        batch = -(-len(sequences) // count)
        multiple = math.lcm(2 * cp if cp > 1 else 1, config.tensor_model_parallel_size)
        multiple *= config.tensor_model_parallel_size if cp > 1 else 1
        length = -(-max(map(len, sequences)) // multiple) * multiple
        positions = torch.from_numpy(cp_positions(length, group=groups.get_context_parallel_group()))

        def padded(parts: Sequence[np.ndarray], filler: int) -> torch.Tensor:
            whole = np.full((count * batch, length), filler, np.int64)
            for row, part in enumerate(parts):
                whole[row, : len(part)] = part
            return torch.from_numpy(whole)[:, positions].to(self._device).unflatten(0, (count, batch))

        tokens = padded(sequences, 0)
        own_labels = [None] * count if labels is None else padded(labels, -1)
        where = positions.to(self._device).expand(batch, -1)
        found: list[TeacherRows | None] = [None] * count

        def step(micro_batches: Iterator[int], model: MegatronModule) -> tuple[torch.Tensor, Callable]:
            number = next(micro_batches)

            def process(**given: Any) -> torch.Tensor:
                found[number] = processor(own_labels[number], **given)
                return tokens.new_zeros((), dtype=torch.float32)

            output = model(tokens[number], where, None, output_processor=process)
            return output, lambda output, non_loss_data: None

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(count)) for _ in self.model],
            model=self.model,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return found

    def _of_all_ranks(self, rows: TeacherRows | None, select: "Selector", with_labels: bool) -> TeacherRows:
        """One micro-batch [S, B, ...] from the last stage and all context-parallel ranks, on every rank."""
        if rows is not None:
            rows = self._whole_sequence(rows)
        last, group = groups.get_pipeline_model_parallel_last_rank(), groups.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) == 1:
            return rows
        shape = [None if rows is None else list(rows.log_tail.shape)]
        dist.broadcast_object_list(shape, src=last, group=group)
        rows = rows or select.empty(shape[0], self._device, with_labels)
        for part in rows:
            if part is not None:
                dist.broadcast(part, src=last, group=group)
        return rows

    def _whole_sequence(self, rows: TeacherRows) -> TeacherRows:
        """This context-parallel rank's positions of [S / CP, B, ...] joined with the others'."""
        group = groups.get_context_parallel_group()
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return rows
        length = ranks * len(rows.log_tail)
        own = torch.from_numpy(cp_positions(length, group=group)).to(rows.ids.device)

        def joined(part: torch.Tensor | None) -> torch.Tensor | None:
            if part is None:
                return None
            parts, places = ([torch.empty_like(x) for _ in range(ranks)] for x in (part, own))
            dist.all_gather(parts, part.contiguous(), group=group)
            dist.all_gather(places, own, group=group)
            return torch.cat(parts)[torch.cat(places).argsort()]

        return TeacherRows(*map(joined, rows))


@dataclass
class _Settings:
    """Where a teacher's settings go, so that an error says `model.KEY` as the user did."""

    model: Any


def _weights_folder(checkpoint: str | Path) -> str:
    """The folder of the newest iteration of a checkpoint, or the folder itself if it is one.

    Raises:
        TeacherError: there is no checkpoint.
    """
    folder = str(checkpoint)
    if Path(folder, ".metadata").exists():
        return folder
    if not checkpoint_exists(folder):
        raise TeacherError(
            f"--checkpoint {folder} is no Megatron checkpoint: expected a run's folder of checkpoints, or one of its "
            "iter_* folders"
        )
    return get_checkpoint_name(folder, *_resolve_checkpoint_iteration(folder, None))


def _precision(dtype: str) -> dict[str, Any]:
    chosen = getattr(torch, dtype)
    return {"bf16": dtype == "bfloat16", "fp16": False, "params_dtype": chosen, "pipeline_dtype": chosen}


def _digest(teacher: str | Path, checkpoint: str | Path | None) -> str:
    if checkpoint is not None:
        return weights_digest(Path(checkpoint), patterns=("*.distcp", "**/*.distcp"))
    if Path(str(teacher)).is_dir():
        return weights_digest(Path(str(teacher)))
    from huggingface_hub import snapshot_download

    return weights_digest(Path(snapshot_download(str(teacher), local_files_only=True)))


def _first_rank(make: Callable[[], Any]) -> Any:
    """What the first process makes, on all."""
    value = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(value, src=0)
    return value[0]
