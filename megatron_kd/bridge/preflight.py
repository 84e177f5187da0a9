# SPDX-License-Identifier: Apache-2.0
"""What can be found wrong with a configuration before anything starts: no rank, no model, no GPU memory.

In: a configuration, what the user set in it, the world size. Out: nothing, or an error that names the key. Bridge's
finalisation runs on a copy, so the configuration stays as it was. Costs well under a second.

What Megatron-Bridge accepts and what of it distils. "Yes" is tested in the real loop, on CPU ranks, against one rank
with the dense loss; "refused" is refused here, by name, unless another place is given.

================================================  ====================================================================
GPT models, dense and with experts, any head      yes; tied and untied, padded vocabulary
heads for later tokens (MTP)                      yes: the divergence is the main head's, theirs is Megatron's own loss
vision, audio, hybrid and encoder models          refused
logits capped, scaled (muP), with a bias          refused; of an unknown output layer, at the first batch (output.py)
adapters (LoRA)                                   refused
TP, SP, PP, CP, EP, ETP, DP, and their products   yes
interleaved stages (VP)                           yes; two stages that exchange messages in batches are refused
hybrid CP, another CP in evaluation               refused
decentralised process groups                      refused
distributed optimizer, overlapped communication   yes
FSDP                                              refused: the head must be whole
deferred embedding gradients, expert overlap      refused
CUDA graphs, fp8 head                             refused
activation recomputation                          yes
calculate_per_token_loss on                       yes, however a batch is cut
calculate_per_token_loss off                      yes where every token has loss; else refused, since Megatron would
                                                  average over micro-batches of unlike numbers of tokens
dataloader type single, cyclic, batch             yes, with workers, over epochs, resumed within one
dataloader type external                          refused
pre-training data, blends, validation             yes
fine-tuning data, packed sequences                yes, where sequences are isolated; deferred packing is refused
mock data                                         in a dry run alone (dataset.py)
a rerun of an iteration                           yes
evaluation, signals, exits, checkpoints, export   yes
================================================  ====================================================================
"""

import os
from collections.abc import Callable

from megatron.bridge.data.builders import DirectHFSFTDatasetConfig, GPTSFTDatasetConfig
from megatron.bridge.data.builders.gpt_sft import FinetuningDatasetConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.checkpointing import checkpoint_exists
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir
from megatron.core.datasets.utils import get_blend_from_list

from megatron_kd.bridge import layout
from megatron_kd.bridge.finalise import check_final, finalise_preview
from megatron_kd.bridge.kd_values import check_corpus
from megatron_kd.bridge.overrides import UserValues
from megatron_kd.bridge.splits import check_split
from megatron_kd.bridge.targets import check_checkpoint
from megatron_kd.errors import ConfigError
from megatron_kd.stages import mix_up_messages


def check_before_start(cfg: ConfigContainer, user_values: UserValues, *, world_size: int) -> None:
    """Every check there is.

    Raises:
        ConfigError: the first that fails.
    """
    check_settings(cfg, world_size=world_size)
    check_final(finalise_preview(cfg, world_size=world_size), user_values, before=cfg)


def check_settings(cfg: ConfigContainer, *, world_size: int) -> None:
    """The checks that need neither a GPU nor Transformer Engine: support, layout, paths, the corpus and its parts.

    Raises:
        ConfigError: the first that fails.
    """
    refuse_unsupported(cfg)
    layout.check_fits(known_values(cfg), world_size)
    check_vocabulary(cfg)
    check_paths(cfg)
    if getattr(cfg, "kd", None) is not None and type(cfg.dataset) in (GPTDatasetConfig, MockGPTDatasetConfig):
        check_corpus(vars(cfg.kd), vars(cfg.dataset))
    check_splits(cfg)


_Finder = Callable[[ConfigContainer], str | None]


def _on(section: str, *names: str, off: tuple = (None, False, "none")) -> _Finder:
    """Finds the first of some fields of one section that is not off, as text."""

    def find(cfg: ConfigContainer) -> str | None:
        part = getattr(cfg, section)
        on = [f"{section}.{name}={value!r}" for name in names if (value := getattr(part, name, None)) not in off]
        return on[0] if on else None

    return find


def _other_model(cfg: ConfigContainer) -> str | None:
    """A provider that builds something else than Megatron's GPT model says so in what it returns."""
    kind = type(cfg.model)
    if isinstance(cfg.model, GPTModelProvider):
        built = kind.provide.__annotations__.get("return")
        if getattr(built, "__name__", built) in ("GPTModel", "MCoreGPTModel"):
            return None
    return f"model {kind.__name__}"


