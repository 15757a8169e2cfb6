"""The table of features in the README is what cuDNN answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn_mha import config, devices, features, runtime
from tests.support import BACKWARD, attention

README = (Path(__file__).parent.parent / "README.md").read_text()
TABLE = README.partition("<!-- `python -m cudnn_mha.features` -->\n\n")[2].partition(
    "\n\n<!-- end"
)[0]
MADE_FOR = re.findall(r"^With cuDNN (\d\S*), ", TABLE)
HERE = config.version_text(runtime.cudnn_version())


@pytest.mark.skipif(
    MADE_FOR != [HERE], reason=f"the table was made for cuDNN {MADE_FOR}, here is {HERE}"
)
def test_the_readme_has_the_table() -> None:
    assert features.table() == TABLE


def test_the_readme_has_a_table_for_one_version() -> None:
    (version,) = MADE_FOR
    assert re.fullmatch(r"9\.\d+\.\d+", version)
    rows = [line.strip("| ").split(" | ") for line in TABLE.splitlines()[2:]]
    assert [re.sub(r"`(.*)` \(sm_\d+\)", r"\1", cell) for cell in rows[0][1:]] == [*features.GPUS]
    assert len(rows) > 15
    assert {cell for row in rows[2:] for cell in row[1:]} == {"yes", "forward", "no"}


@pytest.mark.parametrize(
    ("dims", "gpu", "cell"),
    [
        ((64, 64), "a10", "yes"),
        ((256, 256), "a10", "forward"),
        ((60, 60), "h200", "no"),
    ],
)
def test_cells(dims: tuple[int, int], gpu: str, cell: str) -> None:
    specs = [attention(dims=dims), attention(BACKWARD, dims=dims)]
    assert features._cell(specs, devices.described(gpu)) == cell
    assert features._cell(specs[:1], devices.described(gpu)) == (
        "no" if cell == "no" else "forward"
    )
