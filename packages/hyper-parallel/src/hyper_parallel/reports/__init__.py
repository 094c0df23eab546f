"""What a run shows and writes of itself."""
