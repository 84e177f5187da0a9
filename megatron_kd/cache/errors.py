# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a cache: one class per kind of fault; messages name the thing, both values, the remedy."""

from megatron_kd.errors import UserError


class CacheError(UserError):
    """Base of every error raised by `megatron_kd.cache`.

    Messages quote what files hold, and a hostile one may hold anything: they are made printable and cut at 8,000
    characters.
    """

    def __init__(self, message: str):
        super().__init__(printable(message[:8000]))


def printable(text: str) -> str:
    """The text with everything escaped that a terminal could take for a command, or not show; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class NotACache(CacheError):
    """The path holds no cache, or something else."""


class FutureVersion(CacheError):
    """The cache was written by a later format version than this code reads."""


class Unsealed(CacheError):
    """The cache is still being built: some tiles may be missing."""


class CorruptFile(CacheError):
    """A manifest, tile table, commit record, seal or shard header is not what its writer wrote."""


class CorruptBlock(CacheError):
    """A block of teacher rows does not match its checksum.

    Attributes:
        rows: (first, end) of the block on the cache's token axis; None where that is not known.
    """

    def __init__(self, message: str, *, rows: tuple[int, int] | None = None):
        super().__init__(message)
        self.rows = rows


class MissingShard(CacheError):
    """A shard or its commit record is not there, or not visible on this node."""


class IdentityMismatch(CacheError):
    """The cache was made from something else: another corpus, tokenizer, teacher or setting."""


class EchoMismatch(CacheError):
    """The tokens stored beside the teacher's rows are not the tokens of the batch."""


class ServeError(CacheError):
    """The cache does not hold what was asked of it: too large a K, or a temperature it has no tail for."""


class SpanError(CacheError):
    """A span lies outside the cache's token axis."""


class TileConflict(CacheError):
    """Two writers made different content for one tile."""


class CannotWrite(CacheError):
    """The file system refused a write: full, read-only, over quota or without permission."""


class StoreError(CacheError):
    """An object store refused a request, or did not answer it however often it was asked."""


class Incomplete(CacheError):
    """A tile or a cache is not complete, so it cannot be committed or sealed."""


class ImportRefused(CacheError):
    """What another program wrote does not say, or not well enough, what a cache has to hold."""


class BadSetting(CacheError):
    """A setting that no cache can have."""


class CorpusError(CacheError):
    """A Megatron indexed dataset is missing, damaged or not plain text tokens."""
