# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd cache info | verify` on caches made here; `build` is tested with its teacher."""

import argparse
import json

import pytest

from megatron_kd.cache import CacheError, NotACache
from megatron_kd.cache.commands import add_parser
from tests.cache.conftest import build, random_documents, write_corpus


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="megatron-kd")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["cache", *map(str, argv)])
    return args.run(args)


def test_info_tells_what_is_there(cache, capsys):
    assert run("info", cache) == 0
    text = capsys.readouterr().out
    assert "sealed" in text and "top 100 of 200,000 ids" in text and "repo toy" in text and "[1.0, 2.0]" in text
    assert run("info", cache, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    shards = list((cache / "shards").iterdir())
    assert info["committed_tiles"] == info["tiles"]["count"] == len(shards)
    assert info["bytes"] == sum(shard.stat().st_size for shard in shards)


def test_info_of_an_unfinished_cache_says_how_far_it_is(tmp_path, corpus, capsys):
    writer = build(tmp_path / "c", corpus, seal=False)
    writer.commit_path(1).unlink()
    assert run("info", tmp_path / "c") == 0
    text = capsys.readouterr().out
    count = len(writer.tiles) - 1
    assert "not sealed: run the same" in text and f"{count - 1} of {count} tiles" in text
    with pytest.raises(NotACache, match="nowhere"):
        run("info", tmp_path / "nowhere")


def test_verify_exits_with_one_and_prints_each_problem(cache, corpus, capsys):
    assert run("verify", cache, "--no-progress") == 0
    assert run("verify", cache, "--no-progress", "--level", "tokens", "--corpus", corpus.prefix) == 0
    capsys.readouterr()
    for number in (0, 2):
        path = cache / "shards" / f"shard-{number:06d}.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert run("verify", cache, "--no-progress") == 1
    text = capsys.readouterr().out
    assert text.count("problem: ") == 2 and "shard-000000" in text and "shard-000002" in text and "2 problems" in text
    assert run("verify", cache, "--no-progress", "--level", "header") == 0


def test_verify_finds_a_cache_of_another_corpus(tmp_path, cache, capsys):
    other = write_corpus(tmp_path / "other", random_documents(2))
    assert run("verify", cache, "--no-progress", "--level", "tokens", "--corpus", other.prefix) == 1
    assert "corpus.index_digest" in capsys.readouterr().out
    with pytest.raises(CacheError, match="--corpus"):
        run("verify", cache, "--level", "tokens")
    with pytest.raises(CacheError, match="--teacher"):
        run("verify", cache, "--level", "teacher", "--corpus", other.prefix)


@pytest.mark.parametrize("command", ["build", "info", "verify"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(command, "--help")
    assert f"megatron-kd cache {command} " in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--writer", "3/3"], "0 <= I < N"),
        (["--tile-tokens", "0"], "not a positive integer"),
        (["--values", "f8"], "f16"),
        (["--top-k", "many"], "not a positive integer"),
    ],
)
def test_bad_options_are_refused_at_once(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("build", "--teacher", "x", "--corpus", "y", "--out", "z", *argv)
    assert message in capsys.readouterr().err
