"""What other programs do with an exported folder: the command for each, or why there is none to give."""

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.hf.gguf.vocabulary import vocabulary
from lm.hf.gguf.writing import FILE, architecture_for
from lm.hf.io import mlx, vllm
from lm.hf.io.bodies import headless
from lm.hf.io.family import Family, resolved
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM
from lm.schema import Tree

_PYTHON = (
    "from transformers import AutoTokenizer as T, {auto} as M; t, m = (c.from_pretrained({folder!r}) for c in (T, M)); "
    "x = t('def main(', return_tensors='pt'); print({shown})"
)
_GENERATED = "t.decode(m.generate(input_ids=x['input_ids'], max_new_tokens=20)[0])"


Deciding = Callable[[Family, Tree, Path], tuple[str | None, str]]
DECODERS: dict[str, Deciding] = {"vLLM": vllm.serve, "MLX": mlx.generate}
"""Programs with classes of their own for decoders, and what says of a folder by which command they take it, or why they do not."""


class Use(NamedTuple):
    """How one program uses an exported folder: a shell command, or why there is none to give."""

    program: str
    command: str | None
    why: str = ""


def uses_of_hf(source: str, folder: Path, family: Family, model: LM, tokenizer: Tokenizer, imported: str | None = None) -> list[Use]:
    """Returns the uses of a folder in the format of transformers.  source: what it was exported from; imported: the family that this was
    imported from."""
    there, kind = shlex.quote(str(folder)), model.cfg.kind
    head = model.cfg.head
    told = "m(input_ids=x['input_ids']).logits" + ("" if head.tells_number() else ".sigmoid()" if head.several else ".argmax(-1)")
    shown = _GENERATED if model.cfg.continues() else "m(input_ids=x['input_ids']).last_hidden_state.shape" if headless(model.cfg) else told
    found = [Use("transformers", _python(_PYTHON.format(auto=family.auto, folder=str(folder), shown=shown)))]
    if model.cfg.head.labels is not None:
        return [*found, Use("vLLM, MLX, llama.cpp, lm-eval", None, f"it {head.does()}, and none was tried with such a model")]
    found += [Use(program, *_of_decoder(model.cfg, family, folder, use)) for program, use in DECODERS.items()]
    why, gguf = _no_gguf(model, tokenizer, imported), shlex.quote(f"{folder}-gguf")
    found.append(Use("llama.cpp", None if why else f"lm export from={shlex.quote(source)} format=gguf out={gguf}", why))
    why = "it asks for the likelihood of what follows a text, and an encoder continues none" if kind == "encoder" else ""
    command = f"lm_eval --model hf --model_args pretrained={there},dtype=float32 --tasks TASK"
    return [*found, Use("lm-eval", None if why else command, why)]


def use_of_sentences(folder: Path, prompts: Iterable[str]) -> Use:
    """Returns the use of a folder with the files of sentence-transformers.  prompts: the names of those that it knows."""
    how = "".join(f", prompt_name={name!r}" for name in [*prompts][:1])
    script = f"from sentence_transformers import SentenceTransformer as S; print(S({str(folder)!r}).encode(['a text']{how}))"
    return Use("sentence-transformers", _python(script))


def uses_of_gguf(source: str, folder: Path, chats: bool) -> list[Use]:
    """Returns the uses of a folder with a GGUF file.  source: what it was exported from; chats: the file has a chat template, in which
    llama-cli asks everything (llama.cpp's tools/cli and tools/completion, August 2026)."""
    file = str(folder / FILE)
    command = f"llama-cli -m {shlex.quote(file)}" if chats else f"llama-completion -m {shlex.quote(file)} -no-cnv -p TEXT"
    script = f"from llama_cpp import Llama; print(Llama({file!r})('def main(', max_tokens=20, temperature=0)['choices'][0]['text'])"
    return [
        Use("llama.cpp", command),
        Use("Ollama", f"cd {shlex.quote(str(folder))} && ollama create NAME && ollama run NAME"),
        Use("llama-cpp-python", _python(script)),
        Use("transformers, vLLM, lm-eval", f"lm export from={shlex.quote(source)} format=hf out={shlex.quote(f'{folder}-hf')}"),
    ]


def _of_decoder(cfg: ModelConfig, family: Family, folder: Path, use: Deciding) -> tuple[str | None, str]:
    if cfg.kind != "decoder":
        return None, f"it generates with decoders, and this is an {cfg.kind.replace('_', '-')}"
    return use(family, resolved(cfg), folder)


def _python(script: str) -> str:
    """Returns the shell command that runs a Python script; its single quotes are left alone by a shell between double ones."""
    return f'python -c "{script}"' if not set(script) & set('"$`\\\\!') else f"python -c {shlex.quote(script)}"


def _no_gguf(model: LM, tokenizer: Tokenizer, imported: str | None) -> str:
    try:
        architecture_for(model.cfg, imported=imported)
        vocabulary(tokenizer, model.vocab_size)
    except ConfigError as error:
        return str(error).removeprefix("format=gguf: ").removesuffix(", or export with format=hf.").rstrip(".")
    return ""
