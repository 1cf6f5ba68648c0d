"""What abuse.py tries: hostile calls of `lm` by class, drawn by hypothesis from the schema and from the files that a run leaves."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from lm.cli.compose.compose import compose_config
from lm.cli.compose.keys import fields
from lm.cli.verb import find
from lm.storage.manifest import MANIFEST
from lm.training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    *("model=nano", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64", "tokenizer=bytes"),
    *("data=text", "data.files=text.txt", "data.cache_dir=cache", "data.seq_len=32", "data.global_batch=8", "data.val_rows=4"),
    *("trainer.max_steps=2", "trainer.val_every=2", "checkpoint.every=1", "schedule.warmup_steps=0", "trainer.device=cpu"),
    *("trainer.sample_prompts=[]", "run.dir=.", "run.name=run"),
)
READERS = [
    *(["train", *TINY], ["eval", "from=run", "micro_batch=2", "format=json"], ["generate", "from=run", "prompt=ab", "max_tokens=4"]),
    *(["export", "from=run", "format=hf", "out=made", "check=false"], ["compare", "run"], ["show", "from=run"]),
    *(["train", "init_from=run", *TINY[6:-1], "run.name=tuned"], ["eval", "from=run/checkpoints/step-00000001", "micro_batch=2"]),
]
JUNK: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, 1e-300, 1e308, float("nan"), float("inf"), -0.5, "", " ", "x", "null", "[]", "ä ö"),
    *([], {}, [[]], [None], {"kind": "x"}, {"a": {"b": 1}}, "x" * 5000, "\x1b[31m", "a\nb", "../..", "/dev/zero", "${oc.env:HOME}", "1e9"),
]


@dataclass(frozen=True)
class Case:
    """One call of lm in a folder of its own."""

    group: str
    args: list[str]
    changes: list[tuple[str, str, Any]] = field(default_factory=list)  # (file, what is done to it, with what)
    env: dict[str, str] = field(default_factory=dict)
    shell: str = ""  # what stands around the command where a process of its own is the point
    refused: bool = False  # whether it must not end with 0


def _sayable(case: Case) -> bool:
    """Whether a system can hand these arguments to a process at all."""
    try:
        return not any("\0" in text or len(os.fsencode(text)) > 100_000 for text in case.args)
    except UnicodeEncodeError:
        return False


def overrides() -> st.SearchStrategy[Case]:
    """Calls of a verb with one or two options that are wrong, or hardly right."""
    known = [path for path, _ in fields(TrainConfig, compose_config(TINY).tree())]
    groups = [str(path.parent.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.yaml")]
    scalar = st.sampled_from([json.dumps(value) for value in JUNK]) | st.integers().map(str) | st.floats(width=32).map(str)
    text = (
        scalar
        | st.text(max_size=12)
        | st.sampled_from(["", "a,b", "range(1e9)", "glob(*)", "'", '"', "[1,", "${seed}", "${x", "{a:1}", "~"])
    )

    def misspelt(path: str, at: int) -> str:
        at %= len(path)
        return path[:at] + path[at + 1 :]

    key = st.sampled_from(known)
    option = st.one_of(
        st.tuples(key, text).map("=".join),
        st.builds(misspelt, key, st.integers(0, 99)).map("{}=1".format),
        st.tuples(st.sampled_from(sorted(set(groups))), text | st.sampled_from(groups)).map("=".join),
        st.tuples(st.sampled_from(["+", "++", "~", "-", "--"]), key, text).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"),
        st.sampled_from(TINY),  # once more
        st.text(max_size=20),
    )
    composing = st.sampled_from([["train"], ["train"], ["train", "--cfg", "job"], ["train", "-m"], ["show"], ["data", "show"], ["prepare"]])

    def with_overrides(verb: list[str], wrong: list[str]) -> Case:
        keys = {arg.partition("=")[0] for arg in wrong if arg not in TINY}
        return Case("overrides", [*verb, *(arg for arg in TINY if arg.partition("=")[0] not in keys), *wrong])

    def own(read: list[str], wrong: list[str]) -> Case:
        return Case("overrides", [*read, *wrong])

    owners = [read for read in READERS if read[0] != "train"] + [
        ["tokenizer", "data.files=text.txt", "out=made"],
        ["data", "show"],
        ["explain"],
    ]
    keys = {read[0]: [name.rstrip("_") for name in find(read[0]).model_fields] for read in owners}
    own_option = st.sampled_from(owners).flatmap(
        lambda read: st.builds(
            own, st.just(read), st.lists(st.tuples(st.sampled_from(keys[read[0]] or ["x"]), text).map("=".join), min_size=1, max_size=2)
        )
    )
    return (st.builds(with_overrides, composing, st.lists(option, min_size=1, max_size=2)) | own_option).filter(_sayable)


def files(base: Path) -> st.SearchStrategy[Case]:
    """Readers of a run, a model or a recipe of which one file is not what it was."""
    runs = [path for path in sorted(base.glob("run/**/*")) if path.is_file()]
    exported = [path for path in sorted(base.glob("hf/*")) if path.is_file()]
    tables = [path for path in runs + exported if path.suffix in (".json", ".yaml")]
    importer = ["import", "from=hf", "out=made"]

    def readers(path: Path) -> st.SearchStrategy[list[str]]:
        return st.just(importer) if path in exported else st.sampled_from(READERS)

    def case(path: Path, args: list[str], how: str, value: Any, mended: bool) -> Case:
        name = str(path.relative_to(base))
        silent = how == "flip" and name.endswith("model/model.safetensors") and args[0] in ("eval", "generate", "export")
        changes = [(name, how, value), *([(name, "manifest", None)] if mended else [])]
        return Case("files", args, changes, refused=silent and not mended and "from=run" in args)

    def of(paths: list[Path], hows: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Case]:
        how = st.sampled_from(sorted(hows)).flatmap(lambda name: st.tuples(st.just(name), hows[name]))
        return st.sampled_from(paths).flatmap(
            lambda path: st.builds(lambda args, done, mended: case(path, args, done[0], done[1], mended), readers(path), how, st.booleans())
        )

    where = st.integers(0, 2**20)
    in_tables = {
        "drop": where,
        "put": st.tuples(where, st.sampled_from(JUNK)),
        "add": st.sampled_from(JUNK),
        "whole": st.sampled_from(JUNK),
    }
    in_bytes = {
        "flip": where,
        "cut": where,
        "append": st.binary(min_size=1, max_size=40),
        "junk": st.binary(max_size=200),
        "gone": st.none(),
        **{name: st.none() for name in ("fifo", "folder", "loop", "zero", "bomb", "deep", "bom")},
    }
    recipe = st.sampled_from(
        ["defaults:\n- /recipes: [own]\n", "defaults: [own]\n", "a: &a [*a]\n", "- 1\n", "seed: {\n", "trainer: 1\n", "\0"]
    )
    own = recipe.map(lambda text: Case("files", ["train", "--config-dir", "own", "recipes=own"], [("own/recipes/own.yaml", "write", text)]))
    return st.one_of(of(tables, in_tables), of(runs + exported, in_bytes), own)


def data() -> st.SearchStrategy[Case]:
    """Files of a user, whose names or contents are no text."""
    names = st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
    name = names | st.sampled_from(
        ["\udcff.txt", "a b", "ä", "x\ny", "\x1b[2J", "'", '"', "=", "~", "${x}", "-m", "a,b", "[a]", "{a}", "#"]
    )
    ending = st.sampled_from([".txt", ".txt", ".jsonl", ".json", ".parquet", ".txt.gz", ".csv", ""])
    record = st.dictionaries(st.sampled_from(["text", "messages", "prompt", "a\nb", "\x1b[1m"]), st.sampled_from(JUNK), max_size=3)
    lines = st.lists(record, max_size=8).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    content = st.binary(max_size=300) | lines | st.text(max_size=50).map(lambda text: (text * 200).encode("utf-8", "surrogatepass"))
    calls = st.sampled_from(
        [["train", *TINY], ["prepare", *TINY[:-4]], ["data", "show", *TINY[5:-8]], ["tokenizer", "out=made", "vocab_size=300"]]
    )
    more = st.sampled_from([[], [], ["data.field=x"], ["objective=sft"], ["objective=dpo"], ["data.on_bad_record=skip"]])

    def case(call: list[str], name: str, ending: str, content: bytes, more: list[str]) -> Case:
        args = [arg for arg in call if not arg.startswith(("data.files=", "run.name="))]
        return Case(
            "data",
            [*args, f"data.files={name}{ending}", *(more if call[0] != "tokenizer" else [])],
            [(f"{name}{ending}", "write", content)],
        )

    return st.builds(case, calls, name, ending, content, more).filter(_sayable)


def environments() -> st.SearchStrategy[Case]:
    """Calls that are right, in a process of their own that lacks something."""
    values = {
        **{name: ["C", "POSIX", "xx_XX", "de_DE.ISO-8859-1", ""] for name in ("LC_ALL", "LANG")},
        **{name: ["0", "-1", "x", "2", ""] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "MASTER_PORT")},
        **{
            name: ["/nonexistent", "", "/dev/null", "/dev/full"]
            for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "LM_CONFIG_DIR", "LM_PLUGINS")
        },
        "PYTHONIOENCODING": ["ascii", "latin-1", "cp1252"],
        "COLUMNS": ["0", "-1", "x"],
        "TERM": ["dumb", ""],
        "OMP_NUM_THREADS": ["0", "x"],
    }
    variable = st.sampled_from(sorted(values)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(values[name])))
    around = [
        *("{}", "{}", "{} >&-", "{} 2>&-", "{} <&-", "{} >/dev/full", "{} 2>/dev/full", "{} | head -c 1", "{} >&- 2>&- <&-"),
        *("ulimit -n 32; {}", "ulimit -f 8; {}", "ulimit -v 3000000; {}", "mkdir d; cd d; rmdir ../d; {}", "{} < <(yes)"),
    ]
    calls = [
        ["--help"],
        ["show", "model=nano"],
        ["train", "--help"],
        ["train", "optim.lrr=1"],
        ["explain", "optim.lr"],
        ["train", *TINY],
        *READERS[1:5],
    ]
    return st.builds(
        lambda args, env, shell: Case("environments", args, env=dict(env), shell=shell),
        st.sampled_from(calls), st.lists(variable, max_size=2), st.sampled_from(around),
    )  # fmt: skip


def change(path: Path, how: str, value: Any) -> bool:
    """Does to a file what a case says; False where that cannot be done, so that there is no case."""
    try:
        _change(path, how, value)
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return False
    return True


def _change(path: Path, how: str, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "manifest" and path.name == MANIFEST:
        return  # it is what was spoilt
    if how == "manifest":
        names = [beside for beside in path.parent.iterdir() if beside.is_file() and beside.name != MANIFEST]
        digests = {beside.name: hashlib.sha256(beside.read_bytes()).hexdigest() for beside in names}
        (path.parent / MANIFEST).write_text(json.dumps(digests))
    elif how in ("drop", "put", "add", "whole"):
        tree = _changed(yaml.safe_load(path.read_text()), how, value)
        path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))
    else:
        content = bytearray(path.read_bytes() if path.is_file() else b"")
        path.unlink(missing_ok=True)
        if how in INSTEAD:
            INSTEAD[how](path)
        else:
            path.write_bytes(_spoilt(content, how, value))


def _changed(tree: Any, how: str, value: Any) -> Any:
    """A tree of plain values, a field of it lost or with junk in its place."""
    places = list(_places(tree))
    if how == "whole" or not places:
        return value
    if how == "add":
        return tree | {"unheard_of": value}
    where, junk = (value, None) if how == "drop" else value
    holder, key = places[where % len(places)]
    if how == "drop":
        del holder[key]
    else:
        holder[key] = junk
    return tree


def _spoilt(content: bytearray, how: str, value: Any) -> bytes:
    if how == "write":
        return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    if how == "flip" and content:
        content[value % len(content)] ^= 1 << value % 8
        return bytes(content)
    cut = value % (len(content) + 1) if how == "cut" else None
    made = {
        "append": lambda: content + value,
        "junk": lambda: value,
        "bom": lambda: b"\xef\xbb\xbf" + content,
        "cut": lambda: content[:cut],
    }
    return bytes(made[how]()) if how in made else bytes(content)


def _bomb(path: Path) -> None:
    """A few lines of yaml that would be 9^30 values."""
    path.write_text("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)))


INSTEAD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "bomb": _bomb,
    "gone": lambda path: None,
}


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a tree of plain values."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()):
        yield tree, key
        yield from _places(value)
