# SPDX-License-Identifier: Apache-2.0
"""Write Megatron's indexed dataset: documents of token ids in, `<prefix>.bin` and `<prefix>.idx` out.

The files are the ones `preprocess_data.py` writes, through megatron.core's own builder: one sequence per document.
Costs one pass over the tokens; one document is in memory at a time. The index is put in place last, so a prefix that
has an `.idx` is whole.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


def write_indexed_dataset(prefix: str | Path, documents: Iterable[np.ndarray], dtype: type[np.integer]) -> int:
    """Write `documents` as the indexed dataset `prefix` and return the number of tokens.

    Args:
        prefix: path without a suffix; its folder is made if missing, existing files are replaced.
        documents: 1-dim arrays of token ids, each one document, none empty.
        dtype: integer type on disk, e.g. `np.uint16` for a vocabulary up to 65,536.

    Raises:
        ValueError: a document is empty, not 1-dim, or holds an id that `dtype` cannot; or there is no document.
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(f".{prefix.name}.partial")
    bin_path, idx_path = get_bin_path(str(partial)), get_idx_path(str(partial))
    builder = IndexedDatasetBuilder(bin_path, dtype=dtype)
    n_tokens = 0
    try:
        for number, document in enumerate(documents):
            tokens = _checked(document, dtype, number)
            builder.add_document(tokens, [tokens.size])
            n_tokens += tokens.size
        if not n_tokens:
            raise ValueError(f"no documents for the indexed dataset {prefix}: expected at least one")
        builder.finalize(idx_path)
    except BaseException:
        builder.data_file.close()
        for path in (bin_path, idx_path):
            Path(path).unlink(missing_ok=True)
        raise
    Path(get_idx_path(str(prefix))).unlink(missing_ok=True)
    os.replace(bin_path, get_bin_path(str(prefix)))
    os.replace(idx_path, get_idx_path(str(prefix)))
    return n_tokens


def _checked(document: np.ndarray, dtype: type[np.integer], number: int) -> np.ndarray:
    """The document in the dtype of the dataset, or an error that says what is wrong with it."""
    tokens = np.asarray(document)
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(f"document {number}: expected a 1-dim array of at least one token id, found {tokens.shape}")
    limits = np.iinfo(dtype)
    if tokens.min() < limits.min or tokens.max() > limits.max:
        raise ValueError(
            f"document {number}: ids {tokens.min()}..{tokens.max()} do not fit {np.dtype(dtype)}; use a wider dtype"
        )
    return tokens.astype(dtype)
