"""DTensors on MindSpore, in PyNative mode.

The ideas and the rules are those of `hp_dtensor.torch`; what differs is said where it does.
"""

from hp_dtensor.mindspore.api import from_local as _from_local
from hp_dtensor.mindspore.dtensor import install as _install_methods
from hp_dtensor.mindspore.modules import DParameter as _DParameter
from hp_dtensor.mindspore.ops.dispatching.dispatch import (
    dispatch as _dispatch,  # its import catches what ``__fallback__`` does not see
)
from hp_dtensor.mindspore.ops.indexing import get_item as _get_item
from hp_dtensor.mindspore.ops.indexing import set_item as _set_item

_install_methods(_DParameter, _from_local, _get_item, _set_item, _dispatch)
