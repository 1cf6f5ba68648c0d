"""Finds the key that a user means who writes another program's name for it, or leaves its section out."""

from collections.abc import Iterable

from lm.spelling import words

OTHER_NAMES = {  # in transformers' Trainer and configs, TRL, peft, axolotl, LLaMA-Factory, nanoGPT, litgpt, Lightning and x-transformers
    "adapter.alpha": "lora_alpha",
    "adapter.base=int8": "load_in_8bit quantization_bit quantize",
    "adapter.base=nf4": "bnb_4bit_quant_type load_in_4bit",
    "adapter.dora": "use_dora",
    "adapter.dropout": "lora_dropout",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.rslora": "use_rslora",
    "adapter.targets": "lora_target lora_target_modules target_modules",
    "adapter.whole": "additional_target lora_modules_to_save modules_to_save trainable_token_indices",
    "adapter=lora": "finetuning_type lora peft peft_config qlora use_lora use_peft",
    "checkpoint.background": "async_mode async_save",
    "checkpoint.best": "load_best_model_at_end save_best",
    "checkpoint.every": (
        "checkpoint.interval checkpoint_every checkpoint_interval ckpt_every ckpt_interval save_every save_interval save_steps"
        " save_strategy"
    ),
    "checkpoint.keep_last": "keep max_to_keep save_total_limit save_top_k",
    "data.field": "dataset_text_field text_column text_field",
    "data.files": "corpus data_dir data_path dataset_path file input input_file path text text_file train_data train_file train_files",
    "data.global_batch": (
        "accumulate_grad_batches accumulation batch batch_size bs global_batch_size grad_accum gradient_accumulation_steps train_batch_size"
    ),
    "data.packing": "sample_packing",
    "data.ramp": "batch_ramp batch_size_rampup batch_size_schedule batch_size_warmup batch_warmup ramp_up rampup rampup_batch_size",
    "data.record.template": "chat_template chat_template_path",
    "data.seq_len": (
        "block_size context context_len context_length ctx_len cutoff_len max_len max_length max_prompt_length max_seq_length n_ctx"
        " seq_length sequence_len sequence_length"
    ),
    "data.val_frac": "eval_split test_size val_ratio val_size validation_split",
    "data.val_rows": "eval_iters limit_val_batches max_eval_samples",
    "data.workers": "dataloader_num_workers n_workers num_workers",
    "init_from": "base base_model checkpoint_path ckpt ckpt_path from load_from model_name_or_path parent pretrained resume_from",
    "launch.context": (
        "context_parallel context_parallel_degree context_parallel_size cp cp_size sequence_parallel sequence_parallel_size sp ulysses"
    ),
    "launch.devices": "gpus n_gpu n_gpus ngpu nproc nproc_per_node num_gpus num_processes processes world_size",
    "launch.nodes": "machines nnodes",
    "launch.tensor": "tensor_model_parallel_size tensor_parallel tensor_parallel_degree tensor_parallel_size tp tp_size",
    "logger": "report_to",
    "logger.mode": "offline",
    "logger.run_group": "group",
    "logger=wandb": "use_wandb wandb wandb_log",
    "model.attention": "attn self_attention",
    "model.attention.chunked": "attention_chunk_size chunk_size",
    "model.attention.disentangled": "disentangled_attention pos_att_type relative_attention",
    "model.attention.disentangled.max_distance": "max_relative_positions",
    "model.attention.disentangled.n_buckets": "position_buckets",
    "model.attention.dropout": "attention_dropout attn_dropout attn_pdrop",
    "model.attention.forget": "attn_data_dependent_alibi data_dependent_alibi forget_gate forget_gates",
    "model.attention.global_heads.head_dim": "global_head_dim",
    "model.attention.global_heads.n_kv_heads": "num_global_key_value_heads",
    "model.attention.gpt_oss_sinks": "attn_head_learned_sink head_learned_sink",
    "model.attention.head_dim": "attn_dim_head dim_head",
    "model.attention.indexer": "dsa lightning_indexer",
    "model.attention.indexer.head_dim": "index_head_dim",
    "model.attention.indexer.n_heads": "index_n_heads",
    "model.attention.indexer.top_k": "index_topk",
    "model.attention.n_heads": "attention_heads heads n_head num_attention_heads",
    "model.attention.n_kv_heads": "attn_kv_heads kv_heads n_query_groups num_query_groups num_key_value_heads",
    "model.attention.out_gate": "attn_gate_values gate_values",
    "model.attention.qk_norm": "attn_qk_norm attn_qk_rmsnorm qk_rmsnorm use_qk_norm",
    "model.attention.shared_layers": "kv_sharing num_kv_shared_layers share_kv",
    "model.attention.softcap": "attn_logit_softcapping attn_softclamp_logits logit_softclamp_value softclamp_logits",
    "model.attention.value_embedding": "value_embeds",
    "model.attention.value_residual": "add_value_residual",
    "model.attention.values": "attention_k_eq_v",
    "model.attention.window": "attn_max_attend_past max_attend_past sliding_window window_size",
    "model.block.layer_dropout": "drop_path drop_path_rate layerdrop stochastic_depth",
    "model.block.layer_scale": "layerscale_init_value use_layerscale",
    "model.block=parallel": "parallel_residual use_parallel_residual",
    "model.d_model": "dim emb_dim embed_dim embedding_size hidden_dim hidden_size model_dim n_embd width",
    "model.embed.factorized.width": "factorized_embedding word_embed_proj_dim",
    "model.embed.ngrams": "bigram_embed ngram_embedding ngram_embeddings",
    "model.embed.ngrams.rows": "bigram_vocab_size encoder_hash_byte_group_vocab",
    "model.embed.ngrams.sizes": "encoder_hash_byte_group_size",
    "model.embed.noise": "neftune neftune_alpha neftune_noise_alpha noise_alpha",
    "model.embed.norm": "post_emb_norm",
    "model.embed.per_layer.channels": "hidden_size_per_layer_input",
    "model.embed.smear": "shift_tokens smear_gate smear_lambda",
    "model.ffn": "feed_forward mlp",
    "model.ffn.activation": "activation_function ff_relu_squared ff_swish hidden_act hidden_activation",
    "model.ffn.dropout": "ff_dropout",
    "model.ffn.gated": "ff_glu",
    "model.ffn.hidden": "d_ff ff_mult ffn_dim ffn_hidden ffn_hidden_size hidden_size intermediate_size mlp_hidden",
    "model.ffn.inner_norm": "ff_post_act_ln post_act_ln",
    "model.head.softcap": "final_logit_softcapping",
    "model.head.tied": "tie_embedding tie_embeddings tie_weights tie_word_embeddings untie_embeddings_and_output_weights weight_tying",
    "model.init.out_scale": "zero_init_branch_output zero_init_output",
    "model.max_seq_len": "context context_len context_length max_position_embeddings n_positions",
    "model.n_layers": "depth num_hidden_layers",
    "model.norm": "norm_type use_rmsnorm",
    "model.norm.place": "norm_first post_norm pre_norm sandwich_norm",
    "model.position": "alibi_pos_bias position_embedding_type rel_pos_bias rotary_pos_emb use_abs_pos_emb",
    "model.position.theta": "rope_base rope_theta rotary_base",
    "model.residual=hyper": "num_residual_streams",
    "model.residual=loop": "layers_execute_order looped weight_tie_layers",
    "model.residual=unet": "unet_skips",
    "model.residual=x0": "reinject_input",
    "model.vocab_size": "num_tokens",
    "objective.beta": "pref_beta",
    "objective.clip": "clip_ratio clip_ratio_low cliprange epsilon",
    "objective.clip_high": "clip_ratio_high epsilon_high",
    "objective.environment": "environment_factory",
    "objective.kl": "init_kl_coef kl_beta kl_coef kl_loss_coef objective.beta",
    "objective.learn_cut": "mask_truncated_completions overlong_filter",
    "objective.margin": "simpo_gamma",
    "objective.max_tokens": "max_completion_length max_response_length",
    "objective.minibatches": "mini_batch_size num_mini_batches ppo_mini_batch_size steps_per_generation",
    "objective.n_answers": "group_size n_samples_per_prompt num_generations rollout_n",
    "objective.on_policy": "lmbda",
    "objective.prompt_loss": "assistant_only_loss completion_only_loss mask_prompt train_on_inputs train_on_prompt",
    "objective.ratio": "importance_sampling_level",
    "objective.reward_model": "reward_model_name_or_path reward_model_path",
    "objective.rewards": "reward_funcs reward_functions reward_weights",
    "objective.scale": "scale_rewards",
    "objective.sft_weight": "cpo_alpha pref_ftx rpo_alpha",
    "objective.teacher": "teacher_model teacher_model_name_or_path",
    "objective.teacher_temperature": "distillation_temperature kd_temperature",
    "objective.teacher_weight": "distillation_weight kd_alpha kd_ratio",
    "objective.updates": "mu num_iterations ppo_epochs",
    "objective.weight": "objective.beta orpo_alpha",
    "optim": "optim.name optim.type optimiser optimizer optimizer_type",
    "optim.adam_lr": "scalar_lr unembedding_lr",
    "optim.beta1": "betas",
    "optim.beta2": "betas",
    "optim.clip": "clip_grad_norm clip_norm grad_clip grad_norm gradient_clip_val max_grad_norm",
    "optim.decay_rate": "beta2_decay",
    "optim.embed_lr": "embedding_learning_rate embedding_lr",
    "optim.eps": "adam_epsilon epsilon",
    "optim.lr": "base_lr learning_rate matrix_lr max_lr peak_lr",
    "optim.weight_decay": "wd",
    "resume.mode": "resume_from_checkpoint",
    "recipes": "experiment",
    "run.dir": "checkpoint_dir log_dir logdir logging_dir out out_dir output output_dir paths save_dir",
    "run.name": "exp_name experiment run_name task_name",
    "schedule": "lr_decay_style lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "schedule.decay_frac": "cooldown_frac cooldown_ratio decay_ratio warmdown warmdown_ratio",
    "schedule.final_frac": "final_lr lr_min min_lr min_lr_ratio",
    "schedule.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup warmup_iters",
    "schedule=free": "schedule_free schedulefree",
    "schedule.warmup_steps=3%": "lr_warmup_fraction warmup_fraction warmup_ratio",
    "strategy=ddp": "ddp",
    "strategy=fsdp": "fsdp",
    "strategy=zero2": "deepspeed zero",
    "tokenizer.specials": "add_special_tokens add_tokens additional_special_tokens extra_special_tokens new_special_tokens special_tokens",
    "tokenizer.vocab_size": "vocab vocab_size vocabulary vocabulary_size",
    "trainer.early_stop": "early_stopping early_stopping_patience patience",
    "trainer.log_every": "log_freq log_interval log_steps metrics.log_freq logging_steps logging_strategy",
    "trainer.max_steps": (
        "iterations iters max_duration max_iters n_iters n_steps num_iterations num_steps steps train_iters train_samples train_steps"
    ),
    "trainer.max_steps=10Mtokens": "max_tokens token_budget tokens train_tokens",
    "trainer.max_steps=3epochs": "epochs max_epochs num_epochs num_train_epochs",
    "trainer.micro_batch": (
        "batch batch_size device_batch_size device_train_microbatch_size local_batch_size micro_batch_size per_device_train_batch_size"
    ),
    "trainer.precision": "dtype torch_dtype",
    "trainer.precision=bf16-mixed": "amp bf16 bfloat16 mixed_precision",
    "trainer.precision=fp16-mixed": "float16 fp16 half",
    "trainer.profile": "enable_profiling profile profiler profiler.enabled profile_freq profiling profiling.enable_profiling",
    "trainer.recompute": "activation_checkpointing checkpoint_blocks gradient_checkpointing",
    "trainer.recompute_every": "checkpoint_blocks",
    "trainer.sample_prompts": "log_completions",
    "trainer.val_every": (
        "eval_every eval_freq eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval val_interval validation.freq"
    ),
    "trainer=gpu": "cuda gpu",
}


