# SPDX-License-Identifier: Apache-2.0
"""Bad input to a run with a teacher cache: a clear error, before or at the first batch, and nothing written half."""

import shutil

import pytest

from megatron_kd.dryrun import RankFailed, run_ranks
from tests.bridge.loop import distil, make_bad_caches


@pytest.fixture(scope="module")
def bad(world, tmp_path_factory):
    """Folders of caches and a tokenizer that do not fit the run, by name."""
    root = tmp_path_factory.mktemp("bad")
    run_ranks(make_bad_caches, 1, args=(world.corpus, root))
    return root


def refused(world, tmp_path, *messages, **kwargs):
    """The run fails with all of ``messages`` in its error, and leaves no checkpoint."""
    kd = {"cache": str(world.cache)} | kwargs.pop("kd", {})
    with pytest.raises(RankFailed) as failure:
        run_ranks(distil, 1, args=world.inputs, kwargs={"kd": kd, "run_dir": tmp_path / "run", "steps": 2, **kwargs})
    for message in messages:
        assert message in str(failure.value)
    assert not list(tmp_path.glob("run/iter_*"))


def test_a_cache_of_another_corpus(world, bad, tmp_path):
    refused(world, tmp_path, "no cache in kd.cache belongs to corpus", str(world.corpus), "megatron-kd cache build",
            kd={"cache": str(bad / "other-corpus")})  # fmt: skip


def test_a_cache_of_another_tokenizer(world, bad, tmp_path):
    refused(world, tmp_path, "IdentityMismatch", "tokenizer.digest", "another digest",
            kd={"cache": str(bad / "other-tokenizer")}, tokenizer=str(bad / "tokenizer"))  # fmt: skip


@pytest.mark.parametrize("name,shift", [("shifted-late", "+1"), ("shifted-early", "-1")])
def test_a_shift_by_one(world, bad, tmp_path, name, shift):
    refused(world, tmp_path, "EchoMismatch", f"shifted by {shift}", "train sample", kd={"cache": str(bad / name)})


def test_a_missing_shard(world, tmp_path):
    broken = shutil.copytree(world.cache, tmp_path / "cache")
    for shard in (broken / "shards").iterdir():
        shard.unlink()
    refused(world, tmp_path, "MissingShard", "shard-00000", "cache build", kd={"cache": str(broken)})


def test_a_flipped_byte(world, tmp_path):
    broken = shutil.copytree(world.cache, tmp_path / "cache")
    for shard in (broken / "shards").iterdir():
        data = bytearray(shard.read_bytes())
        for at in range(2000, len(data), 400):
            data[at] ^= 1
        shard.write_bytes(data)
    refused(world, tmp_path, "CorruptBlock", kd={"cache": str(broken)})


def test_a_part_of_the_corpus_without_a_document(world, tmp_path):
    """Megatron alone would not end."""
    message = "leaves the validation part without one of the 60 documents"
    refused(world, tmp_path, "dataset.split=9999,8,2", message, split="9999,8,2")


def test_more_entries_than_stored(world, tmp_path):
    refused(world, tmp_path, "ServeError", "top_k=21", "stores 20", kd={"top_k": 21})


def test_a_temperature_that_is_not_served(world, tmp_path):
    refused(world, tmp_path, "ServeError", "temperature 2.0", "--temperature 2.0", kd={"temperature": 2.0})


def test_a_vocabulary_larger_than_the_students(world, bad, tmp_path):
    refused(
        world, tmp_path, "model.vocab_size", "at least 600", "found 511", kd={"cache": str(bad / "other-vocabulary")}
    )


def test_a_cache_that_is_not_there(world, tmp_path):
    refused(world, tmp_path, "NotACache", str(tmp_path / "nowhere"), kd={"cache": str(tmp_path / "nowhere")})


def test_a_cache_of_other_samples(world, tmp_path, bad):
    refused(world, tmp_path, "IdentityMismatch", "units.samples_digest", kd={"cache": str(bad / "samples")}, seed=99)
