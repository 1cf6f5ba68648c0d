"""Speed and memory of lm/data, each in turn.

python tools/bench_data.py tokenise     # MB/s of preparing against the encoder library alone, on the same text and cores
python tools/bench_data.py batches      # tokens/s of packed rows from warm shards, split and best fit
python tools/bench_data.py loading      # part of a step of the default recipe that goes into its batch
python tools/bench_data.py packing      # seconds and fill of best-fit packing of 10 M tokens
python tools/bench_data.py shards       # seconds to open 1,000 shards and compare a sample of each
python tools/bench_data.py start mtokens=10000   # seconds to the first batch of so many million tokens, 2 bytes each, read from the disk
python tools/bench_data.py memory mb=1000 tokenizer=bytes   # most memory while that much text is prepared; tokenizer=bpe takes minutes more
"""

import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RawTokenizer

from lm.data.batches import Batches
from lm.data.kinds import BPEConfig, BytesConfig, CausalConfig, StdlibConfig, TextConfig, TokenizerConfig
from lm.data.layout.best_fit import BestFit, best_fit
from lm.data.loader import train_loader
from lm.data.order import rows_at
from lm.data.rows.base import Rows
from lm.data.rows.build import build_splits
from lm.data.rows.causal import CausalRows
from lm.data.sizes import Sizes
from lm.data.store.prepare import prepare
from lm.data.store.shards import ShardWriter, TokenStore, write_index

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import asked, options

KINDS: dict[str, TokenizerConfig] = {"bpe": BPEConfig(), "bytes": BytesConfig()}
CACHE, ROUNDS = Path("~/.cache/lm-bench").expanduser(), 5


def quiet(line: str) -> None:
    """Nothing."""


def texts() -> list[str]:
    """The standard library's files."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return ["".join(document.chunks) for document in StdlibConfig().open(CACHE).documents()]


def corpus(folder: Path, mb: int) -> Path:
    """A jsonl file of so much text: the standard library again and again, with a word changed in each file."""
    source, draw, left = texts(), random.Random(0), mb * 1_000_000
    path = folder / "a.jsonl"
    with path.open("w") as stream:
        while left > 0:
            for text in source:
                changed = text.replace("self", f"this_{draw.randrange(10**6)}", 3)
                stream.write(json.dumps({"text": changed}) + "\n")
                left -= len(changed)
                if left <= 0:
                    break
    return path


def tokenise() -> dict[str, float]:
    """Turn about, since machines are shared: the ratio is the median of the rounds'."""
    given = texts()
    size = sum(len(text.encode()) for text in given) / 1e6
    tokenizer = BPEConfig().build(given[:200])
    ours, alone = [], []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        raw = RawTokenizer.from_file(f"{folder}/tokenizer.json")
        path = Path(folder) / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
        for turn in range(ROUNDS):
            data = TextConfig(files=str(path), cache_dir=f"{folder}/cache-{turn}")
            begun = time.perf_counter()
            prepare(data, tokenizer, log=quiet)
            between = time.perf_counter()
            raw.encode_batch_fast(given, add_special_tokens=False)
            ours.append(size / (between - begun))
            alone.append(size / (time.perf_counter() - between))
    ratio = statistics.median(a / b for a, b in zip(ours, alone, strict=True))
    return {"prepare_mb_s": statistics.median(ours), "library_mb_s": statistics.median(alone), "ratio": ratio}


def batches() -> dict[str, float]:
    """8 rows of 1,024 tokens a step, as a run reads them."""
    found = prepare(StdlibConfig(cache_dir=str(CACHE), seq_len=1024), BPEConfig(), log=quiet)
    split = CausalRows(found.train, found.tokenizer, 1024, True)
    fit = CausalRows(found.train, found.tokenizer, 1024, True, BestFit(found.train, 1024, ahead=1))
    return {"split_tokens_s": rate(split), "fit_tokens_s": rate(fit)}


def rate(rows: Rows, steps: int = 2000) -> float:
    """Tokens per second, the best of a few rounds."""

    def once() -> float:
        begun = time.perf_counter()
        for step in range(steps):
            rows.batch(rows_at(0, Sizes(8).places(step), len(rows)), step)
        return steps * 8 * 1024 / (time.perf_counter() - begun)

    return max(once() for _ in range(ROUNDS))


