# SPDX-License-Identifier: Apache-2.0
import pytest

from megatron_kd.report.table import format_bytes, format_table


def test_columns_are_aligned():
    assert format_table(["name", "KL"], [["a", "1.25"], ["longer", "12.50"]]) == (
        "name       KL\n------  -----\na        1.25\nlonger  12.50"
    )


def test_a_short_row_is_an_error():
    with pytest.raises(ValueError):
        format_table(["a", "b"], [["1"]])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (85.2 * 2**30, "85.2 GiB"),
        (327 * 2**20, "327 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes(count: float, text: str):
    assert format_bytes(count) == text
