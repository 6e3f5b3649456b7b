"""Imported before a zygote forks: transformers' table of conversions, of 900 patterns that each process that saves a
model would compile anew."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
