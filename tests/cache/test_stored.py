# SPDX-License-Identifier: Apache-2.0
"""Positions without loss need not be stored: of these the tokens stay, and all other rows are equal."""

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheReader,
    CacheWriter,
    CorpusError,
    DocumentUnits,
    IdentityMismatch,
    MaskedUnits,
    make_manifest,
)
from megatron_kd.cache.corpus import FirstUnits
from megatron_kd.cache.verify import expect_units, verify
from tests.cache.conftest import TEACHER, VOCAB, build, teacher_rows


def prompt_mask(units: DocumentUnits, share: int = 3):
    """The first third of each document is a prompt, and every 50th position is padding."""
    return lambda unit: (
        (np.arange(units.lengths[unit]) >= units.lengths[unit] // share) & (np.arange(units.lengths[unit]) % 50 != 49)
    )


def masked_cache(path, units, **settings):
    manifest, tiles = make_manifest(
        units, teacher=TEACHER, tokenizer=None, vocab_real=VOCAB, vocab_padded=VOCAB, tile_tokens=4000, **settings
    )
    writer, starts = CacheWriter(path, manifest, tiles), np.append(0, np.cumsum(units.lengths))
    for tile in writer.todo():
        buffer = writer.open_tile(tile)
        for unit in range(int(tiles[tile, 1]), int(tiles[tile + 1, 1])):
            rows = teacher_rows(units.tokens(unit), manifest.top_k, tuple(manifest.temperatures))
            buffer.put(int(starts[unit] - tiles[tile, 0]), **rows, stored=units.stored(unit))
        writer.commit(buffer)
    writer.seal()
    return writer


@pytest.mark.parametrize("values,codec", [("f16", "raw"), ("f16", "zstd"), ("u8", "zstd"), ("f32", "raw")])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_stored_rows_equal_those_of_a_whole_cache(tmp_path, corpus, values, codec, temperature):
    units = DocumentUnits(corpus)
    masked = MaskedUnits(units, prompt_mask(units))
    settings = {"values": values, "codec": codec, "temperatures": (2.0,)}
    whole = CacheReader(build(tmp_path / "whole", corpus, **settings).path)
    reader = CacheReader(masked_cache(tmp_path / "masked", masked, top_k=100, **settings).path)
    spans = np.array([[0, reader.n_rows], [777, 1000]])
    mask = np.concatenate([masked.stored(unit) for unit in range(len(units.lengths))])
    mask = np.concatenate([mask, mask[777:1777]])
    found, expected = (r.read(spans, temperature=temperature) for r in (reader, whole))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stored, mask)
    assert expected.stored.all()
    for name in ("ids", "logprobs", "log_tail"):
        np.testing.assert_array_equal(getattr(found, name)[mask], getattr(expected, name)[mask], err_msg=name)
    assert (found.ids[~mask] == -1).all() and np.isneginf(found.logprobs[~mask]).all()
    np.testing.assert_allclose(found.log_tail[~mask], 0, atol=1e-6)
    assert verify(reader.path, "tokens", units=masked).problems == []


def test_a_row_that_is_not_stored_takes_no_more_than_its_token_and_tail(tmp_path, corpus):
    """f16, raw: count 1, tail 4, token 4 bytes; a stored row one byte more than in a dense cache."""
    units = DocumentUnits(corpus)
    masked = MaskedUnits(units, prompt_mask(units))
    writer = masked_cache(tmp_path / "c", masked, top_k=100)
    stored = sum(int(masked.stored(unit).sum()) for unit in range(len(units.lengths)))
    size = sum(writer.shard_path(tile).stat().st_size for tile in range(len(writer.tiles) - 1))
    overhead = (len(writer.tiles) - 1) * 1500 + 16 * (writer.manifest.rows // 512 + len(writer.tiles))
    assert size < stored * 434 + (writer.manifest.rows - stored) * 9 + overhead
    assert stored < 0.7 * writer.manifest.rows


def test_the_mask_is_part_of_the_identity(tmp_path, corpus):
    units = DocumentUnits(corpus)
    masked, other = (MaskedUnits(units, prompt_mask(units, share)) for share in (3, 4))
    writer = masked_cache(tmp_path / "c", masked, top_k=4)
    expect_units(writer.manifest, writer.path, masked)
    expect_units(writer.manifest, writer.path, units)  # the same axis; which rows are stored the reader sees
    with pytest.raises(IdentityMismatch, match="units.stored"):
        expect_units(writer.manifest, writer.path, other)
    with pytest.raises(IdentityMismatch, match="units.stored"):
        masked_cache(tmp_path / "c", other, top_k=4)
    assert FirstUnits(masked, 3).stored(1).shape == (units.lengths[1],)
    with pytest.raises(CorpusError, match="document 0 has .* its mask is int64"):
        MaskedUnits(units, lambda unit: np.ones(5, int)).identity()
