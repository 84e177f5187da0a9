# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd cache build | info | verify | repair | copy | import | bench`: arguments, and what is printed.

In: the command line. Out: text and an exit status. Torch and transformers are imported only when a teacher has to run.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_kd.cache import bench, build_options, coverage
from megatron_kd.cache import transfer_commands as transfer
from megatron_kd.cache.build_options import CACHE, add_build, add_teacher_options, positive
from megatron_kd.cache.commits import SEAL, read_commit
from megatron_kd.cache.corpus import Corpus, DocumentUnits, FirstUnits, UnitSource
from megatron_kd.cache.errors import CacheError, printable
from megatron_kd.cache.manifest import Manifest, differences, expect, load_manifest
from megatron_kd.cache.reader import check_seal, load_cache
from megatron_kd.cache.repair import quarantine, repair
from megatron_kd.cache.sets import LaterUnits
from megatron_kd.cache.store import cache_path, open_store
from megatron_kd.cache.verify import LEVELS, verify
from megatron_kd.cache.writer import CacheWriter

_EXAMPLES = {
    "cache": """\
examples:
  megatron-kd cache build --teacher openai/gpt-oss-120b --corpus data/train_text_document --out caches/train
  megatron-kd cache info caches/train
  megatron-kd cache verify caches/train --level checksums
  megatron-kd cache repair caches/train --corpus data/train_text_document --teacher openai/gpt-oss-120b
""",
    "info": """\
examples:
  megatron-kd cache info caches/train
  megatron-kd cache info caches/train --json
  megatron-kd cache info --diff caches/train caches/other
""",
    "verify": """\
levels, each with those before it:
  commits    manifest, tile table, seal, commit records
  header     header and size of every shard
  checksums  every byte of every shard (default)
  tokens     the echoed tokens against the corpus (--corpus)
  teacher    some units computed again (--corpus, --teacher)

examples:
  megatron-kd cache verify caches/train
  megatron-kd cache verify caches/train --level teacher --corpus data/train_text_document --teacher ./gpt-oss-20b
  megatron-kd cache verify caches/train --quarantine

Exit status: 0 if all is well, 1 if problems were found (each is printed).
""",
    "repair": """\
Verifies the cache first (--level), sets aside what is bad, computes those tiles again and seals. Where only records
are bad, neither corpus nor teacher is needed.

examples:
  megatron-kd cache repair caches/train --corpus data/train_text_document --teacher ./gpt-oss-20b --dtype bfloat16

  # after `cache verify --quarantine`: no second look at the tiles that stayed
  megatron-kd cache repair caches/train --level commits --corpus data/train_text_document --teacher ./gpt-oss-20b
""",
}


