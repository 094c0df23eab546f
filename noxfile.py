"""The one door to every check. `nox -l` lists the sessions, `nox -s <session>` runs one.

Three scopes of the tests:

    nox -s tests                          every package, in one process, on every backend this machine has
    nox -t torch-cpu                      every package, in one process, on that backend
    nox -s "tests(torch-cpu, hp-fsdp)"    one package, in an environment with its own dependencies only

All of them leave out the slow variants of what other tests cover; these, too, are run by `nox -s tests -- --tier all`.
Before a commit:

    nox -s smoke                          a few tests of each package and every command, in a minute

What follows `--` goes to pytest: `nox -s "tests(torch-cpu, hp-fsdp)" -- -k uneven -x`. Paths below packages/ take the
place of all packages: `nox -t torch-cpu -- packages/hp-fsdp packages/hp-plan`. Where no device is needed, two tests run
at a time; `-n 0` runs them in pytest's own process, for `-s` and `--pdb`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
TYPED = [str(path) for path in sorted(ROOT.glob("packages/*/tests/test_typing.py"))]  # what users' checkers conclude
CONSTRAINTS = "constraints.txt"
RESULTS = ".nox/results"  # of whole test runs, a file for each backend; pytest makes the folder
FRAMEWORK_CONSTRAINTS = "constraints-{}.txt"  # PyTorch and MindSpore work with different versions of NumPy

# Tests start a hundred processes and more. Where bytecode may not be written, each compiles its framework anew: PyTorch
# and MindSpore then take twice as long to import, transformers four times.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# uv does not read pip's settings. Where a machine is set up for pip (a folder of wheels with a CPU build of torch, a
# mirror), uv is told the same, unless it has settings of its own. Each takes its list separated in its own way.
for pip_name, uv_name, separator in [
    ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", " "),
]:
    if os.environ.get(pip_name) and uv_name not in os.environ:
        os.environ[uv_name] = separator.join(os.environ[pip_name].split())

# A backend's requirements beyond the packages' extras, the program that shows its device is there (None: always), and
# what to say where it is not.
BACKENDS = {
    "torch-cpu": ([], None, ""),
    "torch-cuda": ([], "nvidia-smi", "needs an NVIDIA GPU and its driver (nvidia-smi is not on the PATH)"),
    "torch-npu": (["torch-npu"], "npu-smi", "needs an Ascend NPU and CANN (npu-smi is not on the PATH)"),
    "torch-npu-sim": (["torch-npu==2.13.*"], "g++", "needs g++ to compile its stand-in for CANN (not on the PATH)"),
    "mindspore-cpu": ([], None, ""),
    "mindspore-ascend": ([], "npu-smi", "needs an Ascend NPU and CANN (npu-smi is not on the PATH)"),
}
# Ends of docs/support.md: a Python, a framework, and the newest or the lowest versions declared of all other libraries.
SUPPORT = [
    *(
        (f"3.{minor}", framework, "newest")
        for minor in (11, 12, 13, 14)
        for framework in ("", "torch 2.13", "mindspore 2.10")
    ),
    *(("3.11", f"torch {series}", "newest") for series in ("2.11", "2.12", "2.14")),
    *(("3.11", framework, "lowest") for framework in ("", "torch 2.13", "mindspore 2.10")),
]
SUPPORT_TESTS = (  # of what rests on transformers' and safetensors' own names
    "packages/hp-checkpoint/tests/torch/test_kinds_of_tensors.py",
    *(f"packages/hp-plan/tests/test_{name}.py" for name in ("derived", "expert_plans", "model_folders", "packing")),
)
EXAMPLES = {"torch": "examples/qwen3_fsdp_tp.toml", "mindspore": "examples/mindspore_qwen3_fsdp_tp.toml"}
LOOPS = {"fabric": ("lightning",), "ray": ("ray[train]",), "trl": ("trl",)}
"""Libraries with loops of their own, to compare with; each has a test_<name>.py in hyper-parallel."""
CI = ("torch-cpu", "torch-npu-sim", "mindspore-cpu")  # they need no device, so two tests may run at a time


def install(
    session: nox.Session, *packages: str, extras: str = "", others: tuple[str, ...] = (), framework: str = "torch"
) -> None:
    """Installs packages of the workspace, editable, and other requirements, at the versions of the constraints."""
    editables = [argument for name in packages for argument in ("-e", f"packages/{name}{extras}")]
    pins = ("--constraint", CONSTRAINTS, "--constraint", FRAMEWORK_CONSTRAINTS.format(framework))
    session.install(*editables, *others, *pins, "--build-constraint", CONSTRAINTS)


def run_tests(session: nox.Session, backend: str, packages: list[str]) -> None:
    """Runs pytest over packages on a backend, or skips in a line where the machine has no such device."""
    requirements, program, needs = BACKENDS[backend]
    if program is not None and shutil.which(program) is None:
        session.skip(f"{backend} {needs}")
    framework = backend.split("-")[0]
    # For tests only; peft brings accelerate.
    libraries = {
        "hp-plan": ("peft",),
        "hp-pipeline": ("transformers",),
        "hyper-parallel": ("pyarrow", "peft", "griffelib"),
    }
    wanted = [each for name in packages for each in libraries.get(name, ())] if framework == "torch" else []
    others = ("pytest-xdist", *requirements, *wanted)
    install(session, *packages, extras=f"[{framework},test]", others=others, framework=framework)
    named = any(argument.startswith("packages/") for argument in session.posargs)
    folders = [] if named else [f"packages/{name}" for name in packages]
    whole = packages == PACKAGES and not session.posargs
    results = [f"--junitxml={RESULTS}/{backend}.xml"] if whole else []
    workers = ["--numprocesses=2", "--dist=worksteal"] if backend in CI else []
    session.run("python", "-m", "pytest", *folders, "--backend", backend, *workers, *results, *session.posargs)


@nox.session
@nox.parametrize("backend", [nox.param(name, id=name, tags=[name]) for name in BACKENDS])
def tests(session: nox.Session, backend: str) -> None:
    """Tests every package in one process on one backend."""
    if backend == "torch-cpu" and not session.posargs:
        session.notify("low_precision")
    run_tests(session, backend, PACKAGES)


@nox.session(default=False)
def low_precision(session: nox.Session) -> None:
    """Tests products in eight bits, apart from the others: transformers imports torchao where that is installed."""
    install(session, *PACKAGES, extras="[torch,test]", others=("pytest-xdist", "peft", "torchao"))
    files = [
        path for path in sorted(ROOT.glob("packages/*/tests/**/test_*.py")) if "torchao" in path.read_text("utf-8")
    ]
    workers = ("--numprocesses=2", "--dist=worksteal")
    warns = ("-W", "ignore:invalid escape sequence")  # as Python compiles torchao 0.18
    arguments = session.posargs or ("--backend", "torch-cpu", *workers)
    session.run("python", "-m", "pytest", *map(str, files), *warns, *arguments)


@nox.session(tags=["smoke"], default=False)
def smoke(session: nox.Session) -> None:
    """A minute on PyTorch on the CPU: a few tests of each package, and every command once."""
    others = ("pytest-xdist", "peft", "transformers")
    install(session, *PACKAGES, extras="[torch,test]", others=others)
    tests = sorted(ROOT.glob("packages/*/tests/**/test_*.py"))
    marked = [str(path.relative_to(ROOT)) for path in tests if "@pytest.mark.smoke" in path.read_text(encoding="utf-8")]
    longest_first = reversed(marked)  # the commands' test takes half a minute: the others run beside it
    workers = ("--numprocesses=2", "--dist=worksteal")
    session.run("python", "-m", "pytest", *longest_first, "--tier", "smoke", *workers, *session.posargs)


@nox.session(venv_backend="none", default=False)
def affected(session: nox.Session) -> None:
    """Tests the packages with changed files and those above them, on CI's backends; `-- REV` for changes since REV."""
    told = session.run(sys.executable, ".ci/affected.py", *session.posargs, silent=True, external=True)
    packages = str(told or "").split()
    session.log(f"affected: {', '.join(packages) or 'no package'}")
    for backend in CI if packages else ():
        session.notify(f"tests({backend})", posargs=[f"packages/{name}" for name in packages])


