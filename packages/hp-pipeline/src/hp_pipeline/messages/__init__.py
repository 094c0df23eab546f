"""Messages between the stages: who sends what to whom, and how."""
