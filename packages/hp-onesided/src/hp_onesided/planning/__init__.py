"""What is known before anything is sent: who shares a host, and the steps of each collective, as data."""
