"""Count the source: lines and files by package and wing, import circles, and contracts that no tool sees.

It also finds closures that call themselves: Note [No closure calls itself] in `hp_platform.values`.

    python docs/structure.py            the working tree
    python docs/structure.py REVISION   a commit, tag or branch
    python docs/structure.py --check    fail where the working tree has a circle of imports or types, imports another
                                        package's internals, looks at callers' frames, takes an error's text apart,
                                        names `torch._C` outside of hp_platform.torch.internals, has
                                        a closure that calls itself, or a helper of tests that no test finds

A wing is `neutral`, `torch` or `mindspore`, by the folder a module is in. Code is what is left of the lines without
docstrings, comments and blank ones. An import counts wherever it stands, in a function too, but not under
`TYPE_CHECKING`. A circle is a strongly connected set of two or more modules of one package. An import of internals
goes to a module of another package that is neither the package itself, nor a role of the platform, nor an `extend`
that declares what other packages of this repository may use: `<package>.extend`, `<package>.torch.extend` and so on.

A contract that no tool sees is a private attribute that only classes of another package have, a look at the callers'
frames outside of debuggers and of `compat` modules, which hold what depends on another library's code, or the text of
an error of this repository that is taken apart.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("neutral", "torch", "mindspore")
ROLES = frozenset(
    f"hp_platform.{role}"
    for role in (
        "collectives devices frames fused groups random"
        " torch.devices torch.dry torch.grouped torch.heavy torch.internals"
    ).split()
)
"""Modules that are public by themselves."""
OF_FRAMEWORKS = frozenset(
    "_version _parameters _buffers _modules _params _requires_grad _ops _call _save _world _base".split()
)
"""Private names of PyTorch's, MindSpore's and transformers' objects that a class of this repository has too."""
_PARSING = ("partition", "rpartition", "removeprefix", "removesuffix")


@dataclass
class Module:
    """A source file."""

    name: str
    package: str
    wing: str
    lines: int
    code: int
    imports: set[str] = field(default_factory=set)
    """Modules that it imports, by full name."""
    late: int = 0
    """Imports inside functions, of modules of this repository."""
    held: list[str] = field(default_factory=list)
    """Closures that call themselves, or each other, each with its line."""
    typed: set[str] = field(default_factory=set)
    """Modules that it imports for type checkers too."""
    private: list[tuple[str, int]] = field(default_factory=list)
    """Private attributes of other objects than `self` and `cls`, each with its line."""
    members: set[str] = field(default_factory=set)
    """Names that its classes define."""
    looks: list[int] = field(default_factory=list)
    """Lines that look at the frames of callers."""
    cores: list[int] = field(default_factory=list)
    """Lines that name `torch._C`."""
    parses: list[int] = field(default_factory=list)
    """Lines that take the text of an error apart."""


def main() -> None:
    """Print the tables of the working tree or of a revision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="default: the working tree")
    parser.add_argument("--check", action="store_true", help="print what is refused alone; the status tells of any")
    options = parser.parse_args()
    revision = options.revision
    if options.check:
        errors = [*complaints(read(ROOT)), *unfound_helpers(ROOT)]
        for error in errors:
            print(error)
        sys.exit(bool(errors))
    if revision is None:
        print("\n".join(tables(read(ROOT))))
        return
    archive = subprocess.run(["git", "archive", revision, "packages"], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        print("\n".join(tables(read(Path(folder)))))


def read(root: Path) -> dict[str, Module]:
    """Read every module below `packages/*/src`."""
    files: dict[str, tuple[Path, bool]] = {}
    for source in sorted(root.glob("packages/*/src")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            files[".".join(parts[:-1] if is_package else parts)] = (path, is_package)
    return {name: _module(name, path, is_package, files.keys()) for name, (path, is_package) in files.items()}


def _module(name: str, path: Path, is_package: bool, known: object) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    parts = name.split(".")
    wing = next((part for part in parts[1:] if part in WINGS), "neutral")
    module = Module(name, parts[0], wing, text.count("\n"), _code_lines(text, tree))
    module.held = list(_holding_themselves(compile(text, str(path), "exec", dont_inherit=True)))
    here = name if is_package else name.rpartition(".")[0]
    for node, inside, runs in _imports(tree):
        for target in _targets(node, here):
            if (found := _longest(target, known)) and found != name:
                module.typed.add(found)
                if runs:
                    module.imports.add(found)
                    module.late += inside
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            module.members.update(_members(node))
        elif isinstance(node, ast.Attribute):
            of_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr in ("_getframe", "f_back", "currentframe", "walk_stack", "extract_stack"):
                if not {"debugging", "stream_audit", "compat"}.intersection(parts):
                    module.looks.append(node.lineno)
            elif ast.unparse(node) == "torch._C":
                if "hp_testing" not in parts and name != "hp_platform.torch.internals":
                    module.cores.append(node.lineno)
            elif node.attr.startswith("_") and not node.attr.startswith("__") and not of_own:
                module.private.append((node.attr, node.lineno))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARSING:
            texts = [each for each in ast.walk(node.func) if isinstance(each, ast.Call)]
            if any(ast.unparse(each) in ("str(error)", "str(e)", "str(exception)") for each in texts):
                module.parses.append(node.lineno)
    return module


def _members(node: ast.ClassDef) -> Iterator[str]:
    """List the names that a class defines: methods, attributes of the class, and those that methods set on `self`."""
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield each.name
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
            if each.value is not None and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in targets):
                yield from (str(c.value) for c in ast.walk(each.value) if isinstance(c, ast.Constant))
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr


def _imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Walk the imports, with whether each is inside a function, and whether it runs: not under `TYPE_CHECKING`."""
    pending: list[tuple[ast.AST, bool, bool]] = [(tree, False, True)]
    while pending:
        node, inside, runs = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, inside, runs
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend((child, inside, runs) for child in node.orelse)
            pending.extend((child, inside, False) for child in node.body)
        else:
            inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            pending.extend((child, inside, runs) for child in ast.iter_child_nodes(node))