def define_package_tests(backend: str, package: str) -> None:
    """Defines the session `tests(backend, package)`. It has no tag: a tag runs each test once."""

    @nox.session(name=f"tests({backend}, {package})", default=False)
    def tests_of_package(session: nox.Session) -> None:
        run_tests(session, backend, [package])

    tests_of_package.__doc__ = f"Tests {package} on {backend}, in an environment of its own."


for each_backend in BACKENDS:
    for each_package in PACKAGES:
        define_package_tests(each_backend, each_package)


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a small Qwen3 on four CPU ranks, two ways sharded; what follows -- goes to `hyper-parallel train`.

    It stops halfway with a checkpoint, and goes on from there.
    """
    install(session, *PACKAGES, extras="[torch]")
    out = Path(session.create_tmp()) / "run"
    shutil.rmtree(out, ignore_errors=True)
    train = ("hyper-parallel", "train", "examples/qwen3_fsdp_tp.toml", "--out", str(out), *session.posargs)
    session.run(*train, "--until", "75")
    session.run(*train, "--resume", "auto")


def mindspore_python(session: nox.Session, extra: str = "mindspore") -> Path:
    """Makes an environment with MindSpore beside the session's own, which has PyTorch, and returns its interpreter."""
    other = ROOT / session.create_tmp() / "mindspore"
    python = other / ("Scripts" if os.name == "nt" else "bin") / "python"
    session.run("uv", "venv", "--quiet", "--clear", str(other))
    editables = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}[{extra}]")]
    pins = ("--constraint", CONSTRAINTS, "--constraint", FRAMEWORK_CONSTRAINTS.format("mindspore"))
    session.run("uv", "pip", "install", "--quiet", "--python", str(python), *editables, *pins)
    return python


