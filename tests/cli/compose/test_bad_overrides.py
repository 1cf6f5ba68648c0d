"""Every mistake on the command line ends with exit code 2 and one sentence: where, what was given, the rule, the remedy."""

import subprocess
from collections.abc import Callable

import pytest

from lm.cli.compose.catalog import GLOBAL
from lm.cli.compose.compose import compose
from lm.cli.compose.naming import known_keys
from lm.cli.listing.nearest import OTHER_NAMES
from lm.errors import ConfigError
from lm.spelling import nearest
from tests.conftest import Lm

MISTAKES = {
    "misspelt key": (["optim.lrr=1"], ["optim.lrr: there is no such key", "Did you mean 'lr'?"]),
    "misspelt key with +": (["+optim.lrr=1"], ["optim.lrr: there is no such key", "Did you mean 'lr'?"]),
    "misspelt key with ~": (["~optim.lrr"], ["optim.lrr: there is no such key", "Did you mean 'lr'?"]),
    "key of another kind": (["data.file=a.txt"], ["data.file: there is no such key in kind 'stdlib'", "Write data=text data.files=..."]),
    "misspelt key of another kind": (
        ["model.attention.kv_lora_rank=8"],
        ["Did you mean 'kv_rank'? Write model/attention=mla model.attention"],
    ),
    "key of another objective": (
        ["objective.beta=1"],
        ["Write objective=apo or objective=dpo or objective=ipo or objective=kto or objective=simpo objective.beta=..."],
    ),
    "key of another kind, and of a section of the chosen one": (
        ["model/ffn=moe", "model.ffn.hidden=512"],
        ["model.ffn.hidden: there is no such key in kind 'moe'. Did you mean 'model.ffn.expert.hidden'?"],
    ),
    "key of two other kinds": (["optim=adamw", "optim.momentum=1"], ["Write optim=muon or optim=sgd optim.momentum=..."]),
    "misspelt key without its section": (["max_step=5"], ["Did you mean 'trainer.max_steps'?"]),
    "key of another kind without its section": (["n_experts=4"], ["Did you mean 'model.ffn.n_experts'?"]),
    "key of another kind of model": (["model=t5_tiny", "model.mtp.depth=1"], ["only in others. Write model=tiny model.mtp=..."]),
    "key of a mixture's sources": (
        ["data=mix", "data.sources=[{name:a,data:{kind:stdlib}}]", "data.record.template=chatml"],
        ["data.record: there is no such key in kind 'mix'", "Write data.sources=[{...,data:{...,record:...}}]"],
    ),
    "key with its section and an underscore": (["data_file=a.txt"], ["Did you mean 'data.files'?"]),
    "key in a section of another program": (["training.local_batch_size=4"], ["training.local_batch_size", "mean 'trainer.micro_batch'?"]),
    "section and key of another program": (
        ["validation.freq=5"],
        ["validation.freq: there is no such key. Did you mean 'trainer.val_every'"],
    ),
    "key of another program with dashes": (["lr-decay-style=cosine"], ["lr-decay-style: there is no such key. Did you mean 'schedule'?"]),
    "nothing near": (["comm.init_timeout_seconds=3"], ["comm: there is no such key. Options: adapter, "]),
    "one of several near": (["trainer.precision=bf16"], ["'bf16' is not an option. Did you mean 'bf16-mixed'?"]),
    "key of several sections": (["dropout=0.1"], ["Did you mean 'model.dropout'?"]),
    "misspelt section": (["optm.lr=1"], ["optm: there is no such key", "Did you mean 'optim'?"]),
    "key without its section": (["n_layers=3"], ["n_layers: there is no such key", "Did you mean 'model.n_layers'?"]),
    "key below a value": (["optim.lr.x=1"], ["optim.lr.x", "optim.lr is a value"]),
    "wrong type": (["trainer.max_steps=many"], ["trainer.max_steps: 'many' does not fit", "Give steps such as 300"]),
    "float for int": (["seed=1.5"], ["seed: 1.5 does not fit", "integer"]),
    "huge float for int": (["trainer.max_steps=1e30"], ["trainer.max_steps: 1e+30 does not fit", "must be a valid integer."]),
    "whole float for int": (["trainer.max_steps=1e3"], ["trainer.max_steps: 1000.0 does not fit", "a valid integer: write 1000."]),
    "string for int": (["seed='1'"], ["seed: '1' does not fit", "integer"]),
    "list for scalar": (["optim.lr=[1]"], ["optim.lr: [1] does not fit", "number"]),
    "out of range": (["trainer.max_steps=-3"], ["trainer.max_steps: -3 does not fit", "greater than 0"]),
    "NaN": (["optim.lr=nan"], ["optim.lr: NaN does not fit", "finite number"]),
    "infinity": (["optim.lr=inf"], ["optim.lr: Infinity does not fit", "finite number"]),
    "misspelt true": (["trainer.compile=ture"], ["trainer.compile: 'ture' is not an option", "Did you mean 'true'? Options: true, false."]),
    "another word for true": (["trainer.compile=yes"], ["trainer.compile: 'yes' is not an option", "Options: ", "true", "false"]),
    "one value for a list": (["trainer.freeze=3"], ["trainer.freeze: 3 does not fit", "a list, such as [a,b]"]),
    "a folder for a model": (["model=/"], ["model: '/' is a path, not an option", 'Write init_from="/".']),
    "a file for data": (["data=/dev/null"], ["data: '/dev/null' is a path", 'Write data=text data.files="/dev/null".']),
    "unknown number": (["optim=adamw", "optim.state_bits=4"], ["optim.state_bits: '4' is not an option", "Options: 8."]),
    "unknown literal": (["trainer.precision=fp23"], ["trainer.precision: 'fp23' is not an option", "Did you mean 'fp32'?"]),
    "unknown option": (["optim=adamww"], ["optim: 'adamww' is not an option", "Did you mean 'adamw'?", "muon"]),
    "option of 5,000 letters": ([f"optim={'x' * 5000}"], ["optim: 'xxxxx", "xxxx...xxxx", "One of your own comes with plugins=FILE.py."]),
    "unknown slot option": (["model/ffn=gegly"], ["model/ffn: 'gegly' is not an option", "Did you mean 'geglu'?"]),
    "unknown recipe": (["recipes=pretrain/tinny"], ["recipes: 'pretrain/tinny' is not an option", "Did you mean 'pretrain/tiny'?"]),
    "unknown group": (["model/fnn=geglu"], ["model/fnn: there is no such group", "Did you mean 'model/ffn'?"]),
    "kind of a section without files": (["model.position.scaling=yarn"], ["Write model.position.scaling.kind=yarn."]),
    "group taken for a key": (["model.ffn=geglu"], ["model.ffn", "model/ffn=geglu"]),
    "kind set by hand": (["optim.kind=sgd"], ["optim.kind", "optim=sgd"]),
    "kind of stack set by hand": (
        ["model.kind=encoder"],
        ["model.kind: the kind comes with the option", "model=albert_base or bert_base or bert_large or bert_tiny"],
    ),
    "key of a section that is null": (
        ["model.position.interleaved=1", "model/position=alibi"],
        ["no such key", "Write model/position=rope model.position.interleaved"],
    ),
    "beginning of a key, which another section has whole": (["model.attention.chunk=8"], ["Did you mean 'model.attention.chunked'?"]),
    "key that the chosen kind lacks": (["optim=adamw", "optim.adam_lr=1"], ["optim.adam_lr: there is no such key", "kind 'adamw'"]),
    "group deleted": (["~optim"], ["optim", "cannot be removed"]),
    "null for a group": (["optim=null"], ["optim: 'null' is not an option"]),
    "heads do not divide": (["model.attention.n_heads=7"], ["n_heads=7", "not a multiple"]),
    "model that the objective does not train": (["model=t5_small"], ["but model.kind is encoder_decoder", "objective=spans"]),
    "key of an entry named like its kind": (
        ["objective=grpo", "init_from=null", "objective.rewards={length:{wieght:2}}"],
        ["objective.rewards.length.wieght: there is no such key in kind 'length'. Did you mean 'weight'?"],
    ),
    "rewards that weigh nothing": (
        ["objective=grpo", "init_from=null", "objective.rewards={exact:{weight:0}}"],
        ["rewards: all weights are 0 (exact), so that nothing is learned"],
    ),
    "an entry set to null": (["objective=grpo", "objective.rewards.exact=null"], ["Write ~objective.rewards.exact to be without it."]),
    "key of a group without an option": (["adapter.rank=4"], ["adapter: it has no kind yet", "Write adapter=lora adapter.rank=..."]),
    "another program's key of a group without an option": (["adapter.r=4"], ["Did you mean 'rank'? Write adapter=lora adapter.rank=..."]),
    "key that no option of a group has": (["adapter.knd=lora"], ["adapter: it has no kind yet, and no kind (lora) has a key 'knd'"]),
    "key of a union without kind": (["model.position.scaling.factor=8"], ["model.position.scaling: it has no kind yet", "linear"]),
    "unknown kind in a union": (
        ["model.position.scaling.kind=linaer"],
        ["model.position.scaling.kind: 'linaer'", "Did you mean 'linear'?"],
    ),
    "more experts than there are": (["model=mixtral_8x7b", "model.ffn.top_k=9"], ["model.ffn: top_k=9", "n_experts=8"]),
    "warm-up longer than the run": (
        ["schedule.warmup_steps=99", "trainer.max_steps=9"],
        ["schedule.warmup_steps=99", "trainer.max_steps=9"],
    ),
    "missing value": (["data=text"], ["data.files: a value is missing"]),
    "sweep without -m": (["seed=0,1"], ["seed=0,1 is a sweep", "-m"]),
    "thousands apart": (["optim.lr=1,000"], ["a sweep", "-m", "or for one number optim.lr=1000, since commas part values."]),
    "section for a list": (["optim.groups={match:embed,lr:1}"], ["optim.groups is a list. Write optim.groups=[{match:...}]"]),
    "unreadable key": (["öptim.lr=1"], ["öptim.lr: there is no such key", "Did you mean 'optim'?"]),
    "no key": (["geglu"], ["geglu", "key=value"]),
    "unknown flag": (["--multi"], ["--multi", "--multirun"]),
    "key with dashes": (["--optim.lr=1"], ["--optim.lr=1: there is no such flag", "key=value"]),
    "folder as Hydra's": (["hydra.run.dir=x"], ["hydra.run.dir: Hydra's own settings are not read. A run is in run.dir/run.name"]),
    "launcher as Hydra's": (["hydra/launcher=joblib"], ["hydra/launcher: Hydra's own settings are not read. -m runs one job after"]),
    "another setting of Hydra": (["+hydra.verbose=true"], ["hydra.verbose: Hydra's own settings are not read. Leave it out."]),
    "flag of Hydra": (["--resolve"], ["--resolve: there is no such flag. --cfg job prints values alone"]),
    "short flag of Hydra": (["-cn", "mine"], ["-cn: there is no such flag. Write recipes=NAME"]),
    "flag of Hydra with a value": (["--package=optim"], ["--package: there is no such flag. `lm explain SECTION` prints a part"]),
    "experiment of a template": (["experiment=x"], ["Did you mean 'recipes' or 'run.name'?"]),
    "section of the chosen kind": (["logger=wandb", "logger.wandb.project=x"], ["stand in logger itself. Leave .wandb out."]),
    "dict for a group": (["optim={'lr': 0.1}"], ["optim: a dict was given for an option. Write its keys one by one: optim.lr=0.1."]),
    "dict with a key of two words": (["budget={'a b': 1}"], ["this is no value. Write each key for itself, as in budget.x=VALUE."]),
    "nothing as Python's": (["optim.clip=None"], ["optim.clip: 'None' does not fit. The value must be a valid number, or null."]),
    "run name that leaves the folder": (["run.name=../../etc/x"], ["run.name: '../../etc/x' cannot name a run folder"]),
    "run name of other letters": (["run.name=größe"], ["run.name: 'größe' cannot name", "letters (a to z, A to Z), digits"]),
    "run name too long": (["run.name=" + "x" * 300], ["run.name", "cannot name a run folder"]),
    "path too long": (["init_from=" + "x" * 300], ["xxx: File name too long. Give the path of a file or folder."]),
}


