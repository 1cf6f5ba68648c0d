"""Writes generated samples into samples.md at each validation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lm.data.order import spread
from lm.data.records.base import LEARNED, OTHER
from lm.data.rows.diffusion import DiffusionConfig
from lm.data.rows.policy import OwnAnswersConfig
from lm.data.sources.base import Turn
from lm.data.store.shards import TokenStore
from lm.errors import ConfigError
from lm.generation.config import FillConfig, SamplingConfig
from lm.generation.decode import eager, room
from lm.generation.fill import Filling
from lm.generation.rollouts import told_answers
from lm.generation.text import chat_template, ids_of
from lm.generation.writer import Writer
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule

_ANSWERS = 4  # with sample_prompts=held_out, of objectives that learn from the model's own: prompts to answer
_DOCUMENTS, _TOKENS = 2, 16  # with sample_prompts=held_out: documents of each source to continue, and their first tokens as prompt
_LOOKED_AT = 256  # of chats whose questions are to fit into a row


class Samples(RunCallback):
    """Continues trainer.sample_prompts."""

    def begin(self, module: TrainModule) -> None:
        prompts = module.cfg.trainer.sample_prompts
        if prompts and not _continues(module) and not _fills(module):
            why = "an encoder, a classifier or a model of vectors continues no text"
            module.run.journal.console.say(f"trainer.sample_prompts are left aside: {why}")
            return
        try:
            if prompts and _fills(module):
                self._filling(module)
                return
            writer = self._writer(module)
            for ids in [*_questions(module), *map(writer.ids, _prompts(module))]:
                room(module.model, ids, writer.cfg)
        except ConfigError as error:
            raise ConfigError(f"trainer.sample_prompts: {error}") from None

    def step_end(self, module: TrainModule) -> None:
        if module.run.validates(module.step):
            self.write(module)

    def look_at_parent(self, module: TrainModule) -> None:
        self.write(module)

    def write(self, module: TrainModule) -> None:
        """Generates and writes the samples. Every rank generates, since each may hold only a part of the weights."""
        run = module.run
        if module.cfg.trainer.sample_prompts and (_continues(module) or _fills(module)):
            told = run.journal.console.during("Sampling")
            with run.clock.paused(), told, module.exported_weights(), eager(module.cfg.trainer.compile):
                run.counters.samples_bytes = run.journal.samples(module.step, self._texts(module))

    def _texts(self, module: TrainModule) -> list[Sequence[str]]:
        """Returns for each prompt (prompt + continuation,); for an encoder-decoder, which answers instead, (prompt, answer); where the
        model learns from its own answers, (prompt, answer) of held-out prompts, and their rewards; of chats (prompt, answer). Where the
        model fills in masks, these are behind the prompt."""
        cfg, rows = module.cfg, module.run.splits.val
        if _fills(module):
            return [(found.text,) for found in self._filling(module).all()]
        if isinstance(cfg.objective, OwnAnswersConfig) and cfg.trainer.sample_prompts == "held_out":
            ids, in_step = spread(len(rows), _ANSWERS), cfg.strategy.slices_weights
            return told_answers(module.model, module.run.data.tokenizer, cfg.objective, rows, ids, in_step)
        found: list[Sequence[str]] = []
        if asked := _questions(module):
            writer = replace(self._writer(module), goes_on=False)
            found += [(writer.tokenizer.decode(ids), new.text) for ids, new in zip(asked, writer.continued(asked), strict=True)]
        writer = self._writer(module)
        for prompt in _prompts(module):
            [new] = writer.complete([prompt])
            found.append((prompt, new.text) if writer.answers else (prompt + new.text,))
        return found

    def _filling(self, module: TrainModule) -> Filling:
        """Returns the prompts with masks behind them, as many as the context has room for."""
        prompts, trainer, most = _prompts(module), module.cfg.trainer, module.model.max_seq_len
        left = most - max(len(self._writer(module).ids(prompt)) for prompt in prompts)
        how = FillConfig(max_tokens=max(1, min(trainer.sample_tokens, left)), temperature=0.8, top_p=0.95, seed=module.cfg.seeds.init)
        return Filling(module.model, module.run.data.tokenizer, prompts, how)

    def _writer(self, module: TrainModule) -> Writer:
        tokens, seed = module.cfg.trainer.sample_tokens, module.cfg.seeds.init
        return Writer(module.model, module.run.data.tokenizer, SamplingConfig(max_tokens=tokens, temperature=0.8, top_p=0.95, seed=seed))


def _continues(module: TrainModule) -> bool:
    """Whether the model continues texts, and its head, which predicts the next token, is trained."""
    return module.model.cfg.continues() and module.cfg.objective.trains_head


def _fills(module: TrainModule) -> bool:
    """Whether the model has learned to fill in any number of masks."""
    return isinstance(module.cfg.objective, DiffusionConfig)


def _answered_stores(module: TrainModule) -> dict[str, TokenStore]:
    """Returns the held-out part of each source of records that a decoder answers, as it reads them in training, by the source's name."""
    if module.model.cfg.kind != "decoder" or not _continues(module):
        return {}
    return {name: store for name, part in module.run.data.parts.items() if len((store := part.stores["val"]).parts)}


def _all_are_chats(module: TrainModule) -> bool:
    """Whether a prompt that is given is a user's message, as all that the run reads are chats."""
    return module.run.data.tokenizer.chat_template is not None and _answered_stores(module).keys() == module.run.data.parts.keys()


def _questions(module: TrainModule) -> list[list[int]]:
    """Returns the tokens of what is answered: the prompts of a run on chats; with held_out, what stands before the first answer of the
    first held-out records of each source, of those that fit into a row."""
    tokenizer, found = module.run.data.tokenizer, []
    if (given := module.cfg.trainer.sample_prompts) != "held_out":
        template = chat_template(tokenizer) if given and _all_are_chats(module) else None
        return [] if template is None else [ids_of(tokenizer, template.question([Turn("user", text)])) for text in given]
    for store in _answered_stores(module).values():
        answers = np.append(store.parts[store.parts[:, 1] % OTHER == LEARNED, 0], store.n_tokens)
        begins, nexts = store.starts[:_LOOKED_AT], np.append(store.starts, store.n_tokens)[1 : _LOOKED_AT + 1]
        ends = answers[np.searchsorted(answers, begins)]
        fitting = np.flatnonzero((begins < ends) & (ends < nexts) & (ends - begins <= module.cfg.data.seq_len))[:_DOCUMENTS]
        found += [store.read(int(begins[i]), int(ends[i])).tolist() for i in fitting]
    return found


def _prompts(module: TrainModule) -> list[str]:
    """Returns the texts to be continued."""
    if (given := module.cfg.trainer.sample_prompts) != "held_out":
        return [] if _all_are_chats(module) else given
    texts = module.run.data.parts.keys() - _answered_stores(module)
    return module.run.data.beginnings(texts, _DOCUMENTS, min(_TOKENS, module.cfg.data.seq_len // 2))
