"""Axolotl saves and resumes through fastckpt, by one entry of its configuration (docs/guides/trainer.md).

plugins:
  - fastckpt.integrations.axolotl.Plugin
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from .transformers import install, newest_of

__all__ = ["Plugin"]


class Plugin(BasePlugin):  # type: ignore[misc]
    """Installs the integration of transformers' Trainer (:func:`fastckpt.integrations.transformers.install`).

    With ``auto_resume_from_checkpoints``, a run resumes from the newest checkpoint that verifies. Without the plugin,
    Axolotl takes the directory with the highest number, even if it is damaged or empty.
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Called by Axolotl after it makes the trainer, before it looks for a checkpoint.

        Args:
            cfg: the configuration of the run.
            trainer: the ``Trainer``.

        Raises:
            OSError: the directory of the run cannot be listed.
        """
        install()
        if cfg.auto_resume_from_checkpoints and cfg.resume_from_checkpoint is None:
            # Unlike None, False keeps Axolotl from searching for a checkpoint itself.
            cfg.resume_from_checkpoint = newest_of(trainer) or False
