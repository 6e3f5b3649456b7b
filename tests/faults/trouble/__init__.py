"""Storage that fails or lies while a program saves: what it raises, and what is there afterwards."""
