# SPDX-License-Identifier: Apache-2.0
"""What a machine lacks for what it is to do, and how to get it.

In: a purpose and a folder. Out: findings, in the order a user would mend them. Each is a fact that was looked up now;
nothing is guessed. Costs a second; with torch and the hub some ten more.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_kd.launch import machine

_GIB = 1 << 30
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY")
_IMAGE = "Use NVIDIA's NeMo container (the Dockerfile here builds on it), which brings it."
_EXTRA = "pip install 'megatron-kd[bridge]', or use NVIDIA's NeMo container."
_NEEDS = {
    "dry-run": ("torch", "megatron-core", "megatron-bridge", "transformers", "hydra-core"),
    "train": ("torch", "megatron-core", "megatron-bridge", "transformers", "hydra-core", "transformer-engine", "apex"),
    "cache": ("torch", "transformers"),
    "submit": (),
}
_UNTHROTTLED = ("0x0000000000000000", "0x0000000000000001")  # running, idle
_MODULES = {"apex": "apex", "transformer-engine": "transformer_engine"}


class Finding(NamedTuple):
    """One thing that was looked at: `ok`, `note` (worth knowing) or `missing` (the purpose needs it)."""

    name: str
    state: str
    found: str
    remedy: str = ""


def default_purpose() -> str:
    """Training where there is a GPU, else its rehearsal."""
    return "train" if machine.gpus() else "dry-run"


def examine(purpose: str, path: Path, *, quick: bool = False) -> list[Finding]:
    """Everything that matters to the purpose.

    Args:
        purpose: train, cache, dry-run or submit.
        path: where runs and caches go.
        quick: leave out what imports torch or asks the network.
    """
    findings = [_python(), *_packages(purpose)]
    if purpose in ("train", "cache"):
        findings += _gpus(purpose)
        findings += [] if quick else [_torch_sees(purpose)]
    findings += [_container(), *_folders(path), _limits(), _clock(path), _slurm(purpose)]
    return [*findings, *([] if quick else [_hub()]), _secrets()]


def _python() -> Finding:
    right = sys.version_info[:2] == (3, 12)
    remedy = "" if right else "Megatron-Bridge needs Python 3.12; make a virtual environment with it."
    return Finding("python", "ok" if right else "missing", platform.python_version(), remedy)


def _packages(purpose: str) -> Iterator[Finding]:
    versions, wanted = machine.versions(), _wanted_versions()
    for name in dict.fromkeys([*_NEEDS[purpose], *versions]):
        if name == "python":
            continue
        found = versions.get(name) or ("present" if importlib.util.find_spec(_MODULES.get(name, "-")) else None)
        optional = name == "apex"
        if found is None:
            remedy = _IMAGE if name in _MODULES else _EXTRA
            remedy += " Only its fused kernels would be missed." if optional else ""
            yield Finding(name, "note" if optional else "missing", "not installed", remedy)
        elif name in wanted and not _satisfies(found, wanted[name]):
            yield Finding(name, "missing", f"{found}, expected {wanted[name]}", f"pip install '{name}{wanted[name]}'")
        else:
            yield Finding(name, "ok", found)


def _wanted_versions() -> dict[str, str]:
    """What our own metadata asks for, by package."""
    wanted = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("megatron-kd") or ():
            if match := re.match(r"([\w-]+)([<>=!~][^;]*)", line):
                wanted[match[1]] = match[2].strip()
    return wanted


def _satisfies(version: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with transformers; where that is absent too, more is missing than a version
        return True
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _gpus(purpose: str) -> Iterator[Finding]:
    gpus = machine.gpus()
    if not gpus:
        remedy = "Ask Slurm for GPUs (--gpus-per-node), and load NVIDIA's driver; in a container pass them in."
        yield Finding("GPUs", "missing" if purpose == "train" else "note", "none, or nvidia-smi is not here", remedy)
        return
    first = gpus[0]
    yield Finding("GPUs", "ok", f"{len(gpus)} x {first['name']}, {first['memory.total']} MiB")
    yield Finding("driver", "ok", first["driver_version"])
    slow = [gpu for gpu in gpus if gpu["clocks_throttle_reasons.active"].lower() not in _UNTHROTTLED]
    clocks = f"{first['clocks.sm']} of {first['clocks.max.sm']} MHz; {len(slow)} of {len(gpus)} GPUs throttled now"
    remedy = "See `nvidia-smi -q -d PERFORMANCE`: power cap, heat, or clocks that somebody set." if slow else ""
    yield Finding("GPU clocks", "note" if slow else "ok", clocks, remedy)
    if len({(gpu["name"], gpu["memory.total"]) for gpu in gpus}) > 1:
        yield Finding("GPUs alike", "note", "GPUs of several kinds", "The slowest sets the pace; choose like ones.")


_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(json.dumps([torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count(), nccl]))
"""


