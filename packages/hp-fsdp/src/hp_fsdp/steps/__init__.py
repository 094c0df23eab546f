"""A step: the order of groups, and the state they share."""
