# SPDX-License-Identifier: Apache-2.0
"""One training run in the real Megatron-Bridge loop, on this process's rank.

With ``cfg.kd`` the student learns from the teacher's cache, or from the teacher itself; without it, it is Megatron's
default loss and nothing of ours takes part. Everything that can be refused is refused before the model is built.
"""

import logging
import signal
from collections.abc import Sequence
from typing import Any

from megatron.bridge.training import gpt_step
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.pretrain import pretrain
from megatron.core.dist_checkpointing.strategies import filesystem_async
from transformers import AutoTokenizer

from megatron_kd.bridge.callbacks import FinalValues, RunWatch, VocabularyCheck
from megatron_kd.bridge.config import KDConfigContainer, UserValues, refuse_unsupported
from megatron_kd.bridge.dataset import keyed_datasets
from megatron_kd.bridge.online import OnlineFeed, OnlineForwardStep, Prepare
from megatron_kd.bridge.preflight import check_splits
from megatron_kd.bridge.settings import SYNTHETIC
from megatron_kd.bridge.step import KDForwardStep
from megatron_kd.bridge.teacher_feed import CacheFeed, SyntheticFeed, TeacherFeed
from megatron_kd.bridge.watch import LossMeter
from megatron_kd.cache import CacheReader, tokenizer_identity
from megatron_kd.cache.sets import combine

logger = logging.getLogger(__name__)


def train(
    cfg: KDConfigContainer,
    user_values: UserValues | None = None,
    callbacks: Sequence[Callback] = (),
    prepare_teacher: Prepare | None = None,
) -> None:
    """Train with ``cfg`` from its first iteration, or from where ``cfg.checkpoint.load`` left off.

    Args:
        cfg: A Bridge configuration; ``cfg.kd`` None trains with Megatron's default loss.
        user_values: What the user set, to make sure that it is what the run uses.
        callbacks: Further Bridge callbacks.
        prepare_teacher: What makes the provider of ``cfg.kd.teacher`` fit for CPU ranks, as the student's is.

    Raises:
        UserError: If the configuration asks for what is not supported, or Bridge changed a value the user set.
        CacheError: If the cache is missing, damaged, or does not fit the run.
    """
    if cfg.kd is not None:
        cfg.kd.finalize()
    refuse_unsupported(cfg)
    check_splits(cfg)
    callbacks = [*([FinalValues(user_values)] if user_values else []), *callbacks]
    if cfg.kd is None:
        pretrain(cfg, gpt_step.forward_step, callbacks=callbacks)
        return
    feed = open_feed(cfg, prepare_teacher)
    step, watching = distilling(cfg, feed, LossMeter())
    with keyed_datasets(feed.bind):
        pretrain(cfg, step, callbacks=[*watching, *callbacks])


def distilling(
    cfg: KDConfigContainer, feed: TeacherFeed | OnlineFeed, meter: LossMeter
) -> tuple[KDForwardStep, list[Callback]]:
    """The forward step of a run with `cfg.kd`, and what watches it."""
    step = (OnlineForwardStep if cfg.kd.teacher else KDForwardStep)(cfg.kd, feed)
    step.meter = meter
    return step, [VocabularyCheck(feed.vocab_size), RunWatch(cfg.kd, feed, meter)]


def leave_on_signal(cfg: KDConfigContainer, user_values: UserValues) -> None:
    """On SIGTERM the run writes a checkpoint after the step it is in and leaves; data workers leave with it.

    Slurm sends it before a time limit, a preemption and a cancellation. What the user set stays. Costs a gather of one
    integer a rank each step.
    """
    asked = {value.key for value in user_values}
    for name in ("exit_signal_handler", "exit_signal_handler_for_dataloader"):
        if f"train.{name}" not in asked:
            setattr(cfg.train, name, True)
    _spare_checkpoint_helper()


def _spare_checkpoint_helper() -> None:
    """Slurm's signal goes to a task's whole process group. Megatron's checkpoint writer keeps its results in a helper
    process that would die of it in the middle of the save; started while SIGTERM is ignored, it ignores it for good.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        filesystem_async.get_write_results_queue()
    finally:
        signal.signal(signal.SIGTERM, before)


def open_feed(cfg: KDConfigContainer, prepare_teacher: Prepare | None = None) -> TeacherFeed | OnlineFeed:
    """Open the caches that ``cfg.kd.cache`` names, or look at the teacher that ``cfg.kd.teacher`` does."""
    kd = cfg.kd
    if kd.teacher:
        return OnlineFeed(cfg, tokenizer=run_tokenizer(cfg), prepare=prepare_teacher)
    if kd.cache == SYNTHETIC:
        return SyntheticFeed(top_k=kd.top_k, vocab_size=cfg.model.vocab_size)
    paths = [kd.cache] if isinstance(kd.cache, str) else kd.cache
    return CacheFeed(
        combine([CacheReader(path, check_blocks=kd.check_blocks) for path in paths], kd.cache_weights),
        top_k=kd.top_k,
        temperature=kd.temperature,
        tokenizer=run_tokenizer(cfg),
        read_ahead=kd.read_ahead,
        bad_blocks=kd.bad_blocks,
        bad_blocks_limit=kd.bad_blocks_limit,
        context=kd.context,
    )


def run_tokenizer(cfg: KDConfigContainer) -> dict[str, Any] | None:
    """Identity of the run's tokenizer; None for one without content (``NullTokenizer``).

    The chat template is left out: in pretraining data it plays no part.
    """
    if cfg.tokenizer.tokenizer_type != "HuggingFaceTokenizer":
        return None
    identity = tokenizer_identity(AutoTokenizer.from_pretrained(cfg.tokenizer.tokenizer_model))
    return {name: identity[name] for name in ("digest", "vocab_size")}
