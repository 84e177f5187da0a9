# SPDX-License-Identifier: Apache-2.0
"""Folders that cannot be written to are met before the work starts, by each command that writes one."""

import pytest

from megatron_kd.cli import main
from megatron_kd.errors import UserError
from megatron_kd.folders import check_can_make, make_folder
from tests.cache.conftest import random_documents, write_corpus

RECIPE = "smollm2_135m_pretrain_3cpu_fp32_kd_config"


def test_what_can_be_made_is_made(tmp_path):
    assert make_folder(tmp_path / "a" / "b", "--out") == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a", "--out")
    check_can_make(tmp_path / "c" / "d", "--out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]


@pytest.mark.parametrize("path", ["/proc/x", "file/below"])
@pytest.mark.parametrize("ask", [make_folder, check_can_make])
def test_what_cannot_is_told(tmp_path, monkeypatch, path, ask):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    from pathlib import Path

    with pytest.raises(UserError, match=f"^--out {path}"):
        ask(Path(path), "--out")


COMMANDS = {
    "train": (["train", "--cpu", "--recipe", RECIPE, "kd=null", "--run-dir"], "--run-dir"),
    "compare": (["compare", "--cpu-ranks", "3", "--recipe", RECIPE, "--run-dir"], "--run-dir"),
    "plan": (["plan", "--recipe", RECIPE, "--out"], "--out"),
    "cache build": (["cache", "build", "--teacher", "TEACHER", "--corpus", "CORPUS", "--out"], "--out"),
    "evaluate": (["evaluate", "a=TEACHER", "--task-folder", "TEACHER", "--out"], "--out"),
    "demo": (["demo", "--quick", "--run-dir"], "--run-dir"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_meets_it_before_it_starts(command, tmp_path, monkeypatch, capsys):
    argv, option = COMMANDS[command]
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "file").touch()
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text("{}")
    corpus = write_corpus(tmp_path / "corpus", random_documents(1, count=5))
    named = {"TEACHER": str(tmp_path / "teacher"), "CORPUS": str(corpus.prefix)}
    words = [named.get(word, word.replace("TEACHER", named["TEACHER"])) for word in argv]
    assert main([*words, str(tmp_path / "file" / "x")]) == 2
    found = capsys.readouterr()
    assert f"megatron-kd: {option} {tmp_path / 'file' / 'x'} cannot be made" in found.err
    assert "Loading" not in found.out
