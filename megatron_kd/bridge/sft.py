# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning data: its sequences as the examples of a cache, and the rows of the sequences of a batch.

In: the datasets that Megatron-Bridge builds of a run's configuration (prompts and answers, chats; from JSON lines,
from a Hugging Face data set, or packed offline), and its batches. Out: each sequence as the model is fed it, cut out
of Bridge's own collated rows, so there is no second tokenisation, chat template or truncation that could disagree.

A sequence of a batch finds its example by its tokens (cache/examples.py). So nothing has to travel with a batch or be
noted when Bridge packs: shuffles, epochs, repeated and padded samples, packing in a batch or offline, and a run
resumed at another layout need nothing of ours. Cost: a digest and a search in a table a sequence, microseconds.

Legend: B rows of a batch, S positions of a row.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from megatron.bridge.data import utils as bridge_data
from megatron.bridge.data.builders import DirectHFSFTDatasetConfig, GPTSFTDatasetConfig
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from torch.utils.data import Dataset
from tqdm import tqdm

from megatron_kd.bridge.dataset import ABSENT, TeacherDataError
from megatron_kd.cache import CacheReader
from megatron_kd.cache.examples import ExampleTable, ExampleUnits, last, read_table
from megatron_kd.cache.sets import JoinedReader, MixedReader

logger = logging.getLogger(__name__)

SFT_DATASETS = (GPTSFTDatasetConfig, DirectHFSFTDatasetConfig)
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_q_padded")
"""What says in a batch where packed sequences lie: cumulated lengths of the tokens alone, and with padding."""
_CHECKED = 32
"""Items of a split that are looked up before a run starts."""


class Place(NamedTuple):
    """Where the teacher rows of one row of a batch lie."""

    reader: CacheReader
    coords: np.ndarray
    """int64 [S]: on the reader's axis, or `ABSENT`."""
    where: str
    """The row, for messages."""
    pad_token: int = -1
    """Token that the batch shows as 0."""
    cut: int = 0
    """At how many first positions the student sees less than the teacher saw."""
    complete: bool = False
    """Whether a position with loss whose row is not stored is an error."""


