"""Memory and rate of fine-tuning: all weights with AdamW, LoRA, and LoRA beside fewer bits, each by `lm train` in a process.

    python tools/bench_adapter.py [models=tiny,gpt2] [precisions=fp32,bf16-true] [rounds=3] [steps=12] [seq_len=128] [out=FOLDER]

The parents are the model `tiny` (3.4 M parameters) and `gpt2` with 13 layers and the default tokenizer (96.8 M), drawn and trained
for a step. Micro-batch 1. `peak_mb` is ru_maxrss of the process, `own_mb` the most that RssAnon of /proc said (asked every 5 ms): the first
has in it the file of the parent, which is mapped while it is read. From both is taken off what the same command needs with a parent of
0.3 M parameters, which has in it all that is imported on the way (`importing_mb` is what lm.training.run alone needs), and data. `cpu_s`
is CPU time of the run beyond that one's, reading and writing in it, by steps; `rate` is full fine-tuning's over this one's. Each figure is
the median of the rounds, in which contestants take turns.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine
from tools.options import options

PARENTS = {
    "least": ("model=tiny", "model.d_model=64", "model.n_layers=1", "model.attention.n_heads=2", "model.attention.n_kv_heads=1"),
    "tiny": ("model=tiny",),
    "gpt2": ("model=gpt2", "model.n_layers=13"),
}
WAYS = {
    "full": (),
    "lora": ("adapter=lora",),
    "lora_bf16": ("adapter=lora", "adapter.base=bf16"),
    "lora_int8": ("adapter=lora", "adapter.base=int8"),
    "lora_nf4": ("adapter=lora", "adapter.base=nf4"),
}
PROGRAM = "import sys; from lm.cli.main import main; sys.exit(main(sys.argv[1:]))"


Figures = tuple[float, float, float]


def measured(program: str, *args: str) -> Figures:
    """Most memory of a process, most anonymous memory, in MB, and CPU seconds. SystemExit where it fails."""
    process = subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    own = 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        own = max(own, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
        time.sleep(0.005)
    _, code, used = os.wait4(process.pid, 0)
    if code:
        assert process.stderr is not None
        sys.exit(process.stderr.read().decode())
    return used.ru_maxrss / 1024, own / 1024, used.ru_utime + used.ru_stime


def train(folder: Path, name: str, *given: str) -> Figures:
    fixed = ("trainer.micro_batch=1", "data.global_batch=1", "data.val_rows=1", "trainer.sample_prompts=[]")
    rest = (
        "schedule.warmup_steps=0",
        "checkpoint.every=1000",
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.cache_dir={folder / 'cache'}",
    )
    return measured(PROGRAM, "train", *fixed, *rest, *given)


def compare(folder: Path, model: str, precision: str, rounds: int, given: list[str]) -> None:
    """Prints a line for each way."""
    first = ("trainer.max_steps=1", "optim=sgd", f"trainer.precision={precision}", given[1])
    for parent in ("least", model):
        if not (folder / f"{parent}-{precision}").exists():
            train(folder, f"{parent}-{precision}", *first, *PARENTS[parent])
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, adapter in WAYS.items():
            runs = {}
            for parent in ("least", model):
                name = f"{way}-{parent}-{precision}-{number}"
                runs[parent] = train(
                    folder, name, f"init_from={folder / f'{parent}-{precision}'}", f"trainer.precision={precision}", *adapter, *given
                )
            peak, own, cpu_s = (of - least for of, least in zip(runs[model], runs["least"], strict=True))
            found[way].append((peak, own, cpu_s / int(given[0].split("=")[1])))
    for way, all_of in found.items():
        peak, own, cpu_s = (statistics.median(values) for values in zip(*all_of, strict=True))
        rate = statistics.median(full[2] / mine[2] for full, mine in zip(found["full"], all_of, strict=True))
        line = {"model": model, "precision": precision, "way": way, "peak_mb": round(peak), "own_mb": round(own)}
        print(json.dumps(line | {"cpu_s": round(cpu_s, 3), "rate": round(rate, 2)}), flush=True)


def main(arguments: list[str]) -> None:
    defaults = {"models": ["tiny", "gpt2"], "precisions": ["fp32", "bf16-true"], "rounds": 3, "steps": 12, "seq_len": 128, "out": ""}
    given = options(arguments, __doc__, defaults, {"models": [name for name in PARENTS if name != "least"]})
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > (own := measured("import lm.training.run")[0] * 1024):
        sys.exit("this process is larger than what it would measure")  # a child counts its parent from before its own program
    print(json.dumps({"machine": machine(), "importing_mb": round(own / 1024)}), flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given["out"] or made)
        for model in given["models"]:
            for precision in given["precisions"]:
                sizes = [f"trainer.max_steps={given['steps']}", f"data.seq_len={given['seq_len']}"]
                compare(folder, model, precision, given["rounds"], sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
