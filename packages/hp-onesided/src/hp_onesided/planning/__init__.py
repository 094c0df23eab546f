"""What is known before anything is sent: the steps of each collective, as data."""
