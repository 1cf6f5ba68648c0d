"""README.md and the pages of docs/: their commands work as they stand, in their order, and what they name exists."""

import json
import re
import sys
from pathlib import Path

import pytest

from lm.cli.compose import catalog
from lm.cli.compose.arguments import parse_call
from lm.cli.compose.compose import compose
from lm.cli.compose.overrides import expand
from lm.cost.memory import Setting, memory
from lm.data.kinds import DataConfig
from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.training.same_settings import _MAY_CHANGE
from lm.training.strategies.config import StrategyConfig
from tests.pages.commands import PAGES, ROOT, Block, blocks, run
from tools import docs

# of many trainings, or of several processes
SLOW = (
    "ablation",
    "commands",
    "data",
    "distributed",
    "finetuning",
    "generation",
    "models",
    "huggingface",
    "papers",
    "plugins",
    "recipes",
    "serve",
    "serving",
    "tutorial",
)
SBATCH = """#!/bin/bash
# Runs the wrapped line at once, for each number of --array.
for arg; do case "$arg" in --array=*) array=${arg#--array=};; esac; last=$arg; done
for n in $(seq ${array%-*} ${array#*-}); do SLURM_ARRAY_TASK_ID=$n bash -c "$last" >&2 || exit 1; done
[ -n "$array" ] || bash -c "$last" >&2
echo 7
"""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a page may take for granted: the checkout's README.md, docs/ and lm/, a folder notes/ of texts, and a queue."""
    for name in ("README.md", "docs", "lm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notes").mkdir()
    for number in range(4):
        records = [{"text": f"Note {n} of file {number}. " * (n % 7 + 2)} for n in range(80)]
        (tmp_path / "notes" / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "bin").mkdir()
    for name, script in {"sbatch": SBATCH, "lm": f'#!/bin/bash\nexec {sys.executable} -m lm "$@"\n'}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(catalog.OWN, "")  # forgotten after the test, if a command sets it
    return tmp_path


def with_blocks() -> list[object]:
    found = [page for page in PAGES if blocks(page)]
    assert len(found) >= 8
    return [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in found]


@pytest.mark.parametrize("page", with_blocks())
def test_the_pages_commands_work(page: Path, folder: Path) -> None:
    for block in blocks(page):
        run(block, folder)


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(folder: Path) -> None:
    cells = json.loads(text("docs/notebook.ipynb"))["cells"]
    assert len(cells) == 10
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)


def test_every_training_of_the_pages_composes() -> None:
    later = ("init_from=", "--config-dir", "plugins=", "recipes=finetune/")  # need what the commands before them have made
    found = [block for page in PAGES for block in blocks(page) if block.way != "not run"]
    composed = [args for block in found for args in block.trainings if not any(arg.startswith(later) for arg in args)]
    assert len(composed) >= 30
    for args in composed:
        for job in expand(parse_call(args).overrides):
            compose(job).config()


def test_a_command_stands_in_a_fence_where_it_is_run() -> None:
    indented = re.compile(r"^ {4}(?:\$ )?(?:lm|python|torchrun) .*=.*$", re.MULTILINE)
    loose = {page.name: found for page in PAGES if (found := indented.findall(page.read_text(encoding="utf-8")))}
    assert loose == {"commands.md": ["    lm VERB key=value ..."]}


def test_no_prompt_of_a_page_ends_in_a_space_which_lm_generate_advises_against() -> None:
    prompts = [found for page in PAGES for found in re.findall(r"""\bprompt"?[=:] ?["']([^"']*)["']""", page.read_text(encoding="utf-8"))]
    assert len(prompts) > 30 and not [prompt for prompt in prompts if prompt.endswith(" ")]


def test_what_a_plugin_adds_is_a_whole_sentence_in_the_table() -> None:
    rows = docs.MADE["plugins"]().splitlines()[2:]
    assert len(rows) >= 9 and all(row.endswith(". |") for row in rows)


