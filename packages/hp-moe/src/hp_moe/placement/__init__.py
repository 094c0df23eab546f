"""Where experts are: homes, replicas, and changes of both between steps."""
