"""What a cache in fewer bits loses, holds and costs: held-out text read one token at a time through each form, and one row that is long.

    python tools/bench_cache.py from=runs/pretrain-tiny [rows=16] [length=256] [rounds=3] [long=8192]

`loss` tells of each form the bits per byte of as many rows of the run's validation text, every token predicted through what the cache holds
of those before it, and CPU microseconds a step, forms taking turns, the least of the rounds. `long` has one row of random tokens in the
shape of bench_generate.py, in float32: bytes of a token, and milliseconds of one token more behind so many. On one thread; JSON lines.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch

from lm.data.order import spread
from lm.data.rows.build import split_rows
from lm.data.store.prepare import prepare
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.examine import Examined
from lm.generation.load import load
from lm.generation.weights import prepare as weights
from lm.nn.batch import IGNORED, Batch
from lm.nn.head import last_position
from lm.nn.transformer import LM, DecoderConfig, build_model
from lm.ops.cache.rounded import FORMS
from lm.schema import Tree, from_tree
from lm.storage.model_folder import resolve_model
from lm.storage.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine
from tools.bench_generate import SHAPE
from tools.bench_length import held
from tools.options import options, refuse

STEPS = 16


def held_out(folder: Path, tokenizer: Tokenizer, model: LM, n_rows: int, length: int) -> Batch:
    """Rows of the validation text of the run that the model comes from, each read as one document."""
    run = RunFolder.around(folder)
    assert run is not None, "the model is in no run folder"
    of = Examined.of_run(run)
    assert of.objective is not None
    data = of.data.replace(seq_len=length)
    [rows] = split_rows(of.objective, data, prepare(data, tokenizer, log=lambda line: None), ["val"], model.cfg)
    return rows.batch(spread(len(rows), n_rows))


@torch.inference_mode()
def through(model: LM, batch: Batch, form: str | None, sizes: torch.Tensor) -> Tree:
    """Bits per byte, bytes of a token and CPU microseconds of a step."""
    assert batch.labels is not None
    model.cache_form = form
    (b, s), nats = batch.tokens.shape, 0.0
    cache, begun = model.new_cache(b, s), time.process_time()
    for t in range(s):
        logits = model(Batch(batch.tokens[:, t : t + 1], positions=torch.full((b, 1), t), padded=False), read=last_position, cache=cache)
        nats += float(torch.nn.functional.cross_entropy(logits.float(), batch.labels[:, t], ignore_index=IGNORED, reduction="sum"))
    us = (time.process_time() - begun) / s * 1e6
    n_bytes = int(sizes[batch.labels[batch.labels != IGNORED]].sum())
    return {"bits_per_byte": nats / math.log(2) / n_bytes, "bytes_per_token": held(cache) / b / s, "us": us, "bytes": n_bytes}


@torch.inference_mode()
def far(model: LM, form: str | None, length: int) -> Tree:
    """Bytes of a token and CPU milliseconds of one more behind so many."""
    model.cache_form = form
    ids = torch.randint(1, 256, (1, length + STEPS), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, length + STEPS)
    for piece in ids[:, :length].split(512, 1):
        model(Batch(piece), read=last_position, cache=cache)
    begun = time.process_time()
    for t in range(length, length + STEPS):
        model(Batch(ids[:, t : t + 1], positions=torch.tensor([[t]]), padded=False), read=last_position, cache=cache)
    return {"bytes_per_token": held(cache) / (length + STEPS), "ms": (time.process_time() - begun) / STEPS * 1e3}


def main(arguments: list[str]) -> None:
    given = options(arguments, __doc__, {"from": "", "rows": 16, "length": 256, "rounds": 3, "long": 8192}, zero=("long",))
    if not given["from"]:
        refuse("from: none was given, and a run is needed. Write from=runs/NAME.")
    torch.set_num_threads(1)
    print(json.dumps({"machine": machine()}))
    folder = resolve_model(given["from"])
    model, tokenizer = load(folder, "cpu", dtype="saved")
    batch = held_out(folder, tokenizer, model, given["rows"], given["length"])
    sizes = tokenizer.token_bytes()
    assert sizes is not None, "bits per byte need a byte-level tokenizer"
    found: dict[str | None, list[Tree]] = {form: [] for form in FORMS}
    for _ in range(given["rounds"]):
        for form, each in found.items():
            each.append(through(model, batch, form, torch.as_tensor(sizes)))
    for form, each in found.items():
        print(json.dumps({"loss": form, **each[0], "us": round(min(one["us"] for one in each))}), flush=True)
    if length := given["long"]:
        shape = SHAPE | {"max_seq_len": length + STEPS}
        long = weights.prepare(build_model(from_tree(DecoderConfig, shape), seed=0).eval(), "saved")
        times: dict[str | None, list[Tree]] = {form: [] for form in FORMS}
        for _ in range(given["rounds"]):
            for form, each in times.items():
                each.append(far(long, form, length))
        for form, each in times.items():
            print(json.dumps({"long": form, **each[0], "ms": round(min(one["ms"] for one in each), 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
