"""Speed, measured side by side in one process.

    python tools/bench.py models            # our decoder against litgpt, transformers and x-transformers (extra `bench`)
    python tools/bench.py models modes=fp32,bf16,compiled rounds=5 steps=4
    python tools/bench.py moe               # 8 experts, top-2, against our dense model of equal active parameters
    python tools/bench.py sft               # chats packed into rows of 1,024 tokens against one a row, padded
    python tools/bench.py loop              # the default recipe through `lm train` against a bare loop over the same batches

Machines are shared and noisy: contestants take turns of a few steps, and the ratio is the median of per-round ratios.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.data.loader import train_loader
from lm.data.order import step_rows
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.rows.causal import CausalRows
from lm.data.store.prepare import prepare
from lm.nn.batch import IGNORED, Batch
from lm.nn.loss import causal_reader
from lm.nn.transformer import DecoderConfig, build_model
from lm.schema import Tree, from_tree
from lm.training.config import TrainConfig
from lm.training.optim.base import begin_state, set_lr
from lm.training.optim.traits import traits_of

VOCAB, D, LAYERS, HEADS, HIDDEN, ROWS, LENGTH = 8192, 384, 6, 6, 1024, 8, 256

LossOf = Callable[[Tensor, Tensor], Tensor]
Contestant = tuple[nn.Module, LossOf]


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def contestant(tree: Tree) -> Contestant:
    """One of our models, with our loss."""
    model = build_model(from_tree(DecoderConfig, tree), seed=0)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = model(Batch(ids), loss=causal_reader(labels)).total
        return total / labels.numel()

    return model, loss


def ours() -> Contestant:
    tree = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": D, "n_layers": LAYERS, "norm": {"kind": "rms"},
        "position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": HEADS}, "ffn": {"kind": "mlp", "hidden": HIDDEN},
    }  # fmt: skip
    return contestant(tree)


def litgpt() -> Contestant:
    from litgpt import GPT, Config

    model = GPT(
        Config(
            block_size=LENGTH, padded_vocab_size=VOCAB, vocab_size=VOCAB, n_layer=LAYERS, n_head=HEADS, n_embd=D, rotary_percentage=1.0,
            parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=HIDDEN,
        )
    )  # fmt: skip
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda ids, labels: plain_loss(model(ids), labels)


def transformers() -> Contestant:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


def x_transformers() -> Contestant:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=D, depth=LAYERS, heads=HEADS, attn_dim_head=D // HEADS, rotary_pos_emb=True, rotary_emb_dim=D // HEADS, ff_glu=True,
        ff_swish=True, ff_no_bias=True, ff_mult=HIDDEN / D, use_rmsnorm=True, attn_flash=True,
    )  # fmt: skip
    model = TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, use_abs_pos_emb=False, tie_embedding=True, attn_layers=layers)
    return model, lambda ids, labels: plain_loss(model(ids), labels)


CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "slotlm": ours,
    "litgpt": litgpt,
    "transformers": transformers,
    "x-transformers": x_transformers,
}


def stepper(model: nn.Module, loss_of: LossOf, mode: str) -> Callable[[], None]:
    """One step function for all: forward, loss, backward, clip, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = list(model.parameters())
    if mode == "compiled":
        model.compile()
    device = parameters[0].device
    source = torch.Generator().manual_seed(0)
    data = torch.randint(0, VOCAB, (16, ROWS, LENGTH + 1), generator=source).to(device)
    count = 0

    def step() -> None:
        nonlocal count
        rows = data[count % len(data)]
        count += 1
        with torch.autocast(device.type, torch.bfloat16, enabled=mode != "fp32"):
            loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Tokens per second over `steps` steps."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return steps * ROWS * LENGTH / (time.perf_counter() - begun)


def mixture(n_experts: int) -> Contestant:
    """d 256, 4 layers: a feed-forward of 1,024, or experts of 512 of which a token passes two."""
    expert = {"hidden": 512}
    moe = {"kind": "moe", "n_experts": n_experts, "top_k": 2, "expert": expert, "balance_loss": 0.01}
    tree = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": 256, "n_layers": 4, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
        "attention": {"kind": "gqa", "n_heads": 4}, "ffn": moe if n_experts else {"kind": "mlp", "hidden": 1024},
    }  # fmt: skip
    return contestant(tree)


