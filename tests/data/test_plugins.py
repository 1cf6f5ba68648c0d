"""Kinds out of a file that a person names: a source, a tokenizer and an objective, cached, split, mixed and resumed like ours."""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lm import plugins
from lm.data.kinds import BPEConfig, BytesConfig, DataConfig, ObjectiveConfig, RecordConfig, TokenizerConfig
from lm.data.loader import train_loader
from lm.data.rows.build import build_splits
from lm.data.sizes import Sizes
from lm.data.sources.base import document
from lm.data.store.prepare import prepare
from lm.errors import ConfigError
from lm.schema import Slot, from_tree

SOURCE = '''
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lm.data.kinds import ObjectiveConfig, SourceConfig
from lm.data.rows.base import Material, Rows
from lm.data.rows.causal import CausalRows
from lm.data.sources.base import Document, Source, document


class CountingConfig(SourceConfig):
    """Numbers, written out."""

    kind: Literal["counting"] = "counting"
    n: int = 400
    """How many."""

    def open(self, cache: Path) -> Source:
        return Counting(self.identity(), self.n)


class Counting(Source):
    def __init__(self, identity: dict, n: int) -> None:
        super().__init__(identity)
        self.n = n

    def documents(self) -> Iterator[Document]:
        for number in range(self.n):
            yield document([f"WORD {number} "], 0.2)


class BackwardsConfig(ObjectiveConfig):
    """Predict the token before."""

    models = ("decoder",)
    kind: Literal["backwards"] = "backwards"

    def rows(self, of: Material) -> Rows:
        return Backwards(of.store, of.tokenizer, of.data.seq_len, of.data.mask_documents)


class Backwards(CausalRows):
    def batch(self, ids, draw=0):
        found = super().batch(ids, draw)
        found.labels = found.tokens.roll(1, dims=1)
        return found
'''

CTRL_C = """
import os, signal
if os.getpid() != {}:
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Any]:
    """Imports a file of this text, as naming it does; its kinds are forgotten at the end."""
    slots: list[type[Slot]] = [DataConfig, ObjectiveConfig, TokenizerConfig, RecordConfig]
    before = [dict(slot._registry) for slot in slots]

    def load(text: str, name: str = "counting_plugin") -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for slot, kinds in zip(slots, before, strict=True):
        slot._registry.clear()
        slot._registry.update(kinds)


def counting(tmp_path: Path, **options: Any) -> DataConfig:
    return from_tree(DataConfig, {"kind": "counting", "cache_dir": str(tmp_path / "cache"), "seq_len": 32, **options})


def entries(tmp_path: Path, room: str = "tokens") -> int:
    return sum(1 for found in (tmp_path / "cache" / room).iterdir() if found.is_dir())


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=290)])
def test_a_source_of_ones_own_is_split_and_cached_like_ours(plugin: Any, tmp_path: Path, tokenizer: TokenizerConfig) -> None:
    plugin(SOURCE)
    first = prepare(counting(tmp_path), tokenizer, log=lambda line: None)
    again = prepare(counting(tmp_path), tokenizer, log=lambda line: None)
    assert first.fingerprint == again.fingerprint and entries(tmp_path) == 1
    assert first.train.n_documents + first.val.n_documents == 400 and first.val.n_documents > 40
    fewer = prepare(counting(tmp_path, n=300), tokenizer, log=lambda line: None)
    assert fewer.train.n_documents < first.train.n_documents and entries(tmp_path) == 2


@pytest.mark.parametrize("wrong", [None, ["a text"], [None]])
def test_a_source_that_yields_no_documents_is_told(plugin: Any, tmp_path: Path, wrong: Any) -> None:
    """Seen: an internal error, of an attribute that None has not."""
    plugin(SOURCE.replace("for number in range(self.n):", f"return {wrong!r}").replace('yield document([f"WORD {number} "], 0.2)', ""))
    says = r"Counting: documents\(\) has yielded .*document\(\.\.\.\)" if wrong else "0 documents"
    with pytest.raises(ConfigError, match=says):
        prepare(counting(tmp_path), BytesConfig(), log=print)


def test_changed_code_of_a_plugin_is_another_cache_entry_and_a_comment_is_not(plugin: Any, tmp_path: Path) -> None:
    """Seen to fail with the plugin's file left out of the key: the tokens were those of the old code."""
    plugin(SOURCE)
    first = prepare(counting(tmp_path), BPEConfig(vocab_size=290), log=lambda line: None)
    plugin(SOURCE + "\n# a word about it\n")
    assert prepare(counting(tmp_path), BPEConfig(vocab_size=290), log=lambda line: None).fingerprint == first.fingerprint
    assert entries(tmp_path) == entries(tmp_path, "tokenizers") == 1
    plugin(SOURCE.replace("WORD", "other"))
    assert prepare(counting(tmp_path), BPEConfig(vocab_size=290), log=lambda line: None).fingerprint != first.fingerprint
    assert entries(tmp_path) == entries(tmp_path, "tokenizers") == 2


