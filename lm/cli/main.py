"""`lm VERB ...`: finds the verb, maps errors to exit codes. Imports nothing heavy, so that `lm --help` answers at once."""

import atexit
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from lm import collector, printing
from lm.errors import ConfigError, Interrupted, LmError, ResourceError, internal
from lm.progress import progress

VERBS = {
    "train": "pretrain, fine-tune, resume; with -m, every combination of a sweep",
    "generate": "sample text from a model",
    "fill": "the masks of a text, filled in by an encoder",
    "classify": "which kind a text is of, by a model that was trained to tell",
    "embed": "texts as vectors, which are alike where the texts are",
    "serve": "a model behind OpenAI's API, and a page to chat with it",
    "eval": "loss and bits per byte of a model on any data",
    "ablate": "a fair comparison of variants, matched, tuned, repeated and judged",
    "runs": "what runs there are: how far, how good, how large",
    "compare": "curves and a table of several runs",
    "import": "a Hugging Face model as a model folder",
    "export": "a model for transformers, vLLM, MLX, llama.cpp and lm-eval",
    "merge": "one model out of several, by their weights",
    "average": "one model out of a run's newest checkpoints",
    "remodel": "another architecture that begins with a model's weights",
    "show": "the tree of a model, its parameters, FLOPs, cache and memory",
    "prepare": "tokenise data ahead of a training, on one machine or several",
    "tokenizer": "train a tokenizer",
    "data": "look at the rows that a model is trained on",
    "explain": "what a setting means and where its value comes from",
    "completion": "what bash, zsh or fish need to complete all this",
}
"""Verb -> one line of help; `lm.cli.verb.find` has its class."""

_ELSEWHERE = {
    "chat": "generate", "complete": "generate", "sample": "generate", "inference": "generate", "predict": "classify", "fill-mask": "fill",
    "infill": "fill", "unmask": "fill", "server": "serve", "api": "serve", "encode": "embed", "embeddings": "embed", "finetune": "train",
    "fine-tune": "train", "fit": "train", "pretrain": "train", "resume": "train", "sweep": "train", "evaluate": "eval", "test": "eval",
    "benchmark": "eval", "report": "compare", "plot": "compare", "convert": "export", "push": "export", "study": "ablate",
    "tokenize": "prepare", "preprocess": "prepare", "inspect": "show", "info": "show", "ls": "runs", "list": "runs", "status": "runs",
    "config": "explain", "upcycle": "remodel", "prune": "remodel",
}  # fmt: skip  # what other programs call a verb

_ASKS = ("-h", "--help")

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), "Free space, or write elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Change its permissions, or give another file or folder"),
    errno.EFBIG: "Raise the limit (ulimit -f), or write elsewhere",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit (ulimit -n)"),
}  # of errors of the system that are nobody's bug

_EXAMPLES = """\
  lm train                                                   the tiny default
  lm train recipes=pretrain/gpt2_124m trainer=gpu            a recipe
  lm train model/ffn=swiglu,geglu seed=0,1,2 -m              a sweep
  lm train init_from=runs/base data=text data.files=a.txt    fine-tune
  lm generate from=runs/base prompt="def main("              sample
  lm export from=runs/base format=hf out=exported            hand on
  lm compare runs/a runs/b                                   compare"""


def program() -> NoReturn:
    """What `lm` runs. The process ends once threads and exit handlers are through: to take apart all modules would take Python seconds."""
    code = main()
    if _counts_on_pythons_end():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # Python's own way, for which there is no public name: joining by hand would wait
    atexit._run_exitfuncs()  # forever for the idle threads of an executor, which are told here to end
    printing.shut_door()
    os._exit(code)


