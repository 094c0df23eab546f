"""Text as tokens: tokenizers, and files of tokens."""
