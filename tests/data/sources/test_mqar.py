"""Multi-query associative recall, as rows of training have it."""

from pathlib import Path

import pytest

from lm.data.batches import Batches
from lm.data.kinds import BytesConfig, MQARConfig, SFTConfig
from lm.data.order import spread
from lm.errors import ConfigError
from lm.nn.batch import IGNORED


def told(tmp_path: Path, **options: int) -> Batches:
    cfg = MQARConfig(n_pairs=5, n_queries=9, n_records=400, val_frac=0.2, seq_len=28, packing="none", cache_dir=str(tmp_path), **options)
    return Batches(cfg, SFTConfig(), BytesConfig(), log=lambda line: None)


def test_each_answer_and_nothing_else_is_learned_and_is_the_value_of_its_key(tmp_path: Path) -> None:
    data = told(tmp_path)
    batch = data.train.batch(spread(len(data.train), 50))
    assert batch.labels is not None
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        text = data.tokenizer.decode(tokens)  # without bos
        value = dict(zip(text[:10:2], text[1:10:2], strict=True))
        assert len(value) == 5
        places = [i for i, label in enumerate(labels) if label != IGNORED]
        assert places == list(range(11, 28, 2))  # bos and 10 tokens of pairs before the first key that is asked for
        assert [chr(labels[i]) for i in places] == [value[chr(tokens[i])] for i in places]


def test_rows_are_a_function_of_seed_and_number_and_held_out_ones_are_in_no_training(tmp_path: Path) -> None:
    def texts(**options: int) -> list[str]:
        source = MQARConfig(n_pairs=3, n_queries=2, n_keys=4, n_values=2, **options).open(tmp_path)
        return [f"{found.split} {''.join(found.chunks)}" for found in source.documents()]

    assert texts(n_records=40) == texts(n_records=60)[:40] != texts(n_records=40, record_seed=1)
    parts: dict[str, set[str]] = {"train": set(), "val": set()}
    for line in texts(n_records=3000):  # of 24 x 8 x 9 that there are: many come twice
        split, text = line.split()
        parts[split].add(text)
    assert all(parts.values()) and not parts["train"] & parts["val"]


def test_more_pairs_than_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_pairs=9 differ in their keys, of which there are 8"):
        MQARConfig(n_pairs=9, n_keys=8)
