"""Mutants of a source file: the same file with one operator, comparison, constant, call or statement changed."""

from __future__ import annotations

import ast
import copy
import hashlib
from dataclasses import dataclass

OPPOSITES = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
OPERATORS = OPPOSITES | {after: before for before, after in OPPOSITES.items()}
OPERATORS |= {
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
}
EXTREMES = {
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "clamp_min": "clamp_max",
    "any": "all",
    "isposinf": "isneginf",
    "fmin": "fmax",
    "argmin": "argmax",
    "cummin": "cummax",
    "ceil": "floor",
    "zeros_like": "ones_like",
    "zeros": "ones",
    "sin": "cos",
    "mul_": "div_",
}
SWAPS = EXTREMES | {after: before for before, after in EXTREMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed place of a file.

    Args:
        path: the file, relative to the repository.
        number: the change among those of the file.
        line: the line of the change, counted from 1.
        function: the qualified name of the function that holds it; empty at module level.
        change: what stood there and what stands there now.
        key: a digest of function, change and the statement around it. It stays the same when a function moves to
            another file, so that a seed draws the same mutants before and after a move.
    """

    path: str
    number: int
    line: int
    function: str
    change: str
    key: str


def mutants(path, source):
    """Returns every mutant of a file. Texts, annotations, imports and errors stay as they are."""
    found = []
    seen = {}
    for number, (function, statement, node, changed) in enumerate(
        _changes(ast.parse(source))
    ):
        before, after = ast.unparse(node), ast.unparse(changed)
        text = f"{function}|{ast.unparse(statement)[:200]}|{before} -> {after}"
        seen[text] = seen.get(text, 0) + 1
        key = hashlib.sha256(f"{text}|{seen[text]}".encode()).hexdigest()
        change = (
            f"{_short(before)} -> {_short(after) if after != 'pass' else 'deleted'}"
        )
        line = node.lineno  # type: ignore[attr-defined]
        found.append(
            Mutant(
                path=path,
                number=number,
                line=line,
                function=function,
                change=change,
                key=key,
            )
        )
    return found


def mutated(source, number):
    """Returns a file with one of its changes made."""
    tree = ast.parse(source)
    _, _, node, changed = next(
        change for i, change in enumerate(_changes(tree)) if i == number
    )
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, changed)
            elif isinstance(value, list):
                setattr(
                    parent, field, [changed if item is node else item for item in value]
                )
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(all_mutants, seed, count):
    """Returns `count` mutants that a seed draws: those whose digest with the seed is smallest."""
    drawn = sorted(
        all_mutants, key=lambda m: hashlib.sha256(f"{seed}|{m.key}".encode()).digest()
    )
    return drawn[:count]


def _short(text):
    line = " ".join(text.split())
    return line if len(line) <= 70 else line[:67] + "..."


def _changes(tree):
    """Function, statement, node and the changed node, for every place of a file."""
    for function, statement in _statements(tree, ""):
        for node in _expressions(statement):
            for changed in _variants(node):
                if ast.unparse(changed) != ast.unparse(node):
                    yield function, statement, node, changed
        if function and _can_go(statement):
            yield (
                function,
                statement,
                statement,
                ast.copy_location(ast.Pass(), statement),
            )


def _statements(node, function):
    """Every statement with the function that holds it, and the arguments of every function, for their defaults."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
            if isinstance(child, ast.FunctionDef):
                yield name, child.args
            yield from _statements(child, name)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child, function)
        elif (
            isinstance(child, ast.stmt)
            and not isinstance(child, ast.Raise | ast.Assert)
            and not _types_only(child)
        ):
            yield function, child
            yield from _statements(child, function)


def _types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _expressions(node):
    """The expressions of a statement, not those of the statements inside of it."""
    kept = (
        ast.stmt
        | ast.JoinedStr
        | ast.ExceptHandler
        | ast.match_case
        | ast.pattern
        | ast.arg
    )
    for field, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if (
                isinstance(item, ast.AST)
                and not isinstance(item, kept)
                and field != "annotation"
            ):
                yield item
                yield from _expressions(item)


def _variants(node):
    if (
        isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign)
        and type(node.op) in OPERATORS
        and not _of_texts(node)
    ):
        yield _with(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield _with(node, ops=[OPERATORS[type(node.ops[0])](), *node.ops[1:]])
        if type(node.ops[0]) in (ast.Lt, ast.LtE, ast.Gt, ast.GtE):
            flipped = {
                ast.Lt: ast.GtE,
                ast.LtE: ast.Gt,
                ast.Gt: ast.LtE,
                ast.GtE: ast.Lt,
            }[type(node.ops[0])]()
            yield _with(node, ops=[flipped, *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield ast.copy_location(
            ast.Constant(
                not node.value if type(node.value) is bool else node.value + 1
            ),
            node,
        )
    if isinstance(node, ast.Name) and node.id in SWAPS:
        yield _with(node, id=SWAPS[node.id])
    if isinstance(node, ast.Attribute) and node.attr in SWAPS:
        yield _with(node, attr=SWAPS[node.attr])
    if (
        isinstance(node, ast.Call)
        and len(node.args) >= 2
        and not isinstance(node.args[1], ast.Starred)
    ):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)


def _of_texts(node):
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(
        isinstance(s, ast.JoinedStr)
        or (isinstance(s, ast.Constant) and type(s.value) is str)
        for s in sides
    )


def _with(node, **fields):
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return copy.deepcopy(changed)


def _can_go(statement):
    """Whether a statement does something that can be left out without a name going missing."""
    if isinstance(statement, ast.AugAssign):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.Assign) and not any(
        isinstance(t, ast.Name | ast.Tuple) for t in statement.targets
    )
