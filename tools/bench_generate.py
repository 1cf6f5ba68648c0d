"""Tokens per second of greedy decoding with the cache, on the same weights, taking turns: ours in each dtype and others'.

    python tools/bench_generate.py [rows=1,16] [tokens=64] [rounds=5] [threads=2] [clock=wall] [only=lm int8,transformers fp32]

The shape is a Llama of 100 M parameters: vocabulary 32,000, width 768, 12 layers, 12 heads and 4 of keys, hidden 2,048. All start
from the same prompts of 16 tokens; those in float32 must give the same tokens. `readable` is our model as it was trained in, before
`prepare`. llama.cpp takes part with one row where llama-cpp-python is installed, litgpt where its model can be imported (it asks for
another huggingface-hub than transformers 5: pip install --no-deps litgpt==0.5.9).
Machines are shared and noisy: `ratio` is the median over rounds of a contestant's speed over that of transformers in float32, `of_memory`
the part of the bandwidth that was measured in the same round (reading 400 MB) at which its matrices came in. clock=cpu counts CPU seconds,
for one thread on a machine that is busy with other things.
"""

import copy
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lm.data.kinds import BytesConfig
from lm.generation.config import Dtype, SamplingConfig
from lm.generation.decode import decode
from lm.generation.weights.prepare import prepare
from lm.hf.gguf.writing import FILE, architecture_for, write_gguf
from lm.hf.io.writing import family_for, write_hf
from lm.nn.transformer import LM, DecoderConfig, build_model
from lm.schema import Tree, from_tree

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench import machine
from tools.options import options, refuse

PROMPT = 16
SHAPE: Tree = {
    "vocab_size": 32000, "max_seq_len": 1024, "d_model": 768, "n_layers": 12, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
    "attention": {"kind": "gqa", "n_heads": 12, "n_kv_heads": 4}, "ffn": {"kind": "mlp", "hidden": 2048},
}  # fmt: skip
REFERENCE = "transformers fp32"
BYTES = {"fp32": 4.0, "f32": 4.0, "bf16": 2.0, "int8": 1.0, "q8_0": 34 / 32, "int4": 20 / 32}  # of a number in a matrix, scales included
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Decode = Callable[[list[list[int]], int], list[list[int]]]


def ours(model: LM) -> Decode:
    return lambda prompts, n: [row.new for row in decode(model, prompts, SamplingConfig(max_tokens=n, temperature=0))]


def theirs(model: LM, dtype: torch.dtype) -> Decode:
    """transformers' own decoding of the exported model."""
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "exported"
        write_hf(folder, family_for(model.cfg), model.cfg, {key: p.detach() for key, p in model.named_parameters()}, None)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    loaded = loaded.to(model.embed.weight.device).eval()

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.embed.weight.device)
        found = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0
        )
        new: list[list[int]] = found[:, PROMPT:].tolist()
        return new

    return decode


