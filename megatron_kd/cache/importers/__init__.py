# SPDX-License-Identifier: Apache-2.0
"""Caches from what other programs wrote. Reading executes nothing: no pickle, no code of theirs."""

from megatron_kd.cache.importers.assemble import Imported, import_cache
from megatron_kd.cache.importers.jsonl import JsonLines
from megatron_kd.cache.importers.megatron_tar import MegatronTars
from megatron_kd.cache.importers.parquet import Columns, DistillKit
from megatron_kd.cache.importers.records import Record, Source
from megatron_kd.cache.importers.samples import IndexedSamples

__all__ = [
    "Columns",
    "DistillKit",
    "Imported",
    "IndexedSamples",
    "JsonLines",
    "MegatronTars",
    "Record",
    "Source",
    "import_cache",
]
