# SPDX-License-Identifier: Apache-2.0
"""From the keys of a micro-batch to its teacher rows, read ahead in threads.

Flows in: ``kd_key`` [B, 2] with the host batch it came with. Flows out: `TeacherBatch`, the rows of exactly the
positions that this context-parallel rank computes. Every row read is compared with the batch's own tokens first (echo
check). Cost: 8·K + 8 bytes a position held for ``read_ahead`` micro-batches, and the read itself in another thread.

Legend: B samples, S positions of a sample, n positions of this context-parallel rank, K teacher entries.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from megatron_kd.bridge.bad_blocks import BadBlocks
from megatron_kd.bridge.dataset import (
    ABSENT,
    KEY,
    SPLITS,
    DocumentSpans,
    KeyedDataset,
    SampleSpans,
    TeacherDataError,
    coordinates,
    corpus_parts,
    locate,
    runs,
    sample_identity,
)
from megatron_kd.bridge.sft import BOUNDARIES, ExampleRows, Place
from megatron_kd.cache import CacheReader, Corpus, CorruptBlock, Rows, check_echo
from megatron_kd.loss import TopK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherBatch:
    """Teacher rows of one micro-batch on the host, in the order of Megatron's hidden states.

    Attributes:
        teacher: ids int32 [n, B, K], logprobs float32 [n, B, K], log_tail float32 [n, B], at the loss's temperature.
        token_weight: float32 [n, B], the batch's loss mask; 0 where ``masked`` or ``absent``, and with ``kd.context:
            exact`` where ``cut``.
        masked: bool [n, B], on the host: positions with loss whose rows could not be read. None if that ends the run.
        cut: bool [n, B], on the host: positions with loss at which the student sees less than the teacher saw. None
            if there is no teacher.
        absent: bool [n, B], on the host: positions with loss for which the cache stores no row. None likewise.
        distinct: Whether no row repeats an id, as a cache and a teacher's top K see to.
    """

    teacher: TopK
    token_weight: torch.Tensor
    masked: torch.Tensor | None = None
    cut: torch.Tensor | None = None
    absent: torch.Tensor | None = None
    distinct: bool = False

    def to(self, device: torch.device) -> "TeacherBatch":
        """A copy on ``device``, without waiting for it; what is on the host stays there."""
        move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
        return replace(self, teacher=TopK(*map(move, self.teacher)), token_weight=move(self.token_weight))

    def without(self, masked: torch.Tensor) -> "TeacherBatch":
        """The same with the positions ``masked`` [n, B] left out of the loss."""
        return replace(self, token_weight=self.token_weight.masked_fill(masked, 0.0), masked=masked)


class CacheFeed:
    """Teacher rows from caches on disk.

    Args:
        readers: One open cache per corpus of the blend, in any order; they are matched by the corpus's index digest.
        top_k: Entries a position to use, None for all stored.
        temperature: Temperature of the loss.
        tokenizer: Identity of the run's tokenizer, compared with each cache's; None where the run has none.
        read_ahead: Micro-batches read before they are asked for.
        bad_blocks: ``raise``, or ``mask`` to go on without rows that cannot be read.
        bad_blocks_limit: With ``mask``, the largest fraction of the caches' rows that may be bad.
        context: ``any``, or ``exact`` to leave out positions at which the student sees less than the teacher saw.

    Raises:
        CacheError: If a cache cannot serve ``top_k`` or ``temperature``.
    """

    def __init__(
        self,
        readers: list[CacheReader],
        *,
        top_k: int | None,
        temperature: float,
        tokenizer: dict[str, Any] | None,
        read_ahead: int,
        bad_blocks: Literal["raise", "mask"] = "raise",
        bad_blocks_limit: float = 0.0,
        context: Literal["any", "exact"] = "any",
    ):
        self.readers = readers
        self.bad_blocks = BadBlocks(bad_blocks, bad_blocks_limit, readers)
        self.context = context
        self.top_k = top_k
        self.temperature = temperature
        self.tokenizer = tokenizer
        self.read_ahead = read_ahead
        self.vocab_size = readers[0].manifest.vocab_real
        self.wait_seconds = 0.0
        """Time the training loop spent waiting for teacher rows, since the start."""
        self._resolvers: dict[int, tuple[Dataset, list[tuple[CacheReader, Callable[[int], np.ndarray]]]]] = {}
        self._examples: ExampleRows | None = None
        self.partition: Callable[[dict[str, Any]], np.ndarray] = every_position
        """Which positions of a batch's rows this context-parallel rank computes; set by the step."""
        self._pending: dict[bytes, Future] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kd-read")
        for reader in readers:
            reader.check_serves(top_k=top_k, temperature=temperature)
            if reader.manifest.vocab_real != self.vocab_size:
                raise TeacherDataError(
                    f"kd.cache: the caches of one run must share a vocabulary, found {self.vocab_size} in "
                    f"{readers[0].path} and {reader.manifest.vocab_real} in {reader.path}."
                )

    def bind(self, datasets: list[Dataset | None]) -> None:
        """Match each split's corpora with the caches, checking identities.

        Raises:
            TeacherDataError: If no cache belongs to a corpus, or to the examples, of the training split.
            IdentityMismatch: If a cache is of other samples or of another tokenizer.
        """
        for reader in self.readers:
            if self.tokenizer is not None:
                reader.expect(tokenizer=self.tokenizer)
        if not all(isinstance(dataset, KeyedDataset) for dataset in datasets if dataset is not None):
            self._examples = ExampleRows(self.readers)
            self._examples.check(datasets)
            return
        for keyed in datasets:
            if keyed is not None:
                parts = [self._resolver(keyed.dataset, part, keyed.split) for part in corpus_parts(keyed.dataset)]
                self._resolvers[keyed.split] = (keyed.dataset, parts)

    def _resolver(self, dataset: Dataset, part: Any, split: int) -> tuple[CacheReader, Callable[[int], np.ndarray]]:
        reader = self.readers[0]
        if reader.manifest.units["kind"] == "sample":
            if split == 0:
                reader.expect(**sample_identity(dataset))
            return reader, SampleSpans(part.config.sequence_length, part._pad_token_id)
        corpus = Corpus(part.dataset_path)
        digest = corpus.index_digest()
        for reader in self.readers:
            if reader.manifest.corpus.get("index_digest") == digest:
                return reader, DocumentSpans(part, corpus)
        held = ", ".join(f"{r.path} (of {r.manifest.corpus.get('index_digest')})" for r in self.readers)
        raise TeacherDataError(
            f"dataset {SPLITS[split]}: no cache in kd.cache belongs to corpus {part.dataset_path} (index digest "
            f"{digest}); found {held}. Build it with: megatron-kd cache build --corpus {part.dataset_path} ..."
        )

    def prefetch(self, batch: dict[str, Any]) -> None:
        """Start reading the rows of a host batch, if that has not begun."""
        if key_bytes(batch) not in self._pending:
            self._pending[key_bytes(batch)] = self._pool.submit(self.read, batch)

    def take(self, batch: dict[str, Any]) -> TeacherBatch:
        """Rows of a host batch: from the read-ahead if it is there (a rerun asks twice), else read now."""
        future = self._pending.pop(key_bytes(batch), None)
        start = time.perf_counter()
        rows = self.read(batch) if future is None else future.result()
        self.wait_seconds += time.perf_counter() - start
        return rows

    def read(self, batch: dict[str, Any]) -> TeacherBatch:
        """Read, echo-check and lay out the rows of one host batch.

        Args:
            batch: The collated items of the dataset: tokens and loss_mask [B, S]; kd_key [B, 2] of pretraining data.

        Raises:
            CacheError: If a block is damaged, a shard is missing, or the stored tokens are not the batch's.
            TeacherDataError: If a position with loss has no teacher row.
        """
        tokens, masks = batch["tokens"].numpy(), batch["loss_mask"].numpy()
        places = self._keyed(batch) if KEY in batch else self._examples.places(batch)
        positions = self.partition(batch)
        rows = [self._read_row(*row, positions) for row in zip(places, tokens, masks, strict=True)]
        ids, logprobs, log_tail, weight, lost, cut, absent = (
            torch.from_numpy(np.stack(x, axis=1)) for x in zip(*rows, strict=True)
        )
        cut &= weight != 0
        if self.context == "exact":
            weight = weight.masked_fill(cut, 0.0)
        rows = TeacherBatch(TopK(ids, logprobs, log_tail), weight, cut=cut, absent=absent, distinct=True)
        return rows if self.bad_blocks.policy == "raise" else rows.without(lost & (weight != 0))

    def _keyed(self, batch: dict[str, Any]) -> Iterator[Place]:
        """Where the rows of each sample of pretraining data lie."""
        length = batch["tokens"].shape[1]
        for split, index in batch[KEY].tolist():
            dataset, parts = self._resolvers[split]
            part, inner = locate(dataset, index)
            reader, spans = parts[part]
            found = spans(inner)
            where = f"{SPLITS[split]} sample {index} of {reader.path}"
            yield Place(reader, coordinates(found, length), where, spans.pad_token, spans.cut(found))

    def _read_row(
        self, place: Place, tokens: np.ndarray, mask: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        coords, where = place.coords[positions], place.where
        present = coords != ABSENT
        weight = mask[positions].astype(np.float32)
        if np.any(weight[~present] != 0):
            raise TeacherDataError(
                f"{where}: {int((weight[~present] != 0).sum())} positions with loss have no teacher row."
            )
        rows, lost = self._read_rows(place.reader, coords, present)
        present &= ~lost
        absent = np.zeros(len(positions), dtype=bool)
        absent[present] = ~np.isfinite(rows.logprobs[:, 0])  # a row without even one entry says: no teacher here
        absent &= weight != 0
        if place.complete and absent.any():
            raise TeacherDataError(
                f"{where}: {int(absent.sum())} positions carry loss here but did not when the cache was built, so it "
                "has no rows for them. Build it with this run's loss mask (dataset.preprocessing.loss_mode)."
            )
        weight[absent] = 0
        echo = rows.tokens.astype(np.int64)
        echo[echo == place.pad_token] = 0  # as GPTDataset does with its padding token
        check_echo(echo, tokens[positions][present], where=where)
        return (
            spread(rows.ids, present, ABSENT),
            spread(rows.logprobs, present, -np.inf),
            spread(rows.log_tail, present, 0.0),
            weight,
            lost,
            positions < place.cut,
            absent,
        )

    def _read_rows(self, reader: CacheReader, coords: np.ndarray, present: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Rows of the present coordinates without those in bad blocks, and which these are: bool [n]."""
        lost = np.zeros(len(coords), dtype=bool)
        while True:
            try:
                spans = runs(coords[present & ~lost])
                return reader.read(spans, top_k=self.top_k, temperature=self.temperature), lost
            except CorruptBlock as error:
                first, end = self.bad_blocks.note(reader, error)
                hit = present & ~lost & (coords >= first) & (coords < end)
                if not hit.any():  # the block is none of those asked for, so asking again would not end
                    raise
                lost |= hit


class SyntheticFeed:
    """Made-up teacher rows for a dry run without a cache: K random ids a position, the same for the same sample."""

    read_ahead = 0
    wait_seconds = 0.0

    def __init__(self, *, top_k: int | None, vocab_size: int):
        self.top_k = min(top_k or 100, vocab_size - 1)
        self.vocab_size = vocab_size
        self.partition: Callable[[dict[str, Any]], np.ndarray] = every_position
        logger.warning("kd.cache=synthetic: the teacher's rows are made up; the KD loss of this run means nothing.")

    def bind(self, datasets: list[Dataset | None]) -> None:
        """Nothing to match."""

    def take(self, batch: dict[str, Any]) -> TeacherBatch:
        """As `CacheFeed.take`."""
        seeds = batch[KEY][:, 1] if KEY in batch else batch["tokens"].sum(1)
        positions = self.partition(batch)
        samples = [
            self._sample(seed, mask, positions) for seed, mask in zip(seeds.tolist(), batch["loss_mask"], strict=True)
        ]
        ids, logprobs, log_tail, weight = (torch.stack(x, dim=1) for x in zip(*samples, strict=True))
        return TeacherBatch(TopK(ids, logprobs, log_tail), weight)

    def _sample(self, seed: int, mask: torch.Tensor, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        length = len(mask)
        start = torch.randint(self.vocab_size, (length, 1), generator=generator)
        ids = (start + torch.arange(self.top_k)) % self.vocab_size
        buckets = torch.randn(length, self.top_k + 1, generator=generator).mul(2).log_softmax(-1)
        rows = (ids.int(), buckets[:, :-1], buckets[:, -1], mask.float())
        return tuple(x[torch.from_numpy(positions)] for x in rows)


TeacherFeed = CacheFeed | SyntheticFeed


class LookAhead:
    """Host batches whose teacher rows are read ``feed.read_ahead`` batches before they are asked for."""

    def __init__(self, iterable: Iterator[dict[str, Any]], feed: CacheFeed):
        self._iterator = iter(iterable)
        self._feed = feed
        self._queue: deque[dict[str, Any]] = deque()

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> dict[str, Any]:
        while len(self._queue) <= self._feed.read_ahead:
            try:
                batch = next(self._iterator)
            except StopIteration:
                break
            self._feed.prefetch(batch)
            self._queue.append(batch)
        if not self._queue:
            raise StopIteration
        return self._queue.popleft()


def key_bytes(batch: dict[str, Any]) -> bytes:
    """What tells a batch from others: its keys, or its tokens and which of them carry loss."""
    if KEY in batch:
        return batch[KEY].numpy().tobytes()
    digest = xxhash.xxh3_128()
    for name in ("tokens", "loss_mask", *BOUNDARIES):
        if batch.get(name) is not None:
            digest.update(batch[name].contiguous().numpy())
    return digest.digest()


def every_position(batch: dict[str, Any]) -> np.ndarray:
    """All positions of a batch's rows."""
    return np.arange(batch["tokens"].shape[1])


def spread(rows: np.ndarray, present: np.ndarray, fill: float) -> np.ndarray:
    """Rows of the present positions put in place, ``fill`` elsewhere: [p, ...] -> [n, ...]."""
    if present.all():
        return rows
    result = np.full((len(present), *rows.shape[1:]), fill, dtype=rows.dtype)
    result[present] = rows
    return result
