# SPDX-License-Identifier: Apache-2.0
"""Options of `megatron-kd cache build`, and those of them that other sub-commands have too.

In: an argparse parser. Out: the same with options. Imports nothing that takes time.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_kd.cache.layout import CODECS, VALUE_DTYPES
from megatron_kd.cache.store import cache_path

CACHE = "cache folder, or msc://PROFILE/PATH on an object store"

EXAMPLES = """\
An interrupted build continues with the same command: only tiles without a commit record are computed.

examples:
  # top 100, serving temperatures 1 and 2
  megatron-kd cache build --teacher ./gpt-oss-20b --dtype bfloat16 --corpus data/train_text_document \\
      --out caches/train --temperature 2

  # a trial on the first 100 documents
  megatron-kd cache build --teacher ./gpt-oss-20b --corpus data/train_text_document --out caches/trial --limit 100

  # GPT-OSS 120B over the GPUs of a node
  srun --ntasks 8 megatron-kd cache build --engine megatron --teacher openai/gpt-oss-120b --dtype bfloat16 \\
      --corpus data/train_text_document --out caches/train \\
      model.tensor_model_parallel_size=8 model.sequence_parallel=true model.expert_model_parallel_size=8

  # prompts and answers, or chats, of a fine-tuning run
  megatron-kd cache build --teacher ./gpt-oss-20b --dtype bfloat16 --sft run.yaml --out caches/chat
  srun megatron-kd train --config-file run.yaml kd.cache=caches/chat

  # the same in vLLM; what it is asked, and why, is told in megatron_kd/teacher/vllm.py
  megatron-kd cache build --engine vllm --teacher openai/gpt-oss-120b --dtype bfloat16 \\
      --corpus data/train_text_document --out caches/train model.tensor_parallel_size=8

  # eight writers under Slurm; the last one to finish seals the cache
  srun --ntasks 8 bash -c 'megatron-kd cache build ... --writer $SLURM_PROCID/$SLURM_NTASKS'
"""


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def device_map(text: str) -> str | dict[str, Any]:
    """A name that accelerate knows, or a JSON object."""
    if text in ("auto", "balanced", "balanced_low_0", "sequential"):
        return text
    try:
        if isinstance(places := json.loads(text), dict):
            return places
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is neither auto, balanced or sequential nor a JSON object")


def share(text: str) -> tuple[int, int]:
    """I/N as (I, N)."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N, for instance 3/8")
    return int(index), int(count)


def add_teacher_options(parser: argparse.ArgumentParser, *, required: bool) -> Any:
    """Options that say which model is the teacher; returns their group."""
    group = parser.add_argument_group("teacher")
    group.add_argument("--teacher", required=required, metavar="MODEL", help="folder, or name on the Hugging Face hub")
    group.add_argument("--gguf-file", metavar="NAME", help="load this GGUF file from the teacher's folder")
    group.add_argument("--revision", help="revision of a hub model")
    group.add_argument("--tokenizer", metavar="MODEL", help="where the corpus's tokenizer is (default: the teacher's)")
    group.add_argument("--vocab-size", type=positive, metavar="N", help="real vocabulary, if there is no tokenizer")
    group.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    group.add_argument("--device", help="default: cuda if there is one")
    group.add_argument(
        "--device-map",
        type=device_map,
        metavar="MAP",
        help="spread the model over this machine's GPUs, as accelerate does it: auto, balanced, sequential, or a JSON "
        "object from modules to places",
    )
    return group


def add_storage_options(group: Any) -> None:
    """How a new cache is encoded and cut."""
    group.add_argument(
        "--values", choices=list(VALUE_DTYPES), default="f16", help="stored log-probabilities (default f16)"
    )
    group.add_argument("--codec", choices=CODECS, default="raw", help="zstd takes two thirds of the space")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="of the K keep no more than hold this mass (default 1)"
    )
    group.add_argument(
        "--tile-tokens", type=positive, default=1 << 20, metavar="N", help="tokens of a shard (default 1048576)"
    )


def add_build(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Options of `cache build`, which `run` runs."""
    parser.add_argument(
        "--config-file",
        type=Path,
        metavar="YAML",
        help="options by name, `top_k: 50`; the command line overrides them. A section `model:` is for --engine "
        "megatron",
    )
    parser.add_argument("--corpus", metavar="PREFIX", help="Megatron indexed dataset, without .bin/.idx")
    parser.add_argument(
        "--sft",
        type=Path,
        metavar="RUN.yaml",
        help="instead of --corpus: the fine-tuning data of the run that this file configures (as for `train "
        "--config-file`), each example as that run will see it",
    )
    parser.add_argument("--out", type=cache_path, metavar="DIR", help=f"{CACHE}; made, or continued")
    group = add_teacher_options(parser, required=False)
    group.add_argument(
        "--engine",
        choices=["transformers", "megatron", "vllm"],
        default="transformers",
        help="one process (default); a Megatron model over all ranks that were started; or vLLM, if it is installed. "
        "The settings of the last two are arguments such as model.tensor_model_parallel_size=8 and "
        "model.tensor_parallel_size=8",
    )
    group.add_argument("--checkpoint", metavar="DIR", help="Megatron checkpoint with the teacher's weights")
    group.add_argument(
        "--cpu-ranks", type=positive, metavar="N", help="run the Megatron teacher on N CPU ranks of this machine"
    )
    group.add_argument(
        "--cpu", action="store_true", help="each rank that was started for the Megatron teacher is a CPU, over gloo"
    )
    group = parser.add_argument_group("what is stored")
    group.add_argument("--top-k", type=positive, default=100, metavar="K", help="entries a token (default 100)")
    group.add_argument(
        "--temperature",
        type=float,
        action="append",
        default=[],
        metavar="T",
        help="serve T besides 1; may be repeated",
    )
    add_storage_options(group)
    group.add_argument("--limit", type=positive, metavar="N", help="only the first N documents")
    group.add_argument(
        "--continues",
        type=cache_path,
        metavar="DIR",
        help="cache of the corpus before it grew: only documents after those are computed; training reads both "
        "(kd.cache=[DIR,OUT])",
    )
    group.add_argument("--window", type=positive, metavar="W", help="read longer documents in windows of W tokens")
    group.add_argument("--stride", type=positive, metavar="S", help="advance windows by S tokens (default W/2)")
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--batch-tokens", type=positive, default=8192, metavar="N", help="tokens of a forward pass (default 8192)"
    )
    group.add_argument("--strip-tokens", type=positive, metavar="N", help="tokens projected to the vocabulary at once")
    group.add_argument(
        "--max-context", type=positive, metavar="N", help="longest document (default: the teacher's context)"
    )
    group.add_argument(
        "--writer", type=share, default=(0, 1), metavar="I/N", help="this is writer I of N (counted from 0)"
    )
    group.add_argument(
        "--accept-teacher-loss",
        action="store_true",
        help="build even if the teacher predicts the corpus no better than chance",
    )
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    group.add_argument(
        "--dry-run", action="store_true", help="load and check the teacher, say how large and how long, write nothing"
    )
    parser.set_defaults(run=run, parser=parser, takes_overrides=True, overrides=[])
