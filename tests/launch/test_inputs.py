# SPDX-License-Identifier: Apache-2.0
"""What a run reads is looked at before Megatron is loaded: is it there, and does it serve what is asked of it?"""

import pytest

from megatron_kd.errors import UserError
from megatron_kd.launch.node import check_inputs
from tests.cache.conftest import build, random_documents, write_corpus

OURS = "smollm2_135m_pretrain_3cpu_fp32_kd_config"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus of five documents and its cache of three entries a row, without a temperature."""
    root = tmp_path_factory.mktemp("inputs")
    build(root / "cache", write_corpus(root / "corpus", random_documents(1, count=5)), top_k=3)
    return root


def tree_of(root, **sections) -> dict:
    tree = {"recipe": OURS, "kd": {"cache": f"{root}/cache"}}
    tree["dataset"] = {"data_path": f"{root}/corpus", "split": "100,0,0"}
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def test_what_is_there_is_taken(place, tmp_path):
    rows = check_inputs(tree_of(place))
    assert rows == check_inputs(tree_of(place, kd={"top_k": 3, "temperature": 1})) > 0
    assert check_inputs(tree_of(place, dataset={"data_path": ["0.3", f"{place}/corpus"]})) == rows
    assert check_inputs(tree_of(place, kd={"top_k": 99, "cache_weights": [1.0]})) == rows  # a mixture has its own K
    checkpoint = {"load": f"{tmp_path}/none-yet", "save": f"{tmp_path}/none-yet"}
    assert check_inputs(tree_of(place, checkpoint=checkpoint)) == rows
    assert check_inputs({"recipe": OURS}) == 0


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"kd": {"cache": "/no/cache"}}, ["/no/cache", "not a teacher cache"]),
        ({"kd": {"top_k": 4}}, ["top_k=4", "stores 3 entries a row"]),
        ({"kd": {"temperature": 2.0}}, ["temperature 2.0", "serves [1.0]"]),
        ({"kd": {"cache": None, "teacher": "/no/teacher"}}, ["kd.teacher /no/teacher holds no config.json"]),
        ({"dataset": {"data_path": "/no/corpus"}}, ["/no/corpus.idx does not exist"]),
        ({"dataset": {"data_path": None}}, ["dataset.data_path is not set", "belongs to a corpus"]),
        ({"dataset": {"split": "9999,8,2"}}, ["leaves the validation part without one of the 5 documents"]),
        ({"checkpoint": {"load": "/no/ckpt"}}, ["checkpoint.load=/no/ckpt is a path that does not exist"]),
        ({"checkpoint": {"pretrained_checkpoint": "/no/ckpt"}}, ["checkpoint.pretrained_checkpoint=/no/ckpt"]),
    ],
    ids=str,
)
def test_what_is_not_there_or_does_not_serve_is_named(place, sections, parts):
    with pytest.raises(UserError) as refused:
        check_inputs(tree_of(place, **sections))
    for part in parts:
        assert part in str(refused.value)
