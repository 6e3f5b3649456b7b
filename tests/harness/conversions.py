"""Imported before a zygote forks: transformers' table of conversions. Each process that saves a model would compile its
900 patterns anew."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
