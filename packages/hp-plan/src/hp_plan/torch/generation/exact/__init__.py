"""A forward whose numbers for a token depend on the tokens before it alone: `[run] generation = "exact"`."""
