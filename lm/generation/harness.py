"""lm-eval's tasks on a model: log-likelihoods, rolling ones and generation, in batches of rows of like length."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.source import around
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, decoding
from lm.generation.prefill import prompt_batch, sees_whole
from lm.generation.text import chat_template, ids_of
from lm.generation.writer import Writer
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.schema import Tree, from_tree
from lm.spelling import nearest
from lm.storage.atomic import disk_errors, replace_file

_LOCAL = ("json", "csv", "parquet", "text", "arrow")  # what `datasets` calls files that lie here
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Scored = tuple[float, bool]
"""Log p of a continuation, and whether each of its tokens is the likeliest one."""


@dataclass
class _Pair:
    """What the model reads, and the continuation whose tokens are scored (labels): the last len(labels) places of `begin` predict them."""

    source: list[int]
    begin: list[int]
    labels: list[int]


class Harness(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model behind lm-eval's interface. It truncates as lm-eval's `--model hf`, and gives the numbers that this gives for the exported
    folder, unless the model sees a context from all sides (objective=prefix), as it does here.

    Where a text alone is scored (rolling), a decoder's begins with bos once; an encoder-decoder's source is bos, or else eos.
    """

    def __init__(self, model: LM, tokenizer: Tokenizer, rows: int, chat: ChatTemplate | None = None) -> None:
        """rows: how many are read together.  chat: writes questions as messages; special tokens are then read out of text.

        Raises ConfigError for a model that continues nothing, such as an encoder, or a tokenizer with neither bos nor eos."""
        super().__init__()
        begin(model, [0])
        self.backend = "seq2seq" if model.cfg.kind == "encoder_decoder" else "causal"
        self._model, self._tokenizer, self._rows, self._chat = model, tokenizer, rows, chat
        first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
        if first is None:
            raise ConfigError("tasks: the model's tokenizer has neither bos nor eos, which a text begins with. Use another model.")
        self._first = first

    @property
    def eot_token_id(self) -> int:
        """Returns the token that ends a text."""
        return self._first if self._tokenizer.eos is None else self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that is put before a text without a context."""
        return self._first

    @property
    def tokenizer_name(self) -> str:
        """Returns what lm-eval tells tokenizers apart by."""
        return self._tokenizer.hash

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a chat up to where the answer begins, or else up to the end of the last message."""
        assert self._chat is not None
        parts = self._chat.asking(chat_history, {}, not add_generation_prompt)
        return "".join(self._tokenizer.special_names[part] if isinstance(part, int) else part for part in parts)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text as a document of training begins, or as a whole source; without special tokens with
        add_special_tokens=False. A bos that the chat template has written is not written twice."""
        parts = [string] if self._chat is None else self._tokenizer.split_specials(string)
        ids = ids_of(self._tokenizer, parts)
        if add_special_tokens is False:
            return ids
        before, behind = around(self._tokenizer) if self.backend == "seq2seq" else (self._tokenizer.prefix, [])
        return [*(before if ids[:1] != before else []), *ids, *behind]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns log p of each text, read in windows as long as the context, each of which begins with the last token of the one
        before."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            ids, before = self._tokenizer.encode(text), len(windows)
            rolling = get_rolling_token_windows(ids, self._first, self._model.max_seq_len, context_len=1)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            counts.append(len(windows) - before)
        scored = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scored)[0] for _ in range(n)) for n in counts]

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> list[Scored]:
        pairs = [self._pair(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].source) - len(pairs[i].begin))
        found: dict[int, Scored] = {}
        with decoding(self._model):
            for at in range(0, len(order), self._rows):
                some = order[at : at + self._rows]
                batch = self._batch([pairs[i] for i in some])
                reader = _Scores([pairs[i].labels for i in some])
                found |= zip(some, self._model(batch, read=reader), strict=True)
        return [found[i] for i in range(len(pairs))]

    def _batch(self, pairs: Sequence[_Pair]) -> Batch:
        batch = prompt_batch(pairs, self._tokenizer.pad, device := self._model.embed.weight.device)
        if not sees_whole(self._model) or batch.positions is None:
            return batch
        contexts = torch.tensor([[len(pair.begin) + 1 - len(pair.labels)] for pair in pairs], device=device)
        return replace(batch, prefix=(batch.positions >= 0) & (batch.positions < contexts))

    def _pair(self, context: list[int], continuation: list[int]) -> _Pair:
        if not continuation:
            raise ConfigError("tasks: an answer has no tokens, and none would be likelier than it. Give it text in the task.")
        most = self._model.max_seq_len
        if self.backend == "seq2seq":
            labels = continuation[-most:]
            return _Pair(context[-most:], [*begin(self._model, context)[:1], *labels[:-1]], labels)
        if len(continuation) > most:
            raise ConfigError(f"tasks: an answer of {len(continuation)} tokens is over the context of {most}. Leave that task out.")
        return _Pair([], [*context, *continuation][-(most + 1) :][:-1], continuation)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each request's context up to a stop string; a context that leaves no room for it loses its
        beginning."""
        asked = [(self.tok_encode(context), self._sampling(options)) for context, options in (request.args for request in requests)]
        found: dict[int, str] = {}
        order = sorted(range(len(asked)), key=lambda i: (asked[i][1].model_dump_json(), -len(asked[i][0])))
        while order:
            cfg = asked[order[0]][1]
            some = [i for i in order[: self._rows] if asked[i][1] == cfg]
            order = order[len(some) :]
            longest = self._model.max_seq_len - (cfg.max_tokens if self.backend == "causal" else 0)
            if longest < 1:
                raise ConfigError(
                    f"tasks: max_gen_toks={cfg.max_tokens} fills the context of {self._model.max_seq_len}. Lower it in the task."
                )
            prompts = [asked[i][0][-longest:] for i in some]
            texts = Writer(self._model, self._tokenizer, cfg, goes_on=False).continued(prompts)
            found |= {i: text.text for i, text in zip(some, texts, strict=True)}
        return [found[i] for i in range(len(asked))]

    def _sampling(self, options: Tree) -> SamplingConfig:
        """Returns generation_kwargs of a task as a SamplingConfig: greedy unless do_sample is set. Raises ConfigError for unknown
        options."""
        options = dict(options)
        stops = [stop for stop in handle_stop_sequences(options.pop("until", None), None) if stop]
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        most = [options.pop(name) for name in names if name in options]
        samples = options.pop("do_sample", False)
        drawn = {name: options.pop(name) for name in _SAMPLED if name in options}
        if options:
            raise ConfigError(f"tasks: generation_kwargs.{min(options)} is not known here. Leave it out of the task.")
        chosen = drawn if samples else {"temperature": 0}
        return from_tree(SamplingConfig, {"max_tokens": most[0] if most else 256, "stop": stops, **chosen}, "tasks: generation_kwargs")


