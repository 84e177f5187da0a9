# SPDX-License-Identifier: Apache-2.0
"""One changed byte, at every place of every file of a cache, is found by reading and by `verify`."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import CacheError, CacheReader
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, random_documents, write_corpus

FORMATS = {
    "raw": {"temperatures": (2.0,), "tile_tokens": 40},
    "u8": {"values": "u8"},
    "ragged zstd": {"codec": "zstd", "values": "u8", "top_p": 0.5, "temperatures": (2.0,)},
}
"""Settings of caches whose files are changed byte by byte; of all but the first only the shards differ."""


@pytest.fixture(scope="module", params=FORMATS)
def cache(request, tmp_path_factory) -> Path:
    """Two tiles of a few dozen rows, K=2, some seven thousand bytes in all; or one tile."""
    folder = tmp_path_factory.mktemp("tiny")
    corpus = write_corpus(folder / "corpus", random_documents(7, count=4, longest=40))
    return build(folder / "cache", corpus, top_k=2, **FORMATS[request.param]).path


def read_all(path: Path):
    reader = CacheReader(path, wait_s=0)
    return reader.read(np.array([[0, reader.n_rows]]))


def test_every_byte_of_every_file(cache):
    """A bit at a place that moves with the position, or all eight: `verify` sees it, and reading (every fourth)."""
    files, header = sorted(path for path in cache.rglob("*") if path.is_file()), 0
    if len(CacheReader(cache).tiles) > 2:
        assert len(files) == 7
    else:
        (path,) = files = [path for path in files if path.suffix == ".safetensors"]
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")  # compared whole, whatever the format
    missed, tried = [], 0
    for path in files:
        sound = path.read_bytes()
        fd = os.open(path, os.O_RDWR)
        for position, byte in enumerate(sound):
            if position < header and position % 16:
                continue
            os.pwrite(fd, bytes([byte ^ (0xFF if position % 9 == 8 else 1 << position % 9)]), position)
            tried += 1
            if position % 4 == 0:
                try:
                    read_all(cache)
                    missed.append((path.name, position, "read"))
                except CacheError:
                    pass
            if not verify(cache, "checksums").problems:
                missed.append((path.name, position, "verify"))
            os.pwrite(fd, bytes([byte]), position)
        os.close(fd)
    assert missed == [] and tried == sum(path.stat().st_size for path in files) - header + -(-header // 16)
    read_all(cache)
    assert verify(cache, "checksums").problems == []


def test_bytes_beyond_the_first_blocks(tmp_path):
    """A tile of several blocks: some bytes of each, by the checksums alone."""
    corpus = write_corpus(tmp_path / "corpus", random_documents(8, count=5, longest=700))
    writer = build(tmp_path / "cache", corpus, top_k=3, tile_tokens=10_000)
    shard = writer.shard_path(0)
    sound = shard.read_bytes()
    assert writer.manifest.rows > 3 * 512
    missed = []
    with open(shard, "r+b", buffering=0) as stream:
        for position in range(0, len(sound), 131):
            os.pwrite(stream.fileno(), bytes([sound[position] ^ 1 << position % 8]), position)
            if not any(shard.name in problem for problem in verify(writer.path).problems):
                missed.append(position)
            os.pwrite(stream.fileno(), sound[position : position + 1], position)
    assert missed == []
