"""One training step of a preset on this machine: forward, loss, backward, clipping and AdamW over random tokens, as fast as it goes.

    python tools/bench_step.py [model=gpt2] [rows=64] [length=1024] [chunk=8192] [compile=true] [float8=true] [steps=20] [group=option ...]

In bf16-mixed, with random weights. Further arguments are overrides as of `lm train`, such as model/ffn=swiglu. Prints a line of JSON:
seconds until the first step is over, the mean of `steps` steps in a row, tokens per second, the part of a known GPU's peak, and on a GPU
the most memory that tensors took.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lm.adapters.float8 import multiply_in_float8
from lm.cli.compose.compose import compose
from lm.cost.count import count
from lm.errors import ConfigError
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.training.budget import peak_flops

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine, stepper, timed
from tools.contestants import SIZES
from tools.options import options, refuse


def main(args: list[str]) -> int:
    defaults = {"model": "gpt2", "rows": 64, "length": 1024, "chunk": 8192, "compile": True, "float8": False, "steps": 20}
    further = [arg for arg in args if "=" in arg and arg.partition("=")[0] not in defaults]
    given = options([arg for arg in args if arg not in further], __doc__, defaults)
    rows, length, chunk = (given[key] for key in ("rows", "length", "chunk"))
    try:
        cfg = compose(["recipes=pretrain/tiny", f"model={given['model']}", "run.name=bench", *further]).config().model
    except ConfigError as error:
        refuse(error.sentence)
    cfg = cfg.sized(50304, length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(cfg, device=device).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    if given["float8"]:
        multiply_in_float8(model)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = model(Batch(ids), read=causal_reader(labels, chunk=chunk)).total
        return total / labels.numel()

    size = replace(SIZES["124m"], vocab=model.vocab_size, rows=rows, length=length)  # of which the batches are
    step = stepper(model, loss, "compiled" if given["compile"] else "bf16", size)
    first, _, seconds = (1 / timed(step, n, time.perf_counter) for n in (1, 2, given["steps"]))
    speed, peak = rows * length / seconds, peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    found = machine() | given | {"overrides": further, "million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6, 1)}
    found |= {"first_s": round(first, 1), "step_ms": round(seconds * 1e3, 1), "tokens_per_second": round(speed)}
    if peak is not None:
        found["of_peak"] = round(count(cfg, length).train_flops_per_token * speed / peak, 3)
        found["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
