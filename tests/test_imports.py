# SPDX-License-Identifier: Apache-2.0
"""Which package may import which, read from the sources; and that the library parts need no more than they say."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_kd"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What each package may import of ours, and which heavy libraries it may touch at all.
OURS = {
    "errors.py": set(),
    "stages.py": set(),
    "hub.py": {"errors"},
    "folders.py": {"errors"},
    "versions.py": set(),
    "bench_commands.py": {"errors", "loss", "report"},
    "evaluate.py": {"errors", "folders", "hub", "report", "versions"},
    "loss": {"errors", "loss", "bench_commands"},  # the last for `python -m megatron_kd.loss.bench` alone
    "cache": {"errors", "cache"},
    "teacher": {"errors", "folders", "hub", "teacher", "cache", "loss"},
    "bridge": {
        "errors",
        "folders",
        "hub",
        "stages",
        "bridge",
        "cache",
        "loss",
        "teacher",
        "dryrun",
    },  # dryrun: see DRY_RUN
    # Of bridge, how settings are read; of loss, the divergences' names.
    "launch": {"errors", "hub", "versions", "launch", "cache", "bridge", "loss"},
    "dryrun": {"errors", "stages", "dryrun"},
    "report": {"errors", "folders", "report", "cache", "loss"},
}
MEGATRON = {"bridge", "dryrun"}
DRY_RUN = {
    "cli.py",
    "demo",
    "compare",
    "plan_commands.py",
    "dryrun",
    "bridge/commands.py",
    "bridge/export_commands.py",
    "bridge/rehearsal.py",
}
TORCH_ONLY = {"loss"}
NO_DISTRIBUTED = {"cache"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; of a command, which joins packages when it runs, on top."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if path.name == "commands.py" else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_direction(path: Path):
    package, found = package_of(path), imports(path)
    ours = {name.split(".")[1] for name in found if name.startswith("megatron_kd.")} - {"__version__"}
    if package in OURS:
        assert ours <= OURS[package], f"{package} must not import {ours - OURS[package]}"
    if package not in MEGATRON:
        assert not {name for name in found if name == "megatron" or name.startswith("megatron.")}
    if package not in DRY_RUN and str(path.relative_to(PACKAGE)) not in DRY_RUN:
        assert "dryrun" not in ours
    if package in NO_DISTRIBUTED:
        assert not {name for name in found if name.startswith("torch.distributed")}
    if package in TORCH_ONLY:
        outside = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "triton", "megatron_kd"}


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_every_file_names_its_license(path: Path):
    text = path.read_text()
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_registry_is_named(path: Path):
    text = path.read_text()
    for host in (
        "pypi.org",
        "pythonhosted.org",
        "pypi.nvidia.com",
        "nvcr.io",
        "download.pytorch.org",
        "huggingface.co",
    ):
        assert host not in text


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("megatron_kd.loss", {"torch", "triton", "numpy"}),
        ("megatron_kd.cache", {"numpy", "safetensors", "xxhash", "tqdm"}),
    ],
)
def test_library_imports_with_little(module: str, allowed: set[str]):
    """In a fresh interpreter where everything else that this project can use cannot be imported."""
    heavy = {"torch", "triton", "megatron", "transformers", "hydra", "omegaconf", "accelerate", "gguf", "matplotlib"}
    heavy |= {"safetensors", "tqdm", "numpy", "yaml", "datasets", "pyarrow"}
    code = f"""
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(heavy - allowed)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import {module}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
