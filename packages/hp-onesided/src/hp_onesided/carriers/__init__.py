"""What goes through memory that ranks share: collectives of a host, in two levels on several, and messages."""
