# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers of odd lengths, and chats, as Bridge feeds them; a cache whose rows tell what they follow.

So a test can tell which row a position ought to meet from the tokens before it, which the batch's own `position_ids`
count, whatever the packing. All functions but the first run inside CPU ranks.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.bridge.corpora import TEACHER, VOCABULARY, made_up_rows
from tests.dryrun.tiny import Recorder, tiny_gpt_oss, write_tiny_gpt_oss

SEQ_LENGTH = 64
PACK = 96
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] == 'user' and 'w3 ' or 'w4 ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} w1 w5 {% endgeneration %}"
    "{% else %}{{ message['content'] }} w1 {% endif %}{% endfor %}"
)
ANSWERS = (1, 7, 23, 0, 2, 13, 5, 3, 1, 18, 4, 9, 33, 6, 11)
"""Words of the answers: one has none, some one."""
TOO_LONG = 61
"""Words of one more answer, which has to be cut, in the data `long` and `chats`."""


def words(generator: np.random.Generator, count: int) -> str:
    """Text of `count` tokens, none of which begins as a special one does."""
    return " ".join(f"w{i}" for i in generator.integers(200, 500, count))


def write_data(root: Path, seed: int = 0) -> None:
    """The student's folder; prompts with answers in `pairs` and `long`, chats in `chats`, each for two splits."""
    from transformers import AutoTokenizer

    write_tiny_gpt_oss(root / "student", num_hidden_layers=6)  # for two stages, and for three
    tokenizer = AutoTokenizer.from_pretrained(root / "student")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "student")
    generator = np.random.default_rng(seed)
    for split, answers in (("training", ANSWERS), ("validation", ANSWERS[:4])):
        pairs, chats = [], []
        for length in (*answers, TOO_LONG):
            pairs.append(
                {"input": words(generator, int(generator.integers(1, 20))), "output": words(generator, length)}
            )
            chat = [("user", 5), ("assistant", length), ("user", 1), ("assistant", 2)]
            chats.append({"messages": [{"role": role, "content": words(generator, count)} for role, count in chat]})
        for name, lines in (("pairs", pairs[:-1]), ("long", pairs), ("chats", chats)):
            path = root / name / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[1]]))  # one stands there twice


def sft_config(
    root: Path, data: str, *, packing: str | None = None, kd: dict[str, Any] | None = None, cp: int = 1, **kwargs: Any
) -> Any:
    """A run on `pairs`, `long` or `chats`; `packing` is None, `offline` or `in_batch`."""
    from megatron.bridge.data.builders import DirectHFSFTDatasetConfig, GPTSFTDatasetConfig
    from megatron.bridge.data.packing import PackedSequenceSpecs
    from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig, PromptCompletionSFTPreprocessingConfig
    from megatron.bridge.data.sources.hf import HFDatasetSourceConfig

    from megatron_kd.bridge.config import KDConfig, KDConfigContainer

    settings = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith("dataset__")}
    per_token = {"model__calculate_per_token_loss": True, "ddp__average_in_collective": False}
    cfg = tiny_gpt_oss(root / "student", cp=cp, seq_length=SEQ_LENGTH, **per_token | kwargs)
    pairs = PromptCompletionSFTPreprocessingConfig(prompt_column="input", completion_column="output", separator=" ")
    common = {
        "seq_length": SEQ_LENGTH,
        "preprocessing": ChatSFTPreprocessingConfig() if data == "chats" else pairs,
        "num_workers": 0,
        "pin_memory": False,
        "do_test": False,
    }
    if packing == "in_batch":

        def source(split: str) -> HFDatasetSourceConfig:
            return HFDatasetSourceConfig(
                path_or_dataset="json",
                split="train",
                load_kwargs={"data_files": str(root / data / f"{split}.jsonl"), "cache_dir": str(root / "hf")},
            )

        cfg.dataset = DirectHFSFTDatasetConfig(
            source=source("training"),
            validation_source=source("validation"),
            enable_in_batch_packing=True,
            dataloader_type="single",
            **common,
        )
    else:
        cfg.dataset = GPTSFTDatasetConfig(dataset_root=str(root / data), **common)
    if packing == "offline":
        cfg.dataset.enable_offline_packing = True
        cfg.dataset.offline_packing_specs = PackedSequenceSpecs(
            packed_sequence_size=PACK, pad_seq_to_mult=2 * cp if cp > 1 else 1
        )
    for key, value in settings.items():
        setattr(cfg.dataset, key.removeprefix("dataset__"), value)
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(root / "student")
    return KDConfigContainer.wrap(cfg, None if kd is None else KDConfig(**kd))


def prefix_numbers(tokens: np.ndarray) -> np.ndarray:
    """A number for each position of a sequence that depends on the tokens up to it alone, int64 [n]."""
    tokens = np.ascontiguousarray(tokens, "<i8")
    return np.array([xxhash.xxh32_intdigest(tokens[: end + 1]) % 100_000 for end in range(len(tokens))], np.int64)


