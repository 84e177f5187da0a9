# SPDX-License-Identifier: Apache-2.0
"""Beyond 2^31 rows and 2^31 bytes, with sparse files (Megatron-LM#1519, #1672)."""

import os
import time

import numpy as np
import xxhash

from megatron_kd.cache import CacheReader, CacheWriter, Corpus, make_manifest
from megatron_kd.cache.codecs import split_ids
from megatron_kd.cache.commits import seal_record
from megatron_kd.cache.files import encode_record
from megatron_kd.cache.layout import BLOCK_ROWS, block_checksums, plane_offsets, shard_header
from megatron_kd.cache.manifest import Manifest
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


def test_opening_does_not_depend_on_the_number_of_tiles(tmp_path, monkeypatch):
    """100,000 tiles, of which the shards are not even there: nothing is listed, no shard or record is looked at."""

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
    looked_at = []

    def watched(real):
        return lambda path, *args, **options: looked_at.append(str(path)) or real(path, *args, **options)

    for name in ("open", "stat", "lstat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    start = time.process_time()
    reader = CacheReader(tmp_path / "c")
    spent = time.process_time() - start
    monkeypatch.undo()
    assert spent < 1 and len(reader.tiles) == 100_001
    assert looked_at and not [path for path in looked_at if "shard" in path or "commits" in path]
    assert isinstance(writer.manifest, Manifest)


def test_a_blocked_shard_beyond_31_bits(tmp_path):
    """2^31 rows in zstd blocks, 16 GB of sparse index and blocks behind a hole: the last rows read right."""
    rows = BEFORE + ROWS
    manifest, tiles = make_manifest(
        TwoUnits(), teacher={}, tokenizer=None, top_k=2, vocab_real=9, vocab_padded=9, tile_tokens=rows, codec="zstd"
    )
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    row_format, digest, blocks = manifest.row_format, manifest.digest(), -(-rows // BLOCK_ROWS)
    tail = rows % BLOCK_ROWS
    last = {"tokens": np.arange(tail), "ids": np.arange(2 * tail).reshape(tail, 2) % 9, "log_tail": -np.ones(tail)}
    last["logprobs"] = np.linspace([-0.5, -2], [-1.5, -3], tail)
    small, small_tiles = make_manifest(
        OneUnit(tail), teacher={}, tokenizer=None, top_k=2, vocab_real=9, vocab_padded=9, codec="zstd"
    )
    other = CacheWriter(tmp_path / "small", small, small_tiles)
    other.write_tile(0, last)
    other.seal()
    with open(other.shard_path(0), "rb") as stream:
        block = stream.read()[-_block_size(other) :]
    before = 5 << 31
    sizes = {"tile": 0, "first_row": 0, "rows": rows, "manifest_digest": digest, "blocks_bytes": before + len(block)}
    header = shard_header(row_format, **sizes)
    offsets, size = plane_offsets(row_format, rows, len(header), before + len(block))
    with open(writer.shard_path(0), "wb") as stream:
        stream.write(header)
        stream.truncate(size)
        for place, data in (
            (offsets["checksum"] + 8 * (blocks - 1), _sum(block, (blocks - 1) * BLOCK_ROWS)),
            (offsets["index"] + 8 * (blocks - 1), np.array([before, before + len(block)], "<u8").tobytes()),
            (offsets["blocks"] + before, block),
        ):
            stream.seek(place)
            stream.write(data)
    record = {"tile": 0, "rows": rows, "bytes": size, "digest": "0" * 32, "manifest": digest, "writer": {}}
    writer.commit_path(0).write_bytes(encode_record(record))
    (tmp_path / "c" / "SEALED.json").write_bytes(encode_record(seal_record(tmp_path / "c", manifest)))
    reader = CacheReader(tmp_path / "c")
    found = reader.read(np.array([[rows - 7, 7]]))
    expected = CacheReader(tmp_path / "small").read(np.array([[tail - 7, 7]]))
    for name in ("tokens", "ids", "logprobs", "log_tail"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert size > 2**33 and writer.shard_path(0).stat().st_blocks * 512 < 1 << 20


class OneUnit:
    """One document of that many tokens."""

    kind = "document"

    def __init__(self, length):
        self.lengths = np.array([length], np.int64)

    def identity(self):
        return {}


def _block_size(writer: CacheWriter) -> int:
    """Bytes of the only block of a cache of one tile."""
    rows, row_format = writer.manifest.rows, writer.manifest.row_format
    sizes = {"tile": 0, "first_row": 0, "rows": rows, "manifest_digest": writer.manifest.digest()}
    return (
        writer.shard_path(0).stat().st_size
        - plane_offsets(row_format, rows, len(shard_header(row_format, **sizes)))[1]
    )


def _sum(block: bytes, seed: int) -> bytes:
    return xxhash.xxh3_64_intdigest(block, seed=seed).to_bytes(8, "little")
