# SPDX-License-Identifier: Apache-2.0
"""Which rows of a teacher cache belong to which sample of Megatron's dataset.

Flows in: the datasets that Megatron-Bridge builds from a stock ``GPTDatasetConfig``. Flows out: the same datasets,
each item carrying one more entry, ``kd_key`` = [split, index], and for every key the *spans* of the cache's token axis
that hold its teacher rows. Cost: 16 bytes a sample in the batch and a few microseconds of numpy a sample; teacher rows
themselves never enter the batch, because Bridge's rerun machinery keeps whole batches.

Legend: S tokens of a sample, m spans of one sample.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from megatron.bridge.data import utils as bridge_data
from megatron.bridge.data.builders import DirectHFSFTDatasetConfig, GPTSFTDatasetConfig
from megatron.bridge.data.loaders import get_train_valid_test_num_samples
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from torch.utils.data import Dataset

from megatron_kd.cache import Corpus
from megatron_kd.errors import UserError

logger = logging.getLogger(__name__)

KEY = "kd_key"
SPLITS = ("train", "valid", "test")
ABSENT = -1
"""Axis coordinate of a position that has no teacher row (padding at the end of a short sample)."""


class TeacherDataError(UserError):
    """The training data and the teacher cache do not fit together."""


class KeyedDataset(Dataset):
    """A Megatron dataset whose items also carry ``kd_key``: int64 [2], the split's number and the item's index."""

    def __init__(self, dataset: Dataset, split: int):
        self.dataset = dataset
        self.split = split
        if hasattr(dataset, "collate_fn"):
            self.collate_fn = dataset.collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], KEY: torch.tensor([self.split, index], dtype=torch.int64)}


@contextlib.contextmanager
def keyed_datasets(on_built: Callable[[list[Dataset | None]], None]) -> Iterator[None]:
    """While active, Bridge builds its GPT datasets as it always does and hands them on as `KeyedDataset`.

    Fine-tuning datasets stay as they are: what their sequences are is found by the tokens (sft.py).
    ``cfg.dataset`` stays the stock dataclass, so every check Bridge makes on it still runs and the saved configuration
    holds nothing of ours. Bridge offers no other seam: a subclass of ``GPTDatasetConfig`` is built by the stock
    builder, and a ``DatasetProvider`` loses the checks. ``on_built`` receives the three datasets (None where a split
    is empty).
    """
    registry = bridge_data._REGISTRY
    stock = dict(registry)

    def announced(provider: Callable) -> Callable:
        @functools.wraps(provider)  # Bridge looks at the signature to see what a provider wants
        def build(*args: Any, **kwargs: Any) -> tuple[Dataset | None, ...]:
            built = tuple(provider(*args, **kwargs))
            on_built(list(built))
            return built

        return build

    def keyed(provider: Callable) -> Callable:
        def build(train_val_test_num_samples: list[int], dataset_config: Any) -> tuple[KeyedDataset | None, ...]:
            built = provider(train_val_test_num_samples, dataset_config)
            datasets = [None if ds is None else KeyedDataset(ds, split) for split, ds in enumerate(built)]
            on_built(datasets)
            return tuple(datasets)

        return build

    gpt = bridge_data.pretrain_train_valid_test_datasets_provider
    registry.update({config: keyed(gpt) for config, provider in stock.items() if provider is gpt})
    registry.update({config: announced(stock[config]) for config in (GPTSFTDatasetConfig, DirectHFSFTDatasetConfig)})
    try:
        yield
    finally:
        registry.update(stock)


class DocumentSpans:
    """Spans of a `GPTDataset` on the axis of its corpus: sample -> the pieces of documents it is made of."""

    def __init__(self, dataset: GPTDataset, corpus: Corpus):
        self.dataset = dataset
        self.corpus = corpus
        self.pad_token = dataset._pad_token_id

    def __call__(self, index: int) -> np.ndarray:
        """Spans of one sample.

        Args:
            index: Index of the sample in the dataset, as the sampler gives it.

        Returns:
            int64 [m, 2], (start on the axis, length); the lengths add up to S, or to less for a padded last sample.
        """
        ds = self.dataset
        if ds.shuffle_index is None:  # index files are mapped at the first access
            ds[index]
        sample = int(ds.shuffle_index[index])
        first, first_offset = (int(x) for x in ds.sample_index[sample])
        last, last_offset = (int(x) for x in ds.sample_index[sample + 1])
        documents = np.asarray(ds.document_index[first : last + 1])
        begin = self.corpus.starts[documents].astype(np.int64)
        end = self.corpus.starts[documents + 1].astype(np.int64)
        end[-1] = begin[-1] + last_offset + ds.config.add_extra_token_to_sequence
        begin[0] += first_offset
        # The extra token is only a label. It is the last, so cutting at S removes it, and nothing of a short sample.
        length = end - begin
        before = np.cumsum(length) - length
        length = np.clip(ds.config.sequence_length - before, 0, length)
        return np.stack([begin, length], axis=1)[length > 0]

    def cut(self, spans: np.ndarray) -> int:
        """At how many first positions of a sample the student sees less of the document than the teacher saw.

        Those of a document that the sample's start cuts, all of it.
        """
        if not len(spans):
            return 0
        start, length = spans[0].tolist()
        return 0 if self.corpus.starts[np.searchsorted(self.corpus.starts, start)] == start else length


class SampleSpans:
    """Spans for a cache whose unit is the sample itself: sample i is rows [i·S, (i+1)·S)."""

    def __init__(self, sequence_length: int, pad_token: int):
        self.sequence_length = sequence_length
        self.pad_token = pad_token

    def __call__(self, index: int) -> np.ndarray:
        """Spans of one sample, int64 [1, 2]."""
        return np.array([[index * self.sequence_length, self.sequence_length]], dtype=np.int64)

    def cut(self, spans: np.ndarray) -> int:
        """0: the teacher saw what the student sees."""
        return 0


class SampleUnits:
    """The samples of a built dataset as the units of a cache (kind ``sample``): what online distillation would see.

    Bound to the seed, the sequence length and everything else that decides which tokens meet in a sample; `identity`
    holds digests of the index arrays, so a cache of other samples is refused.
    """

    kind = "sample"

    def __init__(self, dataset: GPTDataset | BlendedDataset):
        self.dataset = dataset
        self.lengths = np.full(len(dataset), dataset.config.sequence_length, dtype=np.int64)

    def tokens(self, unit: int) -> np.ndarray:
        """Input tokens of sample ``unit``, [S]."""
        return self.dataset[unit]["tokens"].numpy()

    def identity(self) -> dict[str, Any]:
        """What must be equal for two datasets to have the same samples."""
        return sample_identity(self.dataset)


def sample_identity(dataset: GPTDataset | BlendedDataset) -> dict[str, Any]:
    """Identity of the samples of ``dataset`` by content of its index arrays and corpora."""
    digest = xxhash.xxh3_128()
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    if isinstance(dataset, BlendedDataset):
        for array in (dataset.dataset_index, dataset.dataset_sample_index):
            digest.update(np.ascontiguousarray(array))
    for part in parts:
        for array in (part.document_index, part.sample_index, part.shuffle_index):
            digest.update(np.ascontiguousarray(array))
        digest.update(Corpus(part.dataset_path).index_digest().encode())
    config = dataset.config
    return {
        "corpus": {},
        "units": {
            "samples_digest": digest.hexdigest(),
            "sequence_length": config.sequence_length,
            "add_extra_token": bool(config.add_extra_token_to_sequence),
        },
    }


def corpus_parts(dataset: Dataset) -> list[GPTDataset]:
    """The single-corpus datasets that ``dataset`` blends, in the order of its ``dataset_id``.

    Raises:
        TeacherDataError: If the data has no corpus on disk (mock data).
    """
    parts = list(dataset.datasets) if isinstance(dataset, BlendedDataset) else [dataset]
    for part in parts:
        if isinstance(part, MockGPTDataset) or not isinstance(part, GPTDataset):
            raise TeacherDataError(
                f"dataset: expected a GPT dataset on an indexed corpus, found {type(part).__name__}. A teacher cache "
                "belongs to a corpus on disk: set dataset.data_path to its prefix, or kd.cache=synthetic for a dry "
                "run."
            )
    return parts


def locate(dataset: Dataset, index: int) -> tuple[int, int]:
    """(part, index in that part) of item ``index`` of a blended or plain dataset."""
    if not isinstance(dataset, BlendedDataset):
        return 0, index
    if dataset.dataset_index is None:  # index files are mapped at the first access
        dataset[index]
    return int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])


def coordinates(spans: np.ndarray, length: int) -> np.ndarray:
    """Axis coordinate of each position of a sample: int64 [length], `ABSENT` behind the spans' end."""
    starts, lengths = spans[:, 0], spans[:, 1]
    before = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    result = np.full(length, ABSENT, dtype=np.int64)
    result[:total] = np.arange(total) + np.repeat(starts - before, lengths)
    return result


def runs(coords: np.ndarray) -> np.ndarray:
    """Consecutive coordinates joined: int64 [n] -> spans int64 [m, 2]. Undoes `coordinates` (without `ABSENT`)."""
    if len(coords) == 0:
        return np.zeros((0, 2), dtype=np.int64)
    first = np.flatnonzero(np.diff(coords, prepend=coords[0] - 2) != 1)
    return np.stack([coords[first], np.diff(first, append=len(coords))], axis=1)


def build_datasets(cfg: Any) -> list[Dataset | None]:
    """The train, validation and test datasets of a run, as Bridge builds them in it, without a model or ranks.

    Args:
        cfg: A finalised Bridge configuration (``cfg.validate()`` has run).
    """
    cfg.dataset.tokenizer = build_tokenizer(cfg.tokenizer)
    provider = bridge_data.get_dataset_provider(cfg.dataset)
    return list(provider(get_train_valid_test_num_samples(cfg), cfg.dataset))
