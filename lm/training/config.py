"""Everything that `lm train` can be told: the frozen `config.yaml` of a run folder is one TrainConfig."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lm.adapters.adapter import AdapterConfig, LoRAConfig
from lm.cost.memory import Setting
from lm.data.kinds import DataConfig, ObjectiveConfig, TokenizerConfig
from lm.data.loader import micro_batches
from lm.data.rows.base import ScheduledSamplingConfig, TaughtConfig
from lm.generation.config import EvalConfig
from lm.nn.activation_memory import Precision
from lm.nn.head import CHUNK
from lm.nn.parametrization import Growth
from lm.nn.stack import ModelConfig
from lm.nn.transformer import build_model
from lm.ops.defaults import default_kind
from lm.ops.recompute import Recompute, Recomputed
from lm.schema import MOST, Config, MaybeEmpty, Named, flatten
from lm.training.budget import BudgetConfig
from lm.training.callbacks.kinds import CallbackConfig, MetricConfig
from lm.training.callbacks.loggers import JsonlLoggerConfig, LoggerConfig
from lm.training.launch.config import LaunchConfig
from lm.training.numerics import NumericsConfig
from lm.training.optim.kinds import OptimConfig
from lm.training.optim.schedule import ScheduleConfig
from lm.training.run_config import CheckpointConfig, ResumeConfig, RunConfig
from lm.training.strategies import zero_config as zero_config
from lm.training.strategies.config import SingleConfig, StrategyConfig


class TrainerConfig(Config):
    """The loop: length, cadence, precision, device."""

    recompute: Recomputed = "none"
    """What blocks compute again for the backward instead of keeping it (activation checkpointing). block: all but their input; selective:
    all but their input, matrix products and fused attention."""
    recompute_every: int = Field(1, gt=0)
    """Every n-th block does so."""
    max_steps: int = Field(gt=0)
    """Optimizer steps in all."""
    max_minutes: float | None = Field(None, gt=0)
    """Minutes of stepping, validations and saves left out, that end a run before max_steps do; the rate decays in time. null: no limit."""
    micro_batch: int = Field(8, gt=0, le=MOST)
    """Most rows per forward and rank; accumulation is derived."""
    val_every: int = Field(100, gt=0)
    """Steps between validations; the last step always validates."""
    log_every: int = Field(10, gt=0)
    """Steps between lines of metrics."""
    precision: Precision = "fp32"
    """fp32; bf16 compute on fp32 weights; bf16 weights too; fp16 compute, with a loss scale, for GPUs before Ampere, such as a T4."""
    float8: bool = False
    """Linear layers of blocks multiply float8 numbers, a scale for each tensor (in bf16; GPUs from H100 on, and slowly a CPU)."""
    compile: bool = False
    """torch.compile the blocks; those that are alike are compiled once."""
    deterministic: bool = True
    """On CUDA, sums are taken in a fixed order, so that a run repeats bit for bit. A CPU always does so, a Mac's GPU never. false: a little
    faster."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA where there is a GPU, else the CPU. mps: the GPU of a Mac, from torch 2.14 on; no test has run on one."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights; it is validated and exported. null: off."""
    early_stop: int | None = Field(None, gt=0)
    """Stop after this many validations without a better one, whose model checkpoint.best hands on. null: never."""
    freeze: list[str] = []
    """Weights that no step moves: patterns over their names, as in `lm show`, or parts of these: [embed, blocks.0, ffn, '*.bias']."""
    sample_prompts: list[MaybeEmpty] | Literal["held_out"] = []
    """Prompts continued at each validation into samples.md, or sources; held_out: how the first held-out documents begin, or, where the
    model learns from its own answers (grpo, rloo, gkd), held-out prompts, whose answers come with their rewards."""
    sample_tokens: int = Field(64, gt=0, le=MOST)
    """Tokens per sample."""

    @model_validator(mode="after")
    def _every_has_effect(self) -> Self:
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(f"recompute_every={self.recompute_every} has no effect with recompute=none. Set recompute=block or selective.")
        return self

    def recomputes(self) -> Recompute:
        """Returns what the model's blocks recompute."""
        return Recompute(self.recompute, self.recompute_every)


