"""ChainedOptimizer: several optimizers of one model as one, and its parameters divided among them by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hp_optim.port import port

State = dict[str, Any]


class ChainedOptimizer:
    """Optimizers that have a model's parameters among them, with one step and one state by the parameters' names.

    Example:
        >>> optimizer = ChainedOptimizer(model, {"muon": Muon(matrices), "adamw": AdamW(others)})
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        model: whose parameters the optimizers have, or pairs of names and parameters; a frozen one may be in none.
        optimizers: by a name, which is in the state of their groups.
        flatten: states are one dictionary of names such as ``"state.layer.weight.exp_avg"``, as checkpoints want it.

    Attributes:
        optimizers: by name.
        iteration: number of steps; saved and loaded with the state.

    Raises:
        ValueError: no optimizer, a parameter that is not the model's, that two optimizers have, or that is trained and
            none has.
    """

    def __init__(self, model: Any, optimizers: Mapping[str, Any], flatten: bool = False) -> None:
        self.optimizers = dict(optimizers)
        self.flatten = flatten
        self.iteration = 0
        if not self.optimizers:
            raise ValueError("ChainedOptimizer: no optimizers; pass at least one, by a name")
        # Groups and parameters may come later: names are read from the model when they are needed.
        self._model = model if hasattr(model, "state_dict") or hasattr(model, "parameters_dict") else list(model)
        owners: dict[int, str] = {}
        for key, names in self._names().items():
            parameters = [each for group in self.optimizers[key].param_groups for each in group["params"]]
            for name, parameter in zip((name for group in names for name in group), parameters):
                other = owners.setdefault(id(parameter), key)
                if other != key:
                    raise ValueError(f"ChainedOptimizer: {name!r} is in {other!r} and in {key!r}; give it to one")
        named = port().named_parameters(self._model)
        left = [name for name, each in named if id(each) not in owners and each.requires_grad]
        if left:
            raise ValueError(
                f"ChainedOptimizer: {len(left)} of {len(named)} parameters are trained and in no optimizer"
                f" ({', '.join(left[:5])}). Give them to one, or freeze them"
            )

    def _names(self) -> dict[str, list[list[str]]]:
        """Name the parameters of each group of each optimizer, as model and optimizers are now.

        Raises:
            ValueError: a parameter that is not the model's.
        """
        names = {id(parameter): name for name, parameter in port().named_parameters(self._model)}
        listed: dict[str, list[list[str]]] = {}
        for key, optimizer in self.optimizers.items():
            groups = listed.setdefault(key, [])
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        raise ValueError(
                            f"ChainedOptimizer: parameter {number} of a group of {key!r}, of shape"
                            f" {tuple(parameter.shape)}, is not the model's. Make the optimizers of the model as it is"
                            " now: what replaces parameters (to_empty, an adapter) comes before"
                        )
                groups.append([names[id(parameter)] for parameter in group["params"]])
        return listed

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the optimizers, as `hp_fsdp.get_optimizer_state_dict` and torch's own do."""
        return iter(self.optimizers.values())

    @property
    def param_groups(self) -> list[State]:
        """The groups of all optimizers, their own dictionaries."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Update all parameters.

        Args:
            gradients: by the parameters' names, where they are not the parameters' own (MindSpore).

        Raises:
            TypeError: gradients are passed on PyTorch; none on MindSpore, or some without names.
            ValueError: a gradient of a name that no optimizer has.
        """
        port().check_gradients(gradients)
        names = {} if gradients is None else self._names()
        known = {name for groups in names.values() for each in groups for name in each}
        unknown = [name for name in gradients or () if name not in known]
        if unknown:
            raise ValueError(
                f"ChainedOptimizer.step: {', '.join(map(repr, unknown[:5]))} are gradients of no parameter of its"
                f" optimizers, which have {', '.join(map(repr, sorted(known)[:5]))}, ..."
            )
        for key, optimizer in self.optimizers.items():
            own = None if gradients is None else [gradients.get(name) for each in names[key] for name in each]
            port().step(optimizer, own)
        self.iteration += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Args:
            set_to_none: or set them to zero.
        """
        for optimizer in self.optimizers.values():
            port().zero_grad(optimizer, set_to_none)

    def state_dict(self) -> State:
        """Return the states by the parameters' names, and the hyperparameters of the groups.

        Returns:
            ``{"state": {name: {key: value}}, "param_groups": [{..., "params": names, "optimizer": key}],
            "iteration": number}``; with ``flatten`` one dictionary, in which each parameter has its group's
            hyperparameters. Tensors are the optimizers' own.
        """
        states: dict[str, State] = {}
        groups: list[State] = []
        every = self._names()
        for key, optimizer in self.optimizers.items():
            names = every[key]
            states.update(zip((name for each in names for name in each), map(dict, port().states(optimizer))))
            for group, own in zip(optimizer.param_groups, names):
                groups.append({**_hyperparameters(group), "params": list(own), "optimizer": key})
        if not self.flatten:
            return {"state": states, "param_groups": groups, "iteration": self.iteration}
        flat: State = {f"state.{name}.{key}": value for name, own in states.items() for key, value in own.items()}
        for group in groups:
            for name in group["params"]:
                flat |= {f"param_groups.{name}.{k}": value for k, value in group.items() if k != "params"}
        return {**flat, "iteration": self.iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states by the parameters' names, nested or flat.

        Parameters may be in other groups than they were saved in, if all of a group were saved with the same
        hyperparameters, and with another optimizer of the same class.

        Args:
            state_dict: what `state_dict` gave.

        Raises:
            ValueError: parameters without a state, states without a parameter, groups that were divided otherwise.
        """
        every = self._names()
        names = [name for each in every.values() for group in each for name in group]
        states, saved = _unflattened(state_dict, names) if "state" not in state_dict else _nested(state_dict)
        missing, unknown = [n for n in names if n not in saved], [n for n in saved if n not in set(names)]
        if missing or unknown:
            raise ValueError(
                f"ChainedOptimizer.load_state_dict: {len(missing)} parameters are missing in the state"
                f" ({', '.join(missing[:5])}), {len(unknown)} in it are not the optimizers' ({', '.join(unknown[:5])})"
            )
        for key, optimizer in self.optimizers.items():
            groups = [_shared(own, saved) for own in every[key]]
            listed = [states.get(name, {}) for own in every[key] for name in own]
            port().load(optimizer, listed, groups)
        self.iteration = int(state_dict.get("iteration", 0))


