"""What a rank of a plan would do, without its memory."""
