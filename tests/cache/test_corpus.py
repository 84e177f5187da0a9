# SPDX-License-Identifier: Apache-2.0
"""Our reader of Megatron's indexed dataset against Megatron's own builder and reader."""

import numpy as np
import pytest

from megatron_kd.cache import Corpus, CorpusError, DocumentUnits
from megatron_kd.cache.corpus import cut_tiles
from tests.cache.conftest import write_corpus


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_equal_to_megatrons_own_reader(tmp_path, dtype):
    """Empty sequences and documents of several sequences included."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=dtype)
    for _ in range(20):
        lengths = rng.integers(0, 50, rng.integers(1, 4)).tolist()
        builder.add_document(torch.from_numpy(rng.integers(0, 200, sum(lengths))), lengths)
    builder.finalize(str(tmp_path / "data.idx"))
    theirs, ours = IndexedDataset(str(tmp_path / "data")), Corpus(tmp_path / "data")
    np.testing.assert_array_equal(ours.lengths, theirs.sequence_lengths)
    assert ours.dtype == dtype and len(ours) == len(theirs)
    units = DocumentUnits(ours)
    for i in range(len(theirs)):
        np.testing.assert_array_equal(units.tokens(i), theirs[i])
    stream = np.concatenate([theirs[i] for i in range(len(theirs))])
    np.testing.assert_array_equal(ours.tokens(13, 500), stream[13:513])


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("change", ["missing", "short", "long", "other"])
def test_damaged_datasets_are_named(tmp_path, suffix, change):
    prefix = tmp_path / "data"
    write_corpus(prefix, [np.arange(10), np.arange(7)])
    path = tmp_path / f"data{suffix}"
    data = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes({"short": data[:-4], "long": data + b"\0" * 4, "other": b"x" * 50}[change])
    with pytest.raises(CorpusError, match=f"data{suffix}"):
        Corpus(prefix)


def test_pointers_and_lengths_that_lie_are_refused(tmp_path):
    prefix = tmp_path / "data"
    write_corpus(prefix, [np.arange(10), np.arange(7)])
    path = tmp_path / "data.idx"
    sound = path.read_bytes()
    for position, message in ((34, "running sum"), (37, "negative"), (34 + 8 + 8, "running sum"), (17, "dtype code")):
        data = bytearray(sound)
        data[position] ^= 0x80 if message == "negative" else 0x01
        if message == "dtype code":
            data[position] = 6
        path.write_bytes(data)
        with pytest.raises(CorpusError, match=message):
            Corpus(prefix)
    path.write_bytes(sound)
    with pytest.raises(CorpusError, match=r"\[16, 18\) asked of .*, which has 17"):
        Corpus(prefix).tokens(16, 2)


def test_tiles_for_odd_lengths():
    """Empty units go with a neighbour; a long unit makes a long tile; no tile is empty."""
    for lengths in ([5], [0, 5], [5, 0], [0, 0, 3, 0, 50, 0, 0, 1, 0], [10] * 10, [1] * 30):
        for tile_tokens in (1, 7, 10, 1000):
            tiles = cut_tiles(np.array(lengths), tile_tokens)
            starts = np.append(0, np.cumsum(lengths))
            np.testing.assert_array_equal(starts[tiles[:, 1]], tiles[:, 0])
            assert tiles[0].tolist() == [0, 0] and tiles[-1].tolist() == [sum(lengths), len(lengths)]
            assert (np.diff(tiles, axis=0) > 0).all()
    with pytest.raises(CorpusError, match="no tokens"):
        cut_tiles(np.array([0, 0]), 5)
