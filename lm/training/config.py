"""Everything that `lm train` can be told: the frozen `config.yaml` of a run folder is one TrainConfig."""

from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from lm.adapters.adapter import AdapterConfig, LoRAConfig
from lm.cost.memory import Setting
from lm.data.kinds import DataConfig, ObjectiveConfig, TokenizerConfig
from lm.data.loader import micro_batches
from lm.data.rows.base import TaughtConfig
from lm.data.rows.scheduled import ScheduledSamplingConfig
from lm.data.sizes import Sizes
from lm.generation.config import EvalConfig
from lm.nn.head import CHUNK
from lm.nn.model_config import ModelConfig
from lm.nn.parametrization import Growth
from lm.nn.transformer import build_model
from lm.ops.defaults import default_kind
from lm.schema import MOST, Config, Named, flatten
from lm.training.budget import BudgetConfig
from lm.training.callbacks.kinds import CallbackConfig, MetricConfig
from lm.training.callbacks.loggers import JsonlLoggerConfig, LoggerConfig
from lm.training.launch.config import LaunchConfig
from lm.training.numerics import NumericsConfig
from lm.training.optim.kinds import OptimConfig
from lm.training.optim.schedule import FreeConfig, ScheduleConfig
from lm.training.run_config import CheckpointConfig, ResumeConfig, RunConfig, Seed, Seeds
from lm.training.strategies import zero_config as zero_config
from lm.training.strategies.config import SingleConfig, StrategyConfig
from lm.training.trainer_config import TrainerConfig


