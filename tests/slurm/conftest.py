# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()
