# SPDX-License-Identifier: Apache-2.0
"""Reading YAML and arguments, against OmegaConf's own reader. Needs no Megatron."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_kd.bridge.settings import read_arguments, read_yaml, split_references
from megatron_kd.errors import ConfigError

YAML = """\
optimizer: {lr: 1e-5, min_lr: 1.5e-6, adam_eps: 1E+2}   # three spellings of floats
train:
  train_iters: 100
  manual_gc: true
dataset:
  blend: [[/a/b, c], null]
  split: "99,1,0"
common: &common {x: 1, y: [2, 3]}
more:
  <<: *common
  x: 7
env_vars:
  EMPTY: ""
  TILDE: ~
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_yaml_reads_as_omegaconf_reads_it(tmp_path: Path):
    settings = read_yaml(write(tmp_path, YAML))
    assert settings.tree == OmegaConf.to_container(OmegaConf.load(tmp_path / "run.yaml"))
    assert settings.tree["more"] == {"x": 7, "y": [2, 3]}


def test_every_key_knows_its_line(tmp_path: Path):
    path = write(tmp_path, YAML)
    settings = read_yaml(path)
    lines = YAML.splitlines()
    for key in [("train", "manual_gc"), ("dataset", "split"), ("env_vars",), ("env_vars", "TILDE")]:
        (line,) = [number for number, text in enumerate(lines, start=1) if text.strip().startswith(f"{key[-1]}:")]
        assert settings.source(key) == f"{path}:{line}"
    assert settings.source(("optimizer", "nothing")) == f"{path}:1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  a: 1\n  b: 2\n  a: 3\n", "run.yaml:4: train.a is given twice"),
        ("- train\n", "holds a list"),
        ("train: [1\n", "not valid YAML"),
        ("x: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        read_yaml(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path):
    assert read_yaml(write(tmp_path, "# nothing\n")).tree == {}


def test_arguments_follow_hydras_grammar():
    settings = read_arguments(
        ["a.b=1", "a.c=[1, 2.5, x]", "+a.d={k: v, n: null}", "++e='1,2'", "f=1e-5", "g=null", "h=true", "a.b=7", "i="]
    )
    assert settings.tree == {
        "a": {"b": 7, "c": [1, 2.5, "x"], "d": {"k": "v", "n": None}},
        "e": "1,2",
        "f": 1e-5,
        "g": None,
        "h": True,
        "i": "",
    }
    assert settings.source(("a", "b")) == "argument 'a.b=7'"
    assert settings.source(("a",)).startswith("argument 'a.b=")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("train.train_iters", "not key=value"),
        ("a=[1", "not key=value"),
        ("~a.b", r"write a\.b=null"),
        ("a.b=1,2", r"sweep.*a\.b=\[1,2\]"),
        ("a=range(1,5)", "sweep"),
        ("a/b=c", "config groups"),
        ("a@b=c", "config groups"),
    ],
)
def test_bad_arguments_are_refused(argument: str, expected: str):
    with pytest.raises(ConfigError, match=expected) as refused:
        read_arguments(["fine=1", argument])
    assert argument in str(refused.value)


def test_references_are_parted_from_values():
    tree = {"a": {"b": "${c}", "d": 1}, "e": ["x", "${oc.env:HOME}"], "f": {"_target_": "t", "g": "${c}"}}
    plain, references = split_references(tree)
    assert plain == {"a": {"d": 1}}
    assert references == {("a", "b"): "${c}", ("e",): tree["e"], ("f",): tree["f"]}
