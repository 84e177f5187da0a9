# SPDX-License-Identifier: Apache-2.0
"""Beyond 2^31 rows and 2^31 bytes, with sparse files (Megatron-LM#1519, #1672)."""

import time

import numpy as np

from megatron_kd.cache import CacheReader, CacheWriter, Corpus, make_manifest
from megatron_kd.cache.codecs import split_ids
from megatron_kd.cache.files import encode_record
from megatron_kd.cache.layout import BLOCK_ROWS, block_checksums, plane_offsets, shard_header
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.writer import seal_record
from tests.cache.conftest import teacher_rows

BEFORE = 5 * BLOCK_ROWS
ROWS = (1 << 31) + 3 * BLOCK_ROWS + 17


class TwoUnits:
    """A short unit and one of more than 2^31 tokens."""

    kind = "document"
    lengths = np.array([BEFORE, ROWS], np.int64)

    def identity(self):
        return {}


def sparse_shard(writer: CacheWriter, last: dict[str, np.ndarray]) -> None:
    """Tile 1: a file with a hole, of which only header, last rows and last checksums exist."""
    row_format = writer.manifest.row_format
    header = shard_header(row_format, tile=1, first_row=BEFORE, rows=ROWS, manifest_digest=writer.manifest.digest())
    offsets, size = plane_offsets(row_format, ROWS, len(header))
    first = len(range(0, ROWS, BLOCK_ROWS)) * BLOCK_ROWS - 2 * BLOCK_ROWS  # two blocks, the last one not full
    last["ids_lo"], last["ids_hi"] = split_ids(last.pop("ids"), 2)
    planes = [last[plane.name][first - ROWS :].astype(plane.dtype) for plane in row_format.data_planes(ROWS)]
    with open(writer.shard_path(1), "wb") as stream:
        stream.write(header)
        stream.truncate(size)
        for plane, data in zip(row_format.data_planes(ROWS), planes, strict=True):
            stream.seek(offsets[plane.name] + first * plane.row_bytes)
            stream.write(data.tobytes())
        stream.seek(offsets["checksum"] + first // BLOCK_ROWS * 8)
        stream.write(block_checksums(planes, BEFORE + first).tobytes())
    commit = {
        "tile": 1,
        "rows": ROWS,
        "bytes": size,
        "digest": "0" * 32,
        "manifest": writer.manifest.digest(),
        "writer": {},
    }
    writer.commit_path(1).write_bytes(encode_record(commit))


def test_rows_and_bytes_beyond_31_bits(tmp_path):
    manifest, tiles = make_manifest(
        TwoUnits(),
        teacher={},
        tokenizer=None,
        top_k=2,
        vocab_real=200_000,
        vocab_padded=200_000,
        tile_tokens=BEFORE,
    )
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    near = teacher_rows(np.arange(BEFORE), 2)
    writer.write_tile(0, near)
    far = teacher_rows(np.arange(2 * BLOCK_ROWS), 2)
    sparse_shard(writer, dict(far))
    (tmp_path / "c" / "SEALED.json").write_bytes(encode_record(seal_record(tmp_path / "c", manifest)))
    reader = CacheReader(tmp_path / "c")
    assert reader.n_rows == BEFORE + ROWS > 2**31 and writer.shard_path(1).stat().st_size > 30 * 2**30
    rows = reader.read(np.array([[BEFORE + ROWS - 500, 500], [BEFORE - 10, 10]]))
    np.testing.assert_array_equal(rows.tokens[:500], far["tokens"][-500:])
    np.testing.assert_array_equal(rows.ids, np.concatenate([far["ids"][-500:], near["ids"][-10:]]))
    np.testing.assert_allclose(rows.logprobs[:500], far["logprobs"][-500:], rtol=2**-10, atol=2e-3)
    np.testing.assert_allclose(rows.log_tail[:500], far["log_tail"][-500:], rtol=1e-6)


def test_a_corpus_beyond_31_bits(tmp_path):
    """Three documents whose tokens and bytes pass 2^31; the file is a hole but for its end."""
    lengths = np.array([2**31 - 1, 2**31 - 1, 1000], np.int32)
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8])
    head += (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    marks = np.arange(4, dtype=np.int64)
    (tmp_path / "big.idx").write_bytes(head + lengths.tobytes() + (starts[:-1] * 2).tobytes() + marks.tobytes())
    end = np.arange(1000, dtype=np.uint16)
    with open(tmp_path / "big.bin", "wb") as stream:
        stream.truncate(int(starts[-1]) * 2 - 2000)
        stream.seek(0, 2)
        stream.write(end.tobytes())
    corpus = Corpus(tmp_path / "big")
    assert corpus.n_tokens == 2**32 + 998
    np.testing.assert_array_equal(corpus.tokens(int(corpus.starts[2]), 1000), end)
    np.testing.assert_array_equal(corpus.tokens(2**32 - 102, 102), np.append(np.zeros(100), [0, 1]))


def test_opening_does_not_depend_on_the_number_of_tiles(tmp_path):
    """100,000 tiles, none of them touched: no listing, no commit record is read."""

    class Many:
        kind, lengths = "document", np.full(100_000, 600, np.int64)

        def identity(self):
            return {}

    manifest, tiles = make_manifest(
        Many(), teacher={}, tokenizer=None, top_k=2, vocab_real=9, vocab_padded=9, tile_tokens=600
    )
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    seal = {"manifest": manifest.digest(), "rows": manifest.rows, "tiles": 100_000, "shards": ""}
    (tmp_path / "c" / "SEALED.json").write_bytes(encode_record(seal))
    start = time.perf_counter()
    reader = CacheReader(tmp_path / "c")
    assert time.perf_counter() - start < 1 and len(reader.tiles) == 100_001
    assert isinstance(writer.manifest, Manifest)
