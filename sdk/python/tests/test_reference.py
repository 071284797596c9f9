"""The docstrings are the reference: they tell of every argument, of what comes back, and of errors. (That there are any, ruff says.)"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import libdsec

CLASSES = [c for c in (getattr(libdsec, name) for name in libdsec.__all__) if inspect.isclass(c)]
PLAIN = {"from_wire", "to_wire", "to_spec", "to_message", "with_traceback", "add_note"}  # of the wire, or Python's


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for cls in CLASSES:
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            function = getattr(member, "__func__", member)
            if name.startswith("_") or name in PLAIN or not inspect.isfunction(function):
                continue
            if function.__module__.startswith("libdsec"):
                yield f"{cls.__name__}.{name}", function


METHODS = dict(methods())
CASES = pytest.mark.parametrize("name", METHODS)


def told(name: str, seen: frozenset[str] = frozenset()) -> str:
    """A method's docstring, with those that it refers to: ``See ``Sandbox.exec```` or ``as in ``exec````."""
    text = inspect.getdoc(METHODS[name]) or ""
    for other in re.findall(r"(?:[Ss]ee|as in|as|or) ``([\w.]+)``", text):
        target = other if "." in other else f"{name.split('.')[0]}.{other}"
        if target in METHODS and target not in seen:
            text += told(target, seen | {name})
    return text


def test_there_are_methods() -> None:
    assert len(METHODS) > 80
    assert {"Sandbox.run_shell", "Sandbox.list_files", "FileChange.move", "DSecClient.run_containers"} <= set(METHODS)


@CASES
def test_arguments_are_told(name: str) -> None:
    arguments = [p for p in inspect.signature(METHODS[name]).parameters if p != "self"]
    assert not [a for a in arguments if not re.search(rf"\b{a}\b", told(name))]


@CASES
def test_what_comes_back_is_told(name: str) -> None:
    if inspect.signature(METHODS[name]).return_annotation != "None" and not name.startswith(
        "FileChange."
    ):  # those are what they say
        assert re.search(r"\b([Rr]eturn|[Yy]ield|[Ww]hether)", told(name))


@CASES
def test_errors_of_its_own_are_told(name: str) -> None:
    """Those that its own lines raise; InvalidArgumentError goes without saying."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(METHODS[name])))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    cls = getattr(libdsec, name.split(".")[0])
    text = told(name) + (inspect.getdoc(cls) or "")
    assert not [e for e in raised if e.endswith("Error") and e != "InvalidArgumentError" and e not in text]
