# SPDX-License-Identifier: Apache-2.0
"""Makes a recipe tiny, so that a few real steps of it take seconds on at most four CPU ranks.

In: a Bridge ConfigContainer, before it is validated. Out: the same object with smaller numbers and the list of
changes. What a recipe is made of stays: the kind of model and every option of it, which parallelisms are on, the
optimizer, the schedule, the precision. Costs nothing.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_kd.dryrun.prepare import Change
from megatron_kd.errors import ConfigError

MAX_RANKS = 4
STEPS = 5
LAYERS_PER_STAGE = 2
HIDDEN = 64
HEAD_CHANNELS = 16
FFN = 128
EXPERTS = 4
SEQ_LENGTH = 64
WINDOW = 16
VOCABULARY = 512


def shrink(cfg: Any, *, world_size: int | None = None) -> list[Change]:
    """Make a recipe tiny, in place.

    ============================  ==================================================================================
    parallel sizes                each above 1 becomes 2, in the order tensor, pipeline, context, expert, while the
                                  ranks suffice (`world_size`, or 4); the others become 1. Virtual stages: 2
    layers                        2 a pipeline stage; per-layer lists keep their first entries; uneven splits go even
    attention                     2 query groups (1 stays 1), query heads in the recipe's ratio, 16 channels a head,
                                  hidden size 64, window of 16 where there is one
    MLP                           128 wide, an expert and shared experts 64
    experts                       4, of which at most 2 a token; grouped routing: 2 groups, 1 a token
    multi-token prediction        at most 1 layer
    sequence                      64 tokens
    data                          real files stay, with their tokenizer; what is not on this machine becomes Bridge's
                                  mock data, and a tokenizer that is not becomes NullTokenizer
    vocabulary                    512 with a NullTokenizer, else the tokenizer's
    batch                         2 micro-batches of at most 2 samples a rank; no ramp-up
    length                        5 steps, 1 of warm-up; no evaluation
    checkpoints, loggers          none read, none written; the log has every step
    ============================  ==================================================================================

    Args:
        cfg: a ConfigContainer that has not been validated yet; its model is a GPT provider of Bridge.
        world_size: ranks of the run, at most a few; None allows up to 4 and takes as few as the layout needs.

    Returns:
        What was changed, in order.

    Raises:
        ConfigError: `world_size` is not positive.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(f"a dry run on {world_size} ranks: expected at least 1. Leave it out to have it chosen.")
    edit = _Editor(cfg)
    _parallel_sizes(edit, cfg.model, world_size)
    _layers(edit, cfg.model)
    _widths(edit, cfg.model)
    _experts(edit, cfg.model)
    _data(edit, cfg)
    _schedule(edit, cfg, world_size or _smallest_world_size(cfg.model))
    _outputs(edit)
    return edit.changes


class _Editor:
    """Sets values by key and keeps account."""

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg
        self.changes: list[Change] = []

    def set(self, key: str, new: Any, why: str) -> None:
        """Set a dotted key, if the recipe has such a setting and it differs."""
        *path, name = key.split(".")
        section = self._cfg
        for part in path:
            section = getattr(section, part)
        old = getattr(section, name, new)
        if old is not new and (type(old) is not type(new) or old != new):
            setattr(section, name, new)
            self.changes.append(Change(key, old, new, why))

    def at_most(self, key: str, limit: int, why: str) -> None:
        """Lower a dotted key that holds a larger number."""
        section, name = key.split(".")
        old = getattr(getattr(self._cfg, section), name, None)
        if isinstance(old, int) and old > limit:
            self.set(key, limit, why)


def _parallel_sizes(edit: _Editor, model: Any, world_size: int | None) -> None:
    ranks = world_size or MAX_RANKS
    used = 1
    for kind in ("tensor", "pipeline", "context"):
        key = f"{kind}_model_parallel_size" if kind != "context" else "context_parallel_size"
        wanted = getattr(model, key) > 1
        size = 2 if wanted and ranks % (used * 2) == 0 else 1
        used *= size
        why = "2 stands for every larger size" if size == 2 else f"{ranks} ranks have no room for it"
        edit.set(f"model.{key}", size, why)
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        edit.set("model.sequence_parallel", False, "there is no tensor parallelism left")
    _expert_parallel_sizes(edit, model, ranks)
    has_stages = model.pipeline_model_parallel_size > 1
    if model.virtual_pipeline_model_parallel_size:
        edit.set("model.virtual_pipeline_model_parallel_size", 2 if has_stages else None, "2 layers a pipeline stage")
    edit.set("ddp.num_distributed_optimizer_instances", 1, "too few data-parallel ranks for several")