@pytest.mark.parametrize("args, expected", MISTAKES.values(), ids=MISTAKES.keys())
def test_bad_override_ends_with_one_sentence_and_exit_code_2(lm: Lm, args: list[str], expected: list[str]) -> None:
    """Run names seen to fail with their rule removed."""
    code, out, err = lm("train", "--cfg", "job", *args)
    last = err.splitlines()[-1]
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for part in expected:
        assert part in last


@pytest.mark.parametrize("args", [["-m", "optim.lrr=1,2"], ["optim.lrr=1,2", "-m"], ["optim=adamw,adamww", "--multirun"]])
def test_bad_key_or_option_in_a_sweep_is_told(lm: Lm, args: list[str]) -> None:
    code, _, err = lm("train", *args, "--cfg", "job")
    assert code == 2
    assert "Did you mean" in err.splitlines()[-1]


def test_traceback_is_shown_only_on_request(lm: Lm) -> None:
    code, _, err = lm("train", "optim.lrr=1", "traceback=true")
    assert code == 2
    assert "Traceback" in err
    assert "optim.lrr" in err.splitlines()[-1]


def test_a_metric_that_nobody_knows_is_told_of_plugins(lm_process: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """In a process of its own: other tests make metrics known."""
    done = lm_process("train", "metrics.log_freq=1")
    assert done.returncode == 2
    assert "none is known. Did you mean 'trainer.log_every'? One's own comes with plugins=FILE.py." in done.stderr


@pytest.mark.parametrize("args, near", [(["trian"], "train"), (["comapre"], "compare"), (["explian", "optim"], "explain")])
def test_unknown_verb_is_answered_with_the_nearest(lm: Lm, args: list[str], near: str) -> None:
    code, _, err = lm(*args)
    assert code == 2
    assert f"Did you mean '{near}'?" in err.splitlines()[-1]


MEANT = {
    "'trainer.max_steps'": "steps max_step max_iters trainer.steps",
    "'trainer.max_steps=3epochs'": "epochs num_train_epochs trainer.max_epochs",
    "'trainer.max_steps=10Mtokens'": "max_tokens",
    "'schedule.warmup_steps=3%'": "warmup_ratio",
    "'optim.lr'": "lr lrr learning_rate trainer.lr optim.learning_rate",
    "'data.global_batch' or 'trainer.micro_batch'": "batch_size batch model.batch_size",
    "'data.global_batch'": "gradient_accumulation_steps grad_accum trainer.accumulate_grad_batches",
    "'trainer.micro_batch'": "micro_batch_size per_device_train_batch_size trainer.batch_size",
    "'model.n_layers'": "layers n_layer num_layers num_hidden_layers model.num_layers",
    "'model.attention.n_heads'": "heads n_head model.n_heads model.attention.heads",
    "'model.d_model'": "d_model n_embd model.hidden_size",
    "'launch.devices'": "gpus num_gpus nproc_per_node",
    "'checkpoint.every'": "save_every save_steps trainer.save_every",
    "'trainer.val_every'": "eval_every eval_interval trainer.eval_steps",
    "'schedule.warmup_steps'": "warmup optim.warmup schedule.warmup",
    "'data.seq_len'": "seq_len block_size max_length data.context",
    "'data.seq_len' or 'model.max_seq_len'": "context",
    "'model.dropout'": "dropout",
    "'model/norm'": "norm use_rmsnorm",
    "'model/residual=loop'": "weight_tie_layers model.layers_execute_order",
    "'model/block=parallel'": "use_parallel_residual",
    "'model.attention.window'": "sliding_window model.attention.max_attend_past",
    "'model.norm.place'": "model.sandwich_norm",
    "'model/position'": "model.rotary_pos_emb",
    "'model/ffn'": "ffn model.mlp model/mlp",
    "'model/attention'": "attn",
    "'trainer.device'": "device",
    "'trainer.precision=bf16-mixed'": "bf16",
    "'logger=wandb'": "wandb",
    "'run.dir'": "output_dir",
    "'optim.clip'": "trainer.grad_clip",
    "'checkpoint.best'": "load_best_model_at_end",
    "'tokenizer.vocab_size'": "vocab",
    "'data.files'": "train_file",
    "'data.field'": "dataset_text_field",
    "'data.val_rows'": "eval_iters limit_val_batches",
    "'objective.margin'": "simpo_gamma",
    "'trainer.sample_prompts'": "log_completions",
    "'adapter.rank'": "lora_r adapter.r",
    "'adapter.targets'": "lora_target_modules target_modules",
    "'adapter=lora'": "qlora use_peft",
    "'objective.prompt_loss'": "train_on_inputs objective.assistant_only_loss",
    "'objective.n_answers'": "num_generations",
    "'data.packing'": "packing sample_packing",
    "'model.embed.noise'": "neftune_noise_alpha",
    "'model.embed.ngrams'": "bigram_embed",
    "'model.embed.ngrams.rows'": "encoder_hash_byte_group_vocab",
    "'model.embed.ngrams.sizes'": "encoder_hash_byte_group_size",
    "'optim'": "optimizer",
    "'model'": "modle",
    "'seed'": "seeds",
    "'recipes'": "recipe",
}


def test_a_key_of_another_program_is_answered_with_ours() -> None:
    """adapter=lora: or the section has no keys. In one test, so that all run. Seen to fail: optimizer, as init_optimizer; learning_rate, as
    the decay_rate of another optimizer."""
    other = {}
    for key, name in [(key, name) for key, names in MEANT.items() for name in names.split()]:
        with pytest.raises(ConfigError) as raised:
            compose(["adapter=lora", f"{name}=1"])
        if f"Did you mean {key}" not in raised.value.sentence:
            other[name] = raised.value.sentence
    assert other == {}


def test_a_name_that_other_objectives_have_too_is_answered_with_what_it_is_here() -> None:
    """Of TRL's GRPO and ORPO, in which beta is not that of DPO."""
    of = {"beta": "kl", "scale_rewards": "scale", "mask_truncated_completions": "learn_cut", "kl_coef": "kl", "reward_weights": "rewards"}
    given = [("grpo", name, ours) for name, ours in of.items()] + [("orpo", "beta", "weight")]
    other = {}
    for objective, name, ours in given:
        with pytest.raises(ConfigError) as raised:
            compose([f"objective={objective}", f"objective.{name}=1"])
        if f"Did you mean 'objective.{ours}'?" not in raised.value.sentence:
            other[objective, name] = raised.value.sentence
    assert other == {}


@pytest.mark.parametrize(
    "given, options, near",
    [
        ("tokens", ["top_k", "max_tokens", "prompt"], "max_tokens"),
        ("max_new_tokens", ["top_k", "max_tokens", "prompt"], "max_tokens"),
        ("temp", ["top_p", "temperature"], "temperature"),
        ("output", ["format", "out"], "out"),
        ("gpt2", ["pretrain/tiny", "pretrain/gpt2_124m"], "pretrain/gpt2_124m"),
        ("eps", ["steps", "norm_eps"], "norm_eps"),
        ("model/fnn", ["model", "model/ffn"], "model/ffn"),
        ("xyz", ["out", "format"], None),
        ("", ["out", "format"], None),
    ],
)
def test_whole_words_of_a_name_are_nearer_than_its_letters(given: str, options: list[str], near: str | None) -> None:
    assert nearest(given, options) == near


@pytest.mark.parametrize(("name", "key"), [("betas", "beta1"), ("beta2_decay", "decay_rate")])
def test_of_keys_that_another_program_has_as_one_those_of_the_chosen_kind_are_named(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["optim=adafactor", f"optim.{name}=0.9"])
    assert raised.value.sentence == f"optim.{name}: there is no such key in kind 'adafactor'. Did you mean 'optim.{key}'?"


def test_blocks_that_are_computed_again_are_told_by_their_present_name() -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["trainer.checkpoint_blocks=2"])
    assert "trainer.checkpoint_blocks: there is no such key. Did you mean 'trainer.recompute' or 'trainer.recompute_every'?" in str(
        raised.value
    )
    with pytest.raises(ConfigError, match=r"recompute_every=2 has no effect with recompute=none\. Set recompute=block or selective"):
        compose(["trainer.recompute_every=2"]).config()


