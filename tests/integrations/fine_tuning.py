"""A fine-tuning with TRL's ``sft``, started as by its command line, and its results."""

from __future__ import annotations

import json
import random
from pathlib import Path

import runs
import trainers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fastckpt.integrations import transformers as door

#: The options of the command for training, with the values of :data:`trainers.ARGUMENTS`.
OPTIONS = {**trainers.ARGUMENTS, "bf16": False, "gradient_checkpointing": False, "max_length": 16}
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_material(folder):
    """Write a model with its tokenizer, and sentences for training and tests, into a folder."""
    trainers.model_of().save_pretrained(folder / "model")
    words = [*_SPECIAL.values(), *(f"w{number}" for number in range(3, 100))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL).save_pretrained(folder / "model")
    draw = random.Random(0)
    (folder / "sentences").mkdir()
    for split, rows in (("train", trainers.ROWS), ("test", 12)):
        texts = [" ".join(draw.choices(words[3:], k=draw.randint(4, 15))) for _ in range(rows)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / "sentences" / f"{split}.jsonl").write_text("".join(lines))


def command_of(material, out, **options):
    """The arguments of ``trl sft``.

    Args:
        material: the folder of :func:`write_material`.
        out: the folder of the checkpoints.
        **options: options that replace those of :data:`OPTIONS`.
    """
    given = {
        "model_name_or_path": material / "model",
        "dataset_name": material / "sentences",
        "output_dir": out,
        "resume_from_checkpoint": True,
        **OPTIONS,
        **options,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def tune(folder, material, **options):
    """Run the command's function with the integration installed, and return what :func:`trainers.train` returns."""
    import datasets
    import trl
    from trl.scripts import sft

    folder = runs.begin(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    door.install()
    made = []

    class Recorded(trl.SFTTrainer):
        """The trainer that the command makes."""

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            made.append(self)

    trl.SFTTrainer = Recorded
    sft.main(*sft.make_parser().parse_args_and_config(command_of(Path(material), folder / "out", **options)))
    return trainers.found(made[0], folder)