def test_a_source_of_ones_own_is_mixed_with_ours(plugin: Any, tmp_path: Path) -> None:
    plugin(SOURCE)
    (tmp_path / "a.txt").write_text("text " * 2000)
    sources = [
        {"name": "own", "data": {"kind": "counting"}, "weight": 1.0},
        {"name": "ours", "data": {"kind": "text", "files": str(tmp_path / "a.txt")}, "weight": 1.0},
    ]
    cfg = from_tree(DataConfig, {"kind": "mix", "sources": sources, "seq_len": 32, "cache_dir": str(tmp_path / "cache")})
    found = prepare(cfg, BytesConfig(), log=lambda line: None)
    splits = build_splits(from_tree(ObjectiveConfig, {"kind": "causal"}), cfg, found, None, seed=0)
    assert list(splits.named) == ["own", "ours"] and len(splits.train) > 100


def test_an_objective_of_ones_own_makes_its_rows_and_is_refused_where_it_does_not_fit(plugin: Any, tmp_path: Path) -> None:
    plugin(SOURCE)
    objective, data = from_tree(ObjectiveConfig, {"kind": "backwards"}), counting(tmp_path)
    rows = build_splits(objective, data, prepare(data, BytesConfig(), log=lambda line: None), None, seed=0).train
    batch = rows.batch(np.array([0]))
    assert batch.labels is not None and batch.labels[0, 1:].equal(batch.tokens[0, :-1])
    with pytest.raises(ValueError, match=r"objective=backwards trains model.kind=decoder, but model.kind is encoder. .*objective=mlm"):
        objective.require_fit("encoder", data)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_know_the_plugin_and_do_not_run_the_program_again(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As on macOS. Seen to fail with either left out: no module lm_plugins, no file <stdin>; and with KeyboardInterrupt of a Ctrl-C that
    comes while they begin."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv("LM_PLUGINS", "")  # and not as it will be set here, behind the test
    (tmp_path / "backwards.py").write_text(SOURCE + CTRL_C.format(os.getpid()))
    plugins.load([str(tmp_path / "backwards.py")])
    data = counting(tmp_path, n=40)
    prepared = prepare(data, BytesConfig(), log=lambda line: None)
    rows = build_splits(from_tree(ObjectiveConfig, {"kind": "backwards"}), data, prepared, None, seed=0).train
    for name, value in (("__file__", str(tmp_path / "<stdin>")), ("__spec__", None)):
        monkeypatch.setitem(vars(sys.modules["__main__"]), name, value)
    multiprocessing.set_start_method(method, force=True)
    try:
        loader = train_loader(rows, seed=0, sizes=Sizes(2), micro_batch=2, rank=0, world=1, start_step=0, max_steps=1, workers=1)
        [batch] = loader
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert batch.labels is not None and batch.labels[:, 1:].equal(batch.tokens[:, :-1])
    assert sys.modules["__main__"].__file__ == str(tmp_path / "<stdin>")


def test_a_kind_that_no_file_defines_cannot_be_cached(tmp_path: Path, plugin: Any) -> None:
    del plugin  # forgets the kind
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec(SOURCE, scope)
    with pytest.raises(ConfigError, match=r"CountingConfig: no file defines this class, .* Define it in a file"):
        prepare(counting(tmp_path), BytesConfig(), log=lambda line: None)


def test_a_document_of_one_text_is_that_of_its_only_chunk() -> None:
    """Seen to fail: each letter was a chunk, and the first one alone decided the split."""
    for number in range(20):
        whole, chunked = document(f"word {number}", 0.5), document([f"word {number}"], 0.5)
        assert whole is not None and chunked is not None
        assert (whole.split, [*whole.chunks], whole.key) == (chunked.split, [*chunked.chunks], chunked.key)