def _torch_sees(purpose: str) -> Finding:
    said = machine.output_of(sys.executable, "-c", _TORCH, timeout_s=120)
    if said is None:
        return Finding("torch on GPU", "missing", "torch cannot be imported", "python -c 'import torch' says why.")
    cuda, available, count, nccl = json.loads(said.splitlines()[-1])
    if available:
        return Finding("torch on GPU", "ok", f"CUDA {cuda}, {count} GPUs, NCCL {'.'.join(map(str, nccl))}")
    remedy = "The driver must support torch's CUDA; see `nvidia-smi` for the newest it does."
    return Finding("torch on GPU", "missing" if purpose == "train" else "note", f"no GPU for CUDA {cuda}", remedy)


def _container() -> Finding:
    found = machine.container()
    return Finding("container", "ok", found or "none: the packages of this environment count")


def _folders(path: Path) -> Iterator[Finding]:
    kind, shared = machine.file_system(path)
    remedy = "" if shared else "For several nodes choose a folder that all of them see."
    writable = os.access(_nearest(path), os.W_OK)
    yield Finding("runs in", "ok" if shared else "note", f"{Path(path).absolute()} on {kind}", remedy)
    if not writable:
        yield Finding("runs writable", "missing", f"{_nearest(path)} is not writable", "Choose another --path.")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, folder, need in (("disk", path, 50), ("hub's copies", home, 50), ("shared memory", Path("/dev/shm"), 1)):
        free = machine.free_bytes(folder) / _GIB
        remedy = f"{name} wants {need} GiB at least: free some, or move it." if free < need else ""
        yield Finding(name, "note" if remedy else "ok", f"{free:,.0f} GiB free at {folder}", remedy)


def _nearest(path: Path) -> Path:
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def _limits() -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= 4096 or files == resource.RLIM_INFINITY
    return Finding("open files", "ok" if enough else "note", f"{files}", "" if enough else "ulimit -n 65536")


def _clock(path: Path) -> Finding:
    """This machine's clock against the file system's, which on a shared one is another machine's."""
    probe = _nearest(path) / f".clock-{os.getpid()}"
    try:
        probe.touch()
        skew = abs(probe.stat().st_mtime - time.time())
        probe.unlink()
    except OSError:
        return Finding("clock", "note", "cannot be compared: the folder is not writable")
    remedy = "Let both follow one NTP server." if skew > 5 else ""
    return Finding("clock", "note" if remedy else "ok", f"{skew:.1f} s from the file system's", remedy)


def _slurm(purpose: str) -> Finding:
    here = shutil.which("sbatch") is not None
    version = machine.output_of("sbatch", "--version") if here else None
    if version is None:
        state, found = "missing" if purpose == "submit" else "note", "sbatch does not answer" if here else "no sbatch"
        return Finding("Slurm", state, found, "Log in to a node of the cluster that submits jobs.")
    pyxis = "--container-image" in (machine.output_of("srun", "--help") or "")
    return Finding("Slurm", "ok", f"{version.strip()}, {'with' if pyxis else 'without'} pyxis for containers")


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return Finding("hub", "note", "HF_HUB_OFFLINE=1: local copies only")
    ask = "import urllib.request as r; from huggingface_hub.constants import ENDPOINT as e; r.urlopen(e, timeout=5)"
    try:
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return Finding("hub", "ok", "can be reached")
    remedy = "Download models where it can be, give their folders, and export HF_HUB_OFFLINE=1."
    return Finding("hub", "note", "cannot be reached", remedy)


def _secrets() -> Finding:
    """By name alone."""
    names = [name for name in _SECRETS if os.environ.get(name)]
    return Finding("tokens set", "ok", ", ".join(names) or "none")