class TrainSetup(Config):
    """The parts of a training run that decide how its model fits a rank."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    optim: OptimConfig
    trainer: TrainerConfig
    adapter: AdapterConfig | None = None
    """What is trained in place of the weights of init_from, and saved without them. null: the weights themselves."""
    strategy: StrategyConfig = SingleConfig()
    launch: LaunchConfig = LaunchConfig()

    def why_not(self) -> str | None:
        """Returns why the strategy cannot train this, as one sentence with the remedy; None where it can."""
        if self.trainer.device == "mps" and (reason := self._why_not_mps()) is not None:
            return f"trainer.device=mps: {reason}."
        if (reason := self.strategy.why_not(self)) is not None:
            return f"strategy={self.strategy.kind}: {reason}"
        if self.strategy.stage and isinstance(self.adapter, LoRAConfig) and self.adapter.base != "saved":
            return (
                f"strategy={self.strategy.kind}: its engine cuts weights into slices or casts them, and adapter.base={self.adapter.base}"
                " has whole matrices of other numbers. Use strategy=single or ddp."
            )
        if self.trainer.float8 and (reason := self._why_not_float8()) is not None:
            return f"trainer.float8=true: {reason}."
        if (reason := self._why_not_context_parallel()) is not None:
            return f"launch.{self.launch.row_sharing}: {reason}."
        if self.data.global_batch % (readers := self.launch.data_parallel):
            given = f"data.global_batch={self.data.global_batch}"
            who = f"{readers} ranks" if self.launch.ranks_per_row == 1 else f"{readers} groups of {self.launch.ranks_per_row} ranks"
            return f"{given} is not a multiple of the {who}. Choose a multiple, or other devices."
        return None

    def _why_not_mps(self) -> str | None:
        """Returns why this run cannot use the GPU of a Mac, with the remedy; None where it can."""
        if self.launch.world > 1:
            return f"a Mac has one GPU, and there are {self.launch.world} ranks. Set launch.devices=1 and launch.nodes=1"
        if self.strategy.kind != "single":
            return f"a Mac has one GPU, and strategy={self.strategy.kind} is for several ranks. Use strategy=single"
        for name in ("compile", "float8"):
            if getattr(self.trainer, name):
                return f"trainer.{name}=true is for CPUs and CUDA. Leave it out"
        trainer = self.trainer.recompute
        again = {f"trainer.recompute={trainer}": trainer != "none", "objective.recompute=true": self.objective.reads_again}
        if (on := next((name for name, does in again.items() if does), None)) and (draws := self._draws()) is not None:
            return f"{on} would draw anew for {draws}, and torch cannot repeat draws there. Set {draws.split('=')[0]}=0, or drop {on}"
        return None

    def _draws(self) -> str | None:
        """Returns the first option, as key=value, for which a forward in training draws random numbers."""
        trees = {"model": self.model.tree(), "adapter": self.adapter.tree() if self.adapter is not None else {}}
        drawn = ("dropout", "jitter", "noise")
        return next((f"{key}={value}" for key, value in flatten(trees).items() if key.endswith(drawn) and value), None)

    def _why_not_float8(self) -> str | None:
        """Returns why this run cannot compute in float8, with the remedy; None where it can."""
        if self.trainer.precision in ("fp32", "fp16-mixed"):
            return "what is not float8 is bfloat16 beside it. Set trainer.precision=bf16-mixed"
        if self.adapter is not None:
            return "an adapter's parent keeps its own products. Leave one of them out"
        if self.objective.needs_parent:
            return f"objective={self.objective.kind} compares with likelihoods of plain products. Leave one of them out"
        return "ranks with slices of matrices have other products. Set launch.tensor=1" if self.launch.tensor > 1 else None

    def _why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot share rows as launch.context or launch.tensor asks, with the remedy; None where they can."""
        n, s = self.launch.ranks_per_row, self.data.seq_len
        if n == 1:
            return None
        if s % n:
            return f"data.seq_len={s} is not a multiple of it. Choose one, such as {-(-s // n) * n}"
        return (
            self.model.why_not_context_parallel(n)
            or self.objective.why_not_context_parallel()
            or (self.strategy.why_not_tensor_parallel(self) if self.launch.tensor > 1 else None)
        )

    def sized_model(self, n_tokens: int) -> ModelConfig:
        """Returns the model with null sizes set, for a tokenizer of so many tokens, and with the head that the objective trains."""
        return self.objective.headed(self.model).sized(n_tokens, self.data.seq_len)

    @property
    def step_tokens(self) -> int:
        """Tokens that the model reads in a step at the most."""
        return self.data.global_batch * self.objective.texts * self.data.seq_len

    def setting(self) -> Setting:
        """Returns the settings that the memory of a rank depends on."""
        trainer = self.trainer
        return Setting(
            micro_batch=self.objective.held(micro_batches(self.data.global_batch, self.launch.data_parallel, trainer.micro_batch)[0]),
            seq_len=self.data.seq_len,
            chunk=self.objective.chunk if isinstance(self.objective, TaughtConfig) else CHUNK,
            precision=trainer.precision,
            states=self.optim.state_bytes,
            recompute=trainer.recomputes(),
            stage=self.strategy.stage,
            world=self.strategy.sharing(self.launch.world),
            context=self.launch.ranks_per_row,
            tensor=self.launch.tensor,
            device=default_kind() if trainer.device == "auto" else trainer.device,
            compiled=trainer.compile,
        )


