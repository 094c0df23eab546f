"""The stages of a model: where it is cut, and what stages share."""
