"""Import torch's own test files with the names of torch.distributed's areas taken from these packages.

A file's syntax tree is rewritten while it is imported, so torch itself, and the packages, keep torch's names. Public
names become those of the same name here; a name of torch that has no counterpart becomes an `Absent`, which raises only
when a test uses it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

AREAS = {  # the modules of torch, and the packages with their names, the first the one that is asked first
    "torch.distributed.tensor": ("hp_dtensor", "hp_styles"),
    "torch.distributed._tensor": ("hp_dtensor", "hp_styles"),
    "torch.distributed.device_mesh": ("hp_dtensor",),
    "torch.distributed.fsdp": ("hp_fsdp",),
    "torch.distributed._composable.fsdp": ("hp_fsdp",),
    "torch.distributed.pipelining": ("hp_pipeline",),
    "torch.distributed.checkpoint": ("hp_checkpoint", "hp_fsdp"),
}
COUNTERPARTS = {  # under another name here
    "_StridedShard": "StridedShard",
    "_Partial": "Partial",
    "DefaultLoadPlanner": "StandardLoadPlanner",
    "DefaultSavePlanner": "StandardSavePlanner",
    "CheckpointException": "CheckpointError",
}
SPEC = {"placements": "placements", "mesh": "device_mesh", "device_mesh": "device_mesh", "shape": "shape"}  # of _spec
METHODS = {
    "_local_tensor": "to_local",
    "comm_counts": "get_comm_counts",
    "comm_module_counts": "counts_of_modules",
}
FUNCTIONAL = {  # what CommDebugMode counts for torch's DTensors, and for programs that call torch.distributed
    "all_reduce": ("allreduce_",),
    "all_gather_into_tensor": ("_allgather_base_", "allgather_"),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", "reduce_scatter_"),
    "all_to_all_single": ("alltoall_base_", "alltoall_"),
    "shard_dim_alltoall": ("alltoall_base_", "alltoall_"),
    "broadcast": ("broadcast_",),
}
TOP = {"DeviceMesh", "init_device_mesh"}  # also names of torch.distributed
HELPERS = {  # torch's own, in its wheel, that build on these names
    "torch.testing._internal.common_dist_composable",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.testing._internal.distributed.checkpoint_utils",
    "torch.testing._internal.distributed.common_state_dict",
}
STREAMS = {"Event", "Stream", "current_stream", "set_device", "stream", "synchronize"}  # torch.cpu has stand-ins
GPUS = 4  # what tests that are written for CUDA devices are told; they run on CPUs


class TorchInternalError(Exception):
    """A test uses a private name of torch."""


class AbsentNameError(Exception):
    """A test uses a public name of torch that these packages don't have."""


