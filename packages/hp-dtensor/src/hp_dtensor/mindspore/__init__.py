"""DTensors on MindSpore, in PyNative mode.

The ideas and the rules are those of `hp_dtensor.torch`; what differs is said where it does.
"""