def build_sft_cache(path: Path, units: Any, *, top_k: int = 20, **settings: Any) -> Path:
    """A sealed cache of examples whose rows depend on the tokens up to them; with rows only where loss is carried."""
    from megatron_kd.cache import CacheWriter, make_manifest
    from megatron_kd.cache.examples import encode, publish_table

    settings = {"vocab_real": VOCABULARY + 1, "vocab_padded": 512, "tile_tokens": 100} | settings
    manifest, tiles = make_manifest(units, teacher=TEACHER, top_k=top_k, values="f32", **settings)
    writer = CacheWriter(path, manifest, tiles)
    publish_table(writer.store, encode(units.table))
    for tile in writer.todo():
        span = range(writer.tiles[tile][1], writer.tiles[tile + 1][1])
        tokens, stored = (np.concatenate([part(unit) for unit in span]) for part in (units.tokens, units.stored))
        rows = made_up_rows(np.concatenate([prefix_numbers(units.tokens(unit)) for unit in span]), top_k)
        rows["logprobs"] = np.where(stored[:, None], rows["logprobs"], -np.inf)
        writer.write_tile(tile, {"tokens": tokens, "stored": stored, **rows})
    writer.seal()
    return path


def make_caches(root: Path) -> dict[str, int]:
    """Caches of the data as an unpacked run sees it, `pairs-cache` and so on; how many examples they hold."""
    from megatron_kd.bridge.sft import example_units
    from megatron_kd.bridge.train import run_tokenizer

    write_data(root)
    found = {}
    for data in ("pairs", "long", "chats"):
        cfg = sft_config(root, data)
        tokenizer = run_tokenizer(cfg)
        units = example_units(cfg, tokenizer, progress=False)
        build_sft_cache(root / f"{data}-cache", units, tokenizer=tokenizer)
        found[data] = len(units.lengths)
    return found


def check_batches(root: Path, data: str, packing: str | None) -> dict[str, int]:
    """Rows of all training batches against those that the tokens before each position say."""
    import torch
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.cache import CacheReader

    cfg = sft_config(root, data, packing=packing, micro_batch=2 if packing == "in_batch" else 1)
    cfg.dataset.finalize()
    provider = get_dataset_provider(cfg.dataset)
    lines = len((root / data / "training.jsonl").read_text().splitlines())
    datasets = provider([lines, 5, 0], cfg.dataset, tokenizer=build_tokenizer(cfg.tokenizer))
    reader = CacheReader(root / f"{data}-cache")
    feed = CacheFeed([reader], top_k=None, temperature=1.0, tokenizer=None, read_ahead=0)
    feed.bind(list(datasets))
    dataset, counts = datasets[0], {"rows": 0, "packed": 0, "longest": 0}
    for first in range(0, len(dataset), 3):
        batch = dataset.collate_fn([dataset[i] for i in range(first, min(first + 3, len(dataset)))])
        found = feed.take(batch)
        for b in range(batch["tokens"].shape[0]):
            tokens, mask, place = (batch[name][b].numpy() for name in ("tokens", "loss_mask", "position_ids"))
            assert np.array_equal(found.token_weight[:, b].numpy(), mask)
            for at in np.flatnonzero(mask):
                start = at - place[at]
                want = made_up_rows(prefix_numbers(tokens[start : at + 1])[-1:], 20)
                assert np.array_equal(found.teacher.ids[at, b].numpy(), want["ids"][0])
                torch.testing.assert_close(
                    found.teacher.logprobs[at, b], torch.from_numpy(want["logprobs"][0]).float()
                )
                counts["rows"] += 1
            counts["packed"] += 1
            counts["longest"] = max(counts["longest"], int(place[mask.astype(bool)].max(initial=0)) + 1)
    return counts


def check_all_batches(root: Path) -> dict[tuple[str, str | None], dict[str, int]]:
    """`check_batches` of all data and packings."""
    return {
        (data, packing): check_batches(root, data, packing)
        for data in ("pairs", "long", "chats")
        for packing in (None, "offline", "in_batch")
    }


def count_items(root: Path, data: str, **kwargs: Any) -> int:
    """Items of the training data, packed rows where it is packed offline."""
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    cfg = sft_config(root, data, **kwargs)
    cfg.dataset.finalize()
    provider = get_dataset_provider(cfg.dataset)
    return len(provider([1, 1, 0], cfg.dataset, tokenizer=build_tokenizer(cfg.tokenizer))[0])


def distil_evaluated(root: Path, *, kd: bool = True, **kwargs: Any) -> dict[str, float]:
    """Validation losses by name over all of it, after one step that changes nothing (learning rate 0)."""
    from megatron.bridge.training.callbacks import Callback

    from megatron_kd.bridge.train import train

    found = {}

    class Evaluation(Callback):
        def on_eval_end(self, context: Any) -> None:
            found.update({name: float(value) for name, value in context.total_loss_dict.items()})

    cfg = sft_config(
        *(root, "pairs"),
        kd={"cache": str(root / "pairs-cache"), "ce_weight": 0.5} if kd else None,
        steps=1,
        optimizer__lr=0.0,
        optimizer__min_lr=0.0,
        validation__eval_interval=1,
        validation__eval_iters=1,
        **kwargs,
    )
    train(cfg, callbacks=[Evaluation()])
    return found


def distil_sft(
    root: Path, data: str, *, cache: str | None = None, kill_after: int | None = None, **kwargs: Any
) -> list[dict[str, float]]:
    """Train on fine-tuning data; losses by name (last stage) and the gradient norm of each step."""
    from megatron_kd.bridge.train import train
    from tests.bridge.loop import killer

    recorder = Recorder()
    cfg = sft_config(root, data, kd={"cache": str(root / (cache or f"{data}-cache")), "ce_weight": 0.5}, **kwargs)
    train(cfg, callbacks=[recorder, *([killer(kill_after)] if kill_after else [])])
    return recorder.steps
