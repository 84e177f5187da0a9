# SPDX-License-Identifier: Apache-2.0
"""Stages are made once per settings, and never over something else's folder."""

from pathlib import Path

import pytest

from megatron_kd.demo.stages import ForeignFolder, Stages


class Counter:
    """A stage's work that counts how often it was done, and can be told to fail half-way."""

    def __init__(self):
        self.made = 0
        self.found: list[list[str]] = []
        self.fails = False

    def __call__(self, folder: Path) -> dict[str, int]:
        self.found.append(sorted(path.name for path in folder.iterdir() if not path.name.endswith("stage.json")))
        (folder / "half").write_text("x")
        if self.fails:
            raise KeyboardInterrupt
        self.made += 1
        return {"made": self.made}


def run(run_dir: Path, work: Counter, size: int, *, after=(), stages: Stages | None = None, **kwargs):
    stages = stages or Stages(run_dir, total=2)
    return stages.run(
        "one", "One", "text", work, settings={"size": size}, after=after, tell=lambda found: str(found), **kwargs
    )


def test_the_same_settings_reuse_and_say_so(tmp_path: Path, capsys):
    work = Counter()
    assert not run(tmp_path, work, 1).reused
    again = run(tmp_path, work, 1)
    assert again.reused and again.result == {"made": 1}
    assert "Reused" in capsys.readouterr().out


def test_other_settings_make_the_stage_anew_in_an_empty_folder(tmp_path: Path):
    work = Counter()
    run(tmp_path, work, 1)
    assert run(tmp_path, work, 2).result == {"made": 2}
    assert work.found == [[], []]


def test_a_change_upstream_reaches_every_stage_after_it(tmp_path: Path):
    work = Counter()
    for size in (1, 2):
        stages = Stages(tmp_path, total=2)
        first = stages.run("zero", "Zero", "text", Counter(), settings={"size": size}, tell=str)
        run(tmp_path, work, 7, after=[first], stages=stages)
    assert work.made == 2


@pytest.mark.parametrize(("continues", "found"), [(False, [[], []]), (True, [[], ["half"]])])
def test_an_interrupted_stage_starts_over_or_goes_on(tmp_path: Path, continues: bool, found: list):
    work = Counter()
    work.fails = True
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, work, 1, continues=continues)
    work.fails = False
    assert not run(tmp_path, work, 1, continues=continues).reused
    assert work.found == found


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "thesis.tex").write_text("x")
    with pytest.raises(ForeignFolder, match="--run-dir"):
        run(tmp_path, Counter(), 1)
    assert (tmp_path / "one" / "thesis.tex").exists()