def add_parser(subparsers: Any) -> None:
    """Register the command `cache` with its sub-commands on an argparse sub-parsers object."""
    cache = _parser(subparsers, "cache", "Build, inspect and check a teacher cache.")
    commands = cache.add_subparsers(metavar="build | info | verify | repair | copy | import | bench", required=True)
    build = _parser(commands, "build", "Run the teacher over a corpus and store its top K with the tail mass.")
    add_build(build, run_build)
    info = _parser(commands, "info", "Show what a cache was built from, its size, and how far it is.")
    info.add_argument("cache", type=cache_path, nargs="?", help=CACHE)
    info.add_argument(
        "--diff", type=cache_path, nargs=2, metavar=("A", "B"), help="show in which fields two caches differ"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    coverage.add_options(info)
    info.set_defaults(run=run_info)
    _add_verify(_parser(commands, "verify", "Check a cache; the level says how deep."))
    _add_repair(_parser(commands, "repair", "Compute the bad tiles of a cache again, and only those."))
    transfer.add_copy(_parser(commands, "copy", "Copy a sealed cache, checking every byte."))
    _add_bench(_parser(commands, "bench", "Measure each codec's size, loss and speed, or a teacher's speed."))
    transfer.add_import(_parser(commands, "import", "Make a cache of what another program computed."))


def _parser(subparsers: Any, name: str, text: str) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        name,
        help=text[0].lower() + text[1:].rstrip("."),
        description=text,
        epilog=(_EXAMPLES | transfer.EXAMPLES | {"bench": bench.EXAMPLES, "build": build_options.EXAMPLES})[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=cache_path, help=CACHE)
    parser.add_argument("--level", choices=LEVELS, default="checksums", help="how deep (default checksums)")
    parser.add_argument("--corpus", metavar="PREFIX", help="Megatron indexed dataset, without .bin/.idx")
    parser.add_argument(
        "--units", type=positive, default=8, metavar="N", help="units computed again at level teacher (default 8)"
    )
    parser.add_argument(
        "--quarantine", action="store_true", help="move bad tiles to quarantine/, so that nothing reads them"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    add_teacher_options(parser, required=False)
    parser.set_defaults(run=run_verify)


def _add_repair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=cache_path, help=CACHE)
    parser.add_argument(
        "--level", choices=LEVELS[:4], default="checksums", help="how deep to verify first (default checksums)"
    )
    parser.add_argument("--corpus", metavar="PREFIX", help="Megatron indexed dataset, without .bin/.idx")
    parser.add_argument(
        "--batch-tokens", type=positive, default=8192, metavar="N", help="tokens of a forward pass (default 8192)"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    add_teacher_options(parser, required=False)
    parser.set_defaults(run=run_repair)


def _teacher_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("gguf_file", "revision", "tokenizer", "vocab_size", "dtype", "device", "device_map")
    return {name: getattr(args, name) for name in names}


def _add_bench(parser: argparse.ArgumentParser) -> None:
    bench.add_bench(parser)
    group = add_teacher_options(parser, required=False)
    group.add_argument("--corpus", metavar="PREFIX", help="Megatron indexed dataset, without .bin/.idx")
    group.add_argument(
        "--batch-tokens", type=positive, default=8192, metavar="N", help="tokens of a forward pass (default 8192)"
    )
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """`cache bench`."""
    if args.teacher is None:
        return bench.run_bench(args)
    from megatron_kd.teacher.bench import run

    found = run(
        args.teacher, args.corpus, args.rows, args.folder, batch_tokens=args.batch_tokens, **_teacher_options(args)
    )
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"bare forward pass {found['forward']:,.0f} tokens/s, cache build {found['build']:,.0f} tokens/s: "
            f"{found['build'] / found['forward']:.2f} of it"
        )
    return 0


def run_build(args: argparse.Namespace) -> int:
    """`cache build`. Returns 130 if interrupted."""
    from megatron_kd.teacher.commands import run_build

    try:
        made = run_build(args)
    except KeyboardInterrupt:
        print("\nStopped. What was committed is kept; the same command continues.")
        if args.out is not None and open_store(args.out).exists("manifest.json"):
            _print_info(describe(args.out))
        return 130
    if made is not None:
        _print_info(describe(made))
    return 0


def run_info(args: argparse.Namespace) -> int:
    """`cache info`. Returns 1 if the two caches of `--diff` differ."""
    if args.diff:
        return _print_diff(*args.diff)
    if args.cache is None:
        raise CacheError("name a cache, or two with --diff A B")
    info = describe(args.cache)
    found = coverage.coverage(args.cache) if args.coverage or args.chart else None
    if args.json:
        print(json.dumps(info | ({"coverage": found} if found else {}), indent=1, sort_keys=True))
    else:
        _print_info(info)
        print(coverage.table(found) if found else "", end="\n" if found else "")
    if args.chart:
        coverage.draw(args.chart, {Path(args.cache).name: found})
    return 0


def _print_diff(a: Path | str, b: Path | str) -> int:
    manifests = [dataclasses.asdict(load_cache(path)[0]) for path in (a, b)]
    wrong = {name: (left, right) for name, left, right in differences(*manifests)}
    wrong |= {name: (left, right) for name, right, left in differences(*manifests[::-1])}
    for name, (left, right) in sorted(wrong.items()):
        print(f"{name}:\n  {printable(repr(left))}  ({a})\n  {printable(repr(right))}  ({b})")
    print(f"{a} and {b}: {len(wrong)} fields differ" if wrong else f"{a} and {b} have the same identity")
    return 1 if wrong else 0


def describe(path: Path | str) -> dict[str, Any]:
    """Everything `cache info` shows: the manifest's fields, state, tiles, rows and bytes.

    Raises:
        CacheError: it is not a cache, or a part of it is damaged.
    """
    store = open_store(path)
    manifest, tiles = load_cache(store)
    digest = manifest.digest()

    def size_of(tile: int) -> tuple[int, int] | None:
        try:
            commit = read_commit(store, tile, digest)
        except FileNotFoundError:
            return None
        return commit["rows"], commit["bytes"]

    sizes = [size for size in store.map(size_of, range(len(tiles) - 1)) if size]
    sealed = store.exists(SEAL) and bool(check_seal(store, manifest))
    rows, size = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    state = {"path": str(store.path), "sealed": sealed, "committed_tiles": len(sizes), "committed_rows": rows}
    return dataclasses.asdict(manifest) | state | {"bytes": size}


def _print_info(info: dict[str, Any]) -> None:
    tiles, rows, size = info["committed_tiles"], info["committed_rows"], info["bytes"]
    state = "sealed" if info["sealed"] else "not sealed: run the same `megatron-kd cache build` again to finish it"
    lines = {
        "cache": f"{info['path']} ({state})",
        "rows": f"{rows:,} of {info['rows']:,} tokens, {tiles:,} of {info['tiles']['count']:,} tiles",
        "size": f"{size / 1e6:,.1f} MB, {size / max(rows, 1):.1f} bytes a token",
        "stored": f"top {info['top_k']} of {info['vocab_real']:,} ids ({info['vocab_padded']:,} with padding), "
        f"{info['values']} values, codec {info['codec']}, "
        + (f"top p {info['top_p']}, " if info["ragged"] else "")
        + f"temperatures {[1.0, *info['temperatures']]}",
    }
    for name in ("teacher", "tokenizer", "corpus", "units", "context"):
        lines[name] = ", ".join(f"{key} {printable(str(value))}" for key, value in info[name].items()) or "unknown"
    for name, text in lines.items():
        print(f"{name + ':':<11}{text}")


def run_verify(args: argparse.Namespace) -> int:
    """`cache verify`. Returns 1 if there are problems."""
    units = recompute = None
    if args.level in ("tokens", "teacher"):
        units = _units_of(args)
    if args.level == "teacher":
        recompute = _recompute(args, units)
    report = verify(
        args.cache, args.level, units=units, recompute=recompute, sample_units=args.units, progress=args.progress
    )
    for problem in report.problems:
        print(f"problem: {problem}")
    verdict = f"{len(report.problems)} problems" if report.problems else "no problem"
    print(f"{args.cache}: {report.tiles:,} tiles, {report.rows:,} rows checked at level {args.level}: {verdict}")
    if args.quarantine and report.problems:
        todo = quarantine(report)
        print(
            f"{args.cache}: {len(todo)} tiles have to be computed again; `megatron-kd cache repair` does that"
            if todo
            else f"{args.cache}: no tile has to be computed again; `megatron-kd cache repair` seals the cache"
        )
    return 1 if report.problems else 0


def run_repair(args: argparse.Namespace) -> int:
    """`cache repair`."""
    units = None if args.corpus is None else _units_of(args)
    compute = _compute(args, units) if units is not None and args.teacher is not None else None
    report, made = repair(args.cache, level=args.level, units=units, compute=compute, progress=args.progress)
    for problem in report.problems:
        print(f"problem: {problem}")
    print(f"{args.cache}: {len(report.problems)} problems, {len(made)} tiles computed again; the cache is sealed")
    return 0


def _units_of(args: argparse.Namespace) -> UnitSource:
    """The cache's units, from --corpus."""
    manifest = load_manifest(args.cache)
    if args.corpus is None:
        raise CacheError(f"level {args.level} compares with the corpus; give its prefix with --corpus")
    if manifest.units["kind"] != "document":
        raise CacheError(
            f"{args.cache} has units of kind {manifest.units['kind']!r}, which only the run that made them can list; "
            "use level checksums here, or megatron_kd.cache.verify.verify(units=...) from Python"
        )
    units = DocumentUnits(Corpus(args.corpus))
    if "continues" in manifest.units:
        units = LaterUnits(units, manifest.units["first"], manifest.units["continues"])
    return FirstUnits(units, manifest.units["limit"]) if "limit" in manifest.units else units


def _recompute(args: argparse.Namespace, units: UnitSource) -> Callable[[int], dict[str, Any]]:
    """A function that computes one unit's rows again with --teacher."""
    if args.teacher is None:
        raise CacheError("level teacher computes some units again; name the model with --teacher")
    from megatron_kd.teacher.passes import unit_rows

    teacher, manifest = _teacher_of(args)
    return lambda unit: unit_rows(teacher, units, unit, manifest)


def _compute(args: argparse.Namespace, units: UnitSource) -> Callable[[CacheWriter, list[int]], None]:
    """A function that computes and commits whole tiles with --teacher; the teacher is loaded when it is called."""
    from tqdm import tqdm

    def compute(writer: CacheWriter, todo: list[int]) -> None:
        from megatron_kd.teacher.passes import teacher_rows

        teacher, manifest = _teacher_of(args)
        for tile in tqdm(todo, unit="tile", desc="repair", disable=not args.progress):
            buffer, span = writer.open_tile(tile), range(*writer.tiles[tile : tile + 2, 1].tolist())
            for row, planes in teacher_rows(teacher, units, span, manifest, batch_tokens=args.batch_tokens):
                buffer.put(row, **planes)
            writer.commit(buffer)

    return compute


def _teacher_of(args: argparse.Namespace) -> tuple[Any, Manifest]:
    """The model that --teacher names, if it is the cache's, and the cache's manifest."""
    from megatron_kd.teacher.huggingface import HuggingFaceTeacher

    manifest = load_manifest(args.cache)
    teacher = HuggingFaceTeacher.load(args.teacher, **_teacher_options(args))
    same = {name: teacher.identity[name] for name in ("weights", "dtype")}
    expect(manifest, args.cache, {"teacher": same, "vocab_real": teacher.vocab_real})
    return teacher, manifest
