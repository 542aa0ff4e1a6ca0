"""`--where`: a small, safe expression language over the columns of a run table."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def row_filter(where: str | None) -> Callable[[Mapping[str, object]], bool]:
    """Compiles `where`: column names, constants, comparisons, in, and, or, not. Nothing else is evaluated."""
    if where is None:
        return lambda row: True
    try:
        tree = ast.parse(where, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"--where {where!r} is not an expression: {error.msg}") from None
    return lambda row: bool(_evaluate(tree, row, where))


def _evaluate(node: ast.expr, row: Mapping[str, object], where: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in row:
                raise ValueError(f"--where {where!r}: no column {name!r}; columns are {', '.join(row)}")
            return row[name]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_evaluate(item, row, where) for item in items]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, row, where)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, row, where)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_evaluate(value, row, where) for value in values)
        case ast.BoolOp(values=values):
            return any(_evaluate(value, row, where) for value in values)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _chain(_evaluate(left, row, where), ops, [_evaluate(c, row, where) for c in comparators], where)
    raise ValueError(f"--where {where!r}: only columns, constants, comparisons, in, and, or, not are understood")


def _chain(left: Any, ops: list[ast.cmpop], values: list[Any], where: str) -> bool:
    for op, right in zip(ops, values, strict=True):
        compare = _COMPARE.get(type(op))
        if compare is None:
            raise ValueError(f"--where {where!r}: this comparison is not understood")
        try:
            if not compare(left, right):
                return False
        except TypeError:
            return False  # a missing value is neither above nor below anything
        left = right
    return True
