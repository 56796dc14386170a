"""Names of settings that users know from other programs. Each is an error that gives our name."""

# The settings that serve the purpose of other programs' options (transformers' and TRL's arguments, peft, nanoGPT,
# LLaMA-Factory, MiniMind's scripts), where the names differ.
_FOREIGN = {
    "optimizer.learning_rate": "lr max_lr base_lr peak_lr matrix_lr muon_lr",
    "optimizer.adamw_learning_rate": "embedding_lr unembedding_lr",
    "optimizer.name": "optim optimizer_type",
    "optimizer.beta1": "adam_beta1 betas",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.weight_decay": "wd",
    "schedule.name": "lr_scheduler_type lr_scheduler lr_schedule scheduler decay_lr",
    "schedule.warmup_ratio": "warmup_steps warmup_iters warmup num_warmup_steps",
    "schedule.min_lr_ratio": "min_lr min_learning_rate lr_min",
    "schedule.decay_ratio": "lr_decay_iters lr_decay_steps warmdown_ratio warmdown_iters",
    "batch.size": "rows batch_size train_batch_size total_batch_size global_batch_size",
    "batch.micro_size batch.size": "per_device_train_batch_size micro_batch_size device_batch_size accum_iter "
    "gradient_accumulation_steps accumulation_steps grad_accum_steps gradient_accumulation grad_accum",
    "epochs": "num_train_epochs num_epochs n_epochs epoch",
    "max_steps": "max_iters num_iterations num_steps train_steps total_steps n_steps iterations",
    "max_grad_norm": "grad_clip gradient_clipping gradient_clip_val clip_grad",
    "out": "output_dir out_dir save_dir output save_path",
    "init_from": "model_name_or_path model_name from_weight from_pretrained base_model pretrained_model "
    "checkpoint_path adapter_name_or_path sft_model_path ref_model ref_model_name_or_path",
    "ema_decay": "ema use_ema",
    "freeze": "freeze_trainable_layers trainable_layers",
    "compute.dtype": "torch_dtype bf16 fp16 precision mixed_precision amp",
    "compute.activation_checkpointing": "gradient_checkpointing grad_checkpointing use_gradient_checkpointing "
    "recompute",
    "compute.threads": "num_threads n_threads",
    "parallel.strategy": "fsdp fsdp_config zero_stage",
    "parallel.ds_config": "deepspeed deepspeed_config",
    "data.train": "dataset dataset_name dataset_path data_path data_dir dataset_dir",
    "data.seq_len": "block_size max_seq_length max_seq_len max_length sequence_length sequence_len "
    "context_length cutoff_len context_window n_ctx",
    "data.val_fraction": "val_size val_split validation_split validation_split_percentage eval_fraction test_size",
    "data.validation": "val_file eval_file",
    "data.order": "shuffle",
    "data.prefetch": "num_workers dataloader_num_workers prefetch_factor",
    "eval.every": "eval_steps eval_interval eval_every val_every val_interval evaluation_strategy eval_strategy",
    "eval.sequences": "eval_iters eval_batches val_batches",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval checkpoint_every ckpt_interval",
    "eval.patience": "early_stopping early_stopping_patience",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.keep_last": "save_total_limit max_checkpoints",
    "log.every": "logging_steps log_interval log_every log_steps logging_interval",
    "log.trackers": "report_to wandb use_wandb wandb_log tensorboard use_swanlab swanlab",
    "model.num_hidden_layers": "n_layer n_layers num_layers depth layers",
    "model.num_attention_heads": "n_head n_heads num_heads",
    "model.num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads n_query_groups",
    "model.hidden_size": "n_embd d_model dim n_embed embed_dim embedding_size width",
    "model.intermediate_size": "ffn_hidden_size d_ff ffn_dim mlp_dim n_inner hidden_dim",
    "model.num_experts": "n_experts n_routed_experts num_local_experts use_moe",
    "model.shared_expert_intermediate_size": "n_shared_experts",
    "router.aux_loss_coef": "aux_loss_alpha",
    "router.z_loss_coef": "z_loss",
    "model.max_position_embeddings": "n_positions",
    "tokenizer.path": "tokenizer_name tokenizer_path",
    "lora.rank": "lora_r lora_rank r use_lora finetuning_type",
    "lora.target_modules": "lora_target lora_target_modules",
    "regularization.bpe_dropout": "subword_regularization stochastok tokenizer_dropout",
    "regularization.dropout": "dropout resid_pdrop resid_dropout hidden_dropout residual_dropout attention_dropout",
    "objective.beta": "pref_beta dpo_beta",
    "objective.teacher": "teacher_model_name_or_path",
    "objective.reward.model": "reward_model reward_model_path reward_model_name_or_path",
    "objective.value.weight": "vf_coef",
    "objective.rollout.num_generations": "num_return_sequences group_size n_rollout",
    "objective.rollout.max_new_tokens": "max_completion_length response_length max_gen_len",
    "sample.every": "sample_interval sample_every",
}
FOREIGN = {name: tuple(ours.split()) for ours, names in _FOREIGN.items() for name in names.split()}

# What they offer and penjing does not, or does by itself.
_ABSENT = {
    "The same command again continues the run.": "from_resume resume resume_from resume_from_checkpoint auto_resume",
    "It is an option of the command: --gpus, --nproc-per-node or --nnodes.": (
        "gpus num_gpus n_gpus nproc_per_node num_nodes nnodes"
    ),
    "Of a conversation the assistant's turns are learned, of a text all of it.": (
        "completion_only_loss assistant_only_loss train_on_prompt train_on_inputs mask_prompt"
    ),
    "Training does not quantise weights. optimizer.state_dtype=int8 and lora.rank save memory.": (
        "load_in_4bit load_in_8bit quantization_bit quantization qlora use_qlora bnb_4bit_compute_dtype"
    ),
    "A layer is on one GPU; parallel.strategy=fsdp2 or zero3 shards a model over several.": (
        "tensor_parallel_size pipeline_parallel_size tp pp"
    ),
    "The fastest kernel is chosen by itself; `penjing doctor` shows it.": (
        "attn_implementation flash_attn use_flash_attention use_flash_attn flash_attention use_liger_kernel"
    ),
    "It gained next to nothing in trials. regularization.dropout and optimizer.weight_decay act against overfitting.": (
        "drop_path drop_path_rate stochastic_depth layer_drop layerdrop mask_ratio token_dropout word_dropout "
        "input_mask masked_inputs cautious_decay weight_decay_factors weight_decay_end weight_decay_schedule "
        "wd_schedule normuon_beta2"
    ),
    "The template comes with the tokenizer.": "template chat_template prompt_template",
    "Upload an export with your own account.": "push_to_hub hub_model_id hub_token",
}
ABSENT = {name: reason for reason, names in _ABSENT.items() for name in names.split()}
