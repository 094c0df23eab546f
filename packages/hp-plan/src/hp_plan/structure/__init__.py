"""What a plan knows of a model: names, shapes, styles, memory."""
