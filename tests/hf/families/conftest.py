"""Which families `make test` tries: those of every sixth file, each test in its first form and every second behind it; `make test-all`
tries all."""

from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before what is marked slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tried = sorted(HERE.glob("test_*.py"))[::6]
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if HERE in item.path.parents and isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            key = item.path, item.originalname
            if item.path not in tried or seen[key] % 2:
                item.add_marker(pytest.mark.slow)
            seen[key] += 1
