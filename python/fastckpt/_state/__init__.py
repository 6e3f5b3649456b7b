"""States as tokens and tensors, and back again (docs/format.md, sections 4 and 5)."""
