"""Around collectives: checks before one, agreement by means of them, and who watches."""
