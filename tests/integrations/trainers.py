"""A small training with transformers' Trainer that a test may end at any point, and its results."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import peft
import runs
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import fastckpt
from fastckpt.integrations import transformers as door
from harness import pages

STEPS = 20
#: These rows make nine steps per epoch; on two ranks, five, the last of which has half a batch.
ROWS = 36
#: The default arguments of runs in the tests, which include everything that a save must consider.
ARGUMENTS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_steps": 5,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "enable_jit_checkpoint": True,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
#: The fields that differ between two equal runs.
_TIMES = ("runtime", "per_second")


class Counter(TrainerCallback, ExportableState):
    """Counts the steps of the whole run, over restarts."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, *_, **__):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


class Writer(TrainerCallback):
    """Adds a directory to each checkpoint."""

    def on_save(self, args, state, _, **__):
        Path(args.output_dir, f"checkpoint-{state.global_step}", "notes").mkdir()


class Strike(TrainerCallback):
    """Sends this process a signal when a step reaches a point."""

    def __init__(self, number, step, point):
        self.step = step
        setattr(self, point, lambda _, state, __, **___: self.strike(number, state.global_step))

    def strike(self, number, step):
        if step == self.step:
            runs.strike(number)


def model_of(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


#: Adapters of PEFT, by name, and how their configurations are made.
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"]
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


class OwnLoader(Trainer):
    """A Trainer that loads random states in its own way, like Axolotl's Trainer."""

    def _load_rng_state(self, checkpoint):
        assert not Path(checkpoint, "rng_state.pth").exists()


def trainer_of(folder, callbacks=(), *, patience=20, local=False, adapter=None, kind=Trainer, **arguments):
    """Return a Trainer in a folder, with callbacks that have a state.

    Args:
        folder: the folder in which it saves.
        callbacks: additional callbacks.
        patience: the patience of early stopping.
        adapter: the one of :data:`ADAPTERS` that is trained.
        kind: the class of the Trainer.
        local: whether the model has a buffer that each rank changes independently, as BatchNorm does.
        **arguments: arguments of ``TrainingArguments``.
    """
    rows = torch.randint(100, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = {**ARGUMENTS, **arguments}
    stopping = [EarlyStoppingCallback(patience)] if given["load_best_model_at_end"] else []
    model = model_of() if adapter is None else peft.get_peft_model(model_of(), ADAPTERS[adapter]())
    if local:
        model.register_buffer("mean", torch.zeros(3))

        def change(*_):
            model.mean.add_(1 + int(os.environ["RANK"]))

        model.register_forward_hook(change)
    return kind(
        model,
        TrainingArguments(str(folder), **given),
        train_dataset=data,
        eval_dataset=data[:12],
        callbacks=[Counter(), *stopping, *callbacks],
    )


def found(trainer, folder):
    """Return the results that two equal runs share: weights, logs and names of checkpoints."""
    weights, spread = runs.digest(trainer.model)
    log = [
        {key: one[key] for key in one if not any(word in key for word in _TIMES)} for one in trainer.state.log_history
    ]
    del log[-1]["total_flos"]
    loss = log[-1].pop("train_loss")
    trained = {
        "weights": weights,
        "spread": spread,
        "log": log,
        # A resumed run adds losses in a different order.
        "loss": round(loss, 9),
        "best": trainer.state.best_model_checkpoint and Path(trainer.state.best_model_checkpoint).name,
        "metric": trainer.state.best_metric,
        "counted": [one.steps for one in trainer.callback_handler.callbacks if isinstance(one, Counter)],
        "step": trainer.state.global_step,
    }
    # A kill in a removal leaves a hidden directory, which `fastckpt clean` removes.
    return trained, sorted(path.name for path in (folder / "out").glob("checkpoint-*"))


def spread_on_the_cpu():
    """Have accelerate use FSDP2 on the CPU, where it would otherwise always choose DDP."""
    init = AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **more):
        init(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_fsdp


def train(folder, strike=None, *, resume=True, installed=True, wait=0.0, writes=False, **arguments):
    """Run a program with a Trainer and the added line that installs fastckpt.

    Args:
        folder: the folder in which it runs.
        strike: a signal, and the step and the point at which this process gets it.
        resume: the argument of ``Trainer.train``.
        installed: whether the program has the line.
        wait: seconds for which the Trainer waits after SIGTERM.
        writes: whether a callback writes into each checkpoint.
        **arguments: arguments of :func:`trainer_of`.

    Returns:
        The result of :func:`found`.
    """
    folder = runs.begin(folder)
    if installed:
        door.install()
    if arguments.get("fsdp"):
        spread_on_the_cpu()
    callbacks = [*([Writer()] if writes else []), *([Strike(*strike)] if strike else [])]
    trainer = trainer_of(folder / "out", callbacks, **arguments)
    for one in trainer.callback_handler.callbacks:
        manager = getattr(one, "jit_manager", None)
        if manager is not None:
            manager.kill_wait = wait
    trainer.train(resume_from_checkpoint=resume)
    return found(trainer, folder)


def readers(folder, *, background):
    """Train with readers that look for each checkpoint right after its save; return their findings.

    Args:
        folder: the folder in which it runs.
        background: the argument of ``install``.

    Returns:
        Whether the checkpoint existed in ``on_save``, at the push to the hub, and after a save by a Trainer without
        such readers.
    """
    found = {"on_save": [], "push": [], "neither": []}

    def is_there(trainer, who):
        found[who].append(Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}").is_dir())

    class Reader(TrainerCallback):
        def on_save(self, *_, **__):
            is_there(trainer, "on_save")

    door.install(io=fastckpt.IO(bandwidth_limit="100kB"), background=background)
    arguments = {"max_steps": 10, "load_best_model_at_end": False, "save_total_limit": None}
    trainer = trainer_of(folder + "/on_save", [Reader()], **arguments)
    trainer.train()
    trainer = trainer_of(folder + "/push", **arguments)
    trainer.args.push_to_hub = True
    trainer._push_from_checkpoint = lambda _: is_there(trainer, "push")
    trainer._finish_current_push = lambda: None
    trainer.train()
    trainer = trainer_of(folder + "/neither", **arguments)
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *given: (save(*given), is_there(trainer, "neither"))
    trainer.train()
    return found


def killed_after(seconds, run, folder, **arguments):
    """Run a program in a folder, and kill this process after a number of seconds."""

    def kill():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return run(folder, **arguments)


def migrated(folder):
    """Run the programs of docs/migrate/trainer.md one after the other; return the files of all checkpoints."""
    runs.begin(folder)
    os.chdir(folder)
    for steps, program in zip((4, 6), pages.python("docs/migrate/trainer.md"), strict=True):
        given = {**ARGUMENTS, "max_steps": steps, "save_steps": 2, "eval_strategy": "no"}
        given |= {"load_best_model_at_end": False, "save_total_limit": 2}
        row = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
        names = {"model": model_of(), "arguments": TrainingArguments("runs", **given), "rows": [row] * ROWS}
        exec(program, names)
        assert names["trainer"].state.global_step == steps
    return {path.name: sorted(one.name for one in path.iterdir()) for path in Path("runs").glob("checkpoint-*")}