def test_every_link_leads_to_a_file_and_a_name_that_are_there() -> None:
    found = [(page, *link) for page in PAGES for link in docs.LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(found) >= 40
    dead = [f"{page.name}: {to}{name}" for page, to, name in found if not docs.leads_somewhere(page.parent / to, name[1:])]
    assert dead == []


def test_a_dead_link_is_noticed() -> None:
    assert docs.leads_somewhere(ROOT / "lm" / "ops" / "norm.py", "rms_norm")
    assert not docs.leads_somewhere(ROOT / "lm" / "ops" / "norm.py", "no_norm")
    assert not docs.leads_somewhere(ROOT / "lm" / "nn" / "no.py", "")


def test_a_table_that_is_made_has_a_line_for_readers_of_the_page_itself() -> None:
    places = [found for page in PAGES for found in re.findall(r"^<!-- made: .*-->\n(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(places) >= 9 and all(re.fullmatch(r"\*`make docs` puts .*\*", line) for line in places)


def test_every_file_and_folder_of_the_repository_that_a_page_names_is_there() -> None:
    path = re.compile(r"[`( ]((?:lm|tools|tests|conf|recipes)/[\w/.]*\w)(?=[`)\]: ,;#]|[.]?$|[.] )", re.MULTILINE)
    named = {name for page in PAGES for name in path.findall(page.read_text(encoding="utf-8")) if "mine" not in name}
    assert len(named) >= 50
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_option_of_a_group_that_a_page_names_is_there() -> None:
    """Seen to fail of model/ffn=mlp, which is a kind and no option."""
    named = {found for page in PAGES for found in re.findall(r"`[^`\n]*?\b(model/\w+)=([a-z]\w*)", page.read_text(encoding="utf-8"))}
    assert len(named) >= 30
    assert [f"{group}={name}" for group, name in sorted(named) if not (ROOT / "conf" / group / f"{name}.yaml").exists()] == []


def test_every_list_in_the_code_that_contributing_names_is_there() -> None:
    """Seen to fail: the one of optimizers had gone."""
    named = set(re.findall(r"`([A-Z][A-Z_]{3,})`", text("CONTRIBUTING.md")))
    code = "\n".join(file.read_text(encoding="utf-8") for at in ("lm", "tests") for file in (ROOT / at).rglob("*.py"))
    assert len(named) >= 8
    assert [name for name in sorted(named) if not re.search(rf"^{name}\b.* = ", code, re.MULTILINE)] == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = text("README.md")
    assert len(readme.splitlines()) <= 120
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and f"(docs/{page.name})" not in readme] == []


def test_a_broken_command_is_noticed(folder: Path) -> None:
    for broken in ("lm train model=nothing --cfg job", "true | false", "[ $((1 + 1)) = 3 ]"):
        with pytest.raises((AssertionError, ConfigError)):
            run(Block("bash", "", "", f"{broken}\n"), folder)
    with pytest.raises(AssertionError):
        run(Block("console", "prints this", "", "$ echo 1\n2\n"), folder)


def test_every_source_and_packing_is_on_the_page_of_data() -> None:
    page = text("docs/data.md")
    sources = [path.stem for path in (ROOT / "conf" / "data").glob("*.yaml")]
    assert len(sources) > 9 and [name for name in sources if not re.search(rf"[` ]{name}[` ,]", page)] == []
    kinds = re.findall(r"'(\w+)'", str(DataConfig.model_fields["packing"].annotation))
    assert kinds and all(f"| `{kind}` |" in page for kind in kinds)


def row(stage: int) -> list[str]:
    """GiB of weights, gradients and optimizer on one of 8 ranks, in fp32 with AdamW."""
    found = []
    for name in ("gpt2", "olmo2_1b", "llama3_8b"):
        tree = compose([f"model={name}", "model.vocab_size=50304", "model.max_seq_len=4096"]).tree["model"]
        held = memory(build_model(model_config(tree), device="meta"), Setting(1, 1024, 1024, stage=stage, world=8))
        found.append(f"{(held.weights + held.gradients + held.optimizer) / 2**30:.1f}")
    return found


def test_every_key_that_may_differ_from_a_run_that_goes_on_is_told() -> None:
    """Seen to fail of trainer.deterministic."""
    told = (ROOT / "docs" / "coming_from.md").read_text().partition("These keys may differ:")[2].partition("\n\n")[0]
    keys = [key for key in _MAY_CHANGE if "." in key]
    assert len(keys) > 12 and not [key for key in keys if f"`{key}`" not in told and f"`{key.rpartition('.')[2]}`" not in told]


def test_the_table_of_memory_is_the_formulas() -> None:
    cells = [line.split("|") for line in text("docs/distributed.md").splitlines()]
    shown = {line[1].strip("` "): [cell.strip() for cell in line[3:6]] for line in cells if len(line) == 8}
    stages = {kind: strategy.stage for kind, strategy in StrategyConfig.kinds().items()}
    expected = {stage: row(stage) for stage in set(stages.values())}
    assert {kind: shown.get(kind) for kind in stages} == {kind: expected[stage] for kind, stage in stages.items()}