def _hyperparameters(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _nested(state_dict: Mapping[str, Any]) -> tuple[dict[str, State], dict[str, State]]:
    """Return the states, and the hyperparameters of each parameter."""
    hyper: dict[str, State] = {}
    for group in state_dict["param_groups"]:
        values = {key: value for key, value in _hyperparameters(group).items() if key != "optimizer"}
        hyper |= dict.fromkeys(group["params"], values)
    return dict(state_dict["state"]), hyper


def _unflattened(state_dict: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, State], dict[str, State]]:
    """Return the same of a flat dictionary."""
    states: dict[str, State] = {}
    hyper: dict[str, State] = {}
    for entry, value in state_dict.items():
        kind, _, rest = entry.partition(".")
        if kind not in ("state", "param_groups"):
            continue
        name = next(_prefixes(rest, names), rest.rpartition(".")[0])
        key = rest[len(name) + 1 :]
        if kind == "state":
            states.setdefault(name, {})[key] = value
        elif key != "optimizer":
            hyper.setdefault(name, {})[key] = value
        else:
            hyper.setdefault(name, {})
    return states, hyper


def _prefixes(entry: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the beginnings of a dotted name that are names of parameters, the longest first."""
    known = set(names)
    while "." in entry:
        entry = entry.rpartition(".")[0]
        if entry in known:
            yield entry


def _shared(names: Sequence[str], hyper: Mapping[str, State]) -> State:
    """Return the hyperparameters that the parameters of a group were saved with."""
    for name in names[1:]:
        if hyper[name] is not hyper[names[0]] and not _equal(hyper[name], hyper[names[0]]):
            raise ValueError(
                f"ChainedOptimizer.load_state_dict: {name!r} was saved with {hyper[name]}, {names[0]!r} of its group"
                f" with {hyper[names[0]]}. Group the parameters as they were saved"
            )
    return hyper[names[0]] if names else {}


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)


Entry = str | Mapping[str, Any]

EMBEDDING_PATTERNS = (
    *("*embed*", "*wte.*", "*wpe.*", "*lm_head.*", "lm_head.*", "*output_head.*", "head.weight", "*.head.weight"),
    *("*classifier.*", "*score.weight", "*shared.weight"),
)
"""Names of embeddings and output layers, whose rows are no directions of a matrix: they belong to AdamW."""


def get_hyper_optimizer(
    model: Any,
    muon_params: Sequence[Entry],
    adamw_params: Sequence[Entry],
    muon_kwargs: Mapping[str, Any] | None = None,
    adamw_kwargs: Mapping[str, Any] | None = None,
) -> ChainedOptimizer:
    """Make Muon and AdamW of the parameters whose names match.

    Example:
        >>> optimizer = get_hyper_optimizer(
        ...     model,
        ...     muon_params=["layers.*.weight"],
        ...     adamw_params=["embed.*", {"params": ["*.bias", "norm.*"], "weight_decay": 0.0}],
        ...     muon_kwargs={"lr": 2e-3},
        ... )

    Args:
        model: its parameters, or pairs of names and parameters.
        muon_params: names or fnmatch patterns, whose ``*`` also matches dots, or groups: mappings with such a list as
            ``"params"`` and hyperparameters of their own. An empty list leaves Muon out.
        adamw_params: the same for AdamW.
        muon_kwargs: arguments of `Muon`; a prefix ``muon_`` of their names is dropped.
        adamw_kwargs: arguments of `AdamW`; a prefix ``adamw_`` is dropped.

    Returns:
        A ChainedOptimizer, with ``optimizers["muon"]`` and ``optimizers["adamw"]``.

    Raises:
        ValueError: both lists are empty; a pattern without a match; a parameter that two patterns match, or that is
            trained and that none matches; see also `Muon` and `AdamW`.
    """
    named = dict(port().named_parameters(model))
    lists = {"muon": muon_params, "adamw": adamw_params}
    options = {"muon": muon_kwargs, "adamw": adamw_kwargs}
    for kind, entries in lists.items():
        if isinstance(entries, (str, Mapping)):
            raise TypeError(f"get_hyper_optimizer: {kind}_params must be a list of patterns, got {entries!r}")
    if not any(lists.values()):
        raise ValueError("get_hyper_optimizer: muon_params and adamw_params are empty; one of them needs patterns")
    chosen = _matched(named, lists)
    left = [name for name, parameter in named.items() if name not in chosen and parameter.requires_grad]
    if left:
        raise ValueError(
            f"get_hyper_optimizer: {len(left)} parameters are trained and match no pattern ({', '.join(left[:5])})."
            f"{_nearest(left[0], lists)} Add patterns, or freeze them"
        )
    optimizers = {
        kind: port().CLASSES[kind](_groups(kind, entries, chosen, named), **_stripped(kind, options[kind] or {}))
        for kind, entries in lists.items()
        if entries
    }
    return ChainedOptimizer(model, optimizers)


def default_patterns(model: Any) -> tuple[list[str], list[str]]:
    """Divide a model's parameters: hidden matrices to Muon; embeddings, output layers, norms, biases to AdamW.

    Args:
        model: its parameters, or pairs of names and parameters.

    Returns:
        Names for Muon and for AdamW, those of trained parameters.
    """
    muon: list[str] = []
    adamw: list[str] = []
    for name, parameter in port().named_parameters(model):
        if parameter.requires_grad:
            (muon if is_hidden_matrix(name, parameter.ndim) else adamw).append(name)
    return muon, adamw


def is_hidden_matrix(name: str, dims: int) -> bool:
    """Tell whether a parameter is a matrix, or a stack of them, between embeddings and output layers.

    Args:
        name: of the parameter.
        dims: how many it has.
    """
    return dims > 1 and not any(fnmatchcase(name, pattern) for pattern in EMBEDDING_PATTERNS)


def _patterns(entry: Entry, kind: str) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    patterns = entry.get("params") if isinstance(entry, Mapping) else None
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        raise TypeError(
            f"get_hyper_optimizer: {kind}_params has {entry!r}; expected a name, a pattern, or a mapping with a list of"
            ' them as "params"'
        )
    if not patterns:
        raise ValueError(f"get_hyper_optimizer: a group of {kind}_params has no patterns: {dict(entry)}")
    return list(patterns)


def _matched(named: Mapping[str, Any], lists: Mapping[str, Sequence[Entry]]) -> dict[str, tuple[str, int]]:
    """Return for each matched name its optimizer, and the number of the entry, -1 for those without a group."""
    chosen: dict[str, tuple[str, int]] = {}
    by: dict[str, str] = {}
    for kind, entries in lists.items():
        for number, entry in enumerate(entries):
            for pattern in _patterns(entry, kind):
                matches = [pattern] if pattern in named else [name for name in named if fnmatchcase(name, pattern)]
                if not matches:
                    near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.5) or list(named)[:3]
                    raise ValueError(
                        f"get_hyper_optimizer: {pattern!r} of {kind}_params matches no parameter; near it are"
                        f" {', '.join(near)}"
                    )
                place = (kind, number if isinstance(entry, Mapping) else -1)
                for name in matches:
                    if chosen.setdefault(name, place) != place:
                        raise ValueError(
                            f"get_hyper_optimizer: parameter {name!r} is matched by {by[name]!r} of"
                            f" {chosen[name][0]}_params and by {pattern!r} of {kind}_params; make one of them narrower"
                        )
                    by.setdefault(name, pattern)
    return chosen


def _nearest(name: str, lists: Mapping[str, Sequence[Entry]]) -> str:
    patterns = {pattern: kind for kind, each in lists.items() for entry in each for pattern in _patterns(entry, kind)}
    near = difflib.get_close_matches(name, patterns, n=1, cutoff=0.5)
    return f" Nearest to {name!r} is {near[0]!r} of {patterns[near[0]]}_params." if near else ""


def _groups(
    kind: str, entries: Sequence[Entry], chosen: Mapping[str, tuple[str, int]], named: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the groups: one of all plain patterns, and one for each mapping."""
    groups = []
    for number in (-1, *(at for at, entry in enumerate(entries) if isinstance(entry, Mapping))):
        own = [(name, named[name]) for name in named if chosen.get(name) == (kind, number)]
        if own:
            entry = entries[number] if number >= 0 else {}
            assert isinstance(entry, Mapping)
            groups.append({**_stripped(kind, {k: v for k, v in entry.items() if k != "params"}), "params": own})
    return groups


def _stripped(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(f"{kind}_"): value for key, value in options.items()}
