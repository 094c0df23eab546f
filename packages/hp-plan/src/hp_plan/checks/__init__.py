"""What is refused: by the numbers of a plan, by its model, by its ranks; and what a comparison found."""
