# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-OSS for tests on CPU ranks: a Hugging Face folder, a recipe on it, and a few real training steps.

All functions run inside a rank (`run_ranks(train, world_size, kwargs=...)`), where megatron.bridge is imported.
"""

from pathlib import Path
from typing import Any

VOCABULARY = 512
SEQ_LENGTH = 64
LAYERS = 2


def write_tiny_gpt_oss(folder: str | Path, *, dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """A Hugging Face GPT-OSS with random weights, biases, sinks and norms: 4 experts, window 16 in layer 1 of 2."""
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = dict(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return _write(GptOssForCausalLM(GptOssConfig(**settings | config)), folder, dtype, seed)


def write_tiny_llama(folder: str | Path, *, dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """A Hugging Face Llama with a tied head and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return _write(LlamaForCausalLM(LlamaConfig(**settings | config)), folder, dtype, seed)


def write_tiny_qwen3_moe(folder: str | Path, *, dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """A Hugging Face Qwen3 with 4 experts and random weights, without biases: its experts may be tensor parallel."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = dict(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return _write(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | config)), folder, dtype, seed)


def _write(model: Any, folder: str | Path, dtype: str, seed: int) -> Path:
    """With a tokenizer of numbered words, without which Bridge exports nothing."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + mean)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return Path(folder)


def tiny_gpt_oss(
    hf: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    vp: int | None = None,
    steps: int = 5,
    dtype: str = "float32",
    global_batch: int = 4,
    micro_batch: int = 1,
    seq_length: int = SEQ_LENGTH,
    run_dir: str | Path | None = None,
    load_weights: bool = True,
    **settings: Any,
) -> Any:
    """A prepared ConfigContainer that trains the model of the folder `hf`, imported by Bridge, on mock data.

    Data parallelism is what the world size leaves. `settings` are dotted keys with __ for dots, such as
    `ddp__overlap_grad_reduce=True`, applied last.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.common import _pretrain_common

    from megatron_kd import dryrun

    cfg = _pretrain_common()
    bridge = AutoBridge.from_hf_pretrained(str(hf))
    cfg.model = bridge.to_megatron_provider(load_weights=load_weights)
    cfg.model.tensor_model_parallel_size = tp
    cfg.model.sequence_parallel = tp > 1
    cfg.model.pipeline_model_parallel_size = pp
    cfg.model.virtual_pipeline_model_parallel_size = vp
    cfg.model.expert_model_parallel_size = ep
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.context_parallel_size = cp
    cfg.model.seq_length = cfg.dataset.seq_length = seq_length
    _set_precision(cfg, dtype)
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "NullTokenizer", None
    cfg.tokenizer.vocab_size = VOCABULARY - 1
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = steps, global_batch, micro_batch
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, 1000
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 1, 1000
    cfg.optimizer.lr = 1e-3
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.checkpoint.save = cfg.checkpoint.load = str(run_dir) if run_dir else None
    cfg.checkpoint.save_interval = 2
    dryrun.prepare(cfg)
    for key, value in settings.items():
        *path, name = key.split("__")
        section = cfg
        for part in path:
            section = getattr(section, part)
        if not hasattr(section, name):
            raise AttributeError(f"no setting {key.replace('__', '.')}")
        setattr(section, name, value)
    return cfg


def _set_precision(cfg: Any, dtype: str) -> None:
    import torch

    half = dtype == "bfloat16"
    cfg.mixed_precision = "bf16_mixed" if half else None
    cfg.model.bf16 = cfg.optimizer.bf16 = half
    cfg.model.params_dtype = cfg.model.pipeline_dtype = cfg.optimizer.params_dtype = getattr(torch, dtype)


def train(
    hf: str | Path, forward_step: Any = None, stall: tuple[int, Path] | None = None, **kwargs: Any
) -> list[dict[str, float]]:
    """Train `tiny_gpt_oss(hf, **kwargs)` with Bridge's pretrain and the stock loss (or another forward step).

    stall=(n, path): stop after n steps, say so by creating `path`, and wait to be killed.

    Returns one dictionary a step: "grad norm", and the losses by name on ranks of the last pipeline stage.
    """
    from megatron.bridge.training.gpt_step import forward_step as stock_forward_step
    from megatron.bridge.training.pretrain import pretrain

    recorder = Recorder(stall)
    pretrain(tiny_gpt_oss(hf, **kwargs), forward_step or stock_forward_step, callbacks=[recorder])
    return recorder.steps


def Recorder(stall: tuple[int, Path] | None = None) -> Any:
    """A Bridge callback; its `steps` collect the losses and the gradient norm of each step. stall: see `train`."""
    import time

    from megatron.bridge.training.callbacks import Callback

    class StepRecorder(Callback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def on_train_step_end(self, context: Any) -> None:
            losses = {name: float(value) for name, value in (context.loss_dict or {}).items()}
            self.steps.append({**losses, "grad norm": float(context.grad_norm)})
            if stall and len(self.steps) == stall[0]:
                stall[1].touch()
                time.sleep(600)

    return StepRecorder()
