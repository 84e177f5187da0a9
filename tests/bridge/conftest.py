# SPDX-License-Identifier: Apache-2.0
"""A folder with a corpus, a cache of it and a tiny student, made once in a preloaded rank."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_kd import dryrun
from tests.bridge import loop


@dataclass(frozen=True)
class World:
    """Paths of what every loop test needs."""

    root: Path

    @property
    def hf(self) -> Path:
        return self.root / "student"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def index_cache(self) -> Path:
        return self.root / "index-cache"

    @property
    def inputs(self) -> tuple[Path, Path, Path]:
        return self.hf, self.corpus, self.index_cache


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    made = World(tmp_path_factory.mktemp("world"))
    dryrun.run_ranks(loop.make_world, 1, args=(made.hf, made.corpus, made.cache))
    return made
