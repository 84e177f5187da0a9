# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-OSS on documents packed into one row, and on each alone; runs inside CPU ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.dryrun.tiny import VOCABULARY, tiny_gpt_oss

MASKED = 0.3
"""Share of a document's tokens without loss, as prompts have none."""


class Packing(NamedTuple):
    """Lengths of documents in a row, of the tokens and with padding, and what is said of the longest."""

    lengths: list[int]
    padded: list[int]
    longest: int


def documents(packing: Packing) -> list[dict[str, torch.Tensor]]:
    """Tokens, labels and loss mask of each document, [length]."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in packing.lengths:
        tokens = torch.randint(VOCABULARY - 1, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > MASKED).float()
        made.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask})
    return made


def packed_batch(packing: Packing) -> dict[str, Any]:
    """The documents as one row, in the keys that Bridge's data loaders have."""
    row = {}
    for name in ("tokens", "labels", "loss_mask"):
        parts = [
            torch.nn.functional.pad(document[name], (0, padded - len(document[name])))
            for document, padded in zip(documents(packing), packing.padded, strict=True)
        ]
        row[name] = torch.cat(parts)[None]
    row["position_ids"] = torch.cat([torch.arange(length) for length in packing.padded])[None]

    def cumulated(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([[0, *np.cumsum(lengths)]], dtype=torch.int32)

    longest = torch.tensor([[packing.longest]], dtype=torch.int32)
    keys = {"cu_seqlens_q": packing.lengths, "cu_seqlens_kv": packing.lengths}
    if packing.padded != packing.lengths:
        keys |= {"cu_seqlens_q_padded": packing.padded, "cu_seqlens_kv_padded": packing.padded}
    lengths = {name: cumulated(value) for name, value in keys.items()}
    return {**row, **lengths, "attention_mask": None, "max_seqlen_q": longest, "max_seqlen_kv": longest}


def losses(hf: Path, packings: dict[str, Packing], **layout: int) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """For each packing the loss of each document and the gradient of their sum by parameter, all ranks together.

    The batch goes through Bridge's own `get_batch`, which cuts it for context parallelism.
    """
    cfg, model = _built(hf, **layout)
    found = {}
    for name, packing in packings.items():
        mine, document = _of_this_rank(cfg, packed_batch(packing), packing)
        per_token = model(**mine["inputs"]) * mine["loss_mask"]
        sums = torch.stack([per_token[document == number].sum() for number in range(len(packing.lengths))])
        found[name] = _differentiated(model, sums)
    return found


def losses_alone(hf: Path, packings: dict[str, Packing]) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """The same from rows that hold one document each."""
    _, model = _built(hf)
    found = {}
    for name, packing in packings.items():
        sums = []
        for document in documents(packing):
            row = {key: value[None] for key, value in document.items()}
            places = torch.arange(row["tokens"].size(1))[None]
            if not places.numel():
                sums.append(torch.zeros(()))
                continue
            per_token = model(row["tokens"], places, None, labels=row["labels"]) * row["loss_mask"]
            sums.append(per_token.sum())
        found[name] = _differentiated(model, torch.stack(sums))
    return found


def _built(hf: Path, **layout: int) -> tuple[Any, torch.nn.Module]:
    cfg = tiny_gpt_oss(hf, **layout)
    cfg.model.moe_aux_loss_coeff = 0.0  # balance over a batch's tokens depends on what is in it
    cfg.model.finalize()
    torch.distributed.init_process_group("gloo")
    cfg.model.initialize_model_parallel(seed=0)
    return cfg, cfg.model.provide_distributed_model(wrap_with_ddp=False)[0]


def _of_this_rank(cfg: Any, batch: dict[str, Any], packing: Packing) -> tuple[dict[str, Any], torch.Tensor]:
    """The model's inputs and the loss mask, and which document each of the positions belongs to (-1: padding)."""
    from megatron.bridge.training.gpt_step import get_batch
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
    from megatron.core.process_groups_config import ProcessGroupCollection

    numbers = torch.full_like(batch["tokens"], -1)
    starts = np.cumsum([0, *packing.padded[:-1]])
    for number, (start, length) in enumerate(zip(starts, packing.lengths, strict=True)):
        numbers[0, start : start + length] = number
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def cut(whole: dict[str, Any]) -> tuple:
        return get_batch(iter([whole]), cfg, pg_collection=groups)

    tokens, labels, loss_mask, mask, places, metadata = cut(dict(batch))
    inputs = {"input_ids": tokens, "position_ids": places, "attention_mask": mask, "labels": labels}
    inputs["packed_seq_params"] = get_packed_seq_params(metadata)
    return {"inputs": inputs, "loss_mask": loss_mask}, cut({**batch, "tokens": numbers})[0]


def _differentiated(model: torch.nn.Module, sums: torch.Tensor) -> tuple[list[float], dict[str, Any]]:
    """The sums over all ranks, and the gradients of their total, [values by name]."""
    model.zero_grad()
    sums.sum().backward()
    total = sums.detach().clone()
    torch.distributed.all_reduce(total)
    gradients = {}
    for name, parameter in model.named_parameters():
        whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        torch.distributed.all_reduce(whole)
        gradients[name] = whole.numpy()
    return total.tolist(), gradients