def _other_dataset(cfg: ConfigContainer) -> str | None:
    kind = type(cfg.dataset)  # exactly, since a subclass gives other samples
    return None if kind in _DATASETS else f"dataset {kind.__name__}"


def _examples_see_each_other(cfg: ConfigContainer) -> str | None:
    options = getattr(cfg.dataset, "dataset_kwargs", None) or {}
    return None if options.get("return_cu_seqlen", True) else "dataset.dataset_kwargs.return_cu_seqlen=False"


def _uncut_sequences(cfg: ConfigContainer) -> str | None:
    """Each packed sequence is cut for the context-parallel ranks, so it must be padded to what can be cut."""
    specs, size = getattr(cfg.dataset, "offline_packing_specs", None), cfg.model.context_parallel_size
    if specs is None or size == 1 or (specs.pad_seq_to_mult or 1) % (2 * size) == 0:
        return None
    return f"dataset.offline_packing_specs.pad_seq_to_mult={specs.pad_seq_to_mult} at CP={size}"


def _confused_stages(cfg: ConfigContainer) -> str | None:
    if cfg.comm_overlap is not None or not mix_up_messages(cfg.model):
        return None
    return f"model.virtual_pipeline_model_parallel_size={cfg.model.virtual_pipeline_model_parallel_size} on 2 stages"


def _mean_of_means(cfg: ConfigContainer) -> str | None:
    """Without per-token loss Megatron averages over the micro-batches' means, which is the mean over tokens only where
    all have as many: not where answers alone are learned from, or some positions are left out.
    """
    if cfg.model.calculate_per_token_loss:
        return None
    why = "kd.context=exact" if cfg.kd.context == "exact" else None
    if getattr(cfg.dataset, "eod_mask_loss", False):
        why = "dataset.eod_mask_loss=True"
    if type(cfg.dataset) not in (GPTDatasetConfig, MockGPTDatasetConfig):
        why = f"dataset {type(cfg.dataset).__name__}"
    return why and f"model.calculate_per_token_loss=False with {why}"


def _averaged_twice(cfg: ConfigContainer) -> str | None:
    both = cfg.model.calculate_per_token_loss and cfg.ddp.average_in_collective
    return "ddp.average_in_collective=True with model.calculate_per_token_loss=True" if both else None


def _teacher_beside(section: str, name: str, off: tuple) -> _Finder:
    """Finds a setting that is not off while `kd.teacher` runs beside the student."""

    def find(cfg: ConfigContainer) -> str | None:
        value = getattr(getattr(cfg, section), name, None)
        return f"{section}.{name}={value} with kd.teacher" if cfg.kd.teacher and value not in off else None

    return find


_DATASETS = (
    GPTDatasetConfig,
    MockGPTDatasetConfig,
    GPTSFTDatasetConfig,
    FinetuningDatasetConfig,
    DirectHFSFTDatasetConfig,
)
_CACHE_INSTEAD = "a cache of the teacher (kd.cache) instead"
_SCHEDULE_PLAN = "false: it needs a schedule plan (return_schedule_plan)"
_OWN_WGRAD = "false: the loss computes the head's weight gradient itself"
_WHOLE_HEAD = "false: the head's weight must be whole on its rank"
_UNSUPPORTED: tuple[tuple[_Finder, str], ...] = (
    (_other_model, "a provider of Megatron's GPT model"),
    (_on("model", "final_logit_softcapping"), "null: logits must be the head's weight times the hidden state"),
    (_on("model", "use_mup"), "false: logits must be the head's weight times the hidden state"),
    (_on("dataset", "dataloader_type", off=(None, "single", "cyclic", "batch")), "single, cyclic or batch"),
    (
        _other_dataset,
        "GPTDatasetConfig, or GPTSFTDatasetConfig or DirectHFSFTDatasetConfig with text",
    ),
    (_examples_see_each_other, "true: a cache holds what the teacher says of each example alone"),
    (_uncut_sequences, "a multiple of 2 * CP"),
    (_on("dataset", "defer_in_batch_packing_to_step"), "false"),
    (_confused_stages, "model.overlap_p2p_comm=true with model.batch_p2p_comm=false, or a comm_overlap section"),
    (_mean_of_means, "true, and ddp.average_in_collective=false, so that the loss is a sum over tokens divided once"),
    (_averaged_twice, "false: the sum over tokens is divided by their number already"),
    (_on("model", "overlap_moe_expert_parallel_comm"), _SCHEDULE_PLAN),
    (_on("comm_overlap", "overlap_moe_expert_parallel_comm"), _SCHEDULE_PLAN),
    (_on("model", "defer_embedding_wgrad_compute"), _OWN_WGRAD),
    (_on("comm_overlap", "defer_embedding_wgrad_compute"), _OWN_WGRAD),
    (_on("model", "enable_cuda_graph", "external_cuda_graph"), "false"),
    (_on("model", "cuda_graph_impl"), "none"),
    (_on("model", "fp8_output_proj"), "false: the head's weight is read unquantised"),
    (_on("model", "hybrid_context_parallel"), "false"),
    (_on("ddp", "use_megatron_fsdp"), _WHOLE_HEAD),
    (_on("dist", "use_megatron_fsdp", "use_torch_fsdp2"), _WHOLE_HEAD),
    (_on("dist", "use_decentralized_pg"), "false: distillation has not been tested with it"),
    (_on("dist", "eval_context_parallel_size", off=(None,)), "null"),
    (lambda cfg: None if cfg.peft is None else "peft", "null: adapters are not supported yet"),
    (_teacher_beside("model", "pipeline_model_parallel_size", (1,)), f"1, or {_CACHE_INSTEAD}"),
    (_teacher_beside("model", "fp16", (None, False)), f"bf16 or fp32, or {_CACHE_INSTEAD}"),
)


