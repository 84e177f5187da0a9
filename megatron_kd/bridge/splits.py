# SPDX-License-Identifier: Apache-2.0
"""Whether every part of a corpus that a run asks for has a document.

In: a configuration. Out: nothing, or an error. Megatron gives documents to training, validation and test by
`dataset.split`, rounded; of a part that gets none it makes epochs without end, and the run hangs without a word.
"""

from pathlib import Path

from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from megatron_kd.cache.corpus import count_sequences
from megatron_kd.errors import ConfigError

_PARTS = ("training", "validation", "test")


def check_splits(cfg: ConfigContainer) -> None:
    """Refuse a split that leaves a part of a corpus without a document. A corpus that is not there is left to others.

    Raises:
        ConfigError: names the split, the part, the corpus and its number of documents.
    """
    if type(cfg.dataset) is not GPTDatasetConfig or not cfg.dataset.split:
        return
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(cfg.dataset.split))
    for prefix in _prefixes(cfg.dataset):
        if not Path(f"{prefix}.idx").is_file():
            continue
        count = count_sequences(prefix)
        for part, bounds in zip(_PARTS, matrix, strict=True):
            if bounds is not None and round(bounds[1] * count) <= round(bounds[0] * count):
                raise ConfigError(
                    f"dataset.split={cfg.dataset.split} leaves the {part} part without one of the {count} documents "
                    f"of {prefix}, and Megatron would wait for it forever. Give it a larger share, or none: "
                    'dataset.split="100,0,0" with validation.eval_iters=0.'
                )


def _prefixes(dataset: GPTDatasetConfig) -> list[str]:
    """The corpora of a blend whose parts come from `split`."""
    if dataset.blend is not None:
        return list(dataset.blend[0])
    paths = getattr(dataset, "data_path", None) or []
    paths = paths.split() if isinstance(paths, str) else list(paths)
    blend = get_blend_from_list([str(path) for path in paths]) if paths else None
    return list(blend[0]) if blend else []
