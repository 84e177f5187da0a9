# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd submit` and `doctor`: what they print, what they refuse, and in which words."""

import json
import os
import shlex
import stat
from pathlib import Path

import pytest

from megatron_kd.cli import main

ROOT = Path(__file__).parent.parent.parent
TWO_NODES = ROOT / "recipes" / "gpt_oss_20b_pretrain_16gpu_h200_bf16_kd_128k.yaml"
CACHE = ROOT / "recipes" / "gpt_oss_120b_cache_8gpu_h200.yaml"
DATA = ["kd.cache=/k", "dataset.data_path=/c"]


def call(*argv: object) -> int:
    try:
        return main([str(word) for word in argv])
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    """A stand-in for sbatch that writes its words and settings down; whoever it is, it sees what Slurm would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f"#!/bin/bash\nprintf '%s\\0' \"$@\" >{tmp_path}/words\nenv -0 >{tmp_path}/env\necho Submitted batch job 7\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_what_is_printed_is_what_is_submitted(sbatch, capsys):
    run_dir = sbatch / "a run"
    asked = [TWO_NODES, "--time", "8:00:00", "--run-dir", run_dir, "--container", "nemo.sqsh", "--mount", "/d:/d"]
    asked += ["--srun=--mpi=pmix", "--sbatch=--qos=high", "--grace", 600, "kd.cache=/a b", "kd.cache_weights=[1,2]"]
    asked += ["dataset.data_path=/c"]
    assert call("submit", *asked, "--print") == 0
    mkdir, command = capsys.readouterr().out.splitlines()
    assert shlex.split(mkdir) == ["mkdir", "-p", f"{run_dir}/logs"] and not run_dir.exists()
    assert call("submit", *asked) == 0
    assert capsys.readouterr().out == f"Submitted batch job 7\nlog: {run_dir}/logs/latest\n"
    words = shlex.split(command)
    at = words.index("sbatch")
    assert words[at + 1 :] == (sbatch / "words").read_text().split("\0")[:-1]
    assert set(words[:at]) < set((sbatch / "env").read_text().split("\0"))
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=B:USR1@600"} <= set(words)
    assert {f"--output={run_dir}/logs/%x_%j.out", "--qos=high", "kd.cache=/a b", "--time=8:00:00"} <= set(words)
    assert "MEGATRON_KD_SRUN_ARGS=--mpi=pmix" in words and str(ROOT / "slurm" / "train.sbatch") in words


def test_a_comparison_goes_to_its_own_script_and_folder(capsys):
    assert call("submit", TWO_NODES, "--compare", "--print", *DATA, "--", "--sweep", "kd.top_k=20,50") == 0
    words = shlex.split(capsys.readouterr().out)
    script = words.index(str(ROOT / "slurm" / "compare.sbatch"))
    run_dir = f"{Path('runs').absolute()}/{TWO_NODES.stem}-compare"
    assert words[script + 1 :] == [
        "--config-file", str(TWO_NODES), "--run-dir", run_dir, "--sweep", "kd.top_k=20,50", *DATA,
    ]  # fmt: skip
    assert call("submit", CACHE, "--compare", "--out", "/k", "--print") == 2
    assert "this recipe builds a cache" in capsys.readouterr().err


def test_a_cache_goes_to_the_caches_script(capsys, tmp_path):
    assert call("submit", CACHE, "--array", "0-7", "--corpus", "/c", "--out", tmp_path / "k", "--print") == 0
    words = shlex.split(capsys.readouterr().out)
    assert str(ROOT / "slurm" / "cache.sbatch") in words and "--array=0-7" in words
    assert words[-6:] == ["--config-file", str(CACHE), "--corpus", "/c", "--out", str(tmp_path / "k")]
    assert f"--output={tmp_path}/k.logs/%x_%j.out" in words


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([TWO_NODES, "--gpus-per-node", 6], ["ranks do not split into TP=2 PP=1 CP=4", "TP*PP*CP = 8", "--nodes"]),
        ([TWO_NODES, "--node", 2], ["unknown option --node.", "Did you mean --nodes"]),
        ([TWO_NODES, "--nodes", "two"], ["argument --nodes: invalid int value: 'two'"]),
        ([TWO_NODES, "--nodes", -1], ["--nodes -1", "expected at least 1"]),
        ([TWO_NODES, "kd.cache"], ["argument 'kd.cache' is not key=value"]),
        ([TWO_NODES, "--mount", "/d:/d", *DATA], ["--mount is for a container; add --container IMAGE"]),
        ([TWO_NODES, "--out", "/d"], ["--out is for a cache"]),
        ([TWO_NODES, "logger.comet_api_key=abc"], ["logger.comet_api_key=... is a secret", "Export"]),
        ([TWO_NODES, "env_vars.HF_TOKEN=abc"], ["env_vars.HF_TOKEN=... is a secret"]),
        ([TWO_NODES, "x=hf_planted_secret"], ["argument 'x' holds the value of HF_TOKEN"]),
        ([CACHE, "--corpus", "/c"], ["a cache needs --out DIR"]),
        ([TWO_NODES, "--nodes", 0], ["--nodes 0", "expected at least 1"]),
        ([TWO_NODES, "--time", "8hours"], ["--time 8hours: expected minutes", "8:00:00"]),
        ([TWO_NODES, "--sbatch", "qos=high"], ["--sbatch=qos=high", "--sbatch=--qos=high"]),
        ([TWO_NODES, "--container", "x", "--mount", "/data"], ["--mount /data: expected HOST:CONTAINER"]),
        ([CACHE, "--out", "/o"], ["a cache needs --corpus PREFIX"]),
        ([CACHE, "--out", "/o", "--corpus", "/c", "--array", "0,1"], ["--array 0,1: expected FROM-TO"]),
        (
            [CACHE, "--out", "/o", "--corpus", "/c", "kd.cache=/x"],
            ["kd.cache=/x is no setting of a teacher", "model."],
        ),
        ([CACHE, "--run-dir", "/r", "--out", "/o"], ["--run-dir is for a run"]),
        (["/no/recipe.yaml"], ["/no/recipe.yaml cannot be read"]),
        ([ROOT / "requirements" / "dev.txt"], ["dev.txt"]),
        ([TWO_NODES, "kd.cache=/k"], ["dataset.data_path is not set", "kd.cache=/k belongs to a corpus"]),
        ([TWO_NODES, *DATA], ["there is no sbatch here", "--print"]),
    ],
    ids=str,
)
def test_mistakes_are_met_before_the_queue(capsys, monkeypatch, tmp_path, argv, parts):
    monkeypatch.setenv("HF_TOKEN", "hf_planted_secret")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call("submit", *argv) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err and "planted" not in err and "abc" not in err
    for part in parts:
        assert part in err


def test_without_the_clone_it_says_where_the_scripts_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_KD_HOME", str(tmp_path))
    assert call("submit", TWO_NODES) == 2
    assert "Export MEGATRON_KD_HOME=/path/to/the/clone" in capsys.readouterr().err


def findings(capsys, *argv: object) -> tuple[int, dict[str, dict[str, str]]]:
    code = call("doctor", "--quick", "--json", *argv)
    report = json.loads(capsys.readouterr().out)
    return code, {finding["name"]: finding for finding in report["findings"]}


def test_the_doctor_says_what_is_missing_and_how_to_get_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_planted_secret")
    code, found = findings(capsys, "--for", "dry-run", "--path", tmp_path)
    assert code == 0 and found["megatron-bridge"]["state"] == found["torch"]["state"] == "ok"
    assert found["tokens set"]["found"] == "HF_TOKEN" and "planted" not in str(found)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi, no sbatch
    code, found = findings(capsys, "--for", "train", "--path", tmp_path / "not" / "there")
    assert code == 1 and found["GPUs"]["state"] == "missing" and "--gpus-per-node" in found["GPUs"]["remedy"]
    assert found["transformer-engine"]["state"] == "missing" and "container" in found["transformer-engine"]["remedy"]
    assert findings(capsys, "--for", "submit")[1]["Slurm"]["state"] == "missing"


NVIDIA_SMI = """\
#!/bin/bash
echo "NVIDIA H200, 143771, 580.82, 345, 1980, 0x0000000000000001"
echo "NVIDIA H200, 143771, 580.82, 1200, 1980, 0x0000000000000004"
"""


def test_the_doctor_reads_gpus_and_their_clocks(capsys, monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    _, found = findings(capsys, "--for", "train")
    assert found["GPUs"]["found"] == "2 x NVIDIA H200, 143771 MiB" and found["driver"]["found"] == "580.82"
    assert found["GPU clocks"]["state"] == "note" and "1 of 2 GPUs throttled" in found["GPU clocks"]["found"]
