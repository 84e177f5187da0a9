# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile: linted, pinned, unprivileged; and its installation steps, run in a clean environment.

No container engine takes part: the base image, its Python and its GPU libraries are not tried here.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "Dockerfile").read_text()


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)", TEXT.replace("\\\n", " "), re.M)


def test_hadolint_has_no_complaint():
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_it_is_pinned_unprivileged_and_watched_by_the_doctor():
    assert re.fullmatch(r"nvcr\.io/nvidia/nemo:\d\d\.\d\d(\.\d\d)?", *instructions("FROM"))
    assert instructions("USER") == ["10001"] and TEXT.index("USER") > TEXT.rindex("RUN")
    assert '"megatron-kd", "doctor"' in instructions("HEALTHCHECK")[0]
    assert "org.opencontainers.image.revision" in instructions("LABEL")[0]
    assert all("--no-deps" in run for run in instructions("RUN"))  # the image's torch and Megatron stay
    assert not re.search("TOKEN|API_KEY|SECRET", TEXT)


def test_small_libraries_have_the_tested_versions():
    tested = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    lines = (ROOT / "requirements" / "container.txt").read_text().splitlines()
    assert lines and set(lines) <= set(tested)


def test_its_installation_steps_work_in_a_clean_environment(tmp_path: Path):
    """A new environment that sees this one's libraries, as the image's sees its own, and what is copied alone."""
    environment, home = tmp_path / "environment", tmp_path / "opt"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    libraries = next(environment.glob("lib/python3*/site-packages"))
    (libraries / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for copied in instructions("COPY"):
        *sources, target = copied.split()
        for source in sources:
            to = home / target if target != "./" else home / Path(source).name
            to = to / Path(source).name if target.endswith("/") and target != "./" else to
            to.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, to)
    path = f"{environment}/bin:/usr/bin:/bin"
    for run in instructions("RUN"):
        command = re.sub(r"&& useradd[^&]*", "", run)
        done = subprocess.run(["bash", "-c", command], cwd=home, env={"PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert "all that is needed is here" in done.stdout
    where = [environment / "bin" / "python", "-c", "import megatron_kd; print(megatron_kd.__file__)"]
    assert str(home) in subprocess.run(where, cwd=tmp_path, capture_output=True, text=True).stdout