@nox.session(default=False)
def robustness(session: nox.Session) -> None:
    """Checkpoints under hard conditions: packages/hp-checkpoint/benchmarks/robust_*.py; `-- cuts` for one of them."""
    install(session, *PACKAGES, extras="[torch,test]")
    for path in sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/benchmarks/robust_*.py")):
        if not session.posargs or any(part in path for part in session.posargs):
            other = ("--mindspore", str(mindspore_python(session, "mindspore,test"))) if "round_trips" in path else ()
            session.run("python", path, *other)


@nox.session
def compare(session: nox.Session) -> None:
    """The main job on PyTorch and on MindSpore from the same weights: 20 losses, equal; `-- --steps 5` for fewer."""
    install(session, *PACKAGES, extras="[torch]")
    python = mindspore_python(session)
    session.run("python", "examples/compare_frameworks.py", "--mindspore", str(python), *session.posargs)


@nox.session(venv_backend="none")
def backends(session: nox.Session) -> None:
    """Writes docs/backends.md from what the sessions `tests` left, run before without a `--` of their own."""
    session.run(sys.executable, "docs/make_backends.py", RESULTS, *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, imports, changelogs, public names, docs/backends.md, architecture.md, plan.md; `-- --fix` mends them."""
    install(session, others=("ruff", "import-linter", "griffelib"))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("python", ".ci/versions.py")
    session.run("python", "docs/make_backends.py", "--check")
    session.run("python", "docs/structure.py", "--check")
    for script in ("public_api", "architecture", "plan_keys"):
        session.run("python", f"docs/{script}.py", *([] if fix else ["--check"]))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


@nox.session
def docs(session: nox.Session) -> None:
    """Executes the notebooks and builds the site; `-- --run` runs all pages first, `-- --run learn/pipeline.md` one."""
    site = ("mkdocs-material", "mkdocstrings[python]", "ruff", "nbclient", "ipykernel")
    install(session, *PACKAGES, extras="[torch]", others=(*site, "peft", "matplotlib"))
    session.run("python", "docs/snippets.py", *session.posargs)
    if "--run" not in session.posargs:
        notebooks = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/*/*.ipynb"))
        session.run("python", "docs/snippets.py", "--run", *notebooks)
    # Material's word about MkDocs 2, which the pins leave out.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(name="new-package", default=False)
def new_package(session: nox.Session) -> None:
    """Makes a package with an engine, a port, both frameworks and tests, in all lists: `-- hp-example`."""
    if len(session.posargs) != 1:
        session.error("name the package: nox -s new-package -- hp-example")
    session.install("ruff", "griffelib", "--constraint", CONSTRAINTS)
    session.run("python", ".ci/new_package.py", *session.posargs)
    session.run("ruff", "check", "--quiet", "--fix", ".")  # the order of imports is that of the names
    session.run("ruff", "format", "--quiet", f"packages/{session.posargs[0]}")
    for script in ("public_api", "architecture"):
        session.run("python", f"docs/{script}.py")


@nox.session
def types(session: nox.Session) -> None:
    """Pyright on the sources, and on what tests say of types; `-- packages/hp-fsdp/src` on those of one."""
    install(session, *PACKAGES, extras="[torch,test]", others=("pyright[nodejs]", "peft"))
    session.run("pyright", *(session.posargs or (*SOURCES, *TYPED)))


@nox.session
def build(session: nox.Session) -> None:
    """Builds every package's wheel and sdist into dist/, and hp-onesided's wheel with its compiled core."""
    build_packages(session, "dist", *session.posargs)


def build_packages(session: nox.Session, folder: str, *options: str) -> None:
    """Builds the distributions of every package into a folder that is emptied first."""
    shutil.rmtree(ROOT / folder, ignore_errors=True)
    session.run(
        "uv", "build", "--quiet", "--all-packages", "--out-dir", folder, "--build-constraint", CONSTRAINTS, *options
    )
    if sys.platform == "linux" and shutil.which("c++"):  # beside the pure wheel, one with the compiled core inside
        one = ("uv", "build", "--quiet", "--package", "hp-onesided", "--wheel", "--out-dir", folder)
        session.run(*one, "--build-constraint", CONSTRAINTS, env={"HYPER_PARALLEL_BUILD_CORE": "1"})


@nox.session
def isolation(session: nox.Session) -> None:
    """Each package as a wheel, alone with its dependencies: without a framework, with torch, MindSpore, both."""
    folder = ROOT / session.create_tmp() / "wheels"
    build_packages(session, str(folder))  # the wheels are built from the sdists
    check_wheels(session, folder, session.posargs or PACKAGES)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """All of a release but the upload, in dist/; public names are compared with the last tag or `-- REV`."""
    session.install("twine", "griffelib", "packaging", "--constraint", CONSTRAINTS)
    session.run("python", ".ci/versions.py")
    session.run("python", "docs/api_changes.py", *session.posargs)
    build_packages(session, "dist")
    distributions = [str(path) for suffix in ("whl", "tar.gz") for path in sorted(ROOT.glob(f"dist/*.{suffix}"))]
    session.run("twine", "check", "--strict", *distributions)
    check_wheels(session, ROOT / "dist", PACKAGES)


def check_wheels(session: nox.Session, wheel_folder: Path, packages: list[str]) -> None:
    """Installs packages from a folder with the wheels of all, one by one in empty environments, and tries each."""
    folder = ROOT / session.create_tmp()
    wheels = {path.name.split("-")[0].replace("_", "-"): path.as_uri() for path in wheel_folder.glob("*-any.whl")}
    own = folder / "own-wheels.txt"
    own.write_text("".join(f"{name} @ {uri}\n" for name, uri in wheels.items()))
    environment = folder / "environment"  # of each package in turn, so that a framework is compiled once
    bytecode = folder / "bytecode"
    shutil.rmtree(bytecode, ignore_errors=True)
    for package in packages:
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        session.run("uv", "venv", "--quiet", "--clear", str(environment))
        stages = [("", "torch", "without-framework"), ("[torch]", "torch", "with-torch")]
        if package == "hp-dtensor":  # all use one switch, so one package is enough to try it with both
            stages.append(("[torch,mindspore]", "mindspore", "with-both"))
        stages.append(("[mindspore]", "mindspore", "with-mindspore"))
        for extra, framework, mode in stages:
            if mode == "with-mindspore":
                session.run("uv", "venv", "--quiet", "--clear", str(environment))
            requirement = f"{package}{extra} @ {wheels[package]}"
            pins = (CONSTRAINTS, FRAMEWORK_CONSTRAINTS.format(framework), str(own))
            constraints = [argument for pin in pins for argument in ("--constraint", pin)]
            session.run("uv", "pip", "install", "--quiet", "--python", str(python), requirement, *constraints)
            options = ("-I", "-X", f"pycache_prefix={bytecode}")
            session.run(str(python), *options, ".ci/check_isolated.py", package, mode, external=True)
            if package == "hp-onesided" and mode == "with-torch":
                check_cores(session, wheel_folder, python)
    shutil.rmtree(environment)


def check_cores(session: nox.Session, wheel_folder: Path, python: Path) -> None:
    """Has two ranks reduce by each wheel of hp-onesided in an environment, without a compiler and with one."""
    pure = next(wheel_folder.glob("hp_onesided-*-any.whl"))
    own = next(wheel_folder.glob("hp_onesided-*linux*.whl"), None)
    if own is None:  # none was built here
        return
    bare = {"PATH": str(python.parent), "XDG_CACHE_HOME": str(wheel_folder / "cache")}
    cases = [(own, "native", bare), (pure, "native", {**bare, "PATH": os.environ["PATH"]})]
    if platform.machine() == "x86_64":  # where Python can do it
        cases.append((pure, "python", bare))
    for wheel, core, environment in cases:
        session.run("uv", "pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", str(python), str(wheel))
        session.run(str(python), "-I", ".ci/check_core.py", core, external=True, env=environment)


@nox.session(default=False)
@nox.parametrize(
    ["version", "framework", "others"],
    SUPPORT,
    ids=[f"{end[0]}, {end[1] or 'no framework'}, {end[2]}" for end in SUPPORT],
)
def support(session: nox.Session, version: str, framework: str, others: str) -> None:
    """One end of docs/support.md: names, an example, some tests; skipped where there is no such Python or CPU build."""
    folder = ROOT / session.create_tmp()
    shutil.rmtree(folder)
    python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
    make = ("uv", "venv", "--quiet", "--no-python-downloads", "--python", version, str(folder / "environment"))
    session.run(*make, success_codes=[0, 2], silent=True)
    if not python.exists():
        session.skip(f"not tested here: this machine has no Python {version}")
    kind = framework.partition(" ")[0]
    build = cpu_build(session, python, framework.replace(" ", "==") + ".*") if kind else []
    if build is None:
        session.skip(f"not tested here: uv finds no CPU build of {framework} for Python {version}")
    packages = [f"./packages/{name}[{kind},test]" if kind else f"./packages/{name}" for name in PACKAGES]
    options = ("--no-sources", "--resolution", "lowest-direct" if others == "lowest" else "highest")
    pins = ("--build-constraint", CONSTRAINTS)
    session.run("uv", "pip", "install", "--python", str(python), *pins, *options, *packages, *build)
    for package in PACKAGES:
        mode = f"with-{kind}" if kind else "without-framework"
        session.run(str(python), "-I", ".ci/check_isolated.py", package, mode, external=True)
    run = (str(python), "-m", "hyper_parallel")
    if kind == "torch":
        session.run(*run, "verify", EXAMPLES[kind], external=True)
        session.run(str(python), "-m", "pytest", "--quiet", "--backend", "torch-cpu", *SUPPORT_TESTS, external=True)
    if kind:
        session.run(*run, "train", EXAMPLES[kind], "--steps", "10", "--out", str(folder / "run"), external=True)
    shutil.rmtree(folder)


def cpu_build(session: nox.Session, python: Path, requirement: str) -> list[str] | None:
    """The build of a framework that uv would install, as a requirement; None where there is none but for CUDA."""
    ask = ("uv", "pip", "install", "--dry-run", "--python", str(python), requirement)
    told = str(session.run(*ask, success_codes=[0, 1, 2], silent=True))
    wanted = re.findall(r"^ \+ (\S+==\S+)", told, re.MULTILINE)
    name = requirement.partition("==")[0]
    cuda = any(each.startswith(("cuda-", "nvidia-")) for each in wanted)
    return None if cuda else [each for each in wanted if each.startswith(f"{name}==")] or None


@nox.session
def bench(session: nox.Session) -> None:
    """Runs every packages/*/benchmarks/bench_*.py, one after the other; `-- hp-fsdp` runs those of one package.

    `-- summary` prints the figures that are far from their bar, beside it and what was kept last.
    """
    install(session, *PACKAGES, extras="[torch,test]")
    if session.posargs[:1] == ["summary"]:
        session.run("python", "packages/hyper-parallel/benchmarks/summary.py", *session.posargs[1:])
        return
    benchmarks = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/benchmarks/bench_*.py"))
    chosen = [path for path in benchmarks if not session.posargs or any(part in path for part in session.posargs)]
    if not chosen:
        session.error(f"no benchmark's path contains one of {session.posargs}; there are: {', '.join(benchmarks)}")
    for path in chosen:
        session.run("python", path)


@nox.session(name="gpu-day", default=False)
def gpu_day(session: nox.Session) -> None:
    """The first hour on a device: audit of streams, tests, figures; `-- --backend torch-npu-sim audit` to rehearse."""
    others = ("pytest-xdist", "transformers", "peft", "pyarrow")
    install(session, *PACKAGES, extras="[torch,test]", others=others)
    session.run("python", "packages/hyper-parallel/benchmarks/device_day.py", *session.posargs)


@nox.session(default=False)
def context(session: nox.Session) -> None:
    """Context parallelism of transformers models against one process, all combinations; `-- --only gemma3` for some."""
    install(session, "hp-plan", "hp-styles", "hp-fsdp", "hp-dtensor", "hp-platform", extras="[torch,test]")
    session.run("python", "packages/hp-plan/benchmarks/matrix_context_parallel.py", *session.posargs)


@nox.session(default=False)
def experts(session: nox.Session) -> None:
    """Mixtures of experts of transformers under all products of axes and routings; `-- --only Mixtral` for some."""
    install(session, *PACKAGES, extras="[torch,test]")
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "packages/hyper-parallel/benchmarks/matrix_experts.py", *session.posargs, env=environment)


@nox.session(default=False)
def expert_plans(session: nox.Session) -> None:
    """Verifies plans for mixtures of experts of transformers, up to 8 ranks; writes docs/experts.md; `-- Mixtral`."""
    install(session, "hp-plan", extras="[torch,test]")
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "packages/hp-plan/benchmarks/sweep_experts.py", *session.posargs, env=environment)


@nox.session(default=False)
def products(session: nox.Session) -> None:
    """1,000 random products of families, axes, options and habits against one process; writes docs/products.md."""
    install(session, "hp-plan", extras="[torch,test]")
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "packages/hp-plan/benchmarks/matrix_products.py", *session.posargs, env=environment)
    if not session.posargs:
        session.run("python", "packages/hp-plan/benchmarks/matrix_sabotage.py", env=environment)


@nox.session(default=False)
def init(session: nox.Session) -> None:
    """Trains the plans that `hyper-parallel init` writes for 12 model families, 20 steps each on 4 ranks."""
    install(session, *PACKAGES, extras="[torch]")
    session.run("python", "packages/hyper-parallel/benchmarks/sweep_init.py", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Runs every packages/*/benchmarks/soak_*.py, a thousand steps and more; `-- hp-offload` for one package."""
    install(session, *PACKAGES, extras="[torch,test]")
    programs = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/benchmarks/soak_*.py"))
    for path in programs:
        if not session.posargs or any(part in path for part in session.posargs):
            session.run("python", path)


@nox.session(default=False)
def recovery(session: nox.Session) -> None:
    """Stops runs and goes on elsewhere, for ten minutes; injects 200 faults, then 100 into runs that recover.

    `-- --seed 1` for others.
    """
    install(session, *PACKAGES, extras="[torch,test]")
    for name in ("resume_matrix", "hang_matrix", "recovery_matrix"):
        session.run("python", f"packages/hyper-parallel/benchmarks/{name}.py", *session.posargs)
    session.run("python", "packages/hyper-parallel/benchmarks/recovery_matrix.py", "--plans")
    session.run("python", "packages/hyper-parallel/benchmarks/bench_recovery.py", "cycles", "--cycles", "200")


@nox.session(default=False)
def programs(session: nox.Session) -> None:
    """Whole programs as users write them, on ranks and alone, beside a load: programs/; `-- --only gan` for some."""
    install(session, *PACKAGES, extras="[torch,test]", others=("peft", "trl", "torchao"))
    python = mindspore_python(session)
    options = session.posargs or ("--runs", "5", "--load", "8")
    session.run("python", "programs/run.py", "--mindspore", str(python), *options)


@nox.session(default=False)
def sinks(session: nox.Session) -> None:
    """Tests TensorBoard and Weights & Biases as sinks of metrics; what they wrote is read back."""
    install(session, *PACKAGES, extras="[torch,test]", others=("tensorboard", "tensorboardX", "wandb"))
    session.run("python", "-m", "pytest", "packages/hyper-parallel/tests/test_sinks.py", *session.posargs)


@nox.session(default=False)
@nox.parametrize("library", list(LOOPS), ids=list(LOOPS))
def loops(session: nox.Session, library: str) -> None:
    """Tests hyper-parallel beside a library with a loop of its own, as examples/loops do; `nox -s "loops(ray)"`."""
    install(session, *PACKAGES, extras="[torch,test]", others=LOOPS[library])
    session.run("python", "-m", "pytest", f"packages/hyper-parallel/tests/test_{library}.py", *session.posargs)


@nox.session
def sweep(session: nox.Session) -> None:
    """Every operator of torch's own database on DTensors, ours and torch's; writes docs/operators.md."""
    install(session, "hp-dtensor", extras="[torch,test]")
    session.run("python", "packages/hp-dtensor/benchmarks/sweep_operators.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random programs on random layouts against one device in float64; writes docs/fuzz.md where none is wrong."""
    install(session, "hp-dtensor", extras="[torch,test]")
    session.run("python", "packages/hp-dtensor/benchmarks/fuzz_programs.py", *session.posargs)


@nox.session(default=False)
def torch_tests(session: nox.Session) -> None:
    """torch's own test files with these packages' names in place of torch's; `-- --source PATH` of torch's sources."""
    install(session, *PACKAGES, extras="[torch,test]", others=("expecttest",))
    session.run("python", "packages/hyper-parallel/benchmarks/torch_tests.py", *session.posargs)


@nox.session
def sweep_mindspore(session: nox.Session) -> None:
    """MindSpore's operators on DTensors: how many are right, refused and wrong; what follows -- goes to the program."""
    install(session, "hp-dtensor", extras="[mindspore,test]", framework="mindspore")
    session.run("python", "packages/hp-dtensor/benchmarks/sweep_mindspore.py", *session.posargs)


@nox.session
def families(session: nox.Session) -> None:
    """Model families of transformers under plans against one process; writes docs/models.md; `-- llama --again`."""
    install(session, "hp-plan", extras="[torch,test]")
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "packages/hp-plan/benchmarks/sweep_families.py", *session.posargs, env=environment)
    if not session.posargs:
        session.run("python", "packages/hp-plan/benchmarks/sweep_classes.py", env=environment)
    session.run("python", "packages/hp-plan/benchmarks/sweep_initial_weights.py", env=environment)
