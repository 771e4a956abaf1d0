"""The way that calls took through the segments of a model that reads values, as one function.

A walk finds out at the end of every segment what its operator gave, which branch fits that, and what the next
segment gets.  Most calls go the way of the call before, for which all of this is known: a route is that way
written as code, with the same tests between the segments.  A call that fails one has left the route, and the
walk goes on from there with everything computed so far; so no operator is ever run twice in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._C import _DisableAutocast, _is_any_autocast_enabled

from fxamp.capture.recorder import set_grad_enabled
from fxamp.capture.structure import Spec
from fxamp.ir.regions import run_in_region
from fxamp.ir.repeatable import may_draw
from fxamp.ir.text import tuple_text
from fxamp.runtime.likeness import describe
from fxamp.runtime.program import Inputs, Program
from fxamp.runtime.undo import Undo

__all__ = ["Left", "Route", "Routes"]

_NO_CALLS = ("placeholder", "get_attr", "output")
_MOST_MISSES = 8  # calls in a row that leave a route before another takes its place


@dataclass(frozen=True)
class Left:
    """How far a call got that has left its route.

    Attributes:
        path: The programs that have run, each with the operator at its end.
        values: The values of the call: its tensors, then what the segments and all operators but the last
            gave; ``None`` for those that nothing needs any more.
        numbers: What the symbols of these segments stand for.
        answers: What each operator gave.
        undo: What takes back what they have done; ``None`` if they have done nothing.
    """

    path: tuple[Program, ...]
    values: list[Any]
    numbers: tuple[Any, ...]
    answers: tuple[Any, ...]
    undo: Undo | None


class Route:
    """A way from the first segment of a call to its last.

    Args:
        path: The programs that it goes through, two at least.
        keys: What the operator at the end of each must have given, as in the branch to the next.
        leaves: How many tensors the calls have.

    Attributes:
        path: As given.
        text: The code, for people.
    """

    def __init__(self, path: Sequence[Program], keys: Sequence[Any], leaves: int) -> None:
        self.path = tuple(path)
        writer = _Writer(path, keys, leaves)
        self.text = writer.write()
        scope: dict[str, Any] = {**writer.scope, "left": self._left}
        exec(compile(self.text, "<fxamp route>", "exec"), scope)
        self._run: Callable[..., Any] = scope["run"]

    def run(
        self, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], call: Any, *, held: bool
    ) -> Any:
        """The result of a call, or where it left the route.

        Args:
            leaves: The tensors of the call.
            tensors: Those of the model that the first program reads.
            call: ``(args, kwargs)``.
            held: Whether the attributes that its programs rest on are known to be as they were.
        """
        if _is_any_autocast_enabled():
            with _DisableAutocast():
                return self._run(leaves, tensors, call, held)
        return self._run(leaves, tensors, call, held)

    def _left(
        self, index: int, values: list[Any], numbers: tuple[Any, ...], undo: Undo | None, *answers: Any
    ) -> Left:
        return Left(self.path[: index + 1], values, numbers, answers, undo)


class Routes:
    """The route of the calls that begin with one program, which changes with the ways that they take."""

    def __init__(self) -> None:
        self.current: Route | None = None
        self.misses = 0

    def follow(self, path: Sequence[Program], leaves: int) -> None:
        """Note that a call with *leaves* tensors has gone along *path*, all of which was there before."""
        self.misses += 1
        if self.current is not None and self.misses < _MOST_MISSES:
            return
        keys = [_key_between(one, other) for one, other in pairwise(path)]
        if keys and all(key is not None and _is_plain(key[0]) for key in keys):
            self.current, self.misses = Route(path, keys, leaves), 0


def _key_between(one: Program, other: Program) -> Any:
    return next((branch.key for branch in one.branches if branch.program is other), None)


def _is_plain(spec: Spec) -> bool:
    """Whether results of this structure are tensors and numbers in lists and tuples."""
    if spec == ("leaf",):
        return True
    return spec[0] in (list, tuple) and all(map(_is_plain, spec[1]))


class _Writer:
    """Writes the code of a route.

    ``v0, v1, ...`` are the values of the call in the order in which a walk has them, ``a0, a1, ...`` what the
    operators gave, ``n`` the numbers and ``t`` the tensors that the segment reads.
    """

    def __init__(self, path: Sequence[Program], keys: Sequence[Any], leaves: int) -> None:
        self.scope: dict[str, Any] = {"describe": describe, "Undo": Undo}
        self._path, self._keys = path, keys
        self._lines: list[str] = []
        self._values = [f"v{index}" for index in range(leaves)]
        self._saves = any(map(_has_effects, path[:-1]))

    def write(self) -> str:
        self._add(f"{tuple_text(self._values)} = x" if self._values else "")
        self._add("undo = Undo()" if self._saves else "undo = None")
        self._add(f"n = {self._named('bind0', self._path[0].guard.bind)}((), x)")
        for index, key in enumerate(self._keys):
            self._add_segment(index)
            self._add_way_on(index, key)
        last = self._named("last", self._path[-1].run)
        self._add(f"given = {self._gather(self._path[-1].inputs)}")
        self._drop(range(len(self._values)))
        self._add(f"return {last}(given, t, call)")
        return "".join(["def run(x, t, call, held):\n", *(f"    {line}\n" for line in self._lines if line)])

    def _add(self, line: str) -> None:
        self._lines.append(line)

    def _add_segment(self, index: int) -> None:
        program = self._path[index]
        assert program.operator is not None
        self._add(f"given = {self._gather(program.inputs)}")
        if any(program.written):
            inputs, tensors = program.written
            written = [self._name(program.inputs[each]) for each in inputs] + [f"t[{i}]" for i in tensors]
            self._add(f"undo.save({tuple_text(written)})")
        outputs = [f"v{len(self._values) + offset}" for offset in range(len(program.positions))]
        code = program.code.run if program.packed is None else program.outputs
        run = self._named(f"segment{index}", code)
        self._drop(each for each in program.dropped if each < len(self._values))
        self._add(f"{tuple_text(outputs)} = {run}(given, t)" if outputs else f"{run}(given, t)")
        self._values += outputs
        self._drop(program.dropped)
        operator = program.operator
        read = "()"
        if operator.reads:
            read = f"{self._named(f'tensors_of_operator{index}', operator.tensors)}()"
        run = self._named(f"operator{index}", operator.code.run)
        self._add(f"a{index} = {run}({self._gather(operator.inputs)}, {read})[0]")

    def _drop(self, values: Iterable[int]) -> None:
        """Nothing needs these any more; who runs the code next is given the only reference."""
        names = [(index, self._values[index]) for index in values if self._values[index] != "None"]
        if names:
            self._add(f"del {', '.join(name for _, name in names)}")
        for index, _ in names:
            self._values[index] = "None"

    def _add_way_on(self, index: int, key: Any) -> None:
        spec, kinds = key
        answers = "".join(f", a{each}" for each in range(index + 1))
        leave = f"return left({index}, [{', '.join(self._values)}], n, undo{answers})"
        first = len(self._values)
        leaves = [f"v{first + offset}" for offset in range(len(kinds))]
        pattern = self._take_apart(spec, f"a{index}", iter(leaves), leave)
        self._add(f"{pattern} = a{index}")
        tests = [self._test(name, kind) for name, kind in zip(leaves, kinds, strict=True)]
        if tests:
            self._add(f"if not ({' and '.join(tests)}): {leave}")
        following = self._path[index + 1]
        bind = self._named(f"bind{index + 1}", following.guard.bind)
        self._add(f"m = {bind}(n, {tuple_text(leaves)})")
        self._add(f"if m is None: {leave}")
        if following.rests_on_model:
            same = self._named(f"same{index + 1}", following.tensors_of_same)
            tensors = self._named(f"tensors{index + 1}", following.tensors)
            self._add(f"t = {same}() if held else {tensors}()")
            self._add(f"if t is None: {leave}")
        else:
            self._add("t = ()")
        self._add("n = m")
        self._values += leaves

    def _take_apart(self, spec: Spec, name: str, leaves: Any, leave: str) -> str:
        """What an answer of the structure *spec* is unpacked into, once it is known to have it."""
        if spec == ("leaf",):
            return str(next(leaves))
        kind = spec[0].__name__
        self._add(f"if not (isinstance({name}, {kind}) and len({name}) == {len(spec[1])}): {leave}")
        parts = [
            self._take_apart(part, f"{name}[{index}]", leaves, leave) for index, part in enumerate(spec[1])
        ]
        return tuple_text(parts)

    def _test(self, name: str, kind: Any) -> str:
        if isinstance(kind, type):
            return f"type({name}) is {kind.__name__}"
        known = self._named(f"kind{len(self.scope)}", kind)
        return f"type({name}) is {known}[-1] and describe({name}) == {known}"

    def _named(self, name: str, value: Any) -> str:
        self.scope[name] = value
        return name

    def _gather(self, inputs: Inputs) -> str:
        return f"[{', '.join(self._name(each) for each in inputs)}]"

    def _name(self, given: tuple[bool, int]) -> str:
        is_number, index = given
        return f"n[{index}]" if is_number else self._values[index]


def _has_effects(program: Program) -> bool:
    """Whether a segment writes to anything that was there before it, or may draw random numbers."""
    nodes = [node for module in program.modules() for node in module.graph.nodes]
    calls = [node for node in nodes if node.op not in _NO_CALLS and node.target is not set_grad_enabled]
    called = [node.args[1] if node.target is run_in_region else node.target for node in calls]
    return any(program.written) or any(map(may_draw, called))
