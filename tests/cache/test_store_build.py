# SPDX-License-Identifier: Apache-2.0
"""`cache build --out msc://...` with a real teacher: stopped and continued, verified against it, repaired with it."""

import subprocess
import sys

import pytest

from tests.cache.conftest import random_documents, write_corpus
from tests.cache.test_commands import run
from tests.teacher.conftest import VOCAB, save_llama

pytestmark = pytest.mark.slow


def test_the_build_command_on_a_store(server, tmp_path, capsys):
    teacher = save_llama(tmp_path / "llama")
    documents = [document % VOCAB for document in random_documents(3, count=12, longest=120)]
    corpus = write_corpus(tmp_path / "corpus", documents)
    common = ["--teacher", teacher, "--vocab-size", VOCAB, "--corpus", corpus.prefix, "--no-progress"]
    settings = [*common, "--top-k", 7, "--tile-tokens", 200, "--accept-teacher-loss", "--out"]
    place = server.place()
    assert run("build", *settings, tmp_path / "disk") == 0
    shards = {f"shards/{p.name}": p.read_bytes() for p in (tmp_path / "disk" / "shards").iterdir()}
    assert len(shards) > 2
    # a process of its own, ended in the middle by a store that fails for good
    server.faults({"method": "PUT", "path": "shard-000002", "action": "status", "status": 403})
    command = [sys.executable, "-m", "megatron_kd.cli", "cache", "build", *map(str, [*settings, place])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{place} cannot take tile 2 on node" in done.stderr and "run the same" in done.stderr
    server.faults()
    capsys.readouterr()
    assert run("info", place) == 0
    assert f"2 of {len(shards)} tiles" in capsys.readouterr().out
    assert run("build", *settings, place) == 0
    assert f"{place} (sealed)" in capsys.readouterr().out
    put = {line[1].split("/cache/")[1] for line in server.log() if line[0] == "PUT" and "/shards/" in line[1]}
    assert put == set(shards) - {"shards/shard-000000.safetensors", "shards/shard-000001.safetensors"}
    assert {name: server.get(place, name) for name in server.names(place, "shards/")} == shards
    assert run("verify", place, "--level", "teacher", *common) == 0
    bad = shards["shards/shard-000001.safetensors"][:-1] + b"x"
    server.put(place, "shards/shard-000001.safetensors", bad)
    assert run("repair", place, *common) == 0
    assert "1 tiles computed again; the cache is sealed" in capsys.readouterr().out
    assert {name: server.get(place, name) for name in server.names(place, "shards/")} == shards
