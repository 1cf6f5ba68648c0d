"""`lm show model=PRESET [overrides]`: what `lm train` with these overrides would build, without building its weights."""

import os
from pathlib import Path

from lm.cli.compose.arguments import overrides_of
from lm.cli.compose.compose import compose
from lm.cli.compose.finetune import FURTHER
from lm.cli.compose.layers import Layer
from lm.cli.compose.quoting import quoted
from lm.cli.verb import Verb
from lm.printing import answer, note
from lm.schema import Tree, flatten
from lm.storage.model_folder import read_config, resolve_model
from lm.storage.run_folder import RunFolder


class Show(Verb):
    """usage: lm show [model=PRESET | from=FOLDER] [overrides of lm train]

    Prints the modules with their parameters (equal blocks once), parameters in all and for one token, FLOPs and cache bytes per token, and
    the memory that the tensors of a training need on each rank. Weights are not built, and neither data nor tokenizer is read. Memory
    depends on data.seq_len, data.global_batch, trainer.micro_batch, trainer.precision, trainer.recompute, optim, objective.chunk,
    strategy, launch.devices and launch.nodes:

      weights      4 bytes each, 2 in bf16-true; in -mixed 2 more for the cast of each matrix; fsdp, zero3: a slice, and one block whole
      gradients    as many bytes as the weights; fsdp, zero2, zero3: a slice
      optimizer    adamw 2 numbers a weight, muon 1 of a matrix, soap 2 and two squares of each side, adafactor one a row
                   and column, lion 1, sgd 1 with momentum; fsdp, zero1 to zero3: a slice
      activations  what the backward needs of each block: inputs of norms and matrices, q, k, v, and what activations and gates keep;
                   with trainer.recompute=block of each only its input, with selective what matrix products and fused attention
                   give besides, and of one of these everything
      loss         4 bytes (2 in 16 bits) per logit of a chunk, on a CPU in 16 bits 4 more for each of 2^20 that are in float32 at a time,
                   and the head's gradient while it is summed
    """

    takes = None

    from_: str | None = None
    """Run, model or checkpoint folder; rows and optimizer are those of its run, unless told. null: what the overrides say."""

    def run(self, rest: list[str]) -> None:
        """Prints the module tree, the counts and the memory."""
        folder = resolve_model(self.from_) if self.from_ else None
        run = RunFolder.around(folder) if folder is not None else None
        saved = Layer("run", str(run.config_file), _values(run)) if run is not None else None
        composition = compose(overrides_of([*rest, *([f"init_from={quoted(self.from_)}"] if self.from_ else [])]), saved)
        from lm.cli.views.model import described, setup_of

        adapter = read_config(folder).get("adapter") if folder is not None else None
        shown = setup_of(composition, {"adapter": adapter} if adapter is not None else {})
        if not self.from_:  # with from= nothing is trained, so notes on fine-tuning do not matter
            composition.tell()
        for text in described(composition, shown):
            answer(text)


def _values(run: RunFolder) -> Tree:
    """Returns the values of a run's config, without a further model that is there no more, as it is asked how large one is."""
    from lm.storage.adapted import placed  # brings torch

    values = flatten(placed(run.config(), run.path))
    for option in FURTHER:
        if (path := values.get(option)) is not None and not Path(os.path.expanduser(path)).exists():
            note(f"{option}={path} is there no more, so memory is without it")
            values = {key: value for key, value in values.items() if not key.startswith((option, "objective.rewards"))}
    return values
