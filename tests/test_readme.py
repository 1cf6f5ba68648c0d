"""The README's commands work as they stand, in its order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


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
    assert out.strip()


def test_the_readmes_commands_left_what_they_promise(folder: Path) -> None:
    for file in ("config.yaml", "metrics.jsonl", "samples.md", "report.html", "summary.json", "checkpoints", "model/tokenizer.json"):
        assert (folder / "runs" / "a" / file).exists()
    assert (folder / "runs" / "tuned" / "model" / "model.safetensors").exists()
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


def test_the_output_of_lm_show_is_what_it_prints(folder: Path) -> None:
    [shown] = [text for n in range(2) if (text := block("text", n))[0].startswith("$ lm show")]
    assert shell(shown[0].removeprefix("$ "), folder).splitlines() == shown[1:]