def loading() -> dict[str, float]:
    """Making a step's batches in the training process, against the median of a short run's steps."""
    from lm.cli.compose.compose import compose_config
    from lm.storage.run_folder import Metrics
    from lm.training.run import train_rank

    with tempfile.TemporaryDirectory() as folder:
        cfg = compose_config(
            [f"run.dir={folder}", "run.name=run", f"data.cache_dir={CACHE}", "trainer.max_steps=40", "trainer.log_every=1"]
        )
        train_rank(cfg)
        step_s = statistics.median(line["step_s"] for line in Metrics(Path(folder) / "run" / "metrics.jsonl").read() if line.get("step_s"))
    found = prepare(cfg.data, cfg.tokenizer, log=quiet)
    rows = build_splits(cfg.objective, cfg.data, found, None, cfg.seeds.data).train
    loader = train_loader(
        rows, seed=cfg.seeds.data, sizes=cfg.data.sizes, micro_batch=cfg.trainer.micro_batch, rank=0, world=1,
        start_step=0, max_steps=500, workers=0,
    )  # fmt: skip
    begun = time.perf_counter()
    n = len(list(loader))
    took = (time.perf_counter() - begun) / 500
    return {"batch_ms": 1000 * took, "step_ms": 1000 * step_s, "frac": took / step_s, "micro_batches": n / 500}


def packing() -> dict[str, float]:
    """Log-normal lengths, 2,048 tokens a row."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5.8, 1.1, 40_000).astype(np.int64) + 1, 2048)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 10_000_000))]
    begun = time.perf_counter()
    _, bounds = best_fit(lengths, 2048)
    took = time.perf_counter() - begun
    return {"tokens": float(lengths.sum()), "seconds": took, "fill": float(lengths.sum() / (2048 * (len(bounds) - 1)))}


def shards() -> dict[str, float]:
    """1,000 shards of 1,000 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        writer = ShardWriter(path, "train", 1000, shard_tokens=1000)
        writer.start_document()
        writer.add(np.arange(1_000_000, dtype=np.uint32) % 1000)
        write_index(path, {"splits": {"train": writer.close()}})
        begun = time.perf_counter()
        TokenStore(path, "train").sample(1000, seed=0)
        return {"seconds": time.perf_counter() - begun}


def start(mtokens: int) -> dict[str, float]:
    """In place of the tokens of a small file; read from the disk, with a sample compared and with all of it."""
    with tempfile.TemporaryDirectory() as folder:
        records = [json.dumps({"text": f"document {n}"}) + "\n" for n in range(1000)]
        (Path(folder) / "a.jsonl").write_text("".join(records))
        data = TextConfig(files=f"{folder}/a.jsonl", cache_dir=f"{folder}/cache", seq_len=256, global_batch=64)
        [part] = prepare(data, BytesConfig(), log=quiet).parts.values()
        writer, tokens = ShardWriter(part.folder, "train", 259), np.random.default_rng(0).integers(0, 256, 1_000_000).astype(np.uint32)
        for _ in range(mtokens):
            writer.starts_at(np.arange(0, 1_000_000, 1000), np.empty((0, 2), np.int64))
            writer.add(tokens)
        write_index(part.folder, {**part.index, "splits": {**part.index["splits"], "train": writer.close()}})
        return {f"{how}_s": _first_batch(part.folder, data.replace(verify=how)) for how in ("sample", "full")}


def _first_batch(folder: Path, data: TextConfig) -> float:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # what is not on the disk yet stays in memory
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    next(Batches(data, CausalConfig(), BytesConfig(), log=quiet).steps())
    return time.perf_counter() - begun


def memory(mb: int, kind: str) -> dict[str, float]:
    """The process's most memory, with a tokenizer that exists already."""
    with tempfile.TemporaryDirectory() as folder:
        path = corpus(Path(folder), mb)
        tokenizer = KINDS[kind].build(texts()[:50])
        prepare(TextConfig(files=str(path), cache_dir=f"{folder}/cache"), tokenizer, log=print)
        return {"mb": path.stat().st_size / 1e6, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main(args: list[str]) -> int:
    """One benchmark by name, as JSON."""
    own: dict[str, dict[str, Any]] = {"start": {"mtokens": 10_000}, "memory": {"mb": 1000, "tokenizer": "bpe"}}
    named: dict[str, Callable[[], dict[str, float]]] = {
        "tokenise": tokenise,
        "batches": batches,
        "loading": loading,
        "packing": packing,
        "shards": shards,
        "start": lambda: start(given["mtokens"]),
        "memory": lambda: memory(given["mb"], given["tokenizer"]),
    }
    what = asked(args, __doc__, named)
    given = options(args[1:], __doc__, own.get(what, {}), {"tokenizer": KINDS})
    print(json.dumps({what: {key: round(value, 4) for key, value in named[what]().items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
