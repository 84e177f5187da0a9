# SPDX-License-Identifier: Apache-2.0
"""Every command in README is run, or is run by a test that is named here; what it names exists.

Commands that need neither a GPU, a cluster nor a real model run as they stand, in a folder where the paths that README
names hold small things. `train` runs its check of a node, `submit` prints. All others are parsed by the real parser,
with their settings, and have a test of their own.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_kd.cli import build_parser, main
from tests.cache.conftest import build, random_documents, write_corpus
from tests.cli.hub_cache import put_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RUN_BY = {
    "demo": "tests/demo/test_demo.py",
    "bench": "tests/loss/test_bench.py",
    "plan": "tests/report/test_plan.py",
    "compare": "tests/compare/test_command.py",
    "export": "tests/bridge/test_export.py::test_the_command_exports_a_runs_folder_and_names_what_is_wrong",
    "evaluate": "tests/evaluate/test_evaluate.py::test_the_table_has_the_accuracy_of_the_models_logits",
    "report": "tests/report",
    "cache build": "tests/teacher/test_build.py",
    "cache build --engine megatron": "tests/bridge/test_teacher.py::test_the_command_reads_a_file_and_overrides_it",
    "cache": "tests/cache/test_commands.py",
    "train --dry-run": "tests/cli/test_cli.py::test_a_dry_run_trains_the_recipe_shrunk",
    "train": "tests/slurm/test_training.py::test_a_run_leaves_everything_in_its_folder",
    "submit": "tests/slurm/test_training.py::test_a_run_leaves_everything_in_its_folder",
    "doctor": "tests/launch/test_submit.py::test_the_doctor_says_what_is_missing_and_how_to_get_it",
    "make demo": "tests/demo/test_demo.py",
    "make test": "tests/test_readme.py",
    "make test-slow": "tests/bridge/test_recipes.py",
    "make test-slurm": "tests/slurm/test_training.py",
}
"""By the command's first words: the test that runs it for real. `make` targets are run by .ci/run."""


def blocks() -> list[tuple[str, str]]:
    """Language and text of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)


def commands() -> list[list[str]]:
    """The words of each command in the blocks that are a shell's; of srun and torchrun, what they start."""
    found = []
    for language, text in blocks():
        joined = text.replace("\\\n", " ")
        if language not in ("", "bash", "sh") or not re.search(r"^(megatron-kd|make|srun|pip|sbatch) ", joined, re.M):
            continue
        for line in joined.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("srun", "torchrun"):
                words = words[words.index("megatron-kd") :]
            found += [words] if words else []
    return found


COMMANDS = commands()
OURS = [words[1:] for words in COMMANDS if words[0] == "megatron-kd"]


def test_every_line_is_a_command_that_is_known_here():
    assert {words[0] for words in COMMANDS} <= {"megatron-kd", "make", "pip", "git", "cd", "sbatch", "docker"}
    assert len(OURS) >= 5 and len(COMMANDS) >= 8


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where README's relative paths, and its absolute ones below this folder, hold a small corpus, cache and model."""
    root = tmp_path_factory.mktemp("readme")
    (root / "recipes").symlink_to(ROOT / "recipes")
    named = {word.partition("=")[2] or word for words in OURS for word in words}
    for word in sorted(named):
        path = root / word.lstrip("/")
        if "corpus" in word or "text_document" in word:
            path.parent.mkdir(parents=True, exist_ok=True)
            corpus = write_corpus(path, random_documents(1, count=2600, longest=4))
        elif word in (value for words in OURS for value in after(words, "--student")):
            path.mkdir(parents=True)
            (path / "config.json").write_text("{}")
    for word in {word.partition("=")[2] for words in OURS for word in words if word.startswith("kd.cache=")}:
        build(root / word.lstrip("/"), corpus, top_k=100)
    put_model(root / "hub", "openai/gpt-oss-120b")
    return root


def after(words: list[str], option: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words[:-1]) if word == option]


