"""The README's commands work as they stand, in its order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic.fields import FieldInfo

import lm
from lm.cli.compose import catalog
from lm.config import find_field, members, variants
from lm.hf.io.family import families
from lm.training.config import LaunchConfig, TrainConfig

README = Path(__file__).parents[2] / "README.md"


def block(language: str, number: int) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(blocks[number]).splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "README.md").write_bytes(README.read_bytes())
    return folder


def shell(command: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


COMMANDS = block("bash", 1)


def test_the_readme_has_its_commands() -> None:
    assert len(COMMANDS) == 12
    assert block("bash", 0)[0].startswith("make pretrain")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_command_works(command: str, folder: Path) -> None:
    out = shell(command, folder)
    assert out.strip() or "from=runs/t5" in command  # the answer of a model of four steps may be an empty one
    assert out


def test_the_readmes_commands_left_what_they_promise(folder: Path) -> None:
    for file in ("config.yaml", "metrics.jsonl", "samples.md", "report.html", "summary.json", "checkpoints", "model/tokenizer.json"):
        assert (folder / "runs" / "a" / file).exists()
    assert (folder / "runs" / "tuned" / "model" / "model.safetensors").exists()
    model, tokenizer = lm.load(folder / "runs" / "t5", device="cpu")
    assert any(lm.generate(model, tokenizer, "def close(self): ...", max_tokens=20, seed=seed).strip() for seed in range(4))
    assert "finished already" in shell(COMMANDS[1], folder)


def test_the_readmes_python_works(folder: Path) -> None:
    (folder / "three_lines.py").write_text("\n".join(block("python", 0)), encoding="utf-8")
    assert shell(f"{sys.executable} three_lines.py", folder).strip()


def test_every_file_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) >= 2
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_every_recipe_stands_in_the_readmes_table() -> None:
    recipes = sorted(path.relative_to(README.parent / "recipes").with_suffix("") for path in (README.parent / "recipes").glob("*/*.yaml"))
    assert len(recipes) >= 11
    text = README.read_text(encoding="utf-8")
    assert [str(recipe) for recipe in recipes if f"`{recipe}`" not in text] == []


def section(title: str) -> str:
    [text] = re.findall(rf"^## {title}\n(.*?)^## ", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(text)


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def table(title: str) -> dict[str, list[str]]:
    """First cell -> the others, without the heading."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section(title).splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def vocabulary(field: FieldInfo, prefix: str = "") -> set[str]:
    """Every key below a section, by dotted path, and every value that a key chooses from."""
    found = {str(option) for part in members(field.annotation) for option in get_args(part)}
    for cls in variants(field.annotation).values():
        for key, inner in cls.model_fields.items():
            found |= {f"{prefix}{key}"} | vocabulary(inner, f"{prefix}{key}.")
    return found


def test_the_table_of_slots_has_every_group_and_option() -> None:
    shown = {slot: sorted(quoted(cells[0])) for slot, cells in table("Slots").items() if not slot.startswith("the rest")}
    assert shown == {group: sorted(options) for group, options in catalog.groups().items() if group not in ("model", "recipes")}


@pytest.mark.parametrize("slot", table("Slots"))
def test_the_options_in_the_table_of_slots_exist(slot: str) -> None:
    path = ["model"] if slot.startswith("the rest") else slot.split("/")
    _, field = find_field(TrainConfig, {"model": {"kind": "decoder"}}, path)
    known = vocabulary(field) if field is not None else set()
    known |= {f"launch.{key}" for key in LaunchConfig.model_fields} | {"metrics.jsonl"}
    assert [option for option in quoted(table("Slots")[slot][1]) if option not in known] == []


def test_the_table_of_models_has_every_preset_in_the_row_of_its_kind() -> None:
    shown = {stack.replace("-", "_"): sorted(quoted(" ".join(cells))) for stack, cells in table("Models").items()}
    expected: dict[str, list[str]] = {}
    for preset in catalog.groups()["model"]:
        expected.setdefault(catalog.values("model", catalog.lineage(preset)[0])["model.kind"], []).append(preset)
    assert shown == expected


def test_every_family_stands_in_the_readme() -> None:
    [named] = re.findall(r"Families: (.*?)\. Each is", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {re.sub(r"\(.*\)|\W", "", name).lower() for name in named.split(",")}
    assert names == {family.replace("_", "") for family in families()}


def test_the_output_of_lm_show_is_what_it_prints(folder: Path) -> None:
    [shown] = [text for n in range(2) if (text := block("text", n))[0].startswith("$ lm show")]
    assert shell(shown[0].removeprefix("$ "), folder).splitlines() == shown[1:]