_FOLDERS = "A run is in run.dir/run.name; in a sweep run.name=mine names the folder around all runs"
_OF_HYDRA = {
    "job": "A run stays in the folder that it was started in, and writes all it has to say into its own",
    "launcher": "-m runs one job after the other, on each machine where it is given; `lm ablate` several at once, jobs=2, or cluster=slurm",
    "mode": "-m alone makes a sweep",
    "output_subdir": _FOLDERS,
    "run": _FOLDERS,
    "searchpath": "Write --config-dir FOLDER, or set LM_CONFIG_DIR",
    "sweep": _FOLDERS,
    "sweeper": "-m tries every combination; for a search call lm train once for each, as `wandb agent` does, or let `lm ablate` tune",
}
"""Hydra's own settings -> what is here instead."""


def of_hydra(path: str) -> str | None:
    """Returns the sentence on an override of Hydra's own settings, such as hydra.run.dir or hydra/launcher; None for another key."""
    parts = path.replace("/", ".").split(".")
    if parts[0] != "hydra":
        return None
    return f"{path}: Hydra's own settings are not read. {_OF_HYDRA.get(''.join(parts[1:2]), 'Leave it out')}."


def meant(key: str, section: str, paths: Iterable[str]) -> list[str]:
    """Returns the keys that other programs call by this name, alone or as section.key; else the shallowest path with the same words, or
    with a last part that has them; or a key of the section that begins so. Those in the section go before others. Some have a value:
    'logger=wandb'."""
    theirs = {name.lower().replace("-", "_") for name in (key, f"{section}.{key}")}
    found = [path for path, names in OTHER_NAMES.items() if theirs & {*names.split()}]
    if not found:
        paths, begun = list(paths), f"{section}.{key}"
        same = [path for path in paths if words(key) in (words(path), words(path.rpartition(".")[2]))]
        longer = [path for path in paths if section and len(key) > 2 and path.startswith(begun) and "." not in path.removeprefix(begun)]
        found = sorted([*same, *longer], key=lambda path: (not path.startswith(f"{section}."), path.count(".")))[:1]
    return [path for path in found if path.startswith(f"{section}.")] or found
