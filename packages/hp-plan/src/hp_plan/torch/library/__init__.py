"""Models of transformers and peft: built, read and written."""
