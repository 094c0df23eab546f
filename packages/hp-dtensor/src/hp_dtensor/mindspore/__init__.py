"""DTensors on MindSpore, in PyNative mode.

The ideas and the rules are those of `hp_dtensor.torch`; what differs is said where it does.
"""

from hp_dtensor.mindspore import dispatch as _dispatch  # noqa: F401  (catches what ``__fallback__`` does not see)
