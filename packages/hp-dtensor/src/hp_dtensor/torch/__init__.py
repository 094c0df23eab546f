"""The PyTorch side of hp-dtensor."""

from hp_dtensor.torch.api import from_local as _from_local
from hp_dtensor.torch.backward.autograd_functions import install as _install_autograd_functions
from hp_dtensor.torch.backward.autograd_functions import install_hooks as _install_module_hooks
from hp_dtensor.torch.backward.engine import install_graph_tasks as _install_passes
from hp_dtensor.torch.backward.engine import on_local_gradient as _on_local_gradient
from hp_dtensor.torch.compile.compiling import install as _install_compiling
from hp_dtensor.torch.dtensor import install as _install_methods
from hp_dtensor.torch.moves.transfer import relayout as _relayout
from hp_dtensor.torch.ops.dispatching.dispatch import install as _install_dispatch
from hp_dtensor.torch.ops.dispatching.special import install as _install_special

_install_methods(_from_local, _relayout, _on_local_gradient)
_install_special()
_install_dispatch()
_install_compiling()
_install_autograd_functions()
_install_module_hooks()
_install_passes()