def test_every_key_that_others_name_differently_exists() -> None:
    for path in OTHER_NAMES:
        assert path.partition("=")[0] in {*known_keys(), *GLOBAL}


@pytest.mark.parametrize(
    "args, quoted",
    [
        (["train", "run.name=my", "run"], 'run.name="my run"'),
        (["train", "data=text", "data.files=my", "old", "file.txt", "seed=1"], 'data.files="my old file.txt"'),
        (["train", "-m", "seed=0,", "1"], 'seed="0, 1"'),
        (["prepare", "data=text", "data.files=[a.txt,", "b.txt]"], 'data.files="[a.txt, b.txt]"'),
        (["generate", "from=r", "prompt=hello", "world"], 'prompt="hello world"'),
        (["generate", "from=r", "prompt=what's", "$HOME"], "prompt='what'\"'\"'s $HOME'"),
        (["export", "from=r", "out=my", "model", "format=hf"], 'out="my model"'),
        (["tokenizer", "out=my", "words"], 'out="my words"'),
        (["ablate", "plan", "study=my", "study"], 'study="my study"'),
    ],
)
def test_a_value_that_was_cut_at_a_space_is_shown_in_quotes(lm: Lm, args: list[str], quoted: str) -> None:
    code, out, err = lm(*args)
    assert (code, out) == (2, "")
    assert f"write {quoted} in quotes" in err.splitlines()[-1]


