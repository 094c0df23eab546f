"""A planned model that generates, and what it says of tokens that were generated."""
