"""transformers' Trainer, which saves through fastckpt. Started again, it resumes: trainer.py [STEPS]."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fastckpt

fastckpt.integrations.transformers.install()  # the line to add

arguments = TrainingArguments(
    "runs/trainer",
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 40,
    per_device_train_batch_size=4,
    logging_steps=10,
    save_steps=10,
    save_total_limit=2,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(100, (160, 16))]
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=True)
print("ended at step", trainer.state.global_step)
