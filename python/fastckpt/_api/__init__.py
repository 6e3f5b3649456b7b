"""What users call: its arguments, its reports, and the order of the steps behind it."""
