# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd cache copy | import`: a cache from elsewhere, or from what another program wrote.

In: the command line. Out: text and an exit status.
"""

import argparse
from pathlib import Path
from typing import Any

from megatron_kd.cache.build_options import add_storage_options, positive
from megatron_kd.cache.copy import copy_cache
from megatron_kd.cache.corpus import Corpus, DocumentUnits, FirstUnits
from megatron_kd.cache.errors import BadSetting, ImportRefused
from megatron_kd.cache.importers import (
    Columns,
    DistillKit,
    IndexedSamples,
    JsonLines,
    MegatronTars,
    Source,
    import_cache,
)
from megatron_kd.cache.store import cache_path

FORMATS = ("jsonl", "distillkit", "columns", "megatron-tar")
EXAMPLES = {
    "copy": """\
examples:
  megatron-kd cache copy /lustre/caches/train /scratch/caches/train

  # from an object store, which is a profile of multi-storage-client's configuration
  megatron-kd cache copy msc://lab/caches/train /scratch/caches/train
""",
    "import": """\
formats:
  jsonl       answers of vLLM (prompt_logprobs) or SGLang (input_top_logprobs), one JSON object a line
  distillkit  a folder of DistillKit's sampler, with compression_config.yaml
  columns     a dataset with columns of tokens, ids and log-probabilities (Parquet)
  megatron-tar  a folder of Megatron-LM's cached logits (version 1). They belong to the samples of one run, not to a
              corpus: instead of --corpus name the index files of its dataset with --samples

Nothing in a source is executed.

Each record goes to the documents of the corpus that have its tokens. What no source has is the mass outside its top K:
it is derived as 1 - sum(p), exact to 1e-6 for fp32 values; less exact values need --accept-derived-tail. Imported
caches serve temperature 1.

examples:
  megatron-kd cache import answers.jsonl --format jsonl --corpus data/train_text_document --out caches/train \\
      --vocab-size 201088 --teacher openai/gpt-oss-120b --engine vllm --engine-version 0.11.0 \\
      --setting enable_prefix_caching=false --setting max_logprobs=100
  megatron-kd cache import logits/ --format megatron-tar --samples index/0b1c...e7-GPTDataset-train --limit 81920 \\
      --out caches/train --vocab-size 128000 --teacher my/teacher --accept-derived-tail
