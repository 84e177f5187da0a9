# SPDX-License-Identifier: Apache-2.0
"""The offline teacher cache: top-K log-probabilities and tail mass for every token of a corpus. No torch needed."""

from megatron_kd.cache.corpus import (
    Corpus,
    DocumentUnits,
    FirstUnits,
    MaskedUnits,
    UnitSource,
    cut_tiles,
    note_tokenizer,
)
from megatron_kd.cache.errors import (
    BadSetting,
    CacheError,
    CannotWrite,
    CorpusError,
    CorruptBlock,
    CorruptFile,
    EchoMismatch,
    FutureVersion,
    IdentityMismatch,
    ImportRefused,
    Incomplete,
    MissingShard,
    NotACache,
    ServeError,
    SpanError,
    StoreError,
    TileConflict,
    Unsealed,
)
from megatron_kd.cache.manifest import Manifest, make_manifest, tokenizer_identity
from megatron_kd.cache.reader import CacheReader, Rows, check_echo
from megatron_kd.cache.tile import TileBuffer
from megatron_kd.cache.writer import CacheWriter

__all__ = [
    "BadSetting",
    "CacheError",
    "CacheReader",
    "CacheWriter",
    "CannotWrite",
    "Corpus",
    "CorpusError",
    "CorruptBlock",
    "CorruptFile",
    "DocumentUnits",
    "FirstUnits",
    "EchoMismatch",
    "FutureVersion",
    "IdentityMismatch",
    "ImportRefused",
    "Incomplete",
    "Manifest",
    "MaskedUnits",
    "MissingShard",
    "NotACache",
    "Rows",
    "ServeError",
    "SpanError",
    "StoreError",
    "TileBuffer",
    "TileConflict",
    "UnitSource",
    "Unsealed",
    "check_echo",
    "cut_tiles",
    "make_manifest",
    "note_tokenizer",
    "tokenizer_identity",
]
