"""Around collectives: checks before one, what else than the backend carries them, agreement, and who watches."""