class AbsentType(type):
    """The class of `Absent`, so that one can stand where a class is looked at."""

    armed = False  # while a test runs

    def used(cls) -> None:
        """Raise for a use within a test."""
        if AbsentType.armed:
            raise (TorchInternalError if is_private(cls.path) else AbsentNameError)(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls.used()
        return absent(f"{cls.path}.{name}")

    def __setattr__(cls, name: str, value: object) -> None:
        cls.used()

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        cls.used()
        decorated = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorated else absent(f"{cls.path}()")

    def __instancecheck__(cls, instance: object) -> bool:
        cls.used()
        return False

    def __iter__(cls) -> Any:
        cls.used()
        return iter(())

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__

    def __getitem__(cls, key: object) -> Any:
        cls.used()
        return cls


def absent(path: str) -> Any:
    """Return the stand-in of a name of torch."""
    return type.__call__(AbsentType, path.rpartition(".")[2], (), {"path": path})


class Uncounted(int):
    """A number of collectives that is as expected, whatever it is, so that a test goes on to its values."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __radd__(self, other: int) -> Uncounted:
        return Uncounted(int(self) + int(other))

    __hash__ = int.__hash__


def is_private(path: str) -> bool:
    """Whether a name of torch is not one that its modules list."""
    parts = path.replace("distributed._tensor", "distributed.tensor").split(".")
    if any(part.startswith("_") and part != "_composable" for part in parts):
        return True
    for end in range(len(parts) - 1, 2, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return parts[end].rstrip("()") not in getattr(module, "__all__", dir(module))
    return False


class Area(ModuleType):
    """A module of torch whose names are those of the packages."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.find(name)
        setattr(self, name, found)
        return found

    def find(self, name: str) -> Any:
        """Return the counterpart of ``name``."""
        path = f"{self.__name__}.{name}"
        if name == "CommDebugMode":
            return counting_mode()
        for package in packages_of(path):
            ours = importlib.import_module(package)
            for each in (name, COUNTERPARTS.get(name, "")):
                if each in ours.__all__ and not (each == "checkpoint"):
                    return getattr(ours, each)
        try:
            is_module = importlib.util.find_spec(path) is not None
        except ModuleNotFoundError:
            is_module = False
        return area(path) if is_module else absent(path)


def kinds(counts: Any) -> int:
    """Return how many kinds of collectives there were."""
    return len(counts) if Loader.counted else Uncounted(len(counts))


def counting_mode() -> Any:
    """Return torch's CommDebugMode with the collectives of torch.distributed counted as the functional ones, too."""
    from torch.distributed.tensor.debug import CommDebugMode

    class Counts(dict[Any, int]):
        def __eq__(self, other: object) -> bool:
            return not Loader.counted or super().__eq__(other)

        def __ne__(self, other: object) -> bool:
            return not self == other

        __hash__ = None  # type: ignore[assignment]

        def __getitem__(self, key: object) -> int:
            native = FUNCTIONAL.get(str(key).rpartition(".")[2], ())
            count = self.get(key, 0) + sum(self[each] for each in self if str(each).rpartition(".")[2] in native)
            return count if Loader.counted else Uncounted(count)

        def values(self) -> Any:
            return super().values() if Loader.counted else [Uncounted(0)]

    class Counting(CommDebugMode):  # type: ignore[misc,valid-type]
        def get_comm_counts(self) -> Any:
            return Counts(super().get_comm_counts())

        def counts_of_modules(self) -> Any:
            own = super().__getattribute__("comm_module_counts")
            return {name: {pass_: Counts(each) for pass_, each in counts.items()} for name, counts in own.items()}

        def get_total_counts(self) -> int:
            count = super().get_total_counts()
            return count if Loader.counted else Uncounted(count)

    return Counting


def packages_of(path: str) -> Sequence[str]:
    """Return the packages that have the names of a module of torch, none where it is torch's own."""
    for name, packages in AREAS.items():
        if path == name or path.startswith(f"{name}."):
            return packages
    return ()


def area(path: str) -> Area:
    """Return the `Area` for a dotted path, the same each time."""
    key = f"swapped:{path}"
    if key not in sys.modules:
        sys.modules[key] = Area(path)
    return sys.modules[key]  # type: ignore[return-value]


def name_of(path: str, name: str | None = None) -> Any:
    """Return what a rewritten module has for ``path``, or for ``name`` in it."""
    if path == "torch.distributed":
        return getattr(importlib.import_module("hp_dtensor"), name)  # type: ignore[arg-type]
    if name is None or (Loader.swap and packages_of(path)):
        return area(path) if name is None else getattr(area(path), name)
    try:
        module = importlib.import_module(path)
        return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{path}.{name}")
    except ModuleNotFoundError:
        return absent(f"{path}.{name}")  # the installed torch is not the one that the tests are of


def is_rank(node: ast.expr) -> bool:
    """Whether an argument is the number of a test's GPU."""
    return isinstance(node, ast.Attribute) and node.attr in ("rank", "device") and ast.unparse(node.value) == "self"


class Rewrite(ast.NodeTransformer):
    """Replaces the names of the areas (``swap``) and, in tests for CUDA devices, the device (``on_cpu``)."""

    def __init__(self, swap: bool, on_cpu: bool, helper: bool) -> None:
        self.swap, self.on_cpu, self.helper = swap, on_cpu, helper
        self.modules = {"torch": "torch"}

    def asked(self, path: str, name: str | None) -> ast.expr:
        """Return the expression that asks `name_of`."""
        arguments = ", ".join(repr(each) for each in (path, name) if each is not None)
        return ast.parse(f"__import__('torch_swap').name_of({arguments})", mode="eval").body

    def bound(self, target: str, value: ast.expr, at: ast.stmt) -> ast.stmt:
        """Return an assignment in place of an import."""
        return ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], value), at)

    def visit_Import(self, node: ast.Import) -> Any:
        """Bind the areas that have a name of their own; dotted ones are seen where they are used."""
        kept: list[ast.stmt] = []
        for each in node.names:
            if self.swap and each.asname and packages_of(each.name):
                kept.append(self.bound(each.asname, self.asked(each.name, None), node))
            else:
                if each.asname:
                    self.modules[each.asname] = each.name
                kept.append(ast.copy_location(ast.Import([each]), node))
        return kept

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Bind the names that come from an area."""
        module, kept = node.module or "", list[ast.stmt]()
        for each in node.names:
            target = each.asname or each.name
            whole = f"{module}.{each.name}"
            if self.swap and not node.level and packages_of(module):
                kept.append(self.bound(target, self.asked(module, each.name), node))
            elif self.swap and packages_of(whole):
                kept.append(self.bound(target, self.asked(whole, None), node))
            elif self.swap and module == "torch.distributed" and each.name in TOP:
                kept.append(self.bound(target, self.asked(module, each.name), node))
            elif self.on_cpu and not self.helper and each.name in ("TEST_CUDA", "TEST_MULTIGPU"):
                kept.append(self.bound(target, ast.Constant(True), node))
            elif module.startswith("torch.") and not node.level and not self.helper and each.name != "*":
                kept.append(self.bound(target, self.asked(module, each.name), node))
            else:
                kept.append(ast.copy_location(ast.ImportFrom(node.module, [each], node.level), node))
        return kept

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Replace a dotted name within an area."""
        path = self.dotted(node)
        if path is not None and isinstance(node.ctx, ast.Load):
            module, _, name = path.rpartition(".")
            if self.swap and packages_of(path) and not packages_of(module):
                return ast.copy_location(self.asked(path, None), node)
            if self.swap and module == "torch.distributed" and name in TOP:
                return ast.copy_location(self.asked(module, name), node)
            if self.on_cpu and module == "torch.cuda" and name in STREAMS:
                return ast.copy_location(ast.parse(f"torch.cpu.{name}", mode="eval").body, node)
            if self.on_cpu and path == "torch.cuda._sleep":
                return ast.copy_location(ast.Name("int", ast.Load()), node)
        self.generic_visit(node)
        if self.swap and isinstance(node.ctx, ast.Load):
            if node.attr in METHODS and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                public = ast.Call(ast.Attribute(node.value, METHODS[node.attr], ast.Load()), [], [])
                return ast.copy_location(public, node)
            spec = isinstance(node.value, ast.Attribute) and node.value.attr == "_spec"
            if spec and node.attr in SPEC:
                return ast.copy_location(ast.Attribute(node.value.value, SPEC[node.attr], ast.Load()), node)  # type: ignore[attr-defined]
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        """Answer questions for devices, and put tensors on CPUs."""
        self.generic_visit(node)
        path = self.dotted(node.func) if self.on_cpu else None
        answers = {"device_count": GPUS, "is_available": True, "current_device": 0}
        module, _, name = (path or "").rpartition(".")
        if module in ("torch.cuda", "torch.accelerator") and name in answers:
            return ast.copy_location(ast.Constant(answers[name]), node)
        if self.on_cpu and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args = "cpu", []
        if self.on_cpu:
            node.keywords = [each for each in node.keywords if each.arg not in ("device_ids", "device_id")]
        if self.on_cpu and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.args = [ast.Constant("cpu") if is_rank(each) else each for each in node.args]
        for each in node.keywords if self.on_cpu else ():
            if each.arg == "device" and is_rank(each.value):
                each.value = ast.Constant("cpu")
        if self.on_cpu and self.dotted(node.func) == "torch.device":
            node.args = node.args[:1]  # CPUs have no numbers
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Name) and node.func.id == "len" and isinstance(first, ast.Name):
            if "comm_counts" in first.id:
                node.func = ast.parse("__import__('torch_swap').kinds", mode="eval").body
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        """Replace a device with a number."""
        first = node.values[0] if node.values else None
        if self.on_cpu and isinstance(first, ast.Constant) and first.value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        """Replace the devices and backends in texts."""
        if self.on_cpu and isinstance(node.value, str) and len(node.value) < 12:
            text = "gloo" if node.value == "nccl" else node.value
            return ast.copy_location(ast.Constant("cpu" if re.fullmatch(r"cuda(:\d)?", text) else text), node)
        return node

    def dotted(self, node: ast.expr) -> str | None:
        """Return the path of a chain of attributes that starts at an imported module."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        owner = self.dotted(node.value) if isinstance(node, ast.Attribute) else None
        return None if owner is None else f"{owner}.{node.attr}"  # type: ignore[attr-defined]


class Loader(SourceFileLoader):
    """Compiles a rewritten file; its bytecode is not kept."""

    swap, on_cpu, counted = True, True, True

    def get_code(self, fullname: str) -> CodeType:
        """Return the rewritten code."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        helper = fullname in HELPERS
        rewrite = Rewrite(self.swap, self.on_cpu and (not helper or fullname.endswith("common_fsdp")), helper)
        return compile(ast.fix_missing_locations(rewrite.visit(tree)), path, "exec", dont_inherit=True)


class Finder:
    """Finds torch's helpers and the test files, ahead of Python's own finders."""

    def __init__(self, loader: type[Loader], files: dict[str, str]) -> None:
        self.loader, self.files = loader, files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that is rewritten."""
        file = self.files.get(name)
        if name in HELPERS:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            file = found.origin if found else None
        return (
            None if file is None else importlib.util.spec_from_file_location(name, file, loader=self.loader(name, file))
        )


def install(files: dict[str, str], *, swap: bool, counted: bool) -> None:
    """Rewrite the modules of ``files`` (name: path), and torch's helpers, when they are imported.

    Args:
        files: the test files.
        swap: replace torch's names; else only the devices.
        counted: tell the numbers of collectives; else each is as the test expects.
    """
    Loader.swap, Loader.counted = swap, counted
    sys.meta_path.insert(0, Finder(Loader, files))  # type: ignore[arg-type]
