"""Map the key names of transformers, TRL, PEFT and Unsloth, and old names, to this package's, for error messages."""

from __future__ import annotations

# At the top of a recipe, where those libraries' settings are flat. A key is proposed if the training has it.
OURS = {
    "model_name": "model", "model_name_or_path": "model", "teacher_model_name_or_path": "teacher",
    "dataset": "data.path", "dataset_name": "data.path", "dataset_path": "data.path", "train_file": "data.path",
    "chat_template": "data.template", "chat_template_path": "data.template", "output_dir": "--run-dir",
    "run_dir": "--run-dir", "num_train_epochs": "epochs", "num_epochs": "epochs", "max_steps": "steps",
    "batch_size": "batch", "train_batch_size": "batch", "per_device_train_batch_size": "per_device",
    "per_device_batch_size": "per_device", "gradient_accumulation_steps": "accumulate", "max_length": "length",
    "max_seq_length": "length", "seq_length": "length", "learning_rate": "optimizer.lr", "lr": "optimizer.lr",
    "optim": "optimizer.name", "weight_decay": "optimizer.weight_decay", "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2", "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "schedule.warmup", "warmup": "schedule.warmup", "warmup_ratio": "schedule.warmup",
    "lr_scheduler_type": "schedule.name", "lr_scheduler": "schedule.name", "bf16": "precision.compute",
    "fp16": "precision.compute", "dtype": "precision.compute", "gradient_checkpointing": "remat",
    "logging_steps": "log_every", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every", "r": "lora.r", "rank": "lora.r", "lora_r": "lora.r", "lora_rank": "lora.r",
    "lora_alpha": "lora.lora_alpha", "lora_dropout": "lora.lora_dropout", "target_modules": "lora.target_modules",
    "lora_target_modules": "lora.target_modules", "use_rslora": "lora.use_rslora", "use_dora": "lora.use_dora",
    "modules_to_save": "lora.modules_to_save", "base": "quantization", "load_in_4bit": "quantization",
    "load_in_8bit": "quantization", "clip": "optimizer.max_grad_norm", "beta": "preference.beta",
    "loss_type": "preference.loss_type",
    "label_smoothing": "preference.label_smoothing", "max_new_tokens": "max_completion_length",
    "temperature": "sampling.temperature", "top_p": "sampling.top_p",
    "top_k": "sampling.top_k", "epsilon": "loss.epsilon", "epsilon_high": "loss.epsilon_high",
    "reward_funcs": "rewards", "reward_functions": "rewards",
    "ref_model_mixup_alpha": "reference.mixup_alpha", "ref_model_sync_steps": "reference.sync_every",
    "sync_ref_model": "reference.sync_every",
}  # fmt: skip
# In a section of ours: lora.r, optimizer.learning_rate.
IN_SECTION = {
    "rank": "r", "lora_r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules",
    "rslora": "use_rslora", "dora": "use_dora", "learning_rate": "lr", "adam_beta1": "beta1", "adam_beta2": "beta2",
    "betas": "beta1", "epsilon": "eps", "adam_epsilon": "eps", "clip": "max_grad_norm", "warmup_steps": "warmup",
    "type": "name", "loss": "loss_type", "save_steps": "every", "eval_steps": "every", "save_total_limit": "keep",
    "chat_template": "template", "temp": "temperature", "dtype": "compute",
    "ema": "mixup_alpha", "ref_model_mixup_alpha": "mixup_alpha", "ref_model_sync_steps": "sync_every",
}  # fmt: skip
