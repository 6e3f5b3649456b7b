"""What many processes that save or load together agree on, and what each of them does."""
