"""A jinja2 sandbox with bounds: a template that loops, recurses or grows without end is stopped with an error.

Owns the limits of one rendering (`Budget`) and where they are checked: loops, calls, filters, operators, captures and
the output. Never limits what an ordinary template does.
Hazard: the clock is looked at between operations, never inside one built-in operation of Python.
"""

import re
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 64 * 1024 * 1024  # characters of any text a template makes
MAX_ITEMS = 1_000_000  # items of any list a template makes with an operator
MAX_WIDTH = 100_000  # padding, indents, numbers of slices
MAX_BITS = 4096  # size of an integer
MAX_SECONDS = 10.0

# A width of six digits or more, or one taken from the arguments, in a % format and in a {} format.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{6}|\d*\.(\*|\d{6}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{6}|\{)")
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_PADDING_FILTERS = frozenset(("batch", "center", "indent", "slice", "tojson", "wordwrap"))


class Budget:
    """What one rendering may use."""

    def __init__(self, max_s: float = MAX_SECONDS) -> None:
        self._max_s = max_s
        self._end = time.monotonic() + max_s

    def tick(self) -> bool:
        """Raises SecurityError when the time is used up; True, so that it can stand in a condition."""
        if time.monotonic() > self._end:
            raise SecurityError(f"it ran for more than {self._max_s:g} s")
        return True

    def text(self, n_characters: int) -> None:
        """Raises SecurityError for a text that is too long."""
        if n_characters > MAX_TEXT:
            raise SecurityError(f"it makes a text of more than {MAX_TEXT} characters")

    def width(self, values: Iterable[object]) -> None:
        """Raises SecurityError when a padding or indent among `values` is too wide."""
        if any(isinstance(v, int) and abs(v) > MAX_WIDTH for v in values):
            raise SecurityError(f"it asks for a padding of more than {MAX_WIDTH} characters")

    def join(self, parts: Iterable[Any]) -> str:
        """The texts as one; raises SecurityError when it is too long."""
        kept, n_characters = [], 0
        for part in parts:
            text = str(part)
            n_characters += len(text)
            self.text(n_characters)
            self.tick()
            kept.append(text)
        return "".join(kept)

    def product(self, left: Any, right: Any) -> None:
        """Raises SecurityError when left * right would be too big."""
        if isinstance(left, int) and isinstance(right, int):
            self._bits(left.bit_length() + right.bit_length())
            return
        sequence, n = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, str | bytes) and isinstance(n, int):
            self.text(len(sequence) * n)
        elif isinstance(sequence, list | tuple) and isinstance(n, int):
            self._items(len(sequence) * n)

    def power(self, left: Any, right: Any) -> None:
        """Raises SecurityError when left ** right would be too big."""
        if isinstance(left, int) and isinstance(right, int):
            self._bits(left.bit_length() * abs(right))

    def sum(self, left: Any, right: Any) -> None:
        """Raises SecurityError when left + right would be too long."""
        if isinstance(left, str) and isinstance(right, str):
            self.text(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self._items(len(left) + len(right))

    def format(self, text: Any, wide: re.Pattern[str] = _WIDE_PERCENT) -> None:
        """Raises SecurityError when a format pads very far."""
        if isinstance(text, str) and wide.search(text):
            raise SecurityError("it uses a format with a very large or variable width")

    def replace(self, text: Any, arguments: tuple[Any, ...]) -> None:
        """Raises SecurityError when text.replace(*arguments) would be too long."""
        if len(arguments) >= 2 and all(isinstance(a, str) for a in (text, *arguments[:2])):
            self.text(len(text) + text.count(arguments[0]) * len(arguments[1]))

    def method(self, text: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raises SecurityError when this method of a text would make something too big."""
        if name in _PADDING:
            self.width((*arguments, *keywords.values()))
        if name in ("format", "format_map"):
            self.format(text, _WIDE_BRACES)
        elif name == "replace":
            self.replace(text, arguments)
        elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
            self.text(sum(len(text) + len(part) for part in arguments[0] if isinstance(part, str)))

    def _bits(self, n_bits: int) -> None:
        if n_bits > MAX_BITS:
            raise SecurityError(f"it makes a number of more than {MAX_BITS} bits")

    def _items(self, n_items: int) -> None:
        if n_items > MAX_ITEMS:
            raise SecurityError(f"it makes a list of more than {MAX_ITEMS} items")


class _Checks(NodeTransformer):
    """Puts a look at the clock into every loop, and makes `~` go through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        node.body.insert(0, nodes.ExprStmt(self._call("tick", []), lineno=line))
        if node.test is not None:
            node.test = nodes.And(self._call("tick", []), node.test, lineno=line)
        return node.set_lineno(line)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join_texts", node.nodes).set_lineno(node.lineno, override=True)

    @staticmethod
    def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering, or (with a budget of its own) of one compilation."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, budget: Budget, **options: Any) -> None:
        super().__init__(**options)
        self.budget = budget
        self.tick = budget.tick
        self.filters.update({name: self._bounded(name, function) for name, function in self.filters.items()})
        del self.globals["lipsum"]  # writes any number of paragraphs

    def checked(self, source: str) -> nodes.Template:
        """The parsed template with the checks in it, for `compile`."""
        tree: nodes.Template = _Checks().visit(self.parse(source))
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """Called by compiled templates for the output and for every captured block."""
        return self.budget.join(parts)

    def join_texts(self, *parts: Any) -> str:
        """What `a ~ b` does."""
        return self.budget.join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, after a look at how big its result would be."""
        self.budget.tick()
        if operator == "*":
            self.budget.product(left, right)
        elif operator == "**":
            self.budget.power(left, right)
        elif operator == "+":
            self.budget.sum(left, right)
        elif operator == "%":
            self.budget.format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, after a look at the clock and, for methods of texts, at how big the result would be."""
        __self.budget.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            __self.budget.method(text, method.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        budget = self.budget
        n_before = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget.tick()
            value, rest = args[n_before], args[n_before + 1 :]
            if name in _PADDING_FILTERS:
                budget.width((*rest, *kwargs.values()))
            if name == "format":
                budget.format(value)
            elif name == "replace":
                budget.replace(value, rest)
            elif name == "join" and isinstance(value, list | tuple):
                budget.text(sum(len(part) for part in value if isinstance(part, str)))
            return function(*args, **kwargs)

        return bounded


def line_of(error: BaseException, filename: str) -> int | None:
    """The template's own line where the error happened, for code compiled with this file name."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == filename:
            line = step.tb_lineno
        step = step.tb_next
    return line