def litgpt(model: LM, dtype: torch.dtype) -> Decode:
    """litgpt's model with its cache, the loop around it as its own: one position a call, the keys that there are and no more."""
    from litgpt.config import Config
    from litgpt.model import GPT

    cfg = model.cfg
    loaded = GPT(
        Config(
            block_size=cfg.max_seq_len, padded_vocab_size=cfg.vocab_size, vocab_size=cfg.vocab_size, n_layer=cfg.n_layers, n_head=12,
            n_query_groups=4, n_embd=cfg.d_model, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP", intermediate_size=2048,
        )
    )  # fmt: skip
    ours = dict(model.named_parameters())
    weights: dict[str, torch.Tensor] = {
        "transformer.wte.weight": ours["embed.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "lm_head.weight": ours["embed.weight"],
    }
    for i in range(cfg.n_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        weights[f"{there}.attn.qkv.weight"] = torch.cat([ours[f"{here}.attention.{part}.weight"] for part in "qkv"])
        weights[f"{there}.attn.proj.weight"] = ours[f"{here}.attention.o.weight"]
        for ours_name, name in (("gate", "fc_1"), ("up", "fc_2"), ("down", "proj")):
            weights[f"{there}.mlp.{name}.weight"] = ours[f"{here}.ffn.{ours_name}.weight"]
        weights[f"{there}.norm_1.weight"] = ours[f"{here}.attention_residual.norm.weight"]
        weights[f"{there}.norm_2.weight"] = ours[f"{here}.ffn_residual.norm.weight"]
    loaded.load_state_dict(weights)
    loaded = loaded.to(model.embed.weight.device, dtype).eval()

    @torch.inference_mode()
    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.embed.weight.device)
        rows, read = ids.shape
        loaded.max_seq_length = read + n
        loaded.set_kv_cache(rows, device=ids.device, dtype=dtype)
        places, found = torch.arange(read, device=ids.device), []
        for end in range(read, read + n):
            ids = loaded(ids, places, end)[:, -1].argmax(-1, keepdim=True)
            found.append(ids)
            places = places[-1:] + 1
        return torch.cat(found, 1).tolist()

    return decode


def llama_cpp(model: LM, dtype: str) -> Decode:
    """llama.cpp on the exported file, of one row."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as name:
        write_gguf(Path(name) / FILE, architecture_for(model.cfg), model, BytesConfig().build(), dtype, "bench")
        loaded = llama_cpp.Llama(str(Path(name) / FILE), n_ctx=512, n_threads=torch.get_num_threads(), use_mmap=False, verbose=False)

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        loaded.reset()
        return [list(islice(loaded.generate(prompts[0], temp=0.0, top_k=1, repeat_penalty=1.0), n))]

    return decode


def makers(model: LM, n_rows: int) -> dict[str, Callable[[], Decode]]:
    """Who can take part, by name."""
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16", "int8", "int4")
    made: dict[str, Callable[[], Decode]] = {REFERENCE: lambda: theirs(model, torch.float32)}
    made["transformers bf16"] = lambda: theirs(model, torch.bfloat16)
    if importlib.util.find_spec("litgpt") is not None:
        made["litgpt fp32"] = lambda: litgpt(model, torch.float32)
        made["litgpt bf16"] = lambda: litgpt(model, torch.bfloat16)
    made["readable fp32"] = lambda: ours(model)
    for dtype in dtypes:
        made[f"lm {dtype}"] = lambda dtype=dtype: ours(prepare(copy.deepcopy(model), dtype))  # type: ignore[misc]
        if n_rows == 1:  # what is compiled is a step of one row
            made[f"lm compiled {dtype}"] = lambda dtype=dtype: ours(prepare(copy.deepcopy(model), dtype, compiled=True))  # type: ignore[misc]
    if importlib.util.find_spec("llama_cpp") is not None and n_rows == 1:
        for name in ("f32", "bf16", "q8_0"):
            made[f"llama.cpp {name}"] = lambda name=name: llama_cpp(model, name)  # type: ignore[misc]
    return made


def contestants(made: dict[str, Callable[[], Decode]], only: set[str]) -> Iterator[tuple[str, Decode]]:
    yield from ((name, make()) for name, make in made.items() if not only or name in {*only, REFERENCE})


def bandwidth(read: torch.Tensor, clock: str) -> float:
    """Bytes a second at which memory comes in."""
    begun = CLOCKS[clock]()
    read.sum().item()  # waits for a GPU
    return read.nbytes / (CLOCKS[clock]() - begun)


def compare(n_rows: int, n: int, rounds: int, clock: str, model: LM, entered: Iterable[tuple[str, Decode]]) -> Tree:
    """Medians of tokens per second, and of the ratios within a round."""
    decodes = dict(entered)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 256, (n_rows, PROMPT), generator=draw).tolist()
    first = {name: decode(prompts, n) for name, decode in decodes.items()}
    if any(found != first[REFERENCE] for name, found in first.items() if name.endswith("32")):
        print("note: not all in float32 decode the same tokens; equals up to rounding were met", file=sys.stderr)
    speeds: dict[str, list[float]] = {name: [] for name in decodes}
    memory, big = [], torch.ones(100_000_000, device=model.embed.weight.device)
    for turn in range(rounds):
        memory.append(max(bandwidth(big, clock) for _ in range(4)))
        for name in list(decodes)[:: 1 if turn % 2 else -1]:
            begun = CLOCKS[clock]()
            decodes[name](prompts, n)
            speeds[name].append(n_rows * n / (CLOCKS[clock]() - begun))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    found: Tree = {}
    for name, each in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(each, speeds[REFERENCE], strict=True))
        found[name] = {"tokens_per_second": round(statistics.median(each), 1), "best": round(max(each), 1), "ratio": round(ratio, 2)}
        if n_rows == 1:
            read = matrices * BYTES[name.split()[-1]]
            found[name]["of_memory"] = round(statistics.median(read * a / b for a, b in zip(each, memory, strict=True)), 2)
    return {"rows": n_rows, "gb_per_second": round(statistics.median(memory) / 1e9, 1), **found}


def main(args: list[str]) -> int:
    defaults = {"rows": [1, 16], "tokens": 64, "rounds": 5, "threads": 2, "clock": "wall", "only": list[str]()}
    given = options(args, __doc__, defaults, {"clock": CLOCKS})
    torch.set_num_threads(given["threads"])
    model = build_model(from_tree(DecoderConfig, SHAPE), seed=0).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    known = [makers(model, n_rows) for n_rows in given["rows"]]
    if strange := {*given["only"]}.difference(*known):
        refuse(f"only: {', '.join(sorted(strange))} takes no part. Options: {', '.join({name: 0 for each in known for name in each})}.")
    results = [
        compare(n_rows, given["tokens"], given["rounds"], given["clock"], model, contestants(made, {*given["only"]}))
        for n_rows, made in zip(given["rows"], known, strict=True)
    ]
    print(json.dumps(machine() | {"clock": given["clock"], "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
