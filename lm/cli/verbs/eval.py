"""`lm eval from=FOLDER [data=...]`: loss and bits per byte of a model on any data."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from lm.cli.compose.sections import EXAMINED, take_examined
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.generation.config import Dtype
from lm.printing import answer, note
from lm.schema import Tree
from lm.storage.model_folder import read_config, resolve_model
from lm.units import table

_REMARKS = {
    "tokens": "predicted", "zlib_bits_per_byte": "(level 9)", "val_ece": "of what is likeliest",
    "val_macro_f1": "of all labels alike", "val_mcc": "of labels (Matthews)", "val_micro_f1": "of all labels together",
    "val_reward": "of the likeliest answers", "val_answer_tokens": "in each",
}  # fmt: skip
_OF_TASKS = {"limit", "n_shots", "chat", "system", "samples", "overwrite"}
_OF_RETRIEVAL = {"from_", "retrieval", "dims", "device", "dtype", "format"}


class Eval(Verb):
    """usage: lm eval from=FOLDER [key=value ...] [data=..., objective=..., eval..., recipes=... and their keys, as lm train takes them]

    Without data, those of the run that the model comes from. The tokenizer is the model's own. Rows of other data are as long as the run's,
    or as the model's context where there is no run, unless data.seq_len is set, which may be longer where the position has no limit; all of
    the held-out text is read then.
    Without an objective, what models of this kind learn such records by is predicted. Told as well is the loss by place in a document,
    and how far the model's certainty is from how often it is right (val_ece). eval.seq_len=[512] asks for the loss of longer rows beside,
    eval.own_tokens=32 for what becomes of it when it reads itself (val_exposure).

    tasks=arc_easy,my.yaml asks lm-eval's tasks instead, by name or by the file of one's own. retrieval=FOLDER tells how well the model's
    vectors find documents for queries.
    """

    takes = EXAMINED

    from_: str
    """Run, model or checkpoint folder."""
    split: Literal["val", "train", "test", "all"] = "val"
    """The part that `lm train` would validate on, the part that it would train on, what data.test_frac sets aside, or all; of each at most
    data.val_rows rows."""
    micro_batch: int = Field(8, gt=0)
    """Rows per forward."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda, cuda:N or mps (the GPU of a Mac)."""
    dtype: Dtype | None = None
    """As lm generate holds the matrices: saved, fp32, bf16, fp16, int8 or int4. null: as they were trained."""
    tasks: str | None = None
    """Tasks of lm-eval, by name or as yaml files, with commas between; data are theirs then. null: none."""
    limit: int | None = Field(None, gt=0)
    """With tasks: so many samples of each. null: all."""
    n_shots: int | None = Field(None, ge=0)
    """With tasks: examples before each question. null: as the task says."""
    chat: bool = False
    """With tasks: questions are a user's messages in the model's chat template, and examples earlier turns."""
    system: str | None = None
    """With tasks: what the system says before each question, as lm-eval's --system_instruction. null: nothing."""
    samples: str | None = None
    """With tasks: JSON lines to write, one for each question with what was asked and answered, as lm-eval's --log_samples. null: none."""
    overwrite: bool = False
    """Replace the file of samples."""
    retrieval: str | None = None
    """Folder with corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR has them, or another .tsv of its qrels. null: none."""
    dims: int | None = Field(None, gt=0)
    """With retrieval: the first so many numbers of each vector, as in lm embed. null: all."""
    format: Literal["text", "json"] = "text"
    """json: one object on one line."""

    def run(self, rest: list[str]) -> None:
        """Prints metrics on stdout, progress on stderr."""
        model = resolve_model(self.from_)
        if self.retrieval is not None:
            self.refuse(rest)
            found = self._retrieve(model, Path(os.path.expanduser(self.retrieval)))
            self._print(found, [(name, _number(value)) for name, value in found.items()])
        elif self.dims is not None:
            raise ConfigError(f"dims={self.dims}: it is of vectors, and without retrieval none are made. Set that, or leave it out.")
        elif self.tasks is not None:
            self.refuse(rest)
            found = self._ask_tasks(model, self.tasks.split(","))
            self._print(found, _metrics(found))
        elif given := sorted(self.model_fields_set & _OF_TASKS):
            raise ConfigError(f"{', '.join(given)}: only tasks have that, and none are named. Write tasks=arc_easy, or leave it out.")
        else:
            self._evaluate(model, rest)

    def _print(self, found: Tree, *tables: Sequence[tuple[str, ...]]) -> None:
        if self.format == "json":
            answer(json.dumps(found, allow_nan=False, default=str))
        else:
            answer("\n\n".join(table(rows, "") for rows in tables))

    def _evaluate(self, model: Path, rest: list[str]) -> None:
        examined = take_examined(rest, [name.rstrip("_") for name in type(self).model_fields], model)
        from lm.data.rows.base import usual
        from lm.generation.examine import evaluate

        found = evaluate(
            model, examined.data, examined.objective, wanted=examined.eval, parent=examined.init_from, seed=examined.seed,
            split=self.split, micro_batch=self.micro_batch, device=self.device, dtype=self.dtype, log=note,
        )  # fmt: skip
        measure = (examined.objective or usual(read_config(model)["model"]["kind"], examined.data.shape)).measure(None)
        units = {f"val_{figure}": unit for figure, unit in measure.units.items()} | _REMARKS
        numbers = {name: _number(value) for name, value in found.items() if isinstance(value, int | float)}
        figures = [(name, value, units.get(name.partition("/")[0], "")) for name, value in numbers.items()]
        self._print({**found}, figures, [("place", "val_loss", "tokens"), *map(_place, found["loss_by_place"])])

    def _retrieve(self, model: Path, path: Path) -> Tree:
        from lm.generation.load import load
        from lm.generation.retrieval import read_retrieval, retrieve

        if given := sorted(self.model_fields_set - _OF_RETRIEVAL):
            raise ConfigError(f"retrieval: it has no {given[0]}. Leave one of them out.")
        judged, prompts = read_retrieval(path), read_config(model).get("prompts") or {}
        used = [f"{name}: {prompts[name]!r:.60}" for name in ("query", "document") if name in prompts]
        note(f"prompts before texts: {'; '.join(used) or 'none'}")

        def told(what: str, n: int, n_cut: int) -> None:
            note(f"{n:,} {what} to embed" + (f"; the ends of {n_cut:,}, longer than the model reads, are left out" if n_cut else ""))

        return retrieve(*load(model, self.device, dtype=self.dtype), judged, prompts=prompts, dims=self.dims, told=told)

    def _ask_tasks(self, model: Path, tasks: list[str]) -> Tree:
        try:
            from lm.generation.harness import downloads, run_tasks, task_manager
        except ModuleNotFoundError:
            raise ConfigError("tasks: the package lm-eval is needed for them. Run: pip install 'slotlm[eval]'") from None
        from lm.generation.lines import require_lines
        from lm.generation.load import load

        samples = None if self.samples is None else Path(os.path.expanduser(self.samples))
        if samples is not None:
            require_lines(samples, self.overwrite, "samples")
        manager = task_manager(tasks)
        for task, source in downloads(manager, tasks):
            note(f"{task} reads {source} of the Hugging Face hub, which is fetched unless it has been.")
        return run_tasks(
            *load(model, self.device, dtype=self.dtype), manager, tasks, rows=self.micro_batch, limit=self.limit, n_shots=self.n_shots,
            chat=self.chat, system=self.system, samples=samples,
        )  # fmt: skip


def _metrics(found: Tree) -> list[tuple[str, ...]]:
    """Returns table rows of task, metric, value, standard error, number of samples."""
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "error", "samples")]
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, way = name.partition(",")
            if isinstance(value, int | float) and way and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{way}")
                said = f"{error:.4f}" if isinstance(error, float) else ""
                rows.append((task, metric if way == "none" else name, f"{value:.4f}", said, str(found["n_samples"].get(task, ""))))
    return rows


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _place(each: Tree) -> tuple[str, str, str]:
    span = f"{each['from']}" if each["from"] == each["to"] else f"{each['from']}-{each['to']}"
    return span, f"{each['loss']:.4f}", f"{each['tokens']:,}"
