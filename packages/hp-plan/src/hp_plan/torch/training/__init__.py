"""The loss of a step and its gradients under a plan."""
