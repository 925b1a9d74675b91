"""The two programs that judge a submission with tests in Python: its own process, and the process of the tests.

Each runs in a sandbox of its own, as this file, with nothing but the standard library. What passes between them are
plain values as JSON, over two pipes:

    tests:  {"get": name} | {"attribute": [object, name]} | {"call": [object, arguments, keywords]}  -->
    submission:                       {"value": value} | {"error": [class of the exception, text]}   <--

To the tests the submission's functions are proxies. What a proxy returns is rebuilt there from numbers, texts, lists
and the like; any other object stays where it is and is known by its number, can be called and asked for attributes,
and is equal to nothing. So no code of the submission runs where a result is compared.

Invariant: the verdict is written by the process of the tests, into a pipe that no other process of a sandbox has.
"""

from __future__ import annotations

import json
import os
import sys

# What takes long to import is imported where it is used: a process judges one program, and mostly it starts.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    import types
    from collections.abc import Callable, Iterator
    from typing import IO, Any

MAX_LINE = 1 << 20
"""Longest message, bytes."""
EXACT_INT = 2**53
SUBMISSION = "solution"
"""Name of the submission as a module: tests may import it."""
TESTS = "tests"
NOT_COUNTED = {
    "Import", "ImportFrom", "FunctionDef", "AsyncFunctionDef", "ClassDef", "Assign", "AnnAssign", "AugAssign", "Pass",
    "Delete",
}  # fmt: skip
"""Statements that prepare tests, and are none."""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return a value as JSON; `keep` gives numbers to objects that are no plain values, or raises."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < EXACT_INT else ["i", hex(value)]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)):
        if isinstance(value, kind):
            return [tag, [encode(one, keep) for one in value]]
    if isinstance(value, dict):
        return ["d", [[encode(k, keep), encode(v, keep)] for k, v in value.items()]]
    return ["o", keep(value)]


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """Return the value that was encoded: of Python's own classes, and what `kept` gives for the number of an object."""
    if not isinstance(data, list):
        return data
    tag, content = data[0], data[1]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(one, kept) for one in content)
    if tag == "d":
        return {decode(k, kept): decode(v, kept) for k, v in content}
    if tag == "i":
        return int(content, 16)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "c":
        return complex(float(content), float(data[2]))
    if tag == "o":
        return kept(int(content))
    raise ValueError(f"a value of the unknown kind {tag!r:.20}")


