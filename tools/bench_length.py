"""What a token costs in longer and longer rows: attention against what goes through the row by a state of fixed size.

    python tools/bench_length.py [lengths=1024,2048,4096,8192,16384,32768] [decoded=1024,65536] [rounds=3] [only=attention,gla]

One layer of width 64 with heads of 16. `train` is CPU microseconds a token of forward and backward, the least of the rounds, kinds taking
turns; `ratio` is against the shortest row. `decode` fills a cache with as many tokens as `decoded` says, in chunks, and tells the bytes of
everything that it holds, and microseconds of one token more. One thread; a line of JSON each.
"""

import json
import sys
import time
from pathlib import Path

import torch

from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, DecoderLM, build_model
from lm.ops.cache.cache import Cache
from lm.schema import Tree, from_tree

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine
from tools.options import options

VOCAB, CHUNK, TOKENS = 256, 2048, 16
STATE: Tree = {"n_heads": 4, "k_dim": 16, "v_dim": 16}
KINDS: dict[str, Tree | None] = {
    "attention": None,
    "gated_delta": {"kind": "gated_delta", **STATE},
    "kda": {"kind": "gated_delta", **STATE, "channels": True},
    "gla": {"kind": "gla", **STATE},
    "mamba2": {"kind": "mamba2", "n_heads": 8, "head_dim": 16, "state_dim": 16},
    "rg_lru": {"kind": "rg_lru", "width": 64, "n_heads": 4},
    "short_conv": {"kind": "short_conv"},
}


def model_of(kind: str, length: int) -> DecoderLM:
    recurrent = KINDS[kind]
    tree: Tree = {
        "vocab_size": VOCAB, "max_seq_len": length, "d_model": 64, "n_layers": 1, "norm": {"kind": "rms"},
        "position": {"kind": "none" if recurrent else "rope"}, "attention": {"kind": "gqa", "n_heads": 4},
        "ffn": {"kind": "mlp", "hidden": 64}, "recurrent": recurrent, "pattern": ["recurrent" if recurrent else "attention"],
    }  # fmt: skip
    model = build_model(from_tree(DecoderConfig, tree), seed=0)
    assert isinstance(model, DecoderLM)
    return model


def row(n: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(0))


def trained(kind: str, length: int) -> float:
    """Microseconds of a token of forward and backward."""
    model, rows = model_of(kind, length).train(), row(length)
    started = time.process_time()
    model(Batch(rows)).square().mean().backward()
    return (time.process_time() - started) / length * 1e6


@torch.no_grad()
def decoded(kind: str, length: int) -> tuple[int, float]:
    """Bytes of a cache that has read so many tokens, and microseconds of each token that follows."""
    model = model_of(kind, length + TOKENS).eval()
    cache, rows = model.new_cache(1, length + TOKENS), row(length + TOKENS)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        model(rows[:, start:stop], cache=cache)
    size = held(cache)
    started = time.process_time()
    for at in range(length, length + TOKENS):
        model(rows[:, at : at + 1], cache=cache)
    return size, (time.process_time() - started) / TOKENS * 1e6


def held(cache: Cache) -> int:
    """Bytes of all that it keeps of a row, without the states that it could be rewound to."""
    tensors = [x for stores in cache.stores.values() for x in stores] + [x for layer in cache.states for x in cache.state(layer)]
    return sum(x.nbytes for x in tensors)


def main(arguments: list[str]) -> None:
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    defaults = {"lengths": lengths, "decoded": [1024, 65536], "rounds": 3, "only": [*KINDS]}
    given = options(arguments, __doc__, defaults, {"only": KINDS})
    kinds = given["only"]
    torch.set_num_threads(1)
    print(json.dumps({"machine": machine()}))
    trained(kinds[0], 64)  # what is made once
    shortest: dict[str, float] = {}
    for length in given["lengths"]:
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(given["rounds"]):
            for kind in kinds:
                found[kind].append(trained(kind, length))
        for kind, times in found.items():
            ratio = min(times) / shortest.setdefault(kind, min(times))
            print(json.dumps({"train": kind, "length": length, "us": round(min(times), 1), "ratio": round(ratio, 2)}), flush=True)
    for kind in kinds:
        for length in given["decoded"]:
            size, us = decoded(kind, length)
            print(json.dumps({"decode": kind, "length": length, "bytes": size, "us": round(us)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
