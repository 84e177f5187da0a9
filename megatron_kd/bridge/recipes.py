# SPDX-License-Identifier: Apache-2.0
"""Where a run's configuration starts: a function without arguments that returns a container.

In: a name, and the student's Hugging Face folder if there is one. Out: a container. Ours, every recipe of Bridge, and
any function of the user's own can be named. Building one takes a second and no network: the architectures that ours
use are written down here, and `student` replaces the hub's model in every recipe.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.recipes.gpt_oss.h100.gpt_oss import (
    gpt_oss_20b_pretrain_16gpu_h100_bf16_config,
    gpt_oss_120b_pretrain_64gpu_h100_bf16_config,
)
from megatron.bridge.recipes.llama.h100.llama3 import llama32_3b_pretrain_1gpu_h100_bf16_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from megatron_kd.bridge.config import KDConfig, KDConfigContainer
from megatron_kd.bridge.settings import unknown_recipe
from megatron_kd.errors import ConfigError
from megatron_kd.hub import check_on_hub

Recipe = Callable[[], ConfigContainer]
_RECIPES: dict[str, Recipe] = {}


def recipe(function: Recipe) -> Recipe:
    """Registers a recipe under its own name."""
    _RECIPES[function.__name__] = function
    return function


def build_recipe(what: str | Recipe | ConfigContainer, student: str | Path | None = None) -> ConfigContainer:
    """The container a recipe returns.

    Args:
        what: a name of ours or of `megatron.bridge.recipes`; `hf:FOLDER` for any model that Bridge can import;
            `package.module:function`; a function; or a container, which is copied.
        student: Hugging Face folder or hub name. Architecture, tokenizer and initial weights come from it, instead of
            from the model the recipe names.

    Raises:
        ConfigError: no such recipe (the nearest names are given), or the student cannot be read.
    """
    if isinstance(what, ConfigContainer):
        if student is not None:
            raise ConfigError(
                "a student replaces the model of a recipe by name; a container that is built has its own."
            )
        return copy.deepcopy(what)
    if isinstance(what, str) and what.startswith("hf:"):
        what, student = any_model_config, what.removeprefix("hf:")
    function = what if callable(what) else _find(what)
    folder = None if student is None else _local_folder(student)
    with _architectures(folder) as read:
        cfg = function()
    if not isinstance(cfg, ConfigContainer):
        raise ConfigError(f"recipe {what!r} returned {type(cfg).__name__}, expected a ConfigContainer.")
    if folder is not None:
        if not read:
            raise ConfigError(
                f"recipe {what!r} takes no Hugging Face model, so a student cannot replace it: hf:{folder}"
            )
        cfg.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
        cfg.tokenizer.tokenizer_model = folder
        cfg.tokenizer.vocab_size = None
        cfg.tokenizer.use_tokenizer_vocab_size = False  # the weights have the model's own, which is often larger
        cfg.checkpoint.pretrained_checkpoint = folder
    return cfg


def recipe_names() -> list[str]:
    """Every name that `--recipe` finds, ours first."""
    return [*_RECIPES, *sorted(_bridge_recipes())]


def _find(name: str) -> Recipe:
    if ":" in name:
        return _imported(name)
    known = _bridge_recipes() | _RECIPES
    if name not in known:
        raise ConfigError(unknown_recipe(name, _RECIPES, known))
    return known[name]


def _imported(path: str) -> Recipe:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"recipe {path!r} cannot be imported: {error}. Expected package.module:function.") from error


def _bridge_recipes() -> dict[str, Recipe]:
    import megatron.bridge.recipes as stock

    return {
        name: getattr(stock, name)
        for name in dir(stock)
        if name.endswith("_config") and callable(getattr(stock, name))
    }


def _local_folder(student: str | Path) -> str:
    """The folder of the student's weights.

    Raises:
        ConfigError: it holds no weights, or the hub's copy is neither here nor can be had.
    """
    folder = str(student)
    if not Path(folder).exists():
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(folder)
        except Exception as error:  # the hub's client raises many kinds
            raise ConfigError(f"student {student!r} is no folder, and the hub does not give it: {error}") from error
    if not is_hf_checkpoint_dir(folder):
        raise ConfigError(
            f"student {folder} holds no Hugging Face model: expected config.json and *.safetensors in it."
        )
    return folder


# The architectures our recipes name, as their makers publish them.
_ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "openai/gpt-oss-20b": lambda: GptOssConfig(
        architectures=["GptOssForCausalLM"], num_hidden_layers=24, num_local_experts=32, dtype="bfloat16"
    ),
    "openai/gpt-oss-120b": lambda: GptOssConfig(
        architectures=["GptOssForCausalLM"], num_hidden_layers=36, num_local_experts=128, dtype="bfloat16"
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": lambda: LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "meta-llama/Meta-Llama-3.1-8B": lambda: LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        dtype="bfloat16",
    ),
    "meta-llama/Llama-3.2-3B": lambda: LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
}


@contextmanager
def _architectures(folder: str | None) -> Iterator[list[str]]:
    """While a recipe is built, `AutoBridge` reads the student's folder or an architecture of ours instead of the hub.

    Bridge's recipes name a hub model in their code and take no argument, so there is no other way in. Yields a list
    of the models that the recipe asks for.
    """
    asked: list[str] = []
    stock = AutoBridge.__dict__["from_hf_pretrained"]

    def from_hf_pretrained(cls: type[AutoBridge], path: str | Path, **kwargs: Any) -> AutoBridge:
        asked.append(str(path))
        if folder is None and str(path) in _ARCHITECTURES:
            config = _ARCHITECTURES[str(path)]()
            config.name_or_path = str(path)
            return cls.from_hf_config(config)
        try:
            check_on_hub("the recipe's model", str(folder or path))
            return stock.__func__(cls, folder or path, **kwargs)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"the recipe's model {folder or path} cannot be read: {error}\n"
                "Without network give a local Hugging Face folder: --student FOLDER."
            ) from error

    AutoBridge.from_hf_pretrained = classmethod(from_hf_pretrained)
    try:
        yield asked
    finally:
        AutoBridge.from_hf_pretrained = stock


@recipe
def smollm2_135m_pretrain_3cpu_fp32_kd_config() -> KDConfigContainer:
    """SmolLM2-135M, or a pruned one, on three CPU ranks: TP=3 with sequence parallelism, as its 9 heads allow."""
    cfg = _around("HuggingFaceTB/SmolLM2-135M-Instruct")
    cfg.model.tensor_model_parallel_size = 3
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = cfg.dataset.seq_length = 384
    cfg.mixed_precision = None
    cfg.model.bf16 = cfg.optimizer.bf16 = False
    cfg.model.params_dtype = cfg.model.autocast_dtype = cfg.model.pipeline_dtype = torch.float32
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 8
    cfg.scheduler.lr_warmup_iters = 10
    return cfg


@recipe
def gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config() -> KDConfigContainer:
    """GPT-OSS 20B on one node of eight H200 at 32,768 tokens: TP=4 with sequence parallelism, EP=8, DP=2.

    141 GB a GPU hold the student without a pipeline, so there is no bubble.
    """
    return _gpt_oss(gpt_oss_20b_pretrain_16gpu_h100_bf16_config(), tensor=4, seq_length=32768)


@recipe
def gpt_oss_20b_pretrain_8gpu_b200_bf16_kd_config() -> KDConfigContainer:
    """GPT-OSS 20B on one node of eight B200 at 32,768 tokens: TP=2 with sequence parallelism, EP=8, DP=4.

    180 GB a GPU hold twice as many tokens' activations as an H200 does, so half the tensor parallelism will do.
    """
    return _gpt_oss(gpt_oss_20b_pretrain_16gpu_h100_bf16_config(), tensor=2, seq_length=32768)


@recipe
def gpt_oss_120b_pretrain_32gpu_h200_bf16_kd_config() -> KDConfigContainer:
    """GPT-OSS 120B on four nodes of eight H200 at 32,768 tokens: TP=4, EP=8, both inside a node, PP=4 across, DP=2."""
    return _gpt_oss(gpt_oss_120b_pretrain_64gpu_h100_bf16_config(), tensor=4, stages=4, seq_length=32768)


@recipe
def gpt_oss_120b_pretrain_32gpu_b200_bf16_kd_config() -> KDConfigContainer:
    """GPT-OSS 120B on four nodes of eight B200: the layout of the H200, with more room for longer sequences."""
    return gpt_oss_120b_pretrain_32gpu_h200_bf16_kd_config()


@recipe
def llama32_3b_pretrain_1gpu_h200_bf16_kd_config() -> KDConfigContainer:
    """Llama 3.2 3B (3.2 billion parameters) on one H200 at 8,192 tokens, the student of Llama 3.1 8B."""
    cfg = KDConfigContainer.wrap(llama32_3b_pretrain_1gpu_h100_bf16_config(), KDConfig())
    cfg.model.tensor_model_parallel_size = cfg.model.context_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.sequence_parallel = False
    cfg.model.seq_length = cfg.dataset.seq_length = 8192
    cfg.tokenizer.use_tokenizer_vocab_size = False
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 32
    return cfg


@recipe
def llama32_3b_pretrain_1gpu_b200_bf16_kd_config() -> KDConfigContainer:
    """Llama 3.2 3B on one B200 at 8,192 tokens: as on the H200, with two sequences at a time."""
    cfg = llama32_3b_pretrain_1gpu_h200_bf16_kd_config()
    cfg.train.micro_batch_size = 2
    return cfg


def _gpt_oss(cfg: ConfigContainer, *, tensor: int, stages: int = 1, seq_length: int) -> KDConfigContainer:
    """Experts over the eight GPUs of a node, where their exchange travels on NVLink."""
    cfg = KDConfigContainer.wrap(cfg, KDConfig())
    cfg.model.tensor_model_parallel_size = tensor
    cfg.model.sequence_parallel = tensor > 1
    cfg.model.pipeline_model_parallel_size = stages
    cfg.model.expert_model_parallel_size = 8
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.seq_length = cfg.dataset.seq_length = seq_length
    cfg.tokenizer.use_tokenizer_vocab_size = False
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 64
    return cfg


def any_model_config() -> KDConfigContainer:
    """Bridge's common pre-training settings around the student's own architecture: what `hf:FOLDER` names."""
    return _around("a student")


def _around(model: str) -> KDConfigContainer:
    cfg = KDConfigContainer.wrap(_pretrain_common(), KDConfig())
    cfg.model = AutoBridge.from_hf_pretrained(model).to_megatron_provider(load_weights=False)
    cfg.model.seq_length = cfg.dataset.seq_length
    cfg.tokenizer.tokenizer_model = model
    cfg.tokenizer.use_tokenizer_vocab_size = False
    return cfg
