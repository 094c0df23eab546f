"""What a forward saves, counted or predicted."""
