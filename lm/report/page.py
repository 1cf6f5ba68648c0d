"""The report of a run, report.html."""

import re
import shlex
from pathlib import Path

from lm.report.collect import TOLD
from lm.report.curves import curves
from lm.report.frame import render
from lm.report.run import Run, read_run
from lm.schema import Tree, flatten
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder
from lm.units import ABSENT, duration, fixed, shown, si

TEMPLATE = Path(__file__).with_name("page.html.j2")
_SAMPLES = 100  # validations whose samples are shown: a run of weeks has tens of thousands


def write_report(run_folder: Path) -> Path:
    """Writes report.html, one self-contained page, into the folder of a finished or unfinished run, and returns its path. Raises as
    `read_run` does, or ResourceError."""
    run = read_run(run_folder)
    samples = _samples(run.samples)
    html = render(
        TEMPLATE,
        run=run,
        result=_result(run),
        about=_about(run),
        numbers=_numbers(run),
        sources=_sources(run),
        curves=curves(run),
        samples=samples[:_SAMPLES],
        older=len(samples) > _SAMPLES,
        events=[_event(line) for line in run.events],
        config=yaml_text(run.config),
        reproduce=_reproduce(run),
    )
    return RunFolder(run_folder).write_report(html)


def _result(run: Run) -> str:
    steps, most = run.number("steps") or run.number("step") or 0, flatten(run.config).get("trainer.max_steps", ABSENT)
    left = "Diverged" if run.diverged else "Unfinished"
    start = f"After {steps:,.0f} steps and" if run.finished else f"{left}: after {steps:,.0f} of {shown(most)} steps and"
    start += f" {si(run.number('tokens'))} tokens"
    bits, loss, zlib = (run.number(key) for key in ("val_bits_per_byte", "val_loss", "zlib_bits_per_byte"))
    if bits is None:
        known = f"the validation loss is {loss:.3f}" if loss is not None else "nothing is validated yet"
        return f"{start}, {known}."
    beside = f"; zlib at level 9 needs {zlib:.3f}" if zlib is not None else ""
    return f"{start}, the validation text takes {bits:.3f} bits per byte{beside}."


def _about(run: Run) -> list[tuple[str, str]]:
    """Returns (title, text) rows on what was trained, on which data, with which code."""
    flat, summary = flatten(run.config), run.summary
    deep = flat.get("model.n_layers", "?")
    layers = f"{deep} layer{'s' * (deep != 1)} of {flat.get('model.d_model', '?')}"
    slots = [str(flat[key]) for slot in ("norm", "position", "attention", "ffn") if (key := f"model.{slot}.kind") in flat]
    source = [shown(flat[key]) for key in ("data.kind", "data.name", "data.files") if flat.get(key) is not None]
    source += [", ".join(str(one.get("name")) for one in run.config.get("data", {}).get("sources", []))]
    group = f"{pairs} pairs of up to " if (pairs := flat.get("objective.among")) is not None else ""
    fewer = "".join(f"{first.get('global_batch')} to " for first in (run.config.get("data", {}).get("ramp") or [])[:1])
    rows = f"{fewer}{flat.get('data.global_batch', '?')} rows of {group}{flat.get('data.seq_len', '?')} tokens a step"
    prints = str(summary.get("data_fingerprint") or "")[:12]
    commit = str(summary.get("commit") or "")
    changed = ", with changes that are not committed" if commit.endswith("+") else ""
    code = [f"lm {summary['version']}" if summary.get("version") else "", commit and f"commit {commit.rstrip('+')}{changed}"]
    found = [
        ("model", f"{flat.get('model.kind', '?')}, {layers}: {', '.join(slots)}"),
        ("data", ", ".join(filter(None, [" ".join(filter(None, source)), rows, prints and f"fingerprint {prints}"]))),
        (
            "tokenizer",
            " ".join(str(flat[key]) for key in ("tokenizer.kind", "tokenizer.vocab_size", "tokenizer.path") if flat.get(key) is not None),
        ),
        ("code", ", ".join(filter(None, code))),
    ]
    return [(name, text) for name, text in found if text]


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    number, summary = run.number, run.summary
    zlib, inner, per_token = number("zlib_bits_per_byte"), number("parameters_non_embedding"), number("cache_bytes_per_token")
    mfu, bits, active = number("mfu_pct"), number("val_bits_per_byte"), number("parameters_active")
    of_which = [f"{si(inner)} without embeddings"] if inner is not None else []
    of_which += [f"{si(active)} for one token"] if active is not None and active < (number("parameters") or 0) else []
    cards = [
        ("val bits per byte", fixed(bits), f"zlib level 9: {zlib:.4f}" if zlib is not None else ""),
        ("val loss", fixed(number("val_loss")), run.measure.unit("val_loss")),
        *((name, fixed(number(key)), "") for name, key in TOLD.items()),
        ("parameters", si(number("parameters")), ", ".join(of_which)),
        ("FLOPs per token", si(number("flops_per_token")), f"{si(per_token)}B cache per token" if per_token is not None else ""),
        ("tokens", si(number("tokens")), f"seed {run.config.get('seed', 0)}"),
        ("tokens per second", si(number("tokens_per_second")), f"{mfu:.0f} % of peak FLOPs" if mfu is not None else ""),
        ("wall time", duration(number("train_s")), ""),
        ("device", str(summary.get("device") or "-"), ""),
        ("torch", str(summary.get("torch") or "-"), f"Python {summary['python']}" if summary.get("python") else ""),
    ]
    parent = summary.get("parent") or run.config.get("init_from")
    if parent:
        cards.append(("fine-tuned from", str(parent), ""))
    return [card for card in cards if card[1] != "-"]


def _sources(run: Run) -> list[tuple[str, ...]]:
    """Returns for each source of a mixture: name, tokens read, their share, epochs, validation loss."""
    names = [source["name"] for source in run.config.get("data", {}).get("sources", [])]
    tokens, epochs, losses = ([run.number(f"{key}/{name}") for name in names] for key in ("tokens", "epochs", "val_loss"))
    total = sum(filter(None, tokens)) or 1
    return [
        (name, si(read or 0), f"{(read or 0) / total:.1%}", f"{turns or 0:.2f}", fixed(loss))
        for name, read, turns, loss in zip(names, tokens, epochs, losses, strict=True)
    ]


def _samples(text: str) -> list[tuple[str, str]]:
    """Returns (heading, text) per `## ` heading of samples.md, newest first; one untitled piece where there is no heading."""
    before, *parts = re.split(r"^## +(step\b.*)$", text, flags=re.MULTILINE | re.IGNORECASE)
    if not parts:
        return [("", before.strip())] if before.strip() else []
    return [(title.strip(), body.strip("\n")) for title, body in zip(parts[::2], parts[1::2], strict=True)][::-1]


def _event(line: Tree) -> tuple[str, str, str]:
    details = {key: value for key, value in flatten(line).items() if key not in ("step", "event")}
    return shown(line["step"]), str(line["event"]), ", ".join(f"{key} {value}" for key, value in details.items())


def _reproduce(run: Run) -> dict[str, str]:
    command = run.summary.get("command")
    if isinstance(command, str):
        return {"text": "Written by this command; in an empty runs folder it repeats the run.", "command": command}
    config = shlex.quote(str(run.folder / "config.yaml"))
    text = "Every value is in config.yaml, defaults included. To repeat the run, copy the file, change run.name and train from it."
    return {"text": text, "command": f"cp {config} again.yaml\npython -m lm.training.worker again.yaml"}