class TrainSetup(Config):
    """The parts of a training run that decide how its model fits a rank."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    optim: OptimConfig
    trainer: TrainerConfig
    schedule: ScheduleConfig
    adapter: AdapterConfig | None = None
    """What is trained in place of the weights of init_from, and saved without them. null: the weights themselves."""
    strategy: StrategyConfig = SingleConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _without_usual_packing(cls, tree: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """The rows of the objective's usual packing are the same whether it is said or not, and so is the config."""
        made = validated(tree)
        if made.data.packing != made.objective.packings[0]:
            return made
        return made.model_copy(update={"data": made.data.model_copy(update={"packing": None})})

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
        readers = self.launch.data_parallel
        if (uneven := next((n for n in self.data.sizes.all() if n % readers), None)) is not None:
            given = f"data.{'' if uneven == self.data.global_batch else 'ramp: '}global_batch={uneven}"
            who = f"{readers} ranks" if self.launch.ranks_per_row == 1 else f"{readers} groups of {self.launch.ranks_per_row} ranks"
            return f"{given} is not a multiple of the {who}. Choose a multiple, or other devices."
        return None

    @property
    def averaged_by(self) -> str | None:
        """The option that keeps averages of the weights; None where there is none."""
        averages = isinstance(self.schedule, FreeConfig)
        return f"schedule={self.schedule.kind}" if averages else "trainer.ema_decay" if self.trainer.ema_decay else None

    def _why_not_mps(self) -> str | None:
        """Returns why this run cannot use the GPU of a Mac, with the remedy; None where it can."""
        if self.launch.world > 1:
            return f"a Mac has one GPU, and there are {self.launch.world} ranks. Set launch.devices=1 and launch.nodes=1"
        if self.strategy.kind != "single":
            return f"a Mac has one GPU, and strategy={self.strategy.kind} is for several ranks. Use strategy=single"
        for name in ("compile", "float8"):
            if getattr(self.trainer, name):
                return f"trainer.{name}=true is for CPUs and CUDA. Leave it out"
        recompute = self.trainer.recompute
        again = {f"trainer.recompute={recompute}": recompute != "none", "objective.recompute=true": self.objective.reads_again}
        if (on := next((name for name, does in again.items() if does), None)) and (draws := self.draws()) is not None:
            return f"{on} would draw anew for {draws}, and torch cannot repeat draws there. Set {draws.split('=')[0]}=0, or drop {on}"
        return None

    def draws(self) -> str | None:
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

    def tokens(self, steps: int) -> int:
        """Returns how many tokens the model reads in so many steps at the most."""
        return self.data.sizes.before(steps) * self.objective.texts * self.data.seq_len // self.objective.parts_of_rows()

    @property
    def step_tokens(self) -> int:
        """Tokens that the model reads in a step of data.global_batch rows at the most."""
        return self.data.global_batch * self.objective.texts * self.data.seq_len // self.objective.parts_of_rows()

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch of one rank; a smaller step in data.ramp may have fewer."""
        return micro_batches(self.data.global_batch, self.launch.data_parallel, self.trainer.micro_batch)[0]

    @property
    def accumulation(self) -> Sizes:
        """Returns how many micro-batches each step has on one rank."""
        return self.data.sizes.each(lambda rows: micro_batches(rows, self.launch.data_parallel, self.micro_batch)[1])

    def setting(self) -> Setting:
        """Returns the settings that the memory of a rank depends on."""
        trainer = self.trainer
        return Setting(
            micro_batch=self.objective.held(self.micro_batch),
            seq_len=self.data.seq_len,
            chunk=self.objective.chunk if isinstance(self.objective, TaughtConfig) else CHUNK,
            precision=trainer.precision,
            states=self.optim.state_bytes,
            copies=2 if isinstance(self.schedule, FreeConfig) else 1 if self.trainer.ema_decay else 0,
            recompute=trainer.recomputes(),
            stage=self.strategy.stage,
            world=self.strategy.sharing(self.launch.world),
            context=self.launch.ranks_per_row,
            tensor=self.launch.tensor,
            device=default_kind() if trainer.device == "auto" else trainer.device,
            compiled=trainer.compile,
        )


class TrainConfig(TrainSetup):
    """One training run."""

    run: RunConfig
    seed: Seed | Seeds = 0
    """Decides initial weights, data order, dropout and samples; seed.init, seed.data and seed.dropout move one of them alone."""
    tokenizer: TokenizerConfig
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
    """Tell what it will take in tokens, time, cost and memory, and stop; nothing is trained, and data are read for epochs alone."""
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
        return next((step for step in range(0, shorter, every) if not self.schedule.same(step, self.trainer.max_steps, max_steps)), shorter)

    def _counts_steps(self) -> str | None:
        """Returns the option that is for steps of equally many rows; None where there is none."""
        asked = {
            "trainer.max_minutes": self.trainer.max_minutes, "numerics.rollbacks": self.numerics.rollbacks,
            "objective.minibatches": self.objective.parts_of_rows() > 1, "objective.updates": self.objective.updates_of_rows() > 1,
        }  # fmt: skip
        return next((key for key, value in asked.items() if value), None)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        self._require_schedule()
        self._require_objective()
        self._require_start()
        limit = self.model.max_seq_len
        if limit is not None and self.data.seq_len > limit:
            raise ValueError(f"data.seq_len={self.data.seq_len} is over model.max_seq_len={limit}. Lower one or raise the other.")
        return self

    def _require_schedule(self) -> None:
        """Raises ValueError where the run's length, device, schedule and optimizer do not fit each other."""
        if self.schedule.warmup_steps >= self.trainer.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is not below trainer.max_steps={self.trainer.max_steps}."
                f" Write schedule.warmup_steps={self.trainer.max_steps // 10} as well, or lengthen the run."
            )
        self.schedule.require(self.trainer.max_steps)
        if (refused := self.why_not()) is not None:
            raise ValueError(refused)
        if isinstance(self.schedule, FreeConfig) and (decay := self.trainer.ema_decay):
            raise ValueError(f"trainer.ema_decay={decay} and schedule={self.schedule.kind} both average the weights. Drop one.")
        half = self.trainer.max_steps // 2  # a length that is given as a mere bound may be of any size, so not every step is looked at
        if self.trainer.max_minutes is not None and (shared := self.shared_steps(half, every=1 + half // 10_000)) < half // 4:
            decays_long = self.schedule.kind == "wsd" and shared > 0
            remedy = (
                "Lower schedule.decay_frac, such as to 0.5" if decays_long else "Use schedule=wsd or constant, without scheduled sampling"
            )
            raise ValueError(
                f"trainer.max_minutes={self.trainer.max_minutes:g} leaves the length to the clock, and what is trained depends on it from"
                f" step {shared:,} on. {remedy}."
            )
        if self.model.growth() != Growth() and not self.optim.obeys_rates:
            kind = self.model.parametrization.kind
            raise ValueError(f"optim={self.optim.kind} has no rule for model.parametrization={kind}. Use optim=adamw or muon.")
        if self.budget != BudgetConfig() and not (self.plan or self.check):
            raise ValueError("budget is what a plan reckons with, and this is none. Write plan=true as well, or leave it out.")

    def _require_objective(self) -> None:
        """Raises ValueError where the objective does not fit the model and the data, or cannot be combined with how steps are made."""
        self.objective.require_fit(self.model.kind, self.data)
        self.objective.headed(self.model)
        if (refused := self.eval.why_not(self.model, self.data.seq_len, self.objective.kind)) is not None:
            raise ValueError(refused)
        if self.objective.needs_parent and self.init_from is None:
            raise ValueError(f"objective={self.objective.kind} compares with the model that training starts from. Set init_from.")
        if self.objective.own_answers and self.init_from is None:
            raise ValueError(f"objective={self.objective.kind} learns from what the model answers, and a new one cannot. Set init_from.")
        if self.objective.own_answers and (drawn := self.draws()) is not None:
            raise ValueError(
                f"objective={self.objective.kind} learns from what the model itself has drawn, and {drawn} makes it another model in"
                f" each step. Set {drawn.partition('=')[0]}=0."
            )
        if self.numerics.rollbacks and self.objective.updates_of_rows() > 1:
            raise ValueError(
                "numerics.rollbacks leaves out the rows of a few steps, and objective.updates and minibatches read them again. Drop one."
            )
        parts, share = self.objective.parts_of_rows(), self.data.global_batch // self.launch.data_parallel
        for key, rows in {"trainer.micro_batch": self.micro_batch, "data.global_batch / ranks": share}.items():
            if rows % parts:
                what = f"objective.minibatches={parts} does not divide {key}={rows}, the prompts at a time"
                raise ValueError(f"{what}. Give one that does, or other prompts.")
        if self.checkpoint.best and self.data.test_frac:
            raise ValueError("checkpoint.best: the test is of the last weights, and others are handed on. Drop one.")
        if self.data.ramp and (beside := self._counts_steps()) is not None:
            raise ValueError(f"data.ramp makes steps of unlike rows, and {beside} counts on steps that are alike. Drop one.")

    def _require_start(self) -> None:
        """Raises ValueError where the run cannot start from its weights as it asks to."""
        if self.init_optimizer and (self.init_from is None or self.adapter is not None):
            without = "there is no init_from" if self.adapter is None else f"adapter={self.adapter.kind} is new"
            raise ValueError(f"init_optimizer=true goes on with the optimizer of a checkpoint, and {without}. Leave it out.")
        if self.adapter is not None and self.init_from is None:
            raise ValueError(f"adapter={self.adapter.kind} is trained beside weights that have learned already. Set init_from.")
        if self.adapter is not None:
            self.adapter.apply(build_model(self.sized_model(MOST), device="meta"))
