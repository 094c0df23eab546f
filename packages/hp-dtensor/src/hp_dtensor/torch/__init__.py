"""The PyTorch side of hp-dtensor."""

from hp_dtensor.torch import dispatch as _dispatch  # noqa: F401  (DTensor's interception)
from hp_dtensor.torch.compiling import install as _install_compiling
from hp_dtensor.torch.hot import install as _install_hot
from hp_dtensor.torch.own_functions import install as _install_own_functions
from hp_dtensor.torch.special import install as _install_special

_install_special()
_install_hot()
_install_compiling()
_install_own_functions()
