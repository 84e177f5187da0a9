# SPDX-License-Identifier: Apache-2.0
"""The samples of a Megatron pretraining run, from the index files that its dataset left in `path_to_cache`.

In: `HASH-GPTDataset-SPLIT-*` or `HASH-BlendedDataset-SPLIT-*` and the corpora. Out: a `UnitSource` of kind `sample`,
with the identity that `megatron_kd.bridge.dataset.SampleUnits` gives the built dataset. Needs numpy alone.

`description.txt` is JSON: of one corpus its path, the sequence length, seed and split; of a blend those of each
corpus, whose own files are named by the MD5 of their description. `shuffle_index` leads from a sample to a line of
`sample_index`, which holds the place in `document_index` and the offset in that document where the sample begins; the
next line says where it ends. `dataset_index` and `dataset_sample_index` lead from a blend's sample to a corpus's.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache.corpus import Corpus
from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.files import read_bounded


class IndexedSamples:
    """The samples of a run, in the order it consumes them.

    Args:
        files: path of the index files, up to and without `-description.txt`.
        extra_token: `add_extra_token_to_sequence` of the run (Megatron's default).
        pad_token: the tokenizer's padding id, which Megatron feeds as 0; None if it has none.

    Raises:
        ImportRefused: a file is missing or not what Megatron writes.
        CorpusError: a corpus is not where the run had it.
    """

    kind = "sample"

    def __init__(self, files: str | Path, *, extra_token: bool = True, pad_token: int | None = None):
        self._extra, self._pad, self._blend = extra_token, pad_token, None
        files = Path(str(files).removesuffix("-description.txt"))
        about = _description(files)
        if about.get("class") == "BlendedDataset":
            self._blend = [_array(files, name, 1) for name in ("dataset_index", "dataset_sample_index")]
            parts = [(files.with_name(_name(part)), part) for part in about["datasets"]]
        else:
            parts = [(files, about)]
        self._parts = [_Part(*part) for part in parts]
        lengths = {part.length for part in self._parts}
        if len(lengths) != 1:
            raise ImportRefused(f"{files}: the corpora of a blend have sequence lengths {sorted(lengths)}")
        self._length = lengths.pop()
        count = len(self._parts[0].shuffle if self._blend is None else self._blend[0])
        self.lengths = np.full(count, self._length, np.int64)

    def tokens(self, unit: int) -> np.ndarray:
        """Input tokens of one sample."""
        part, index = (0, unit) if self._blend is None else (int(array[unit]) for array in self._blend)
        found = self._parts[part].tokens(index, self._extra)
        if self._pad is not None:
            found[found == self._pad] = 0
        return np.pad(found, (0, self._length - len(found)))

    def identity(self) -> dict[str, Any]:
        """Digest of the index arrays and corpora."""
        state = xxhash.xxh3_128()
        for array in self._blend or ():
            state.update(np.ascontiguousarray(array))
        for part in self._parts:
            for array in (part.documents, part.samples, part.shuffle):
                state.update(np.ascontiguousarray(array))
            state.update(part.corpus.index_digest().encode())
        units = {"sequence_length": self._length, "add_extra_token": self._extra}
        return {"corpus": {}, "units": {"samples_digest": state.hexdigest()} | units}


class _Part:
    """The samples of one corpus."""

    def __init__(self, files: Path, about: dict[str, Any]):
        if about.get("class") != "GPTDataset":
            raise ImportRefused(f"{files} describes a {about.get('class')!r}, expected a GPTDataset")
        try:
            self.length, self.corpus = int(about["sequence_length"]), Corpus(about["dataset_path"])
        except (KeyError, TypeError, ValueError) as error:
            raise ImportRefused(f"{files}-description.txt does not describe a dataset: {error!r}") from error
        self.documents = _array(files, "document_index", 1)
        self.samples = _array(files, "sample_index", 2)
        self.shuffle = _array(files, "shuffle_index", 1)

    def tokens(self, index: int, extra: bool) -> np.ndarray:
        """Tokens of a sample, int64; the last one of a dataset can be short."""
        line = int(self.shuffle[index])
        (first, offset), (last, end) = self.samples[line].tolist(), self.samples[line + 1].tolist()
        parts, left = [], self.length
        for place in range(first, last + 1):
            document = int(self.documents[place])
            stop = min(end + extra if place == last else 1 << 62, int(self.corpus.lengths[document]))
            count = min(stop - offset, left)
            parts.append(self.corpus.tokens(int(self.corpus.starts[document]) + offset, max(count, 0)))
            left, offset = left - len(parts[-1]), 0
        return np.concatenate(parts).astype(np.int64)


def _name(about: dict[str, Any]) -> str:
    """How Megatron calls the files of a corpus of a blend."""
    digest = hashlib.md5(json.dumps(about, indent=4).encode(), usedforsecurity=False).hexdigest()
    return f"{digest}-{about.get('class')}-{about.get('index_split')}"


def _description(files: Path) -> dict[str, Any]:
    path = Path(f"{files}-description.txt")
    try:
        about = json.loads(read_bounded(path, follow_links=True))
        if not isinstance(about, dict) or not all(isinstance(part, dict) for part in about.get("datasets", [])):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ImportRefused(
            f"{path} cannot be read ({error}); name the files that the run's dataset left in its path_to_cache, up to "
            "GPTDataset-train or BlendedDataset-train"
        ) from error
    return about


def _array(files: Path, name: str, dimensions: int) -> np.ndarray:
    path = Path(f"{files}-{name}.npy")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ImportRefused(f"{path} cannot be read: {error}") from error
    if array.ndim != dimensions or array.dtype.kind not in "iu" or array.shape[1:] not in ((), (2,)):
        raise ImportRefused(f"{path} holds {array.dtype} {array.shape}, which is no index of samples")
    return array
