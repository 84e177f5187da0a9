# SPDX-License-Identifier: Apache-2.0
"""Whether parallel sizes, batch, lengths, the model's parts and the schedule fit each other, without Megatron.

In: values by key ("model.num_layers"), of a configuration or as far as they are known before there is one. Out:
nothing, or an error that names the keys and what would fit. A key that is absent is unknown, and nothing is said of
it; None is a value.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_kd.errors import ConfigError

Known = Mapping[str, Any]

ARCHITECTURE = ("model.num_attention_heads", "model.num_layers", "model.num_moe_experts")
"""Values that come with the student's own configuration."""
_UNEVEN = (
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
    "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split",
)
"""Settings under which stages need not have equally many layers."""
_COUNTS = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.expert_tensor_parallel_size",
    "model.seq_length",
    "dataset.seq_length",
    "train.global_batch_size",
    "train.micro_batch_size",
)
"""At least 1, where they are set."""
KEYS = (
    *ARCHITECTURE,
    *_UNEVEN,
    *_COUNTS,
    "dataset.split",
    "train.train_iters",
    "optimizer.lr",
    "optimizer.min_lr",
    "scheduler.max_steps",
    "scheduler.lr_decay_iters",
    "scheduler.lr_warmup_iters",
    "scheduler.lr_warmup_fraction",
)
"""All that is looked at here."""

_SIZES = {
    "TP": "tensor_model",
    "PP": "pipeline_model",
    "CP": "context",
    "EP": "expert_model",
    "ETP": "expert_tensor",
}
_MUST_DIVIDE = (("TP", "PP", "CP"), ("ETP", "PP", "EP"))


class LayoutError(ConfigError):
    """Sizes that do not fit each other, or not the number of ranks."""


def parallel_sizes(known: Known) -> dict[str, int]:
    """TP, PP, CP, EP, ETP, as far as they are known."""
    sizes = {name: known.get(f"model.{key}_parallel_size", 0) for name, key in _SIZES.items()}
    if sizes["ETP"] is None:
        sizes["ETP"] = sizes["TP"]
    return {name: size or 1 for name, size in sizes.items() if size != 0}


def check_fits(known: Known, world_size: int | None) -> None:
    """Every check here; the last only if the number of ranks is known.

    Raises:
        LayoutError: the first that fails.
    """
    check_counts(known)
    check_lengths(known)
    check_parts(known)
    check_schedule(known)
    if world_size:
        check_layout(known, world_size)


def check_counts(known: Known) -> None:
    """Sizes are at least 1.

    Raises:
        LayoutError: one is not.
    """
    for key in _COUNTS:
        value = known.get(key)
        if value is not None and value < 1:
            raise LayoutError(f"{key} must be at least 1, found {value}.")


def check_schedule(known: Known) -> None:
    """The learning rate rises before it falls, and falls to a lower one.

    Raises:
        LayoutError: Megatron would stop at it once the model is built.
    """
    highest, lowest = known.get("optimizer.lr"), known.get("optimizer.min_lr")
    for key, rate in (("optimizer.lr", highest), ("optimizer.min_lr", lowest)):
        if rate is not None and rate < 0:
            raise LayoutError(f"{key} must be at least 0, found {rate}.")
    if None not in (highest, lowest) and lowest > highest:
        raise LayoutError(
            f"optimizer.min_lr={lowest} is above optimizer.lr={highest}, to which the learning rate rises. Set "
            "optimizer.min_lr as well."
        )
    warmup = known.get("scheduler.lr_warmup_iters")
    if known.get("scheduler.lr_warmup_fraction", 0) is not None:
        return  # known to be a fraction, or not known
    for key in ("scheduler.max_steps", "scheduler.lr_decay_iters", "train.train_iters"):
        if key not in known:
            return
        if known[key] is not None:
            break
    if warmup and known[key] is not None and warmup >= known[key]:
        raise LayoutError(
            f"scheduler.lr_warmup_iters={warmup} must be below {key}={known[key]}, the iterations over which the "
            "learning rate rises and falls. Set scheduler.lr_warmup_iters to fewer."
        )


def check_layout(known: Known, world_size: int) -> None:
    """The ranks split into the parallel sizes, and the batch into micro-batches.

    Raises:
        LayoutError: names all sizes and what would fit.
    """
    sizes = parallel_sizes(known)
    text = " ".join(f"{name}={size}" for name, size in sizes.items())
    for names in _MUST_DIVIDE:
        given = [name for name in names if name in sizes]
        product = math.prod(sizes[name] for name in given)
        if world_size % product:
            step = smallest_world_size(known)
            fits = max(step, world_size // step * step)
            raise LayoutError(
                f"{world_size} ranks do not split into {text}: expected a multiple of {'*'.join(given)} = {product}. "
                f"With these sizes {fits} or {fits + step} ranks fit (--nodes times GPUs a node); or change "
                "model.*_parallel_size."
            )
    batch, micro = known.get("train.global_batch_size"), known.get("train.micro_batch_size")
    if batch and micro and all(name in sizes for name in _MUST_DIVIDE[0]):
        data = world_size // math.prod(sizes[name] for name in _MUST_DIVIDE[0])
        step = micro * data
        if batch % step:
            raise LayoutError(
                f"train.global_batch_size={batch} must be a multiple of train.micro_batch_size * DP = {micro} * "
                f"{data} = {step} (world size {world_size}, {text}). {max(step, batch // step * step)} would fit."
            )


def smallest_world_size(known: Known) -> int:
    """The fewest ranks that the parallel sizes allow; every other world size is a multiple of it."""
    sizes = parallel_sizes(known)
    return math.lcm(*(math.prod(sizes.get(name, 1) for name in names) for names in _MUST_DIVIDE))


def check_lengths(known: Known) -> None:
    """One sequence length for model and dataset, which context-parallel ranks can cut.

    Raises:
        LayoutError: it is not so.
    """
    model, dataset = known.get("model.seq_length"), known.get("dataset.seq_length")
    if None not in (model, dataset) and model != dataset:
        raise LayoutError(
            f"model.seq_length={model} and dataset.seq_length={dataset} must be equal. Set both, or in YAML write "
            "dataset: {seq_length: ${model.seq_length}}."
        )
    context = known.get("model.context_parallel_size") or 1
    if context > 1 and model and model % (2 * context):
        raise LayoutError(
            f"model.seq_length={model} must be a multiple of 2 * CP = {2 * context}, so that each rank has two equal "
            f"chunks. {-(-model // (2 * context)) * 2 * context} would fit."
        )


def check_parts(known: Known) -> None:
    """Heads, layers and experts split evenly over the ranks that share them.

    Raises:
        LayoutError: they do not.
    """
    sizes = parallel_sizes(known)
    stages = sizes.get("PP", 1) * (known.get("model.virtual_pipeline_model_parallel_size") or 1)
    even = not any(known.get(name, True) for name in _UNEVEN)
    for key, name, size in (
        ("model.num_attention_heads", "TP", sizes.get("TP", 1)),
        ("model.num_moe_experts", "EP", sizes.get("EP", 1)),
        ("model.num_layers", "PP" if stages == sizes.get("PP", 1) else "PP * VP", stages if even else 1),
    ):
        count = known.get(key)
        if count and count % size:
            fits = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
            raise LayoutError(f"{key}={count} does not split into {name} = {size}; expected one of {fits}.")
