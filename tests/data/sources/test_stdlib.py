from pathlib import Path

import pytest

from lm.data.kinds import StdlibConfig
from lm.data.sources.stdlib import StdlibSource


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> StdlibSource:
    return StdlibSource(StdlibConfig(), tmp_path_factory.mktemp("cache"))


def test_the_standard_library_is_a_corpus_of_megabytes_without_tests_and_installed_packages(source: StdlibSource) -> None:
    assert source.total is not None and source.total > 5_000_000 and len(source.files) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(source.files)
    folders = {part for name in source.files for part in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}


def test_a_file_is_in_one_split_by_its_path(source: StdlibSource) -> None:
    found = [(document.split, "".join(document.chunks)) for document in source.documents()]
    assert source.position() == source.total
    assert {split for split, _ in found} == {"train", "val"}
    assert len({text for _, text in found}) > 0.97 * len(found)
    frac = sum(len(text) for split, text in found if split == "val") / sum(len(text) for _, text in found)
    assert 0.01 < frac < 0.1


def test_a_larger_validation_part_contains_the_smaller(source: StdlibSource, tmp_path: Path) -> None:
    larger = StdlibSource(StdlibConfig(val_frac=0.2), tmp_path)
    small, large = ({d.key for d in each.documents() if d.split == "val"} for each in (source, larger))
    assert small < large