def _expert_parallel_sizes(edit: _Editor, model: Any, ranks: int) -> None:
    if (model.expert_tensor_parallel_size or 1) > 1:
        edit.set("model.expert_tensor_parallel_size", model.tensor_model_parallel_size, "as tensor parallelism")
    if (model.expert_model_parallel_size or 1) > 1:
        # An unset expert tensor parallelism follows tensor parallelism.
        expert_tensor = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
        fits = ranks % (expert_tensor * model.pipeline_model_parallel_size * 2) == 0
        why = "2 stands for every larger size" if fits else f"{ranks} ranks have no room for it"
        edit.set("model.expert_model_parallel_size", 2 if fits else 1, why)


def _smallest_world_size(model: Any) -> int:
    dense = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    expert_tensor = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    experts = expert_tensor * model.pipeline_model_parallel_size * (model.expert_model_parallel_size or 1)
    return math.lcm(dense, experts)


def _layers(edit: _Editor, model: Any) -> None:
    layers = LAYERS_PER_STAGE * model.pipeline_model_parallel_size
    why = f"{LAYERS_PER_STAGE} a pipeline stage"
    edit.set("model.num_layers", layers, why)
    for name in ("window_attn_skip_freq", "moe_layer_freq", "cp_comm_type", "no_rope_freq"):
        if isinstance(getattr(model, name, None), list):
            edit.set(f"model.{name}", getattr(model, name)[:layers], "the first layers' entries")
    edit.set("model.pipeline_model_parallel_layout", None, why)
    edit.set("model.num_layers_in_first_pipeline_stage", None, why)
    edit.set("model.num_layers_in_last_pipeline_stage", None, why)
    edit.set("model.account_for_embedding_in_pipeline_split", False, why)
    edit.set("model.account_for_loss_in_pipeline_split", False, why)
    edit.at_most("model.mtp_num_layers", 1, "one of them runs the same code")
    edit.at_most("model.recompute_num_layers", 1, why)


def _widths(edit: _Editor, model: Any) -> None:
    edit.set("model.hidden_size", HIDDEN, "small")
    groups = getattr(model, "num_query_groups", None) or model.num_attention_heads
    ratio = model.num_attention_heads // groups
    small_groups = min(groups, 2)
    edit.set("model.num_attention_heads", small_groups * ratio, f"{ratio} query heads a group, as in the recipe")
    if getattr(model, "num_query_groups", None):
        edit.set("model.num_query_groups", small_groups, "small, and 2 tensor-parallel ranks divide it")
    edit.set("model.kv_channels", HEAD_CHANNELS, "small")
    for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"):
        edit.at_most(f"model.{name}", HEAD_CHANNELS, "small")
    edit.set("model.ffn_hidden_size", FFN, "small")
    if getattr(model, "window_size", None):
        back, ahead = model.window_size
        edit.set("model.window_size", (min(back, WINDOW - 1), ahead), f"{WINDOW} of {SEQ_LENGTH} tokens")