@pytest.mark.parametrize("args", [["data.seq_len", "=", "512"], ["seed=1", "data.seq_len", "=512"]])
def test_a_space_beside_an_equals_sign_is_told(lm: Lm, args: list[str]) -> None:
    assert "there is a space beside the '='. Write data.seq_len=512." in lm("train", *args)[2].splitlines()[-1]


@pytest.mark.parametrize(
    "args, remedy",
    [
        (["eval", "runs/a"], "Write lm eval from=runs/a."),
        (["generate"], "Write lm generate from=runs/NAME."),
        (["export", "runs/a"], "Write lm export from=runs/a out=OUT."),
        (["export", "out=x"], "Write lm export from=runs/NAME."),
    ],
)
def test_what_a_verb_needs_is_named_all_at_once(lm: Lm, args: list[str], remedy: str) -> None:
    code, out, err = lm(*args)
    assert (code, out) == (2, "") and err.splitlines()[-1].endswith(remedy)


def test_a_range_without_a_step_is_refused(lm: Lm) -> None:
    code, _, err = lm("train", "seed=range(0,3,0)", "-m")
    assert code == 2 and err.splitlines()[-1].startswith("seed=range(0,3,0): it has no values")


def test_a_key_of_a_study_is_told_without_its_section(lm: Lm) -> None:
    """Seen to fail: 'study: there is no such key', beside the key study=ablation/mixers."""
    code, out, err = lm("ablate", "plan", "study=ablation/mixers", "study.tune=null")
    assert (code, out) == (2, "") and err.splitlines()[-1].endswith("Write tune=null.")