def compare(contestants: Mapping[str, Callable[[], Contestant]], modes: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Tokens/s of each, and the ratio of the first one, slotlm, to the others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for mode in modes:
        steppers = {}
        for name, make in contestants.items():
            torch.manual_seed(0)
            model, loss_of = make()
            model.to(device).train()
            if name == "slotlm":
                print(f"{mode}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
            steppers[name] = stepper(model, loss_of, mode)
            timed(steppers[name], 3)
        speeds: dict[str, list[float]] = {name: [] for name in steppers}
        for turn in range(rounds):
            order = list(steppers) if turn % 2 == 0 else list(reversed(steppers))
            for name in order:
                speeds[name].append(timed(steppers[name], steps))
        middle = {name: round(statistics.median(values)) for name, values in speeds.items()}
        others = [name for name in speeds if name != "slotlm"]
        ratios = {name: round(statistics.median(a / b for a, b in zip(speeds["slotlm"], speeds[name], strict=True)), 3) for name in others}
        print(f"  tokens/s {middle}\n  slotlm / other {ratios}", flush=True)
        results.append({"mode": mode, "tokens_per_second": middle, "ratio": ratios})
    return results


def compare_sft(rounds: int, steps: int) -> dict[str, Any]:
    """Label tokens/s of the nano model on stdlib_chat: 4 packed rows of 1,024 tokens a step, or 16 chats each in a row of its own."""
    from lm.cli.compose.compose import compose

    config = compose(["model=nano", "tokenizer.vocab_size=2048", "data=stdlib_chat", "objective=sft", "data.seq_len=1024"]).config()
    data = prepare(config.data, config.tokenizer, log=lambda text: None)
    model = build_model(config.model.replace(vocab_size=2048, max_seq_len=1024), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def labels_per_second(rows: Rows, size: int, first: int) -> float:
        begun, labels = time.perf_counter(), 0
        for step in range(first, first + steps):
            batch = rows.batch(step_rows(0, step, size, len(rows)))
            assert batch.labels is not None
            labels += int((batch.labels != IGNORED).sum())
            model(batch, loss=causal_reader(batch.labels)).total.backward()
            optimizer.step()
            optimizer.zero_grad()
        return labels / (time.perf_counter() - begun)

    sizes, speeds = {"fit": 4, "none": 16}, dict[str, list[float]](fit=[], none=[])
    rows = {how: build_rows(config.objective, config.data.replace(packing=how), data.train, data.tokenizer, model.cfg) for how in sizes}
    for turn in range(rounds + 1):
        for how in sorted(sizes, reverse=bool(turn % 2)):
            speeds[how].append(labels_per_second(rows[how], sizes[how], turn * steps))
    packed, padded = speeds["fit"][1:], speeds["none"][1:]  # the first round warms up
    ratio = statistics.median(a / b for a, b in zip(packed, padded, strict=True))
    return {"packed": round(statistics.median(packed)), "padded": round(statistics.median(padded)), "ratio": round(ratio, 3)}


def compare_loop(rounds: int, steps: int) -> dict[str, Any]:
    """Tokens/s of `train()` on the default recipe, without validation and saving, against a bare loop with the same pieces."""
    from lm.cli.compose.compose import compose_config
    from lm.storage.run_folder import Metrics
    from lm.training.run import train

    through, bare = [], []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"run.dir={folder}", "run.name=bench", f"trainer.max_steps={steps}", "trainer.val_every=100000", "data.val_rows=8"]
            config = compose_config([*overrides, "schedule.warmup_steps=1", "trainer.sample_prompts=[]", "checkpoint.every=100000"])
            if turn % 2:
                bare.append(bare_loop(config, steps))
            train(config)
            lines = [line for line in Metrics(Path(folder) / "bench" / "metrics.jsonl").read() if "loss" in line and line["step"] > 1]
            through.append(sum(line["tokens_per_second"] for line in lines) / len(lines))
            if not turn % 2:
                bare.append(bare_loop(config, steps))
    ratio = statistics.median(a / b for a, b in zip(through, bare, strict=True))
    return {"lm_train": round(statistics.median(through)), "bare_loop": round(statistics.median(bare)), "ratio": round(ratio, 3)}


def bare_loop(config: TrainConfig, steps: int) -> float:
    """The step function alone: forward, loss, backward, clip, optimizer, on the batches of the run."""
    data = prepare(config.data, config.tokenizer, log=lambda text: None)
    rows = CausalRows(data.train, data.tokenizer, config.data.seq_len, config.data.mask_documents)
    loader = train_loader(
        rows, seed=config.seeds.data, global_batch=config.data.global_batch, micro_batch=config.trainer.micro_batch, rank=0, world=1,
        start_step=0, max_steps=steps, workers=0,
    )  # fmt: skip
    vocab_size = -(-data.tokenizer.vocab_size // 64) * 64
    model = build_model(config.model.replace(vocab_size=vocab_size, max_seq_len=config.data.seq_len), seed=config.seeds.init)
    optimizer = config.optim.build([*model.named_parameters()], traits_of(model))
    begin_state(optimizer)
    batches, begun = list(loader), 0.0
    for number, batch in enumerate(batches):
        if number == 1:
            begun = time.perf_counter()
        assert batch.labels is not None
        loss = model(batch, loss=causal_reader(batch.labels)).total / batch.step_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), config.optim.clip or 1e9)
        set_lr(optimizer, config.schedule.factor(number, steps))
        optimizer.step()
        optimizer.zero_grad()
    return (steps - 1) * config.data.global_batch * config.data.seq_len / (time.perf_counter() - begun)


def machine() -> dict[str, Any]:
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {"date": date.today().isoformat(), "commit": commit, "device": device, "torch": torch.__version__}


def main(args: list[str]) -> int:
    options = dict(arg.split("=", 1) for arg in args[1:])
    rounds = int(options.get("rounds", 4 if args[:1] == ["loop"] else 5))
    modes = options.get("modes", "fp32,bf16,compiled" if args[:1] == ["models"] else "fp32").split(",")
    results: Any
    if args[:1] == ["models"]:
        results = compare(CONTESTANTS, modes, rounds, int(options.get("steps", 3)))
    elif args[:1] == ["moe"]:
        results = compare({"slotlm": lambda: mixture(8), "dense": lambda: mixture(0)}, modes, rounds, int(options.get("steps", 3)))
    elif args[:1] == ["sft"]:
        results = compare_sft(rounds, int(options.get("steps", 8)))
    elif args[:1] == ["loop"]:
        results = compare_loop(rounds, int(options.get("steps", 41)))
    else:
        print(__doc__)
        return 2
    print(json.dumps(machine() | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
