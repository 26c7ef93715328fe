"""Which functions write to two kinds of stores: found in the source, without running it.

A function writes to a store by a call of :data:`CALLS`, or by a call of another function of the
program that does. What is called is found by its name: a function of the same module, an imported
one, a method of ``self``, of a parameter that has an annotation, or of an attribute that is made or
annotated in the class. What is called through anything else is not seen, nor is what is written
later from memory, as the counts of what an engine has answered: such windows are found by reading.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set
    from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef

STORES: Final = {
    "database": "our database",
    "objects": "the object store",
    "prefect": "Prefect",
    "engine": "the engine",
    "receiver": "a receiver",
    "place": "a user's place",
    "disk": "the disk",
}
"""What each kind is called. A receiver is one of webhooks or e-mails; a user's place is a path, a
URL or an object that a user names; the disk is that of the machine."""

_ASSIGNING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.withitem),
    *(ast.For, ast.AsyncFor, ast.comprehension),
)


class Calls(NamedTuple):
    """Calls that write: of ``methods`` on one of ``names``, or of ``functions``."""

    names: Set[str]
    methods: Set[str]
    functions: Set[str] = frozenset()


CALLS: Final = {
    "database": Calls({"database"}, {"write"}, {"reseal", "upgrade"}),
    "objects": Calls({"storage"}, {"put", "delete", "remove_unfinished"}),
    "prefect": Calls(
        {"api", "prefect", "client"},
        {
            *("start", "start_after", "postpone", "emit", "request"),
            *("mark_crashed", "mark_completed", "mark_cancelled"),
            *("create_artifact", "create_flow", "create_flow_run_from_deployment"),
            *("set_flow_run_state", "update_flow_run"),
            *("create_work_pool", "update_work_pool", "delete_block_document"),
        },
        {"emit_event", "aupdate_progress_artifact", "request_runner"},
    ),
    "engine": Calls({"engine", "window"}, {"start", "stop", "stream", "submit", "withdraw"}),
    "receiver": Calls({"sender", "mailer", "messenger", "channel"}, {"send"}),
    "place": Calls({"location", "place", "location.path"}, {"write", "unlink"}, {"write_location"}),
    "disk": Calls(
        {"draft", "new", "next_path", "stamp", "file"},
        {"write_text", "write_bytes", "replace", "unlink"},
        {"link", "keep_secret"},
    ),
}
"""For each kind of store. The methods of aggregates that write are added: :attr:`Code.writers`."""

BELOW: Final = frozenset(
    f"batchyard.{name}"
    for name in (
        *("batch", "datasets", "engine", "lines", "locations", "logs", "metrics", "notify"),
        *("plan", "processes", "results", "schedule", "storage", "web"),
    )
)
"""Packages that know no store, or one kind only: the import contracts keep it so."""

_FUNCTIONS: Final = {name: kind for kind, each in CALLS.items() for name in each.functions}

OPENED: Final = {"batchyard.services.services:open_services"}
"""What it makes as a process starts is a window of its own, and not one of all that call it."""

_AS_IT_IS_USED: Final = ("__enter__", "__exit__", "__aenter__", "__aexit__")
"""Who names a class calls these of it."""


class Function(NamedTuple):
    """A function or a method, with what is defined in it."""

    module: str
    owner: str
    """The class; empty: it is a function."""
    node: _Function

    @property
    def name(self) -> str:
        """As the catalogue names it."""
        inner = f"{self.owner}.{self.node.name}" if self.owner else self.node.name
        return f"{self.module}:{inner}"


@dataclass
class Code:
    """Modules by their dotted names."""

    modules: Mapping[str, ast.Module]

    @classmethod
    def of(cls, root: Path, *packages: str) -> Code:
        """All modules of these packages below ``root``, but for those in :data:`BELOW`."""
        modules = {}
        for path in (each for package in packages for each in (root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if ".".join(parts[:2]) not in BELOW and "migrations" not in parts:
                name = ".".join(parts).removesuffix(".__init__")
                modules[name] = ast.parse(path.read_text())
        return cls(modules)

    def windows(self) -> dict[str, frozenset[str]]:
        """The functions that write to stores of two kinds at least, and these kinds.

        One that only calls others, each of which writes to several kinds, is not among them: the
        windows are in those.
        """
        found = {}
        for name in self.functions:
            if name.endswith("__init__"):
                # It names what will be called later, by others.
                continue
            sites = self._kinds_of_sites(name)
            if any(len(kinds) == 1 for kinds in sites):
                every = frozenset().union(*sites)
                if len(every) > 1:
                    found[name] = every
        return found

    @cached_property
    def functions(self) -> dict[str, Function]:
        """All functions and methods, by name, but for the store's own: they write to it only."""
        found = {}
        for module, tree in self.modules.items():
            for node in [] if module.startswith("batchyard.store") else tree.body:
                owner = node.name if isinstance(node, ast.ClassDef) else ""
                for each in node.body if isinstance(node, ast.ClassDef) else [node]:
                    if isinstance(each, _Function):
                        function = Function(module, owner, each)
                        found[function.name] = function
        return found

    @cached_property
    def kinds(self) -> dict[str, frozenset[str]]:
        """The stores that each function writes to, itself or through others."""
        found: dict[str, frozenset[str]] = dict.fromkeys(self.functions, frozenset())
        for name in OPENED:
            found.pop(name, None)
        is_more = True
        while is_more:
            is_more = False
            for name, before in found.items():
                sites = self._sites[name]
                kinds = sites.written.union(*(found.get(each, ()) for each in sites.called))
                if kinds != before:
                    found[name], is_more = kinds, True
        return found

    def _kinds_of_sites(self, name: str) -> list[frozenset[str]]:
        sites = self._sites[name]
        written = [frozenset({kind}) for kind in sites.written]
        called = [self.kinds.get(each, frozenset()) for each in sites.called - {name}]
        return [kinds for kinds in [*written, *called] if kinds]

    @cached_property
    def _sites(self) -> dict[str, _Sites]:
        return {name: self._sites_in(function) for name, function in self.functions.items()}

    def _sites_in(self, function: Function) -> _Sites:
        nodes = _nodes(function.node)
        names = self._names_in(function, nodes)
        written, called = set(), set()
        for node in nodes:
            if isinstance(node, (ast.Name, ast.Attribute)):
                if kind := self._written(node, names.aggregates):
                    written.add(kind)
                else:
                    called |= set(self._called(function, node, names.classes))
        return _Sites(frozenset(written), frozenset(called))

    # -- what is written ----------------------------------------------------------------------

    @cached_property
    def writers(self) -> dict[str, set[str]]:
        """The methods that write to our database, by the name of the aggregate in the store.

        They are those of the classes of the fields of ``Store`` that are marked with ``writes``, or
        that call another one that is.
        """
        found: dict[str, set[str]] = {}
        for name in (each for each in self.classes if each.endswith(":Store")):
            for each in self.classes[name].body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    kind = self._class(name.partition(":")[0], each.annotation)
                    if kind is not None:
                        found[each.target.id] = _writing_methods(self.classes[kind])
        return found

    def _written(self, node: ast.Name | ast.Attribute, aggregates: Mapping[str, str]) -> str | None:
        """The store that is written to by what is named."""
        if isinstance(node, ast.Name):
            return _FUNCTIONS.get(node.id)
        if node.attr not in self._methods:
            return _FUNCTIONS.get(node.attr)
        whole = _dotted(node.value)
        of = whole.rpartition(".")[2].lstrip("_")
        if node.attr in self.writers.get(aggregates.get(whole, of), ()):
            return "database"
        for kind, calls in CALLS.items():
            is_named = of in calls.names or any(whole.endswith(f".{each}") for each in calls.names)
            if is_named and node.attr in calls.methods:
                return kind
        return None

    @cached_property
    def _methods(self) -> frozenset[str]:
        """All that may write, by name only."""
        return frozenset().union(*self.writers.values(), *(each.methods for each in CALLS.values()))

    # -- what is called -----------------------------------------------------------------------

    def _called(
        self, function: Function, node: ast.Name | ast.Attribute, classes: Mapping[str, str]
    ) -> Iterator[str]:
        """The functions of ours that are named: to call them, now or later."""
        match node:
            case ast.Name(id=name):
                if found := self._defined(function.module, name, self.functions):
                    yield found
                elif kind := self._defined(function.module, name, self.classes):
                    yield from (f"{kind}.{each}" for each in _AS_IT_IS_USED)
            case ast.Attribute(value=ast.Name(id="self"), attr=method) if function.owner:
                yield f"{function.module}:{function.owner}.{method}"
            case ast.Attribute(value=value, attr=method):
                if kind := classes.get(_dotted(value)):
                    yield f"{kind}.{method}"

    @cached_property
    def _imports(self) -> dict[str, dict[str, str]]:
        """What is imported from our own modules: of each module, by name, ``module:name``."""
        return {
            module: {
                alias.asname or alias.name: f"{node.module}:{alias.name}"
                for node in _statements(tree)
                if isinstance(node, ast.ImportFrom) and node.module in self.modules
                for alias in node.names
            }
            for module, tree in self.modules.items()
        }

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """All classes, by ``module:name``."""
        return {
            f"{module}:{node.name}": node
            for module, tree in self.modules.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

    def _class(self, module: str, node: ast.expr) -> str | None:
        """The class of ours that an annotation or a call names, of a collection that of its
        values."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        match node:
            case ast.BinOp(left=left):
                return self._class(module, left)
            case ast.Call(func=value) | ast.DictComp(value=value) | ast.ListComp(elt=value):
                return self._class(module, value)
            case ast.Subscript(slice=ast.Tuple(elts=[*_, value])) | ast.Subscript(slice=value):
                return self._class(module, value)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._defined(module, name, self.classes)
        return None

    def _defined(self, module: str, name: str, among: Mapping[str, object]) -> str | None:
        """Where a name of a module is defined, also if that is imported from elsewhere."""
        seen = set()
        while f"{module}:{name}" not in among:
            imported = self._imports.get(module, {}).get(name)
            if imported is None or imported in seen:
                return None
            seen.add(imported)
            module, _, name = imported.partition(":")
        return f"{module}:{name}"

    def _names_in(self, function: Function, nodes: Iterable[ast.AST]) -> _Names:
        found = _Names({}, self._attributes(function) | self._parameters(function))
        for node in nodes:
            for target, value in _assigned(node):
                name = _dotted(target)
                if isinstance(value, ast.Attribute) and value.attr in self.writers:
                    found.aggregates[name] = value.attr
                elif kind := found.classes.get(_dotted(value)) or self._made(function, value):
                    found.classes[name] = kind
        return found

    def _made(self, function: Function, value: ast.expr) -> str | None:
        is_made = isinstance(value, ast.Call | ast.DictComp | ast.ListComp)
        return self._class(function.module, value) if is_made else None

    def _parameters(self, function: Function) -> dict[str, str]:
        given = function.node.args
        return {
            each.arg: kind
            for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]
            if each.annotation and (kind := self._class(function.module, each.annotation))
        }

    def _attributes(self, function: Function) -> dict[str, str]:
        if not function.owner:
            return {}
        name = f"{function.module}:{function.owner}"
        if name not in self._known_attributes:
            self._known_attributes[name] = dict(self._attributes_of(name))
        return self._known_attributes[name]

    @cached_property
    def _known_attributes(self) -> dict[str, dict[str, str]]:
        return {}

    def _attributes_of(self, name: str) -> Iterator[tuple[str, str]]:
        module = name.partition(":")[0]
        for node in self.classes[name].body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=own), annotation=annotation):
                    if kind := self._class(module, annotation):
                        yield f"self.{own}", kind
                case ast.FunctionDef(name="__init__"):
                    found = self._names_in(Function(module, "", node), _nodes(node)).classes
                    yield from ((own, found[own]) for own in found if own.startswith("self."))


class _Names(NamedTuple):
    """What is known of names in a function, also of attributes of ``self``."""

    aggregates: dict[str, str]
    classes: dict[str, str]


class _Sites(NamedTuple):
    """``written``: the kinds of stores that a function writes to by itself; ``called``: others."""

    written: frozenset[str]
    called: frozenset[str]


def _nodes(root: ast.AST) -> list[ast.AST]:
    """As :func:`ast.walk`, in a third of the time: without what says how a name is used."""
    found = [root]
    for node in found:
        for name in node._fields:
            value = getattr(node, name)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                found.append(value)
    return found


def _statements(root: ast.Module) -> list[ast.AST]:
    """All statements, also those in functions."""
    found: list[ast.AST] = [root]
    for node in found:
        for name in ("body", "orelse", "finalbody", "handlers"):
            found += [each for each in getattr(node, name, ()) if isinstance(each, ast.AST)]
    return found


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names and what they are set to, an element of a collection as the collection."""
    if not isinstance(node, _ASSIGNING):
        return
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.AnnAssign(target=target, annotation=value):
            yield target, ast.Call(value, [], [])
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value
        case ast.For(target=target, iter=ast.Call(func=ast.Attribute(value=value, attr="values"))):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value


def _dotted(node: ast.AST) -> str:
    """A dotted name, without the indices in it; of anything else its last names."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case ast.Subscript(value=value):
            return _dotted(value)
    return ""


def _writing_methods(aggregate: ast.ClassDef) -> set[str]:
    methods = {each.name: each for each in aggregate.body if isinstance(each, _Function)}
    writing = {
        name
        for name, each in methods.items()
        if any(_dotted(mark) == "writes" for mark in each.decorator_list)
    }
    calls = defaultdict(set)
    for name, each in methods.items():
        for node in _nodes(each):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=called):
                    calls[name].add(called)
    while more := {name for name in calls if calls[name] & writing} - writing:
        writing |= more
    return {name for name in writing if not name.startswith("_")}