def moved(word: str, root: Path) -> str:
    """An absolute path of README below `root`."""
    return re.sub(r"(?<![\w.])/(?=(data|models|images)\b)", f"{root}/", word)


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_is_understood_and_runs(words, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    words = [moved(word, place) for word in words]
    for word in words:
        assert not word.startswith("recipes/") or (ROOT / word).is_file(), word
    args, rest = build_parser().parse_known_args(words)
    assert not rest or args.takes_overrides
    if words[0] == "train":
        (recipe,) = after(words, "--config-file")
        ranks = re.search(r"_(\d+)gpu_", recipe)[1]
        check = [word for word in words if word != "--dry-run"] + ["--check-only", "--cpu", "--world-size", ranks]
        assert main([*check, *([] if "--run-dir" in words else ["--run-dir", "runs/x"])]) == 0
        assert "caches with" in capsys.readouterr().out
    elif words[0] == "submit":
        assert main([words[0], "--print", *words[1:]]) == 0
        assert "sbatch" in capsys.readouterr().out
    elif words[:2] == ["cache", "build"]:
        from megatron_kd.teacher.commands import merged

        args.overrides, args.argv = rest, words
        args, settings = merged(args)
        assert bool(settings) <= (args.engine == "megatron")
    elif words[0] == "doctor":
        assert main(["doctor", "--quick", "--for", "dry-run"]) == 0
    assert_exists(named_test(words))


def named_test(words: list[str]) -> str:
    keys = ["cache build --engine megatron"] if "megatron" in after(words, "--engine") else []
    keys += ["train --dry-run"] if words[0] == "train" and "--dry-run" in words else []
    keys += [" ".join(words[:2]), words[0]]
    return next(RUN_BY[key] for key in keys if key in RUN_BY)


def assert_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists(), test
    assert not name or f"def {name}(" in (ROOT / path).read_text(), test


def test_make_and_pip_name_what_there_is():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), words
            assert_exists(RUN_BY[" ".join(words[:2])])
        elif words[0] == "pip":
            for name in re.findall(r"\[(.*?)\]", words[2]):
                assert set(name.split(",")) <= set(extras), words
        elif words[0] == "sbatch":
            assert any((ROOT / word).is_file() for word in words if word.endswith(".sbatch")), words


def test_commands_and_files_in_the_text_exist():
    """`megatron-kd X`, `cache X` and `make X` in running text, and files that are named with their folder."""
    text = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
    quoted = [re.sub(r"\s+", " ", words) for words in re.findall(r"`([^`]+)`", text)]
    makefile = (ROOT / "Makefile").read_text()
    checked = 0
    for phrase in quoted:
        words = phrase.split()
        if words[0] == "make" and len(words) > 1:
            assert re.search(rf"^{words[1]}:", makefile, re.M), phrase
        elif words[0] in ("megatron-kd", "cache") and len(words) > 1 and words[1].isalpha():
            words = words[1:] if words[0] == "megatron-kd" else words
            command = words[: 2 if words[0] == "cache" and len(words) > 1 else 1]
            with pytest.raises(SystemExit) as stopped:
                main([*command, "--help"])
            assert stopped.value.code == 0, phrase
        elif re.match(r"(megatron_kd|slurm|requirements|recipes|tests)/\S+$", phrase):
            assert (ROOT / phrase).exists(), phrase
        else:
            continue
        checked += 1
    assert checked >= 10


def test_the_layout_is_the_folders():
    (layout,) = [text for _, text in blocks() if text.startswith("megatron_kd/loss")]
    named = [line.split()[0] for line in layout.splitlines()]
    assert all((ROOT / name).is_dir() for name in named)


def test_the_library_example_runs():
    import torch

    from megatron_kd.loss import TopK, fused_linear_divergence

    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 1, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    logprobs = torch.log_softmax(torch.randn(6, 1, 11), -1).topk(3)
    log_tail = torch.log1p(-logprobs.values.exp().sum(-1))
    names = {"hidden": hidden, "weight": weight, "ids": logprobs.indices, "logprobs": logprobs.values}
    names |= {"log_tail": log_tail, "token_weight": torch.ones(6, 1)}
    examples = [text for language, text in blocks() if language == "python"]
    assert examples and TopK and fused_linear_divergence
    for text in examples:
        exec(compile(text, "README.md", "exec"), names)
    assert weight.grad.abs().sum() > 0 and hidden.grad.abs().sum() > 0
