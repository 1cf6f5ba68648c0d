"""Tokens per second of greedy decoding with the cache, against transformers' `generate` on the same weights, taking turns.

    python tools/bench_generate.py [rows=1,8] [tokens=128] [rounds=5]

The model is the one of `tools/bench.py models`, exported; both start from the same prompts of 16 tokens and must give the same tokens.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lm.generation.config import SamplingConfig
from lm.generation.decode import generate
from lm.hf.io.writing import family_for, write_hf
from lm.nn.transformer import LM

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine, ours

PROMPT = 16
Decode = Callable[[list[list[int]], int], list[list[int]]]


def theirs(model: LM) -> Decode:
    """transformers' own decoding of the exported model."""
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "exported"
        write_hf(folder, family_for(model.cfg), model.cfg, {key: p.detach() for key, p in model.named_parameters()}, None)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = loaded.to(model.embed.weight.device).eval()

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.embed.weight.device)
        found = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0
        )
        new: list[list[int]] = found[:, PROMPT:].tolist()
        return new

    return decode


def compare(n_rows: int, n: int, rounds: int, model: LM, contestants: dict[str, Decode]) -> dict[str, Any]:
    """Medians of tokens per second, and of the ratios within a round."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.vocab_size, (n_rows, PROMPT), generator=draw).tolist()
    first = [decode(prompts, n) for decode in contestants.values()]
    if first[0] != first[1]:
        raise SystemExit("the two decode different tokens, so their speeds do not compare")
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            begun = time.perf_counter()
            contestants[name](prompts, n)
            speeds[name].append(n_rows * n / (time.perf_counter() - begun))
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    return {"rows": n_rows, **{name: round(statistics.median(found), 1) for name, found in speeds.items()}, "ratio": round(ratio, 2)}


def main(args: list[str]) -> int:
    options = {"rows": "1,8", "tokens": "128", "rounds": "5"} | dict(arg.split("=", 1) for arg in args)
    model = ours()[0].to("cuda" if torch.cuda.is_available() else "cpu").eval()
    assert isinstance(model, LM)

    def mine(prompts: list[list[int]], n: int) -> list[list[int]]:
        return generate(model, prompts, SamplingConfig(max_tokens=n, temperature=0))

    contestants: dict[str, Decode] = {"lm": mine, "transformers": theirs(model)}
    rows = map(int, options["rows"].split(","))
    results = [compare(n_rows, int(options["tokens"]), int(options["rounds"]), model, contestants) for n_rows in rows]
    print(json.dumps(machine() | {"tokens_per_second": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