def _counts_on_pythons_end() -> bool:
    """Whether a plugin is loaded, whose open files are written then, or a profiler or a debugger, which writes what it has learned."""
    if "lm.plugins" in sys.modules and sys.modules["lm.plugins"].loaded():
        return True
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. The last line on stderr is one sentence; with traceback=true a traceback precedes."""
    args = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # else torch's threads spin while they wait, which starves a busy machine
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    printing.open_door()
    try:
        _dispatch(args)
        code = 0
    except KeyboardInterrupt:
        code = _fail(args, Interrupted("interrupted", signal.SIGINT))
    except BrokenPipeError:  # the reader of stdout is gone
        printing.drop_answers()
        code = 0
    except LmError as error:
        code = _fail(args, error)
    except Exception as error:
        code = _fail(args, _unexpected(error))
    printing.shut_door()
    return code


def _dispatch(args: list[str]) -> None:
    args = _with_own_configs(args)
    wants_help = args[:1] == ["help"] or any(arg in _ASKS for arg in args)
    rest = [arg for i, arg in enumerate(args) if arg not in _ASKS and (i or arg != "help")]
    if not rest or rest[0] in ("--version", "version"):
        printing.answer(f"lm {import_module('lm').__version__}" if rest else _help())
        return
    if rest[0] not in VERBS:
        from lm.spelling import did_you_mean

        raise ConfigError(f"lm: '{rest[0]}' is not a verb. {did_you_mean(_ELSEWHERE.get(rest[0], rest[0]), VERBS)}")
    _require_folder()
    with progress(f"lm {rest[0]}"):
        with collector.paused():
            from lm import plugins
            from lm.cli.verb import call, find

            given = plugins.take(rest[1:])
            verb = find(rest[0])
        if wants_help:
            printing.answer(verb.help_text(given))
        else:
            call(verb, given)


def _with_own_configs(args: list[str]) -> list[str]:
    """Returns the arguments without `--config-dir FOLDER`, after adding the options of that folder, or of LM_CONFIG_DIR."""
    by, folder = "LM_CONFIG_DIR", os.environ.get("LM_CONFIG_DIR", "")
    rest, queue = [], list(args)
    while queue:
        arg = queue.pop(0)
        if arg in ("--config-dir", "-cd"):
            by, folder = "--config-dir", queue.pop(0) if queue else ""
        elif arg.startswith("--config-dir="):
            by, _, folder = arg.partition("=")
        else:
            rest.append(arg)
    if folder or by != "LM_CONFIG_DIR":
        from lm.cli.compose.catalog import add_own

        add_own(folder, by)
    return rest


def _help() -> str:
    verbs = "\n".join(f"  {verb:<12}{line}" for verb, line in VERBS.items())
    own = "  --config-dir FOLDER   recipes and options of your own, in folders like those\n"
    own += "                        of conf/; so does LM_CONFIG_DIR\n"
    own += "  plugins=FILE.py,...   Python files with kinds of your own, such as a norm;\n"
    own += "                        so does LM_PLUGINS"
    return f"usage: lm VERB [key=value ...]\n\n{verbs}\n\n{own}\n\nexamples:\n{_EXAMPLES}\n\n`lm VERB --help` says more."


def _fail(args: Sequence[str], error: LmError) -> int:
    """Prints an error, and returns its exit code."""
    if "traceback=true" in args:
        printing.trace()
    for line in error.lines:
        printing.note(line)
    return error.exit_code


def _unexpected(error: Exception) -> LmError:
    """Returns what is told of an error that is no LmError: of memory, of the file system, or a bug."""
    if isinstance(error, MemoryError):
        return ResourceError("memory: an allocation failed. Lower trainer.micro_batch, data.seq_len or the model's size.")
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        printing.drop_answers()
        return ResourceError(f"{error.filename or 'output'}: {error.strerror}. {_REMEDIES[error.errno]}.")
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return ConfigError(f"{error.filename}: {error.strerror}. Give the path of a file or folder.")
    try:
        _require_folder()
    except ConfigError as gone:  # since the command started
        return gone
    return internal(error)


def _require_folder() -> None:
    """Raises ConfigError where the current folder has been deleted; else libraries would fail later, each with another message."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("current folder: it has been deleted, and paths are relative to it. Change to one that exists.") from None