def _targets(node: ast.Import | ast.ImportFrom, here: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parent = ".".join(here.split(".")[: len(here.split(".")) - node.level + 1])
        base = f"{parent}.{base}" if base else parent
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _longest(target: str, known: object) -> str | None:
    """Find the module that `target`, a module or a name in one, belongs to; None outside this repository."""
    while target:
        if target in known:  # type: ignore[operator]
            return target
        target = target.rpartition(".")[0]
    return None


def _code_lines(text: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _holding_themselves(code: CodeType) -> Iterator[str]:
    """Find functions inside functions that hold themselves by their cells: they call themselves, or each other."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    holds = {each.co_name: set(each.co_freevars).intersection(code.co_cellvars) for each in inner}
    for each in inner:
        reached, pending = set[str](), [each.co_name]
        while pending:
            new = holds.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        if each.co_name in reached:
            yield f"{each.co_name}, line {each.co_firstlineno}"
        yield from _holding_themselves(each)


def circles(modules: dict[str, Module], typed: bool = False) -> list[list[str]]:
    """Find the strongly connected sets of two or more modules within one package, largest first (Tarjan 1972).

    Args:
        modules: by name.
        typed: count imports under `TYPE_CHECKING` too.
    """
    search = _Search({name: module.typed if typed else module.imports for name, module in modules.items()})
    sys.setrecursionlimit(10_000)
    for name in modules:
        search.visit(name)
    return sorted(search.found, key=len, reverse=True)


class _Search:
    """Tarjan's search, by what each module imports."""

    def __init__(self, imports: dict[str, set[str]]) -> None:
        self.imports = imports
        self.index: dict[str, int] = {}
        self.low: dict[str, int] = {}
        self.stack: list[str] = []
        self.found: list[list[str]] = []

    def visit(self, name: str) -> None:
        if name in self.index:
            return
        index, low, stack = self.index, self.low, self.stack
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(self.imports[name]):
            if other.partition(".")[0] != name.partition(".")[0]:
                continue
            if other not in index:
                self.visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                self.found.append(sorted(component))


def foreign(modules: dict[str, Module]) -> Iterator[tuple[str, str, int]]:
    """List the uses of private attributes that only classes of another package define: module, attribute, line."""
    members: dict[str, set[str]] = {}
    for module in modules.values():
        members.setdefault(module.package, set()).update(module.members)
    for module in modules.values():
        others = set().union(*(names for package, names in members.items() if package != module.package))
        own = members[module.package]
        for name, line in module.private:
            if name in others and name not in own and name not in OF_FRAMEWORKS:
                yield module.name, name, line


def internals(modules: dict[str, Module]) -> Counter[tuple[str, str]]:
    """Count imports of internals by (importing package, imported module); tests may use them."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in modules.values():
        for other in module.imports if module.package != "hp_testing" else ():
            target = modules[other]
            own = other.split(".")
            declared = len(own) == 1 or own[-1] == "extend" or other in ROLES
            if target.package != module.package and not declared:
                counts[module.package, other] += 1
    return counts


def complaints(modules: dict[str, Module]) -> Iterator[str]:
    """Say what `--check` refuses.

    These are imports of internals, circles, those that an import in a function or for type checkers closes too, looks
    at callers' frames, errors' texts that are taken apart, and closures that call themselves.
    """
    for package, name in sorted(internals(modules)):
        yield f"{package} imports {name}: export what it needs in an `extend` module and import it from there"
    for ring in circles(modules):
        edges = [f"{name} -> {other}" for name in ring for other in sorted(modules[name].imports.intersection(ring))]
        yield (
            f"{len(ring)} modules import each other in a circle ({', '.join(edges)}): move what both ends need into a"
            " module below them, or hand a function over as `hp_dtensor.torch` does with `dtensor.install`; an import"
            " inside a function counts too"
        )
    closed = [set(ring) for ring in circles(modules)]
    for ring in circles(modules, typed=True):
        if not any(each <= set(ring) for each in closed):
            yield (
                f"{len(ring)} modules know each other's types in a circle ({', '.join(ring)}): a Protocol of what one"
                " asks of the other, beside it, opens it"
            )
    for module in modules.values():
        if module.looks:
            yield f"{module.name} looks at its callers' frames: leave what another library decides to a `compat` module"
        if module.cores:
            yield f"{module.name} names torch._C: take it from hp_platform.torch.internals, or give it a name there"
        if module.parses:
            yield f"{module.name} takes an error's text apart: give the error fields"
        for closure in module.held:
            yield (
                f"{module.name} has a closure that calls itself ({closure}): it holds all that it sees until Python's"
                " collector runs; make it a function of the module that is handed what it needs, or walk nested values"
                " by hp_platform.extend.map_nested"
            )


def unfound_helpers(root: Path) -> Iterator[str]:
    """Say which helpers of tests can't be imported by name: pytest's `pythonpath` has their folders."""
    listed = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["pythonpath"]
    found: dict[str, Path] = {}
    for path in sorted(root.glob("packages/*/tests/**/*.py")):
        if path.name == "conftest.py" or path.name.startswith("test_"):
            continue
        folder = path.relative_to(root).parent.as_posix()
        if folder not in listed:
            yield f"{folder} has a helper of tests, {path.name}: add the folder to pythonpath in pyproject.toml"
        if (other := found.setdefault(path.stem, path)) != path:
            yield f"{path} has the name of {other}, and tests would import either: rename one"


def tables(modules: dict[str, Module]) -> Iterator[str]:
    """Write the tables as Markdown."""
    packages = sorted({module.package for module in modules.values()})
    yield "| package | files | lines | code: neutral | torch | mindspore | testing | imports in functions |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for package in [*packages, "all"]:
        own = [module for module in modules.values() if package in (module.package, "all")]
        testing = [module for module in own if ".testing" in module.name or module.package == "hp_testing"]
        rest = [module for module in own if module not in testing]
        code = [sum(module.code for module in rest if module.wing == wing) for wing in WINGS]
        numbers = [len(own), sum(module.lines for module in own), *code, sum(module.code for module in testing)]
        yield f"| {package} | {' | '.join(f'{n:,}' for n in numbers)} | {sum(module.late for module in own)} |"
    across = [
        (module.package, other)
        for module in modules.values()
        for other in module.imports
        if modules[other].package != module.package
    ]
    inner = internals(modules)
    yield ""
    yield f"Imports between packages: {len(across)}, of internals: {sum(inner.values())}"
    for (package, name), count in inner.most_common(12):
        yield f"- {package} -> {name}: {count}"
    for what, rings in (("Import", circles(modules)), ("Type", circles(modules, typed=True))):
        yield ""
        yield f"{what} circles: {len(rings)}"
        for ring in rings:
            yield f"- {len(ring)} modules: {', '.join(ring)}"
    uses = Counter(name for _, name, _ in foreign(modules))
    yield ""
    listed = ", ".join(f"{name} {count}" for name, count in uses.most_common())
    yield f"Private attributes of other packages: {uses.total()} ({listed})"
    yield f"Private attributes of other objects: {sum(len(module.private) for module in modules.values())}"
    yield f"Looks at callers' frames: {sum(len(module.looks) for module in modules.values())}"
    yield f"Modules that name torch._C: {sum(bool(module.cores) for module in modules.values())}"
    yield f"Errors' texts taken apart: {sum(len(module.parses) for module in modules.values())}"


if __name__ == "__main__":
    main()
