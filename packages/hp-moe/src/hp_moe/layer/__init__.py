"""A layer of experts over ranks: its inputs, its steps and what it checks."""
