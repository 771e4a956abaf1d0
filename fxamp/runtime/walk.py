"""One call of a model that reads values: from segment to segment, by what its operators give.

A program that is not the last of its call ends with an operator, and its branches say how calls went on from
its results.  Where none fits, the model's Python is recorded once more from the top: through the segments
that have run already it is told the results that they had, and from there on each new segment is run as soon
as it is recorded.  So no operator is ever run twice in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxamp.capture.mirror import ChangedModelError
from fxamp.capture.segments import Captured
from fxamp.capture.structure import Spec, flatten_results
from fxamp.capture.symbols import Sizes
from fxamp.errors import InvariantError
from fxamp.runtime.likeness import describe
from fxamp.runtime.program import Branch, Inputs, Program
from fxamp.runtime.route import Left
from fxamp.runtime.undo import Undo

__all__ = ["Walk"]


class Walk:
    """The state of one call.

    Args:
        leaves: The tensors of the call.
        call: ``(args, kwargs)``.
        build: Called as ``build(segment, sizes, alone=...)``: makes the program of a segment.
        record: Records the call anew, with this walk beside it, with these sizes symbolic; gives the last
            segment.

    Attributes:
        path: The programs that the call has gone through.
        following: Whether the call has begun with programs that were there already.
        explored: Whether anything was recorded for it.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        call: Any,
        build: Callable[..., Program],
        record: Callable[[Walk, Sizes], Captured],
    ) -> None:
        self._leaves, self._call = leaves, call
        self._build, self._record = build, record
        self.path: list[Program] = []
        self._values: list[Any] = list(leaves)
        self._numbers: tuple[Any, ...] = ()
        self._answers: list[tuple[Spec, list[Any]]] = []
        self._undo = Undo()
        self._started = False
        self._sizes = Sizes.FIXED
        self._position = 0
        self.following = self.explored = False
        self._positions: list[tuple[tuple[int, str], ...]] = []

    @property
    def begun(self) -> bool:
        """Whether anything has been run for real."""
        return bool(self._answers)

    # --- running ------------------------------------------------------------------------------------

    def run(self, program: Program, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the call, which begins with *program*."""
        self._enter(program)
        return self._follow((program, tensors))

    def go_on(self, left: Left) -> Any:
        """The result of the call, which has left a route."""
        self.path, self._numbers = list(left.path), left.numbers
        self._positions = [program.positions for program in left.path]
        self._answers = [flatten_results(answer) for answer in left.answers]
        self._values = left.values + self._answers[-1][1]
        self._undo = left.undo or self._undo
        self._started = True
        return self._follow(self._branch(self.path[-1]))

    def _follow(self, found: tuple[Program, Sequence[torch.Tensor]] | None) -> Any:
        while found is not None:
            program, tensors = found
            if program.operator is None:
                return program.run(self._gather(program.inputs), tensors, self._call)
            self._positions.append(program.positions)
            self._execute(program, tensors)
            found = self._branch(program)
        return self.finish(self.explore())

    def finish(self, program: Program) -> Any:
        """The result of the call, of which *program* is the last segment and all others have run."""
        return program.run(self._gather(program.inputs), _tensors_of(program), self._call)

    def explore(self, sizes: Sizes = Sizes.FIXED) -> Program:
        """Record the call and run all of it but the last segment, which is given back.

        Args:
            sizes: Which are symbolic; where the call has begun, those of its first program.
        """
        self.following, self.explored = bool(self.path), True
        self._sizes = self.path[0].sizes if self.path else sizes
        captured = self._record(self, self._sizes)
        program = self._attach(captured)
        if self.path:
            self._enter(program)
        return program

    def undo(self) -> None:
        """Take back what the call has done so far."""
        if self._started:
            self._undo.restore()

    def _enter(self, program: Program) -> None:
        numbers = program.guard.bind(self._numbers, self._latest())
        if numbers is None:
            raise InvariantError(f"a program does not serve its own call: {program.guard.conditions}")
        self._numbers = numbers
        self.path.append(program)

    def _latest(self) -> Sequence[Any]:
        """The values that the segment behind the end of the path begins with."""
        return self._answers[len(self.path) - 1][1] if self.path else self._leaves

    def _execute(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        assert program.operator is not None
        values = self._gather(program.inputs)
        self._started = True  # even if it does not come to its end
        for source, indices in zip((values, tensors), program.written, strict=True):
            self._undo.save(source[index] for index in indices)
        first = len(self._values)
        for index in program.dropped:
            if index < first:
                self._values[index] = None
        self._values += program.outputs(values, tensors)
        for index in program.dropped:
            self._values[index] = None
        spec, results = flatten_results(program.operator.run(self._gather(program.operator.inputs)))
        self._values += results
        self._answers.append((spec, results))

    def _gather(self, inputs: Inputs) -> list[Any]:
        return [self._numbers[index] if is_number else self._values[index] for is_number, index in inputs]

    def _branch(self, program: Program) -> tuple[Program, Sequence[torch.Tensor]] | None:
        key = self._key()
        for branch in program.branches:
            if branch.key != key:
                continue
            numbers = branch.program.guard.bind(self._numbers, self._answers[-1][1])
            tensors = None if numbers is None else branch.program.tensors()
            if numbers is not None and tensors is not None:
                self._numbers = numbers
                self.path.append(branch.program)
                return branch.program, tensors
        return None

    def _key(self) -> Any:
        spec, results = self._answers[len(self.path) - 1]
        return spec, tuple([describe(r) if isinstance(r, torch.Tensor) else type(r) for r in results])

    # --- beside a recording -------------------------------------------------------------------------

    def begin(self, sizes: Sizes) -> None:
        """A recording starts; one with other sizes than the path was made with makes a new path."""
        self._position, self._sizes = 0, sizes
        if not self.following:
            self.path, self._numbers = [], ()

    def expected(self) -> tuple[tuple[int, str], ...] | None:
        """The outputs of the next segment, where it has run already."""
        return self._positions[self._position] if self._position < len(self._positions) else None

    def advance(self, captured: Captured) -> tuple[Spec, Sequence[Any]]:
        """Give the results of the operator at the end of *captured*, which is run unless it has been."""
        position = self._position
        self._position += 1
        if self.following and position < len(self.path):
            return self._answers[position]
        program = self._attach(captured)
        self._enter(program)
        if position == len(self._answers):
            self._positions.append(program.positions)
            self._execute(program, _tensors_of(program))
        return self._answers[position]

    def _attach(self, captured: Captured) -> Program:
        alone = captured.operator is None and not self.path
        program = self._build(captured, self._sizes, alone=alone)
        if self.path:
            self.path[-1].branches.append(Branch(self._key(), program))
        return program


def _tensors_of(program: Program) -> Sequence[torch.Tensor]:
    """The tensors that a fresh *program* reads."""
    tensors = program.tensors()
    if tensors is None:
        raise ChangedModelError(f"the model was changed while it was captured: {program.difference()}")
    return tensors