Seed = Annotated[int, Field(ge=0)]


class Seeds(Config):
    """What chance decides in a run, each by a seed of its own; seed=N is all of them."""

    init: Seed
    """Initial weights, and samples."""
    data: Seed
    """Order of the rows, and what is masked, cut or drawn in them."""
    dropout: Seed
    """Dropout, and scheduled sampling."""


class TrainConfig(TrainSetup):
    """One training run."""

    run: RunConfig
    seed: Seed | Seeds = 0
    """Decides initial weights, data order, dropout and samples; seed.init, seed.data and seed.dropout move one of them alone."""
    tokenizer: TokenizerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    numerics: NumericsConfig = NumericsConfig()
    eval: EvalConfig = EvalConfig()
    logger: LoggerConfig = JsonlLoggerConfig()
    callbacks: Named[CallbackConfig] = {}
    """Callbacks of one's own, by name; one without `kind` is of the kind that its name says."""
    metrics: Named[MetricConfig] = {}
    """Metrics of one's own, by name; one without `kind` is of the kind that its name says."""
    init_from: str | None = None
    """Model folder, run folder or checkpoint to start the weights from (fine-tuning); the only match of a pattern, or latest, of runs/."""
    init_optimizer: bool = False
    """Start with the optimizer's state of init_from too, which is then a checkpoint: to go on with other data, or to another end."""
    resume: ResumeConfig = ResumeConfig()
    check: bool = False
    """Try everything once and small, tell what it takes, and stop."""
    plan: bool = False
    """Tell what it will take in tokens, time, cost and memory, and stop; nothing is read or trained."""
    budget: BudgetConfig = BudgetConfig()
    plugins: dict[str, str] = {}
    """Files of code that define a kind used here, by name, with the SHA-256 of each; filled in from plugins=FILE and LM_PLUGINS."""
    traceback: bool = False
    """Print the whole traceback of an error."""

    @property
    def seeds(self) -> Seeds:
        """Returns the seeds for init, data and dropout."""
        return Seeds(init=self.seed, data=self.seed, dropout=self.seed) if isinstance(self.seed, int) else self.seed

    def shared_steps(self, max_steps: int, every: int = 1) -> int:
        """Returns the number of first steps that are the same in this run and in one that differs only in trainer.max_steps.

        every: look at one of so many steps alone, and return up to so many too many."""
        if isinstance(self.objective, ScheduledSamplingConfig) and self.objective.scheduled_sampling:
            return 0
        shorter = min(self.trainer.max_steps, max_steps)
        return next((step for step in range(0, shorter, every) if not self.same_rate(step, max_steps)), shorter)

    def same_rate(self, step: int, max_steps: int) -> bool:
        """Says whether a step, counted from 0, has the same rate in a run of another length."""
        return self.schedule.factor(step, self.trainer.max_steps) == self.schedule.factor(step, max_steps)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.schedule.warmup_steps >= self.trainer.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is not below trainer.max_steps={self.trainer.max_steps}."
                f" Write schedule.warmup_steps={self.trainer.max_steps // 10} as well, or lengthen the run."
            )
        if (refused := self.why_not()) is not None:
            raise ValueError(refused)
        half = self.trainer.max_steps // 2  # a length that is given as a mere bound may be of any size, so not every step is looked at
        if self.trainer.max_minutes is not None and (shared := self.shared_steps(half, every=1 + half // 10_000)) < half // 4:
            raise ValueError(
                f"trainer.max_minutes={self.trainer.max_minutes:g} leaves the length to the clock, and what is trained depends on it from"
                f" step {shared:,} on. Use schedule=wsd or constant, without scheduled sampling."
            )
        if self.model.growth() != Growth() and not self.optim.obeys_rates:
            kind = self.model.parametrization.kind
            raise ValueError(f"optim={self.optim.kind} has no rule for model.parametrization={kind}. Use optim=adamw or muon.")
        if self.budget != BudgetConfig() and not (self.plan or self.check):
            raise ValueError("budget is what a plan reckons with, and this is none. Write plan=true as well, or leave it out.")
        self.objective.require_fit(self.model.kind, self.data)
        self.objective.headed(self.model)
        if (refused := self.eval.why_not(self.model, self.data.seq_len, self.objective.kind)) is not None:
            raise ValueError(refused)
        if self.objective.needs_parent and self.init_from is None:
            raise ValueError(f"objective={self.objective.kind} compares with the model that training starts from. Set init_from.")
        if self.objective.own_answers and self.init_from is None:
            raise ValueError(f"objective={self.objective.kind} learns from what the model answers, and a new one cannot. Set init_from.")
        if self.objective.own_answers and (drawn := self._draws()) is not None:
            raise ValueError(
                f"objective={self.objective.kind} learns from what the model itself has drawn, and {drawn} makes it another model in"
                f" each step. Set {drawn.partition('=')[0]}=0."
            )
        if self.numerics.rollbacks and self.objective.updates_of_rows() > 1:
            raise ValueError("numerics.rollbacks leaves out the rows of a few steps, and objective.updates reads them again. Drop one.")
        if self.init_optimizer and (self.init_from is None or self.adapter is not None):
            without = "there is no init_from" if self.adapter is None else f"adapter={self.adapter.kind} is new"
            raise ValueError(f"init_optimizer=true goes on with the optimizer of a checkpoint, and {without}. Leave it out.")
        if self.adapter is not None and self.init_from is None:
            raise ValueError(f"adapter={self.adapter.kind} is trained beside weights that have learned already. Set init_from.")
        if self.adapter is not None:
            self.adapter.apply(build_model(self.sized_model(MOST), device="meta"))
        limit = self.model.max_seq_len
        if limit is not None and self.data.seq_len > limit:
            raise ValueError(f"data.seq_len={self.data.seq_len} is over model.max_seq_len={limit}. Lower one or raise the other.")
        return self
