"""Backward from DTensors: ``DTensor.backward``, torch.autograd's functions, marks, and the scaling of losses.

Note [The engine runs with interception on]
The engine runs the user's code: recomputed checkpoints, hooks, custom autograd functions. All of it must see DTensors
as it did in forward, so the engine is called directly and not through torch's functions, which would be intercepted
again.

Note [Marks]
    The engine runs the youngest node that is ready. So a node that was made right after the forward of a module, and is
    a root of the pass, runs after all younger nodes and before all that the forward made, wherever the pass enters the
    module: by its output, by a tensor that a hook kept, or by an output that was written in place. Such a root is a
    mark. It has no elements, and whether the pass needs anything of its module is the engine's to say (`will_run`).

    A pass of ``torch.autograd.grad`` runs only what leads to its inputs, so the leaf of the marks is one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import GradientEdge

from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.backward.autograd_functions import going_on
from hp_dtensor.torch.dtensor import DTensor, local_of, local_view, redistribute, wrap
from hp_platform import collectives, get_platform
from hp_platform.torch.internals import (
    backward_id,
    current_fake_mode,
    current_transform,
    engine_will_run,
    get_is_leaf,
    get_requires_grad,
    plainly,
    transforms_active,
)

_engine = graph._engine_run_backward
_root_leaves: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
marks: list[Callable[[], Iterable[Mark]]] = []
"""Of those that take part in backward passes: called as a pass begins; they return their marks."""
explaining: list[Callable[[RuntimeError], RuntimeError | None]] = []
"""Called with an error of a pass; one that knows why returns the error to raise from it."""


class Mark:
    """A node that is younger than all that this thread has made; see Note [Marks].

    Args:
        device: of the computation, whose thread of the engine runs the node.
        reached: called when a pass has come there.
    """

    __slots__ = ("device", "root")

    def __init__(self, device: torch.device, reached: Callable[..., None]) -> None:
        self.device = device
        if device not in _root_leaves:
            with torch.inference_mode(False):
                leaf = torch.empty(0, device=device, requires_grad=True)
                _root_leaves[device] = leaf, leaf.detach()
        self.root = _root_leaves[device][0].view(0)
        self.root.grad_fn.register_prehook(reached)  # type: ignore[union-attr]


def will_run(node: Any) -> bool:
    """Tell whether the pass under way comes to a leaf's node, as `torch.autograd.graph.get_gradient_edge` gives it."""
    try:
        return engine_will_run(node)
    except RuntimeError:  # it is an input of torch.autograd.grad
        return True


def _apart() -> bool:
    """Tell whether a pass that begins is a part of another one, as a checkpoint's, or of a trace, without values."""
    return backward_id() != -1 or current_transform() is not None or current_fake_mode() is not None


def run(outputs: Any, gradients: Any, retain: bool, create: bool, inputs: Any, *rest: Any, **options: Any) -> Any:
    """Run the engine, as torch's function of this signature does, with the marks among the roots."""
    found = [] if _apart() else [mark for each in marks for mark in each()]
    try:
        if not found:
            return _engine(outputs, gradients, retain, create, inputs, *rest, **options)
        roots = [mark.root for mark in found]
        outputs, gradients = (*outputs, *roots), (*gradients, *(_root_leaves[mark.device][1] for mark in found))
        if not inputs:
            return _engine(outputs, gradients, retain, create, inputs, *rest, **options)
        leaves = [_root_leaves[device][0] for device in {mark.device for mark in found}]
        results = _engine(outputs, gradients, retain, create, (*inputs, *leaves), *rest, **options)
        return results[: len(inputs)]
    except RuntimeError as error:
        for explain in explaining:
            other = explain(error)
            if other is not None:
                raise other from error
        raise


def install_graph_tasks() -> None:
    """Have torch's functions begin their passes here."""
    torch.autograd._engine_run_backward = graph._engine_run_backward = run


T = torch.Tensor
_BACKWARD = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
_GRAD = (
    "outputs",
    "inputs",
    "grad_outputs",
    "retain_graph",
    "create_graph",
    "only_inputs",
    "allow_unused",
    "is_grads_batched",
    "materialize_grads",
)


