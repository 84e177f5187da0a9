# SPDX-License-Identifier: Apache-2.0
"""What teacher rows the data loaders of a run meet, and what they ought to meet; all runs inside a CPU rank."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.bridge.corpora import LETTERS, build_cache, made_up_rows, pair_sequence, write_pair_corpus
from tests.bridge.loop import distil_config


def built(
    hf: Path, blend: list[str], index_cache: Path, *, samples: int = 40, extra_token: bool = True, **kwargs: Any
) -> Any:
    """The keyed training dataset of a run of ``samples`` samples."""
    from megatron_kd.bridge.dataset import KeyedDataset, build_datasets

    cfg = distil_config(
        hf, blend[-1], index_cache, kd=None, load_weights=False, steps=1, global_batch=samples, **kwargs
    )
    cfg.dataset.data_path = [str(part) for part in blend]
    cfg.dataset.add_extra_token_to_sequence = extra_token
    cfg.validate()
    return KeyedDataset(build_datasets(cfg)[0], 0)


@cache
def places_of_pairs() -> np.ndarray:
    """Axis position of each ordered pair of letters, [letters, letters]."""
    corpus = pair_sequence()
    where = np.full((LETTERS, LETTERS), -1)
    where[corpus[:-1], corpus[1:]] = np.arange(len(corpus) - 1)
    return where


def true_positions(dataset: Any, index: int, length: int) -> list[tuple[int, np.ndarray]]:
    """Axis positions of a `GPTDataset` sample by its tokens: (position in the sample, axis positions) per document.

    Every pair of neighbouring tokens stands once in the corpus, so two tokens of one document say where they are.
    """
    corpus, where = pair_sequence(), places_of_pairs()
    text, _, lengths = dataset._query_document_sample_shuffle_indices(index)
    found, at = [], 0
    for part in lengths:
        part = min(part, length - at)
        if part >= 2:
            start = where[text[at], text[at + 1]]
            assert np.array_equal(corpus[start : start + part], text[at : at + part])
            found.append((at, np.arange(start, start + part)))
        at += part
    return found


def check_coordinates(hf: Path, root: Path) -> int:
    """Coordinates of all samples against what their tokens say: lengths, seeds, epochs, both extra-token settings."""
    from megatron_kd.bridge.dataset import DocumentSpans, coordinates, runs
    from megatron_kd.cache import Corpus

    write_pair_corpus(root / "corpus")
    checked = 0
    for length, seed, samples, extra in (
        (64, 1, 40, True),
        (64, 2, 700, True),
        (128, 1, 300, False),
        (36, 3, 40, False),
    ):
        keyed = built(
            hf, [root / "corpus"], root / "index", samples=samples, seed=seed, seq_length=length, extra_token=extra
        )
        spans = DocumentSpans(keyed.dataset, Corpus(root / "corpus"))
        for index in range(len(keyed)):
            coords = coordinates(spans(index), length)
            assert len(coords) == length and (coords >= 0).all()
            assert np.array_equal(coordinates(runs(coords), length), coords)
            for at, axis in true_positions(keyed.dataset, index, length):
                assert np.array_equal(coords[at : at + len(axis)], axis)
                checked += len(axis)
    return checked


def check_feed(hf: Path, root: Path) -> dict[str, int]:
    """Rows met by each token over seeds, lengths, DP and micro-batch sizes, against the rows of its axis position."""
    import torch
    from megatron.bridge.data.samplers import build_pretraining_data_loader

    from megatron_kd.bridge.teacher_feed import CacheFeed, LookAhead
    from megatron_kd.cache import CacheReader, DocumentUnits

    corpus = write_pair_corpus(root / "corpus")
    reader = CacheReader(build_cache(root / "cache", DocumentUnits(corpus), values="f32"))
    met = [np.full((corpus.n_tokens, *row), np.nan) for row in ((20,), (20,), ())]
    counts = {"rows": 0, "runs": 0}
    for length, seed in ((64, 1), (64, 2), (96, 1), (96, 2)):
        keyed = built(hf, [root / "corpus"], root / "index", samples=200, seed=seed, seq_length=length)
        for data_parallel, micro_batch in ((1, 1), (2, 1), (1, 2), (2, 2)):
            feed = CacheFeed([reader], top_k=None, temperature=1.0, tokenizer=None, read_ahead=2)
            feed.bind([keyed, None, None])
            counts["runs"] += 1
            for rank in range(data_parallel):
                loader = build_pretraining_data_loader(
                    keyed, 0, "single", micro_batch, 0, True, data_parallel_rank=rank,
                    data_parallel_size=data_parallel, global_batch_size=4, pin_memory=False,
                )  # fmt: skip
                for batch in LookAhead(loader, feed):
                    rows = feed.take(batch)
                    for b, (_, index) in enumerate(batch["kd_key"].tolist()):
                        for at, axis in true_positions(keyed.dataset, index, length):
                            want = made_up_rows(axis, 20)
                            part = slice(at, at + len(axis))
                            got = [x[part, b] for x in rows.teacher]
                            assert torch.equal(got[0], torch.from_numpy(want["ids"]).int())
                            torch.testing.assert_close(got[1], torch.from_numpy(want["logprobs"]).float())
                            torch.testing.assert_close(got[2], torch.from_numpy(want["log_tail"]).float())
                            for first_met, row in zip(met, got, strict=True):
                                before = first_met[axis]
                                same = (before == row.numpy()) | np.isnan(before)
                                assert same.all()
                                first_met[axis] = row
                            counts["rows"] += len(axis)
    return counts | {"positions": int((~np.isnan(met[2])).sum())}


def check_context(hf: Path, root: Path) -> dict[str, int]:
    """Which positions see less than the teacher: those that lie further in their document than in the sample."""
    import torch

    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader, DocumentUnits

    corpus = write_pair_corpus(root / "corpus")
    cache = build_cache(root / "cache", DocumentUnits(corpus))
    keyed = built(hf, [root / "corpus"], root / "index", samples=150, seed=1, seq_length=64)
    counts = {"cut": 0, "all": 0}
    for policy in ("any", "exact"):
        feed = CacheFeed(
            [CacheReader(cache)], top_k=None, temperature=1.0, tokenizer=None, read_ahead=0, context=policy
        )
        feed.bind([keyed, None, None])
        feed.partition = lambda batch: np.arange(1, 64, 2)  # as a context-parallel rank has a part of them
        for index in range(len(keyed)):
            item = keyed[index]
            item["loss_mask"][5] = 0
            rows = feed.take({key: value[None] for key, value in item.items() if value is not None})
            expected = np.zeros(64, bool)
            for at, axis in true_positions(keyed.dataset, index, 64):
                starts = corpus.starts[np.searchsorted(corpus.starts, axis, side="right") - 1]
                expected[at : at + len(axis)] = axis - starts > np.arange(at, at + len(axis))
            expected[5] = False
            expected = expected[1::2]
            assert np.array_equal(rows.cut[:, 0].numpy(), expected)
            weight = item["loss_mask"].numpy()[1::2] * ~(expected & (policy == "exact"))
            assert torch.equal(rows.token_weight[:, 0], torch.from_numpy(weight))
            counts["cut"] += int(expected.sum())
            counts["all"] += len(expected)
    return counts


def damage(cache: Path, tiles: list[int]) -> np.ndarray:
    """Change the last byte of these tiles' shards; bool [rows], true for the rows of the blocks that are bad then."""
    from megatron_kd.cache import CacheReader
    from megatron_kd.cache.layout import BLOCK_ROWS

    reader = CacheReader(cache)
    bad = np.zeros(reader.n_rows, bool)
    for tile in tiles:
        first, end = (int(row) for row in reader.tiles[tile : tile + 2, 0])
        shard = cache / "shards" / f"shard-{tile:06d}.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
        bad[first + (end - first - 1) // BLOCK_ROWS * BLOCK_ROWS : end] = True
    return bad


def check_bad_blocks(hf: Path, root: Path) -> dict[str, int]:
    """Under `mask` exactly the positions of bad blocks lose their weight, the others keep their rows."""
    import torch

    from megatron_kd.bridge.bad_blocks import TooManyBadBlocks
    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader, CorruptBlock, DocumentUnits

    corpus = write_pair_corpus(root / "corpus")
    cache = build_cache(root / "cache", DocumentUnits(corpus))
    bad = damage(cache, [0, 1])
    keyed = built(hf, [root / "corpus"], root / "index", samples=200)

    def feed(policy: str, limit: float) -> CacheFeed:
        made = CacheFeed([CacheReader(cache)], top_k=None, temperature=1.0, tokenizer=None, read_ahead=0,
                         bad_blocks=policy, bad_blocks_limit=limit)  # fmt: skip
        made.bind([keyed, None, None])
        return made

    masking, counts = feed("mask", bad.sum() / len(bad)), {"masked": 0, "kept": 0, "refused": 0}
    raising, limited = feed("raise", 1.0), feed("mask", bad.sum() / len(bad) * 0.99)
    for index in range(len(keyed)):
        batch = {name: value[None] for name, value in keyed[index].items() if torch.is_tensor(value)}
        rows = masking.take(batch)
        for at, axis in true_positions(keyed.dataset, index, 64):
            part, hit = slice(at, at + len(axis)), bad[axis]
            assert np.array_equal(rows.masked[part, 0].numpy(), hit)
            assert np.array_equal(rows.token_weight[part, 0].numpy() == 0, hit)
            want = made_up_rows(axis, 20)
            assert np.array_equal(rows.teacher.ids[part, 0][~hit].numpy(), want["ids"][~hit])
            counts["masked"] += int(hit.sum())
            counts["kept"] += int((~hit).sum())
            if hit.any():
                for other, kind in ((raising, CorruptBlock), (limited, TooManyBadBlocks)):
                    try:
                        other.take(batch)
                    except kind:
                        counts["refused"] += 1
    assert masking.bad_blocks.rows == bad.sum()
    return counts


def check_unknown_rows(hf: Path, root: Path) -> dict[str, int]:
    """Rows that an import marked as having no teacher lose their weight, under either policy; the others keep it."""
    import torch

    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader, DocumentUnits

    def rows(at: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
        made, unknown = made_up_rows(at, top_k), at % 7 == 0
        made["logprobs"][unknown], made["log_tail"][unknown] = -np.inf, 0.0
        return made

    cache = build_cache(root / "cache", DocumentUnits(write_pair_corpus(root / "corpus")), rows=rows)
    keyed = built(hf, [root / "corpus"], root / "index", samples=20)
    counts = {"unknown": 0, "known": 0}
    for policy in ("raise", "mask"):
        feed = CacheFeed([CacheReader(cache)], top_k=None, temperature=1.0, tokenizer=None, read_ahead=0,
                         bad_blocks=policy)  # fmt: skip
        feed.bind([keyed, None, None])
        for index in range(len(keyed)):
            batch = {name: value[None] for name, value in keyed[index].items() if torch.is_tensor(value)}
            found = feed.take(batch)
            weight, absent = found.token_weight[:, 0].numpy(), found.absent[:, 0].numpy()
            for at, axis in true_positions(keyed.dataset, index, 64):
                unknown = axis % 7 == 0
                assert np.array_equal(weight[at : at + len(axis)] == 0, unknown)
                assert np.array_equal(absent[at : at + len(axis)], unknown)
                counts["unknown"] += int(unknown.sum())
                counts["known"] += int((~unknown).sum())
    return counts


def check_blend(hf: Path, root: Path) -> dict[str, int]:
    """Two corpora blended: each sample's rows come from the cache of its own corpus."""
    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader, DocumentUnits

    readers = []
    for name, shift in (("a", 0), ("b", 100_000)):
        units = DocumentUnits(write_pair_corpus(root / name, seed=shift))
        readers.append(
            CacheReader(
                build_cache(root / f"cache-{name}", units, rows=lambda at, k, shift=shift: made_up_rows(at + shift, k))
            )
        )
    keyed = built(hf, ["0.3", root / "a", "0.7", root / "b"], root / "index", samples=100)
    feed = CacheFeed(readers[::-1], top_k=None, temperature=1.0, tokenizer=None, read_ahead=0)
    feed.bind([keyed, None, None])
    counts = {"a": 0, "b": 0}
    for index in range(len(keyed)):
        item = keyed[index]
        part = int(item["dataset_id"])
        batch = {name: item[name][None] for name in ("kd_key", "tokens", "loss_mask")}
        ids = feed.take(batch).teacher.ids[:, 0]
        inner = keyed.dataset.datasets[part]
        for at, axis in true_positions(inner, int(keyed.dataset.dataset_sample_index[index]), len(ids)):
            want = made_up_rows(axis + 100_000 * part, 20)["ids"]
            assert np.array_equal(ids[at : at + len(axis)].numpy(), want)
            counts["ab"[part]] += 1
    return counts