""",
}


def add_copy(parser: argparse.ArgumentParser) -> None:
    """Options of `cache copy`."""
    parser.add_argument("source", type=cache_path, help="a sealed cache: a folder, or msc://PROFILE/PATH")
    parser.add_argument("target", type=cache_path, help="where to; a copy that was begun is finished")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run_copy)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Options of `cache import`."""
    parser.add_argument("source", type=Path, metavar="SRC", help="file or folder that the other program wrote")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what wrote it")
    parser.add_argument("--corpus", metavar="PREFIX", help="Megatron indexed dataset, without .bin/.idx")
    parser.add_argument(
        "--out", required=True, type=cache_path, metavar="DIR", help="cache folder, or msc://PROFILE/PATH"
    )
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="real vocabulary (default: the corpus's)")
    parser.add_argument("--vocab-padded", type=positive, metavar="N", help="rows of the teacher's output projection")
    parser.add_argument("--top-k", type=positive, metavar="K", help="entries a token (default: all of the source)")
    add_storage_options(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents or samples")
    parser.add_argument(
        "--accept-derived-tail", action="store_true", help="take values less exact than fp32; the manifest says so"
    )
    parser.add_argument(
        "--partial", action="store_true", help="go on where documents have no record, or records no document"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    group = parser.add_argument_group("what is known of the teacher, for the manifest")
    group.add_argument("--teacher", required=True, metavar="NAME", help="its repository")
    group.add_argument("--revision", help="its revision")
    group.add_argument("--dtype", help="type it ran in")
    group.add_argument("--engine", help="what ran it")
    group.add_argument("--engine-version", help="version of that")
    group.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine; may be repeated"
    )
    group = parser.add_argument_group("format megatron-tar")
    group.add_argument(
        "--samples",
        metavar="FILES",
        help="index files of the run's dataset, in its path_to_cache: DIR/HASH-GPTDataset-train, or -BlendedDataset-",
    )
    group.add_argument(
        "--no-extra-token", dest="extra_token", action="store_false", help="add_extra_token_to_sequence was false"
    )
    group.add_argument(
        "--pad-token", type=int, metavar="ID", help="the tokenizer's padding id, which Megatron feeds as 0"
    )
    group = parser.add_argument_group("format columns")
    group.add_argument("--tokens-column", default="input_ids", metavar="NAME", help="default input_ids")
    group.add_argument("--ids-column", metavar="NAME", help="lists of ids")
    group.add_argument("--logprobs-column", metavar="NAME", help="lists of log-probabilities")
    group.add_argument("--predicts", choices=["next", "same"], help="row i is about token i + 1 (next) or i (same)")
    parser.set_defaults(run=run_import)


def run_copy(args: argparse.Namespace) -> int:
    """`cache copy`."""
    count = copy_cache(args.source, args.target, progress=args.progress)
    print(f"{args.target}: {count} tiles copied and checked; the cache is sealed")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """`cache import`."""
    needed = "samples" if args.format == "megatron-tar" else "corpus"
    if getattr(args, needed) is None:
        raise BadSetting(f"--{needed} is missing: format {args.format} is imported for the units that it names")
    if args.format == "megatron-tar":
        units: Any = IndexedSamples(args.samples, extra_token=args.extra_token, pad_token=args.pad_token)
    else:
        units = DocumentUnits(Corpus(args.corpus))
    if args.limit is not None:
        units = FirstUnits(units, args.limit)
    tokenizer = units.identity().get("tokenizer")
    vocab = args.vocab_size or (tokenizer or {}).get("vocab_size")
    if vocab is None:
        raise BadSetting(
            f"{args.corpus or args.samples} does not say its tokenizer; state the real vocabulary with --vocab-size"
        )
    result = import_cache(
        _source(args, units),
        units,
        args.out,
        teacher=_teacher(args),
        tokenizer=tokenizer,
        vocab_real=vocab,
        vocab_padded=args.vocab_padded,
        top_k=args.top_k,
        values=args.values,
        codec=args.codec,
        top_p=args.top_p,
        tile_tokens=args.tile_tokens,
        accept_derived_tail=args.accept_derived_tail,
        partial=args.partial,
        progress=args.progress,
    )
    print(
        f"{result.path}: rows for {result.units:,} documents; {result.missing:,} documents without a record, "
        f"{result.foreign:,} records without a document; {result.unknown_rows:,} positions have no teacher and "
        "take no part in the loss; the cache is sealed"
    )
    return 0


def _source(args: argparse.Namespace, units: Any) -> Source:
    if args.format == "megatron-tar":
        return MegatronTars(args.source, units)
    if args.format == "jsonl":
        return JsonLines(args.source)
    if args.format == "distillkit":
        return DistillKit(args.source)
    for name in ("ids_column", "logprobs_column", "predicts"):
        if getattr(args, name) is None:
            raise ImportRefused(f"format columns needs --{name.replace('_', '-')}: a dataset does not say it itself")
    return Columns(
        args.source,
        tokens=args.tokens_column,
        ids=args.ids_column,
        logprobs=args.logprobs_column,
        predicts=args.predicts,
    )


def _teacher(args: argparse.Namespace) -> dict[str, Any]:
    settings = {}
    for text in args.setting:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BadSetting(f"--setting {text!r} is not NAME=VALUE")
        settings[name] = value
    known = {"repo": args.teacher, "revision": args.revision, "weights": None, "dtype": args.dtype}
    return {**known, "engine": args.engine, "version": args.engine_version, "settings": settings}