def backward_of(
    self: DTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Run backward as ``torch.Tensor.backward`` does.

    Args:
        self: the root. Backward of a partial sum starts from each rank's term.
        gradient: the root's gradient, a DTensor or its local tensor; optional if the root has one element.
        retain_graph: keep the graph for another backward; default ``create_graph``.
        create_graph: record backward, for gradients of gradients.
        inputs: collect only the gradients of these; default every leaf.

    Raises:
        RuntimeError: no gradient for a root of several elements, or a gradient of another shape.
    """
    if inputs is not None or self._spec.partial or transforms_active():
        backward(None, (self, gradient, retain_graph, create_graph), {"inputs": inputs})
        return
    run(
        (self,),
        (_start(0, self, gradient),),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def backward(func: Any, args: Any, kwargs: Any) -> None:
    """Run ``torch.autograd.backward`` with a DTensor among the tensors or the inputs."""
    bound = {**dict(zip(_BACKWARD, args, strict=False)), **kwargs}
    gradients = bound.get("grad_tensors")
    roots, ready = _roots(bound["tensors"], bound.get("grad_variables") if gradients is None else gradients)
    inputs = bound.get("inputs")
    if inputs is not None:
        inputs = _leaves(inputs)
        if not inputs:
            raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
        for x in inputs:
            autograd.refuse_late(x, "backward(inputs=)")
        inputs += [shadow for x in inputs if isinstance(x, DTensor) for _, shadow in autograd.shadows(x)]
    create = bool(bound.get("create_graph"))
    retain = bound.get("retain_graph")
    run(
        roots,
        ready,
        create if retain is None else retain,
        create,
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def grad(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Run ``torch.autograd.grad`` with a DTensor among outputs or inputs; the gradient of a DTensor is a DTensor."""
    bound = {**dict(zip(_GRAD, args, strict=False)), **kwargs}
    outputs, gradients = bound["outputs"], bound.get("grad_outputs")
    if bound.get("is_grads_batched"):
        return _one_by_one(func, outputs, bound["inputs"], gradients, bound)
    create, retain, zeros = bool(bound.get("create_graph")), bound.get("retain_graph"), bound.get("materialize_grads")
    unused = bool(bound.get("allow_unused") or zeros)
    inputs = _leaves(bound["inputs"])
    for x in inputs:
        autograd.refuse_late(x, "torch.autograd.grad")
    roots, ready = _roots(outputs, gradients)
    shadows = [autograd.shadows(x) if isinstance(x, DTensor) else [] for x in inputs]
    flat = [shadow for of in shadows for _, shadow in of]
    gradients_found = run(
        roots,
        ready,
        create if retain is None else retain,
        create,
        (*inputs, *flat),
        allow_unreachable=unused or bool(flat),
        accumulate_grad=False,
    )
    parts = iter(gradients_found[len(inputs) :])
    return tuple(
        _gradient(index, x, own, [(vary, next(parts)) for vary, _ in of], unused, bool(zeros))
        for index, (x, own, of) in enumerate(zip(inputs, gradients_found, shadows, strict=False))
    )


def _gradient(index: int, x: Any, own: Any, parts: Sequence[Any], unused: bool, zeros: bool) -> Any:
    """Return the gradient of one input: the engine's own, plus the sums that its shadows collected."""
    own, collected = None if own is None else local_of(own), None
    for vary, part in parts:
        if part is not None:
            summed = autograd.move(part, autograd.grad_spec(x._spec, vary), autograd.grad_spec(x._spec))
            collected = summed if collected is None else collected + summed
    if collected is not None:
        collected = autograd.through_hooks(x, own, collected)
        own = collected if own is None else own + collected
    if own is None and zeros:
        own = torch.zeros_like(local_view(x))
    if own is None and not unused:
        raise RuntimeError(
            f"One of the differentiated Tensors (input {index}) appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    if own is None or not isinstance(x, DTensor):
        return own
    spec, parts = autograd.grad_spec(x._spec), tuple(placement.is_partial() for placement in x._spec.placements)
    gradient = autograd.of_parts(own, spec, parts)
    # autograd forbids writes to a view that a function returned
    return wrap(gradient.view_as(own) if gradient is own else gradient.clone(), spec)


def _one_by_one(func: Any, outputs: Any, inputs: Any, gradients: Any, bound: dict[str, Any]) -> tuple[Any, ...]:
    """Run a backward for each gradient of a batch; torch's vmap would treat collectives as local operations."""
    outputs = _listed(outputs)
    gradients = [None] * len(outputs) if gradients is None else _listed(gradients)
    sizes = {gradient.shape[0] for gradient in gradients if gradient is not None and gradient.dim()}
    if len(sizes) != 1 or 0 in sizes or any(gradient is not None and not gradient.dim() for gradient in gradients):
        raise RuntimeError(
            "torch.autograd.grad: with is_grads_batched=True the first size of each of grad_outputs is the number of"
            f" gradients, one or more; got shapes {[None if g is None else tuple(g.shape) for g in gradients]}"
        )
    [count] = sizes
    options = {name: bound[name] for name in _GRAD[4:] if name in bound and name != "is_grads_batched"}
    retain = bool(options.get("create_graph") if bound.get("retain_graph") is None else bound["retain_graph"])
    rows = []
    for row in range(count):
        chosen = [None if gradient is None else gradient[row] for gradient in gradients]
        rows.append(func(outputs, inputs, chosen, retain_graph=retain or row < count - 1, **options))
    return tuple(None if each[0] is None else torch.stack(each) for each in zip(*rows, strict=True))


def _roots(tensors: Any, gradients: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the roots of backward and their local gradients; averages are reduced first, which scales the gradient.

    Raises:
        RuntimeError: a transform of ``torch.func`` is active, or a gradient is missing or of another shape.
    """
    if transforms_active():
        raise RuntimeError(
            "backward of a DTensor inside a transform of torch.func is not supported: transforms don't see DTensors."
            " Call torch.autograd.grad outside of it"
        )
    tensors = _listed(tensors)
    gradients = [None] * len(tensors) if gradients is None else _listed(gradients)
    ready: list[Any] = []
    for index, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        if isinstance(tensor, DTensor):
            if any(p.is_partial() and not p.is_partial("sum") for p in tensor._spec.placements):
                with torch.enable_grad():  # reentrant checkpoints call from a backward, where gradients are off
                    tensor = tensors[index] = tensor.reduce_partial()
            ready.append(_start(index, tensor, gradient))
        else:
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            ready += torch.autograd._make_grads((tensor,), (gradient,), is_grads_batched=False)
    return tuple(tensors), tuple(ready)


def _start(index: int, tensor: DTensor, gradient: Any) -> Any:
    """Return the local tensor of the gradient that backward starts from."""
    spec = tensor._spec
    if type(gradient) is DTensor and gradient._spec is spec and not spec.partial:
        in_graph = plainly(get_requires_grad, (), (gradient,))
        return plainly(T.view_as, (), (gradient, gradient)) if in_graph else local_view(gradient)
    if gradient is None:
        if not tensor.requires_grad:
            return None
        if any(size != 1 for size in spec.shape):
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, output {index} is a DTensor of shape"
                f" {tuple(spec.shape)}"
            )
        return plainly(torch.ones_like, (), (tensor,))
    if isinstance(gradient, DTensor):
        if gradient._spec.shape != spec.shape:
            raise RuntimeError(
                f"Mismatch in shape: grad_output[{index}] has a shape of {tuple(gradient.shape)} and output[{index}]"
                f" has a shape of {tuple(spec.shape)}."
            )
        parts = tuple(placement.is_partial() for placement in spec.placements)
        return local_of(autograd.convert(gradient, autograd.grad_spec(spec), parts if any(parts) else None))
    if tuple(gradient.shape) != tuple(tensor.local_shape):
        raise RuntimeError(
            f"Mismatch in shape: grad_output[{index}] is a plain tensor of shape {tuple(gradient.shape)},"
            f" output[{index}] is a DTensor of shape {tuple(spec.shape)} placed {spec.placements}, whose local part has"
            f" {tuple(tensor.local_shape)}; pass a DTensor, or the local part"
        )
    return gradient


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, (T, GradientEdge)) else list(values)


def _leaves(inputs: Any) -> list[Any]:
    """Return the inputs as a list, with the edge of a leaf DTensor replaced by the DTensor, which may have shadows.

    Raises:
        RuntimeError: an input is not part of graphs, which have another tensor in its place (``_outside_graphs``).
    """
    values: Iterable[Any] = inputs.values() if isinstance(inputs, dict) else _listed(inputs)
    leaves = [_leaf_of(x) if isinstance(x, GradientEdge) else x for x in values]
    for index, x in enumerate(leaves):
        why = x.__dict__.get("_outside_graphs") if isinstance(x, DTensor) else None
        if why is not None:
            raise RuntimeError(f"torch.autograd: input {index}, of shape {tuple(x.shape)}, {why}")
    return leaves


def _leaf_of(edge: GradientEdge) -> Any:
    leaf = getattr(edge.node, "variable", None)
    return leaf if isinstance(leaf, DTensor) else edge


# ---- hooks of gradients ----
def on_local_gradient(tensor: DTensor, hook: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    """Return the hook for the local gradient that calls ``hook`` with the DTensor.

    Where the user has the leaf's graph node, the local gradient becomes a DTensor, for the node's own hooks see it.
    A DTensor that the hook gets or gives holds the tensor that autograd goes on with (``_holds``): while somebody keeps
    it, autograd does not add the next gradient to its memory, which the two share.

    Args:
        tensor: the tensor on which to register it. A leaf's gradient has the layout that the leaf has in backward,
            another tensor's that of now.
        hook: a function of the gradient that returns None or its replacement.
    """
    leaf, owner, now = plainly(get_is_leaf, (), (tensor,)), weakref.ref(tensor), tensor._spec

    def call(grad: torch.Tensor) -> Any:
        there, local = owner(), local_of(grad)
        autograd.note_call(there)
        own = there._spec if leaf and there is not None else now
        spec, parts = autograd.grad_spec(own), tuple(placement.is_partial() for placement in own.placements)
        given: Any = wrap(autograd.of_parts(local, spec, parts).view_as(local), spec)
        given._holds = result = grad
        replacement = hook(given)
        if isinstance(replacement, DTensor):
            if replacement._spec.shape != spec.shape:
                raise RuntimeError(f"register_hook: a gradient of shape {spec.shape} became {replacement._spec.shape}")
            replacement = replacement if replacement._spec is spec else redistribute(replacement, spec)
            given, replacement = replacement, autograd.read_in_parts(going_on(replacement), own)
        if replacement is not None:
            result = replacement
        if "_node_taken" in getattr(there, "__dict__", ()) and not isinstance(result, DTensor):
            result = replacement = wrap(result.view_as(result), spec)
        if not torch.is_grad_enabled():  # else nothing is added in place
            given._holds = result
        return replacement

    return call


def give_node(leaf: DTensor) -> None:
    """Make later gradients of ``leaf`` arrive at its graph node, as DTensors, because a user asked for the node.

    Raises:
        RuntimeError: the graph of an earlier forward has gradients of ``leaf`` that bypass that node, or all graphs
            have another tensor in its place (``_outside_graphs``).
    """
    why = leaf.__dict__.get("_outside_graphs")
    if why is not None:
        raise RuntimeError(
            f"the graph node of a parameter of shape {tuple(leaf.shape)} takes no gradient: it {why}. Hooks of the"
            " parameter itself (register_hook, register_post_accumulate_grad_hook) see its gradient"
        )
    if "_node_taken" not in leaf.__dict__:
        leaf._node_taken = True  # type: ignore[attr-defined]
        plainly(T.register_hook, (), (leaf, on_local_gradient(leaf, lambda grad: None)))
    autograd.refuse_bypassing(
        leaf,
        "the gradient edge, or a hook of the graph node,",
        "ask for it before the forward, or name the tensor itself: torch.autograd.grad(loss, [leaf])",
    )


def unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Multiplies gradients in place, and notes in ``found_inf`` whether any rank's part is not finite.

    All ranks must skip a step or none, so the note is the largest of the ranks' of each mesh.

    Args:
        func: ``torch._amp_foreach_non_finite_check_and_unscale_``.
        args: the gradients, ``found_inf`` (a plain tensor of one element), the factor.
        kwargs: the same by name.
    """
    bound = {**dict(zip(("self", "found_inf", "inv_scale"), args, strict=False)), **kwargs}
    gradients, found_inf = bound["self"], bound["found_inf"]
    plainly(func, (), (gradients, found_inf, bound["inv_scale"]))
    meshes = dict.fromkeys(each._spec.mesh for each in gradients if isinstance(each, DTensor))
    for mesh in meshes:
        device = "cpu" if mesh.device_type == "cpu" else get_platform().devices.current_device()
        sent = found_inf.to(device)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                collectives.all_reduce(sent, "max", group=mesh.get_group(axis))
        found_inf.copy_(sent)