_SEQUENCES: dict[str, Callable[[Iterator[Any]], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}


def _send(writer: IO[bytes], message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    writer.flush()


# ---------------------------------------------------------------- the submission's process


def serve(reader: IO[bytes], writer: IO[bytes]) -> None:
    """Load the submission, and answer until the other side is gone."""
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    module = type(sys)(SUBMISSION)
    sys.modules[SUBMISSION] = module
    failed: BaseException | None = None
    try:
        with open(f"{SUBMISSION}.py", encoding="utf-8") as file:
            exec(compile(file.read(), f"{SUBMISSION}.py", "exec"), module.__dict__)
    except BaseException as error:
        failed = error
    for line in reader:
        try:
            if failed is not None:
                raise failed
            answer = {"value": encode(_answer(json.loads(line), module, objects), keep)}
            text = json.dumps(answer)
        except BaseException as error:
            text = json.dumps({"error": [type(error).__name__, str(error)[:500]]})
        writer.write(text.encode() + b"\n")
        writer.flush()


def _answer(asked: dict[str, Any], module: types.ModuleType, objects: list[Any]) -> Any:
    if "get" in asked:
        if asked["get"] not in module.__dict__:
            raise NameError(f"name {asked['get']!r} is not defined")
        return module.__dict__[asked["get"]]
    if "attribute" in asked:
        number, name = asked["attribute"]
        return getattr(objects[number], name)
    number, arguments, keywords = asked["call"]
    return objects[number](*decode(arguments, objects.__getitem__), **decode(keywords, objects.__getitem__))


# ---------------------------------------------------------------- the process of the tests


class BrokenTestsError(Exception):
    """The tests ask for what cannot be had, whatever the submission: none of its fault."""


class SubmissionError(Exception):
    """What the submission did wrong: raised an exception that Python has no class for, or ended."""


class Peer:
    """The submission, as its tests see it."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes], on_touch: Callable[[], None]) -> None:
        """`on_touch` is called when the submission is first asked for more than a name."""
        self._reader, self._writer, self._on_touch = reader, writer, on_touch
        self._ended = ""
        self.touched = False
        """Whether what the tests do may depend on the submission."""

    def get(self, name: str) -> Any:
        """Return what the submission defines as `name`. Raises as `ask` does."""
        found: Any = None
        try:
            found = self.ask({"get": name}, touches=False)
        finally:
            if not isinstance(found, Proxy):
                self.touch()
        return found

    def touch(self) -> None:
        """Remember that the tests have seen something of the submission."""
        if not self.touched:
            self.touched = True
            self._on_touch()

    def ask(self, message: dict[str, Any], touches: bool = True) -> Any:
        """Return the submission's answer. Raises what it raised, or SubmissionError."""
        if touches:
            self.touch()
        if self._ended:
            raise SubmissionError(self._ended)
        try:
            _send(self._writer, message)
            line = self._reader.readline(MAX_LINE)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self._ended = f"an answer is longer than {MAX_LINE} bytes" if line else "its process ended"
            raise SubmissionError(self._ended)
        try:
            answer = json.loads(line)
            if "error" not in answer:
                return decode(answer["value"], lambda number: Proxy(self, number))
            kind, text = (str(part) for part in answer["error"])
        # It may have written anything.
        except Exception as error:
            raise SubmissionError(f"its answer is no value: {type(error).__name__}") from None
        raise _exception(kind, text)

    def arguments(self, value: Any) -> Any:
        """Return arguments of a call as JSON. Raises BrokenTestsError for what is no plain value."""
        return encode(value, _number)


class Proxy:
    """An object of the submission: can be called and asked for attributes; is not compared, and has no truth."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        """Stand for the object that `peer` knows by this number."""
        self._peer, self._number = peer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, where it is."""
        peer = self._peer
        return peer.ask({"call": [self._number, peer.arguments(args), peer.arguments(kwargs)]})

    def __getattr__(self, name: str) -> Any:
        """Ask it for an attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask({"attribute": [self._number, name]})

    def __eq__(self, other: object) -> bool:
        """Refuse: what is equal would be for the submission to say."""
        raise SubmissionError("it returned an object of its own, which is not compared")

    def __ne__(self, other: object) -> bool:
        """Refuse, as `==` does."""
        raise SubmissionError("it returned an object of its own, which is not compared")

    def __bool__(self) -> bool:
        """Refuse, as `==` does."""
        raise SubmissionError("it returned an object of its own, which is neither true nor false")

    def __hash__(self) -> int:
        """Return its number."""
        return self._number


def _number(value: Any) -> int:
    if isinstance(value, Proxy):
        return value._number
    raise BrokenTestsError(
        f"the tests give the submission a {type(value).__name__}: arguments are plain values, such as numbers, texts, "
        "lists, tuples, sets and dicts"
    )


def _exception(kind: str, text: str) -> Exception:
    """Return the exception that the tests see: Python's own of that name, as far as none of them ends a loop."""
    import builtins

    known = getattr(builtins, kind, None)
    ends_loops = (StopIteration, StopAsyncIteration)
    if not isinstance(known, type) or not issubclass(known, Exception) or issubclass(known, ends_loops):
        return SubmissionError(f"{kind}: {text}")
    try:
        return known(text)
    except TypeError:  # it wants more than a text
        return SubmissionError(f"{kind}: {text}")


class _Module(type(sys)):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["__peer__"].get(name)


def wanted_names(text: str) -> tuple[set[str], set[str]]:
    """Return the names that tests take from the submission, and modules of Python that they do not import themselves.

    A name that the tests define, or that Python has built in, is never the submission's. Raises SyntaxError.
    """
    import ast
    import builtins
    import symtable

    top = symtable.symtable(text, TESTS, "exec")
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    inner = list(top.get_children())
    while inner:
        table = inner.pop()
        inner += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        own |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    dotted = {
        node.value.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    free = {name for name in used - own if not hasattr(builtins, name) and not name.startswith("__")}
    modules = {name for name in free & dotted if name in sys.stdlib_module_names}
    return free - modules, modules


def counted(text: str, entry_point: str | None) -> tuple[ast.Module, list[ast.stmt], list[str]]:
    """Return the parsed tests, and the statements and names of functions that count. Raises BrokenTestsError."""
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise BrokenTestsError(f"the tests are no Python: {error}") from None
    statements = [
        node
        for node in tree.body
        if type(node).__name__ not in NOT_COUNTED
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
    ]
    functions = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name.startswith("test") or (node.name == "check" and entry_point and not statements))
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            raise BrokenTestsError(
                f"the tests have the class {node.name} of unittest: use functions test_..."
            )
    if not statements and not functions:
        raise BrokenTestsError(f"the tests have no assert and no function test_...: {text!r:.120}")
    return tree, statements, functions


def examine(text: str, entry_point: str | None, peer: Peer, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run the tests, and tell how each ended. Raises BrokenTestsError."""
    import ast
    import importlib
    from functools import partial

    tree, statements, functions = counted(text, entry_point)
    tell({"tests": len(statements) + len(functions)})
    space: dict[str, Any] = {"__name__": TESTS}
    names, modules = wanted_names(text)
    wanted = sorted(names)
    for name in modules:
        space[name] = importlib.import_module(name)
    module = _Module(SUBMISSION)
    module.__dict__["__peer__"] = peer
    sys.modules[SUBMISSION] = module

    def fetch(name: str) -> None:
        space[name] = peer.get(name)

    def call(name: str, given: list[str]) -> None:
        space[name](*map(peer.get, given))

    error = None
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            # After imports, whose failure says nothing of the submission.
            while wanted and not error:
                error = _raised(partial(fetch, wanted.pop(0)), peer)
        code = compile(ast.Module([node], []), TESTS, "exec")
        found = error or _raised(partial(exec, code, space), peer)
        if node in statements:
            tell({"passed": found is None, "words": f"line {node.lineno}: {found}" if found else ""})
        else:
            error = found  # what prepares the tests failed: none of those that follow can pass
    for name in functions:
        given = [entry_point] if name == "check" and entry_point else []
        found = error or _raised(partial(call, name, given), peer)
        tell({"passed": found is None, "words": f"{name}: {found}" if found else ""})


def _raised(call: Callable[[], Any], peer: Peer) -> str | None:
    """Return how a call failed, None if it did not. Raises BrokenTestsError if it was not for the submission."""
    try:
        call()
    except BrokenTestsError:
        raise
    # Tests are foreign code, which fails by any exception, SystemExit among them.
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:300]
        if not peer.touched:
            raise BrokenTestsError(f"the tests fail before they ask for the submission: {text}") from error
        return text
    return None


def main(role: str, read_fd: int, write_fd: int, entry_point: str | None = None) -> None:
    """Be one of the two processes; standard output of the tests' is for verdicts alone."""
    reader, writer = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
    if role == "submission":
        serve(reader, writer)
        return
    verdicts = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(f"{TESTS}.py", encoding="utf-8") as file:
        text = file.read()
    try:
        peer = Peer(reader, writer, lambda: _send(verdicts, {"touched": True}))
        examine(text, entry_point, peer, lambda verdict: _send(verdicts, verdict))
        _send(verdicts, {"end": True})
    except BrokenTestsError as error:
        _send(verdicts, {"broken": str(error)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
