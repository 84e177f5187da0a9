# SPDX-License-Identifier: Apache-2.0
"""Distillation runs of the tiny GPT-OSS in the real Bridge loop; the functions run inside CPU ranks."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.bridge.corpora import VOCABULARY, build_cache, write_pair_corpus
from tests.dryrun.tiny import Recorder, tiny_gpt_oss, write_tiny_gpt_oss


def make_world(hf: Path, corpus: Path, cache: Path) -> None:
    """Write the student's folder, the corpus and a document cache of it."""
    from megatron_kd.cache import DocumentUnits

    write_tiny_gpt_oss(hf)
    build_cache(cache, DocumentUnits(write_pair_corpus(corpus)))


def distil_config(
    hf: str | Path,
    corpus: str | Path,
    index_cache: str | Path,
    *,
    kd: dict[str, Any] | None,
    seed: int = 1234,
    split: str = "100,0,0",
    **kwargs: Any,
) -> Any:
    """`tiny_gpt_oss` on a corpus on disk, with the given `kd` settings (None: Megatron's default loss)."""
    from megatron_kd.bridge.config import KDConfig, KDConfigContainer

    cfg = tiny_gpt_oss(hf, **kwargs)
    cfg.dataset.data_path = str(corpus)
    cfg.dataset.blend, cfg.dataset.mock = None, False
    cfg.dataset.split = split
    cfg.dataset.random_seed = seed
    cfg.dataset.path_to_cache = str(index_cache)
    return KDConfigContainer.wrap(cfg, None if kd is None else KDConfig(**kd))


def distil(
    *args: Any, kill_after: int | None = None, tokenizer: str | None = None, **kwargs: Any
) -> list[dict[str, float]]:
    """Train; losses by name (last stage) and the gradient norm of each step.

    Args:
        kill_after: SIGKILL this rank at the end of that iteration.
        tokenizer: Hugging Face tokenizer folder for the run.
    """
    from megatron_kd.bridge.train import train

    cfg = distil_config(*args, **kwargs)
    if tokenizer is not None:
        cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "HuggingFaceTokenizer", tokenizer
    recorder = Recorder()
    train(cfg, callbacks=[recorder, *([killer(kill_after)] if kill_after else [])])
    return recorder.steps


def distil_evaluated(hf: Path, corpus: Path, index_cache: Path, *, kd: dict[str, Any] | None, **kwargs: Any) -> dict:
    """Validation losses by name after two steps that change nothing (learning rate 0), on a fifth of the corpus."""
    from megatron.bridge.training.callbacks import Callback

    from megatron_kd.bridge.train import train

    found = {}

    class Evaluation(Callback):
        def on_eval_end(self, context: Any) -> None:
            found.update({name: float(value) for name, value in context.total_loss_dict.items()})

    evaluate = {"eval_interval": 2, "eval_iters": 3}
    cfg = distil_config(
        *(hf, corpus, index_cache),
        kd=kd,
        steps=2,
        optimizer__lr=0.0,
        optimizer__min_lr=0.0,
        **{f"validation__{name}": value for name, value in evaluate.items()},
        split="80,20,0",
        **kwargs,
    )
    train(cfg, callbacks=[Evaluation()])
    return found


def distil_several_tokens(*args: Any, **kwargs: Any) -> tuple[list[dict[str, float]], list[float]]:
    """Train a model with a head for the token after the next: what `distil` returns, and that head's loss each step.

    Its weights are random: Bridge has none to load for it.
    """
    from megatron.bridge.training.callbacks import Callback
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_kd.bridge.train import train

    later: list[float] = []

    class LaterTokens(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if "loss_values" in MTPLossLoggingHelper.tracker:  # on the last stage
                later.append(float(MTPLossLoggingHelper.tracker["loss_values"].sum()))

    recorder = Recorder()
    train(
        distil_config(*args, model__mtp_num_layers=1, load_weights=False, **kwargs),
        callbacks=[recorder, LaterTokens()],
    )
    return recorder.steps, later


def distil_damaged(
    hf: Path, corpus: Path, index_cache: Path, caches: list[str], **kwargs: Any
) -> list[dict[str, float]]:
    """As `distil`, each rank with the cache of its number: a disk that is bad on one node alone."""
    cache = caches[int(os.environ["RANK"])]
    kd = {"cache": cache, "ce_weight": 0.5, "bad_blocks": "mask", "bad_blocks_limit": 0.5}
    return distil(hf, corpus, index_cache, kd=kd, **kwargs)


def killer(iteration: int) -> Any:
    """A callback that kills its own process without a chance to clean up."""
    from megatron.bridge.training.callbacks import Callback

    class Killer(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if context.state.train_state.step >= iteration:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer()


def make_bad_caches(corpus: Path, root: Path) -> None:
    """Caches that do not belong to a run on ``corpus``, each wrong in one way, and a tokenizer for it."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from megatron_kd.cache import Corpus, DocumentUnits

    class Shifted(DocumentUnits):
        """Units whose tokens come one position late or early, under the identity of the right ones."""

        def __init__(self, corpus: Corpus, by: int):
            super().__init__(corpus)
            self.by = by

        def tokens(self, unit: int) -> np.ndarray:
            whole = np.roll(self.corpus.tokens(0, self.corpus.n_tokens), self.by)
            return whole[self.corpus.starts[unit] : self.corpus.starts[unit + 1]]

    class OtherSamples(DocumentUnits):
        """Units that say they are the samples of some other run."""

        kind = "sample"

        def identity(self) -> dict[str, Any]:
            return {"corpus": {}, "units": {"samples_digest": "of another run"}}

    right = Corpus(corpus)
    build_cache(root / "other-corpus", DocumentUnits(write_pair_corpus(root / "other", seed=9)))
    build_cache(
        root / "other-tokenizer", DocumentUnits(right), tokenizer={"digest": "another digest", "vocab_size": 511}
    )
    build_cache(root / "other-vocabulary", DocumentUnits(right), vocab_real=600, vocab_padded=600)
    build_cache(root / "shifted-late", Shifted(right, 1))
    build_cache(root / "shifted-early", Shifted(right, -1))
    build_cache(root / "samples", OtherSamples(right))
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w2"
    )
    tokenizer.save_pretrained(root / "tokenizer")


def next_loss_of_export(hf: Path, corpus: Path, index_cache: Path, run_dir: Path, out: Path) -> float:
    """Export the checkpoint of iteration 2; mean cross entropy of the exported model on the batch of iteration 3."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_kd.bridge.dataset import build_datasets
    from megatron_kd.bridge.export import export_hf

    export_hf(run_dir, hf, out)
    cfg = distil_config(hf, corpus, index_cache, kd=None, steps=3)
    cfg.validate()
    dataset = build_datasets(cfg)[0]
    items = [dataset[i] for i in range(8, 12)]
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.stack([item["tokens"] for item in items])).logits[..., :VOCABULARY]
    labels = torch.stack([item["labels"] for item in items])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))