class _Scores:
    """A reader that scores each row's labels.  labels: of each row's last places."""

    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        self._labels = labels

    def __call__(self, hidden: Tensor, head: Head, ctx: Context) -> list[Scored]:
        return [
            self._row(head(row[-len(labels) :]), torch.tensor(labels, device=row.device))
            for row, labels in zip(hidden, self._labels, strict=True)
        ]

    def _row(self, logits: Tensor, labels: Tensor) -> Scored:
        told = logits.float().log_softmax(-1)
        return float(told.gather(-1, labels.unsqueeze(-1)).sum()), bool((told.argmax(-1) == labels).all())


def run_tasks(
    model: LM, tokenizer: Tokenizer, manager: TaskManager, tasks: list[str], *, rows: int, limit: int | None = None,
    n_shots: int | None = None, chat: bool = False, system: str | None = None, samples: Path | None = None,
) -> Tree:  # fmt: skip
    """Returns lm-eval's results by task, and how many samples each has.  chat, system: as lm-eval's --apply_chat_template and
    --system_instruction; samples: a file for what was asked and answered, as --log_samples, a line each.

    Raises ConfigError where a data set is not here, or with `chat` no template."""
    if samples is not None:
        with disk_errors(samples):
            samples.parent.mkdir(parents=True, exist_ok=True)
    harness = Harness(model, tokenizer, rows, chat_template(tokenizer) if chat else None)
    try:
        found = simple_evaluate(
            harness, tasks=tasks, num_fewshot=n_shots, limit=limit, task_manager=manager, log_samples=samples is not None,
            bootstrap_iters=1000, apply_chat_template=chat, system_instruction=system,
        )  # fmt: skip
    except (ConnectionError, FileNotFoundError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tasks: a data set cannot be had ({said}). Fetch it where there is a network, or name a task of your own files."
        ) from None
    assert found is not None
    if samples is not None:
        lines = [{"task": task, **sample} for task, each in found["samples"].items() for sample in each]
        replace_file(samples, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))
    return {"results": found["results"], "n_samples": {name: n["effective"] for name, n in found["n-samples"].items()}}


def task_manager(tasks: Sequence[str]) -> TaskManager:
    """Returns lm-eval's index of tasks, with its built-in ones unless all `tasks` are files. Raises ConfigError for an unknown task."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [task for task in tasks if task.endswith((".yaml", ".yml"))]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise ConfigError(f"tasks: {missing[0]} does not exist. Give the path of a task's yaml, or the name of a task of lm-eval.")
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    if unknown := [task for task in tasks if task not in files and task not in manager.task_index]:
        near = nearest(unknown[0], manager.all_tasks)  # there are thousands
        remedy = f"Did you mean {near!r}?" if near is not None else "Take a name that `lm-eval ls tasks` lists."
        raise ConfigError(f"tasks: lm-eval has no {unknown[0][:200]!r}. {remedy}")
    return manager


def downloads(manager: TaskManager, tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each task that reads a data set of the Hugging Face hub, and the name of this data set."""
    queue, seen = list(tasks), set(tasks)
    while queue:
        entry = manager.task_index.get(task := queue.pop(0))
        cfg = load_yaml(task, resolve_func=False) if entry is None else entry.cfg or {}
        listed = cfg["task"] if isinstance(cfg.get("task"), list) else []
        inner = {str(each.get("task", each.get("group"))) if isinstance(each, dict) else str(each) for each in listed}
        inner |= entry.tags if entry is not None and entry.kind.name == "TAG" else set()
        queue += sorted(name for name in inner - seen if name in manager.task_index)
        seen |= inner
        path = cfg.get("dataset_path")
        if isinstance(path, str) and path not in _LOCAL and not Path(path).exists():
            yield str(cfg.get("task", task)), path