def bounds(batch: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Where the sequences of each row lie: (start, end); one a row where nothing is packed."""
    rows, length = batch["tokens"].shape
    marks = batch.get("cu_seqlens_q_padded")
    marks = batch.get("cu_seqlens_q") if marks is None else marks
    if marks is None:
        return [[(0, length)]] * rows
    marks = marks.reshape(rows, -1).tolist()
    return [list(zip(row, row[1:], strict=False)) for row in marks]


def sequences(batch: dict[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and loss mask of each sequence of a batch, [n] and bool [n]."""
    for row, tokens, mask in zip(bounds(batch), batch["tokens"].numpy(), batch["loss_mask"].numpy(), strict=True):
        for start, end in row:
            yield tokens[start:end], mask[start:end] != 0


class ExampleRows:
    """Rows of a batch of fine-tuning data, from a cache of examples.

    Args:
        readers: The run's caches, of which there must be one, or several teachers' of the same examples, mixed.

    Raises:
        TeacherDataError: If that is not so.
    """

    def __init__(self, readers: list[CacheReader | MixedReader | JoinedReader]):
        reader = readers[0]
        source = reader.readers[0] if isinstance(reader, MixedReader) else reader
        if len(readers) > 1 or isinstance(source, JoinedReader) or source.manifest.units["kind"] != "example":
            found = ", ".join(f"{r.path} (of kind {r.manifest.units['kind']})" for r in readers)
            raise TeacherDataError(
                f"kd.cache: fine-tuning data needs one cache, of kind example, found {found}. {_HOW_TO_BUILD}"
            )
        self._reader = reader
        self._table = ExampleTable(
            read_table(source.store, source.manifest),
            source.n_rows,
            lambda start, length: source.read(np.array([[start, length]])).tokens,
        )

    def places(self, batch: dict[str, Any]) -> list[Place]:
        """Where the rows of each row of a batch lie; sequences without loss need none.

        Raises:
            TeacherDataError: If a sequence is none of the cache's.
        """
        tokens, masks = batch["tokens"].numpy(), batch["loss_mask"].numpy()
        places = []
        for number, row in enumerate(bounds(batch)):
            where = f"row {number} of a batch, in {self._reader.path}"
            coords = np.full(tokens.shape[1], ABSENT, np.int64)
            for start, end in row:
                mask = masks[number, start:end] != 0
                if length := last(mask):
                    found = self._find(tokens[number, start : start + length], int(np.argmax(mask)), where)
                    coords[start : start + length] = np.arange(found, found + length)
            places.append(Place(self._reader, coords, where, complete=True))
        return places

    def _find(self, tokens: np.ndarray, first: int, where: str) -> int:
        found = self._table.find(tokens, first)
        if found is None:
            raise TeacherDataError(
                f"{where}: a sequence of {len(tokens)} tokens up to its last with loss (they begin "
                f"{tokens[:8].tolist()}) is none of the cache's examples. The cache was built with other data, another"
                " tokenizer, chat template, sequence length, packing or loss mask, or with --limit. " + _HOW_TO_BUILD
            )
        return found

    def check(self, datasets: list[Dataset | None]) -> None:
        """Look up some items of each split, so that a cache of other examples is refused before a run starts.

        Raises:
            TeacherDataError: See `places`.
        """
        for dataset in datasets:
            if dataset is None or not len(dataset):
                continue
            items = distinct_items(dataset)
            for index in np.unique(np.linspace(0, items - 1, min(items, _CHECKED)).astype(int)).tolist():
                self.places(dataset.collate_fn([dataset[index]]))
            if hasattr(dataset, "close"):  # files opened here are not for the data workers
                dataset.close()


_HOW_TO_BUILD = "Build it of this run's data: megatron-kd cache build --sft RUN.yaml ..."


def distinct_items(dataset: Dataset) -> int:
    """How many items a dataset has before it repeats itself."""
    examples = getattr(dataset, "_base_examples", None)
    return len(dataset) if examples is None else len(examples)


def example_units(cfg: Any, tokenizer: dict[str, Any] | None, *, progress: bool = True) -> ExampleUnits:
    """The examples of a run's training, validation and test data, as they will be fed to the model.

    Runs Bridge's own preparation, so data that the run would download, write as JSON lines or pack is prepared here.

    Args:
        cfg: A Bridge configuration with fine-tuning data.
        tokenizer: Identity of the run's tokenizer.
        progress: Show a bar.

    Raises:
        TeacherDataError: If its data is of another kind.
    """
    if not isinstance(cfg.dataset, SFT_DATASETS):
        raise TeacherDataError(
            f"dataset {type(cfg.dataset).__name__} is not fine-tuning data (GPTSFTDatasetConfig, "
            "DirectHFSFTDatasetConfig). For pre-training data give its prefix: --corpus PREFIX"
        )
    cfg.dataset.finalize()
    provider = bridge_data.get_dataset_provider(cfg.dataset)
    built = provider([1, 1, 1], cfg.dataset, tokenizer=build_tokenizer(cfg.tokenizer))
    if built[0] is None:
        raise TeacherDataError(f"dataset {type(cfg.dataset).__name__}: Bridge finds no training data, see its warning")
    datasets = [dataset for dataset in built if dataset is not None]
    return ExampleUnits(_fed(datasets, progress), tokenizer=tokenizer)


def _fed(datasets: list[Dataset], progress: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with tqdm(total=sum(map(distinct_items, datasets)), unit="item", desc="examples", disable=not progress) as bar:
        for dataset in datasets:
            for index in range(distinct_items(dataset)):
                yield from sequences(dataset.collate_fn([dataset[index]]))
                bar.update()
