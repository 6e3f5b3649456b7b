"""Makes transformers' table of conversions before a zygote forks. Otherwise, each process that saves a model compiles
its 900 patterns."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