def _experts(edit: _Editor, model: Any) -> None:
    if not model.num_moe_experts:
        return
    edit.at_most("model.num_moe_experts", EXPERTS, "small, and 2 expert-parallel ranks divide it")
    edit.at_most("model.moe_router_topk", EXPERTS // 2, "fewer than there are experts")
    edit.at_most("model.moe_router_num_groups", 2, f"{EXPERTS} experts")
    edit.at_most("model.moe_router_group_topk", 1, "fewer than there are groups")
    edit.at_most("model.moe_ffn_hidden_size", FFN // 2, "small")
    edit.at_most("model.moe_shared_expert_intermediate_size", FFN // 2, "small")


def _data(edit: _Editor, cfg: Any) -> None:
    from megatron.bridge.training.config import GPTDatasetConfig, MockGPTDatasetConfig

    paths = _data_paths(cfg.dataset)
    missing = [path for path in paths if not Path(f"{path}.bin").exists()]
    if not isinstance(cfg.dataset, GPTDatasetConfig) or missing:
        why = f"{missing[0]}.bin is not on this machine" if missing else "only files of tokens are read in a dry run"
        edit.set("dataset", _mock_dataset(cfg.dataset, MockGPTDatasetConfig), why)
        paths = []
    edit.set("dataset.seq_length", SEQ_LENGTH, "small")
    edit.set("model.seq_length", SEQ_LENGTH, "small")
    _tokenizer(edit, cfg, has_data=bool(paths))


def _data_paths(dataset: Any) -> list[str]:
    """Prefixes of Megatron's indexed datasets, from whichever of the three settings holds them."""
    blends = [getattr(dataset, "blend", None), *(getattr(dataset, "blend_per_split", None) or [])]
    paths = [path for blend in blends if blend for path in blend[0]]
    given = getattr(dataset, "data_path", None) or []
    words = given.split() if isinstance(given, str) else [str(word) for word in given]
    return paths + [word for word in words if not _is_number(word)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _mock_dataset(dataset: Any, kind: Callable[..., Any]) -> Any:
    return kind(
        seq_length=SEQ_LENGTH,
        random_seed=getattr(dataset, "random_seed", 1234),
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=getattr(dataset, "eod_mask_loss", False),
        split="9999,8,2",
        dataloader_type="single",
    )


def _tokenizer(edit: _Editor, cfg: Any, *, has_data: bool) -> None:
    model_path = cfg.tokenizer.tokenizer_model
    if has_data or (model_path and Path(model_path).exists()):
        return
    if cfg.tokenizer.tokenizer_type != "NullTokenizer":
        why = f"{model_path} is not on this machine" if model_path else "mock data need none"
        edit.set("tokenizer.tokenizer_type", "NullTokenizer", why)
        edit.set("tokenizer.tokenizer_model", None, why)
    edit.set("tokenizer.vocab_size", VOCABULARY - 1, "small; NullTokenizer adds the end of a document")
    edit.set("model.vocab_size", VOCABULARY, "small")


def _schedule(edit: _Editor, cfg: Any, world_size: int) -> None:
    model = cfg.model
    edit.at_most("train.micro_batch_size", 2, "small")
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    batch = 2 * cfg.train.micro_batch_size * max(1, world_size // ranks)
    edit.set("train.global_batch_size", batch, "2 micro-batches a rank, so that gradients accumulate")
    edit.set("train.train_iters", STEPS, "a few steps")
    for name in ("rampup_batch_size", "step_batch_size_schedule", "train_samples", "num_epochs"):
        edit.set(f"train.{name}", None, f"{STEPS} steps of one size")
    for name in ("exit_interval", "exit_duration_in_mins"):
        edit.set(f"train.{name}", None, f"{STEPS} steps end by themselves")
    why = f"{STEPS} steps"
    edit.at_most("scheduler.lr_warmup_iters", 1, why)
    edit.set("scheduler.lr_warmup_samples", 0, why)
    edit.set("scheduler.lr_warmup_fraction", None, why)
    for name in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_samples"):
        edit.set(f"scheduler.{name}", None, why)
    edit.at_most("scheduler.lr_wsd_decay_iters", 2, why)
    edit.set("validation.eval_iters", 0, "no evaluation")
    edit.set("validation.eval_interval", 1000, "no evaluation")
    edit.set("validation.eval_global_batch_size", None, "no evaluation")
    edit.set("validation.eval_micro_batch_size", None, "no evaluation")


def _outputs(edit: _Editor) -> None:
    for name in ("save", "load", "non_persistent_save_interval", "non_persistent_ckpt_type", "ckpt_step"):
        edit.set(f"checkpoint.{name}", None, "a dry run leaves nothing behind")
    edit.set("checkpoint.also_save_hf_checkpoint", False, "a dry run leaves nothing behind")
    edit.set("checkpoint.pretrained_checkpoint", None, "its weights do not fit the small model")
    edit.set("checkpoint.finetune", False, "no checkpoint is read")
    edit.set("logger.log_interval", 1, "every step is shown")
    for name in ("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project", "save_config_filepath"):
        edit.set(f"logger.{name}", None, "a dry run leaves nothing behind")