def refuse_unsupported(cfg: ConfigContainer) -> None:
    """Refuses by name what distillation does not support yet. Without `cfg.kd` the run is Bridge's: nothing to refuse.

    Raises:
        ConfigError: names the setting and what it has to be.
    """
    if getattr(cfg, "kd", None) is None:
        return
    for find, expected in _UNSUPPORTED:
        if found := find(cfg):
            raise ConfigError(f"{found} does not work with distillation; expected {expected}.")


def check_splits(cfg: ConfigContainer) -> None:
    """Every part of the corpora has a document, where the parts come from `dataset.split`."""
    dataset = cfg.dataset
    if type(dataset) is not GPTDatasetConfig or not dataset.split:
        return
    blend = dataset.blend
    if blend is None:
        paths = getattr(dataset, "data_path", None) or []
        paths = paths.split() if isinstance(paths, str) else list(paths)
        blend = get_blend_from_list([str(path) for path in paths]) if paths else None
    check_split(dataset.split, blend[0] if blend else ())


def check_vocabulary(cfg: ConfigContainer) -> None:
    """The model keeps the vocabulary of the weights it starts from, as Bridge's pre-training recipes would not."""
    if cfg.checkpoint.pretrained_checkpoint is not None and cfg.tokenizer.use_tokenizer_vocab_size:
        raise ConfigError(
            "tokenizer.use_tokenizer_vocab_size=True would replace model.vocab_size by the tokenizer's, and the "
            "weights of checkpoint.pretrained_checkpoint would not fit. Set it to false."
        )


def check_paths(cfg: ConfigContainer) -> None:
    """What is to be read is there. `checkpoint.load` may be empty only where it is also where the run saves."""
    checkpoint = cfg.checkpoint
    for key in ("pretrained_checkpoint", "load"):
        path = getattr(checkpoint, key)
        if path is None or (key == "load" and path == checkpoint.save):
            continue
        check_checkpoint(path)
        if checkpoint_exists(path) or is_hf_checkpoint_dir(path):
            continue
        found = "a path that does not exist" if not os.path.exists(path) else "a folder without a checkpoint in it"
        raise ConfigError(
            f"checkpoint.{key}={path} is {found}. Expected a Megatron checkpoint, or a Hugging Face folder with "
            "config.json and weights. Bridge would go on with random weights."
        )


def check_layout(cfg: ConfigContainer, world_size: int) -> None:
    """The world size splits into the parallel sizes, and the batch into micro-batches.

    Raises:
        LayoutError: names all sizes and what would fit.
    """
    layout.check_layout(known_values(cfg), world_size)


def smallest_world_size(cfg: ConfigContainer) -> int:
    """The fewest ranks that the parallel sizes allow; every other world size is a multiple of it."""
    return layout.smallest_world_size(known_values(cfg))


def known_values(cfg: ConfigContainer) -> layout.Known:
    """What the layout depends on. Data of other kinds have no one length."""
    keys = {key: key.split(".") for key in layout.KEYS}
    return {key: getattr(getattr(cfg, section), name, None) for key, (section, name) in keys.items()}
