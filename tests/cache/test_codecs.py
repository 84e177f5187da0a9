# SPDX-License-Identifier: Apache-2.0
"""Every codec, read by a second reader that was written from the text of `layout` alone; sizes and distances."""

import itertools
import json
import struct

import numpy as np
import pytest
import xxhash
import zstandard

from megatron_kd.cache import (
    CacheError,
    CacheReader,
    CacheWriter,
    CorruptBlock,
    DocumentUnits,
    bench,
    codecs,
    make_manifest,
)
from megatron_kd.cache.commits import seal_record
from megatron_kd.cache.files import encode_record
from megatron_kd.cache.layout import block_checksums
from megatron_kd.cache.verify import verify
from tests.cache.conftest import SUPPORT, VOCAB, build, random_documents, teacher_rows, write_corpus
from tests.cache.foreign_reader import foreign_reader


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", random_documents(3, count=5, longest=400))


@pytest.mark.parametrize("top_p", [1.0, 0.3])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("values", ["f16", "f32", "u8"])
def test_a_reader_written_from_the_text_agrees(tmp_path, small_corpus, values, codec, top_p):
    """Two shards, last blocks not full, K no multiple of 4, T = 1 and 2; bit for bit, u8 within f32's rounding."""
    settings = {"values": values, "codec": codec, "top_p": top_p, "temperatures": (2.0,), "tile_tokens": 700}
    writer = build(tmp_path / "c", small_corpus, top_k=13, **settings)
    reader, shards = CacheReader(writer.path), sorted((writer.path / "shards").iterdir())
    found = [row for shard in shards for row in foreign_reader(shard, [2.0])]
    assert len(shards) > 1 and len(found) == reader.n_rows
    rows = reader.read(np.array([[0, reader.n_rows]]))
    counts = np.array([len(row[1]) for row in found])
    kept = np.arange(13) < counts[:, None]
    np.testing.assert_array_equal(rows.tokens, [row[0] for row in found])
    np.testing.assert_array_equal(rows.ids[kept], np.concatenate([row[1] for row in found]))
    tolerance = 1e-5 if values == "u8" else 0
    np.testing.assert_allclose(rows.logprobs[kept], np.concatenate([row[2] for row in found]), rtol=0, atol=tolerance)
    np.testing.assert_array_equal(rows.log_tail, np.array([row[3] for row in found], np.float32))
    assert (rows.ids[~kept] == -1).all() and np.isneginf(rows.logprobs[~kept]).all()
    np.testing.assert_array_equal(reader.read_planes(np.array([[0, reader.n_rows]]))["tail_T"], [r[4] for r in found])
    assert (counts.min() < 13) == (top_p < 1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_top_p_keeps_the_fewest_entries_with_that_mass(tmp_path, small_corpus, top_p, temperature):
    """What is left out is in the tail, at every temperature; the truth is the dense distribution in fp64."""
    build(tmp_path / "c", small_corpus, values="f32", top_p=top_p, temperatures=(2.0,))
    reader = CacheReader(tmp_path / "c")
    rows = reader.read(np.array([[0, reader.n_rows]]), temperature=temperature)
    full = teacher_rows(rows.tokens, SUPPORT)
    running = np.exp(full["logprobs"]).cumsum(1)
    counts = np.minimum((running < top_p).sum(1) + 1, 100)
    np.testing.assert_array_equal((rows.ids >= 0).sum(1), counts)
    scaled = full["logprobs"] / temperature
    scaled -= np.log(np.exp(scaled).sum(1, keepdims=True))
    outside = np.where(np.arange(SUPPORT) < counts[:, None], -np.inf, scaled)
    np.testing.assert_allclose(rows.log_tail, np.log(np.exp(outside).sum(1)), atol=2e-5)
    kept = np.arange(100) < counts[:, None]
    np.testing.assert_allclose(rows.logprobs[kept], scaled[:, :100][kept], atol=2e-5)


def test_sizes_and_distances_of_the_codecs(tmp_path):
    """The made-up teacher of the benchmark: K = 100 of 201,088 ids, mass of the first and of all K as on the web."""
    exact = bench.synthetic_rows(8192)
    mass = np.exp(exact.logprobs.astype(np.float64))
    assert 0.55 < mass[:, 0].mean() < 0.65 and 0.95 < mass.sum(1).mean() < 0.97
    np.testing.assert_allclose(mass.sum(1) + np.exp(exact.log_tail), 1, atol=1e-5)
    limits = {  # bytes a token, mean KL
        "raw": (433.2, 2e-7),
        "raw f32": (633.2, 1e-12),
        "raw u8": (339.2, 3e-5),
        "zstd": (320, 2e-7),
        "zstd u8": (270, 3e-5),
        "zstd p=0.99": (200, 2e-7),
        "zstd u8 p=0.95": (110, 3e-5),
    }
    assert limits.keys() == bench.CODECS.keys()
    for name, (size, distance) in limits.items():
        writer = bench.write(tmp_path / name, exact, 8192, **bench.CODECS[name])
        rows = CacheReader(writer.path).read(np.array([[0, 8192]]))
        assert writer.shard_path(0).stat().st_size / 8192 < size, name
        assert 0 <= bench.divergence(exact, rows).mean() < distance, name


def test_divergence_is_what_its_formula_says():
    """Against an element-by-element sum; and an id moved to the tail costs nothing there."""
    exact = bench.synthetic_rows(50, top_k=7, vocab=1000)
    stored = exact._replace(logprobs=exact.logprobs - np.float32(0.01), log_tail=exact.log_tail + np.float32(0.02))
    expected = []
    for p, q, tail_p, tail_q in zip(exact.logprobs, stored.logprobs, exact.log_tail, stored.log_tail, strict=True):
        pairs = [*zip(p, q, strict=True), (tail_p, tail_q)]
        expected.append(
            sum(
                np.exp(np.float64(a)) * (np.float64(a) - b) - np.exp(np.float64(a)) + np.exp(np.float64(b))
                for a, b in pairs
            )
        )
    np.testing.assert_allclose(bench.divergence(exact, stored), expected, rtol=1e-6)
    folded = np.logaddexp(exact.log_tail, exact.logprobs[:, 6])
    short = exact._replace(ids=exact.ids.copy(), logprobs=exact.logprobs.copy(), log_tail=folded)
    short.ids[:, 6], short.logprobs[:, 6] = -1, -np.inf
    np.testing.assert_allclose(bench.divergence(exact, short), 0, atol=1e-12)


def test_f16_is_widened_as_numpy_does():
    """Every f16 but NaN, in the first, second and last place of falling rows and of rows that no teacher makes."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = np.sort(every[~np.isnan(every)])[-63_488:][::-1]
    for rows in (
        every.reshape(-1, 2),
        every.reshape(-1, 4),
        every[::-1].reshape(-1, 4),
        every[every < -1e-4][-30000:].reshape(-1, 5),
    ):
        for start in range(0, len(rows), 97):
            part = np.ascontiguousarray(rows[start : start + 97])
            out = np.empty(part.shape, np.float32)
            codecs.decode_values({"logprobs": part}, out)
            np.testing.assert_array_equal(out, part.astype(np.float32))


def test_u8_values_at_their_limits():
    """One entry, equal entries, entries without mass, a span beyond f16: first and last exact, order kept."""
    rows = np.array(
        [
            [-0.5] * 4,
            [0, -np.inf, -np.inf, -np.inf],
            [-1e-4, -1, -70000, -np.inf],
            [-np.inf] * 4,
            [-1, -2, -3, -20.123],
        ],
        np.float32,
    )
    planes = codecs.encode_values(rows, "u8")
    out = np.empty_like(rows)
    codecs.decode_values(planes, out)
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(rows))
    np.testing.assert_array_equal(out[:, 0], rows[:, 0])
    np.testing.assert_allclose(out[[0, 4], -1], rows[[0, 4], -1], rtol=2**-10)
    assert (out[:, 1:] <= out[:, :-1]).all()
    single = codecs.encode_values(rows[:, :1], "u8")
    codecs.decode_values(single, out[:, :1])
    np.testing.assert_array_equal(out[:, 0], rows[:, 0])


def refresh(writer, tile, data):
    """Give a changed blocked shard checksums, digest, commit and seal that agree with it."""
    path = writer.shard_path(tile)
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    first = int(header["__metadata__"]["first_row"])
    at = {name: 8 + length + plane["data_offsets"][0] for name, plane in header.items() if name != "__metadata__"}
    index = np.frombuffer(data, "<u8", header["index"]["shape"][0], at["index"]).tolist()
    for block, (begin, end) in enumerate(itertools.pairwise(index)):
        piece = bytes(data[at["blocks"] + min(begin, 1 << 40) : at["blocks"] + min(end, 1 << 40)])
        struct.pack_into(
            "<Q", data, at["checksum"] + 8 * block, xxhash.xxh3_64_intdigest(piece, seed=first + 512 * block)
        )
    path.write_bytes(data)
    commit = json.loads(writer.commit_path(tile).read_text())
    commit.pop("checksum")
    commit |= {"digest": xxhash.xxh3_128_hexdigest(bytes(data)), "bytes": len(data)}
    writer.commit_path(tile).write_bytes(encode_record(commit))
    (writer.path / "SEALED.json").write_bytes(encode_record(seal_record(writer.path, writer.manifest)))
    return at


def huge_frame(size):
    """A small zstd frame whose content has `size` zeros."""
    return zstandard.ZstdCompressor(level=1).compress(bytes(size))


@pytest.mark.parametrize("ragged", [False, True])
def test_hostile_blocks_are_refused_before_memory_is_taken(tmp_path, small_corpus, ragged):
    """Right checksums everywhere: bombs, empty and foreign frames, an index that runs backwards or away."""
    writer = build(
        tmp_path / "c", small_corpus, top_k=3, codec="zstd", top_p=0.9 if ragged else 1.0, tile_tokens=10**6
    )
    sound = bytearray(writer.shard_path(0).read_bytes())
    at = refresh(writer, 0, bytearray(sound))
    spans = np.array([[0, 10]])
    expected = CacheReader(writer.path).read(spans)
    index = np.frombuffer(sound, "<u8", 2, at["index"]).tolist()
    room = index[1] - index[0]
    frames = [huge_frame(1 << 27), huge_frame(100), b"", b"\xff" * 10, huge_frame(0)]
    frames += [zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"abc")]
    (ids,) = struct.unpack_from("<I", sound, at["blocks"])
    prefixes = [sound[at["blocks"] : at["blocks"] + 4 + ids], bytes(4), b"\xff" * 4, b""]
    for prefix, frame in itertools.product(prefixes, frames):
        data = bytearray(sound)
        data[at["blocks"] : at["blocks"] + room] = (prefix + frame).ljust(room, b"\0")
        refresh(writer, 0, data)
        with pytest.raises(CorruptBlock, match="block 0.*cannot be decoded"):
            CacheReader(writer.path).read(spans)
    for place, value in [(0, 1), (1, 0), (1, 1 << 63), (1, room + 1), (1, len(sound)), (2, 1), (2, 1 << 40)]:
        data = bytearray(sound)
        struct.pack_into("<Q", data, at["index"] + 8 * place, value)
        writer.shard_path(0).write_bytes(data)
        with pytest.raises(CorruptBlock):
            CacheReader(writer.path).read(np.array([[0, CacheReader(writer.path).n_rows]]))
        assert verify(writer.path).problems
    writer.shard_path(0).write_bytes(sound)
    np.testing.assert_array_equal(CacheReader(writer.path).read(spans).ids, expected.ids)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_any_flipped_byte_of_a_blocked_shard_is_found(tmp_path, small_corpus, codec):
    """One bit of many bytes, by reading and by verifying; a sampling reader may be deceived but never crashes."""
    units = DocumentUnits(small_corpus)
    manifest, tiles = make_manifest(
        units,
        teacher={},
        tokenizer=None,
        vocab_real=VOCAB,
        vocab_padded=VOCAB,
        top_k=2,
        codec=codec,
        top_p=0.6,
        values="u8",
    )
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    writer.write_tile(0, teacher_rows(small_corpus.tokens(0, manifest.rows), 2))
    writer.seal()
    path, spans = writer.shard_path(0), np.array([[0, manifest.rows]])
    sound, missed = path.read_bytes(), []
    for count, position in enumerate([*range(0, 1300, 5), *range(1300, len(sound), 41)]):
        data = bytearray(sound)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            CacheReader(writer.path).read(spans)
            missed.append(position)
        except CacheError:
            pass
        if count % 4 == 0:
            if not verify(writer.path).problems:
                missed.append(position)
            reader = CacheReader(writer.path) if position > 2000 else None
            if reader is not None:
                reader.check_blocks, reader._reads = "sample", 1
                try:
                    reader.read(spans)
                except CacheError:
                    pass
    assert missed == []


def test_checksums_of_dense_blocks_do_not_depend_on_where_a_read_begins(cache):
    """Spans that begin and end anywhere in blocks are verified as their whole blocks."""
    reader = CacheReader(cache)
    planes = reader.read_planes(np.array([[0, int(reader.tiles[1, 0])]]))
    rows = {name: plane[:512] for name, plane in planes.items()}
    assert len(block_checksums(list(rows.values()), 0)) == 1
    for start, count in ((0, 1), (511, 1), (511, 2), (1, 510), (0, 513), (300, 1500), (512, 512)):
        part = reader.read_planes(np.array([[start, count]]))
        for name, plane in part.items():
            np.testing.assert_array_equal(plane, planes[name][start : start + count])
    buffer = reader.read(np.array([[0, 700]]))
    again = reader.read(np.array([[3, 700]]), out=buffer)
    assert again.ids is buffer.ids
    np.testing.assert_array_equal(again.ids, reader.read(np.array([[3, 700]])).ids)
    with pytest.raises(ValueError, match="out must be contiguous"):
        reader.read(np.array([[3, 701]]), out=buffer)
