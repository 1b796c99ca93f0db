"""The sources of a checkout in numbers: length of functions and files, comments, docstrings, `Any`."""

import ast
import io
import re
import tokenize
from pathlib import Path

import numpy as np

LONG = 350  # lines of a file
CALLS = ("shard_train_step", "shard_eval_step", "estimate")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def numbers(checkout: Path) -> dict[str, float]:
    sources = [path.read_text() for path in sorted((checkout / "jzero").rglob("*.py"))]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    lengths = [length(node) for node in nodes if isinstance(node, Function)]
    num_docstring_lines = sum(len(docstring(node)) for node in nodes)
    files = [len(source.splitlines()) for source in sources]
    return {
        "files": len(files),
        f"files over {LONG} lines": sum(lines > LONG for lines in files),
        "lines": sum(files),
        "lines of code": sum(map(code, sources)),
        "comments per 100 lines": round(100 * sum(map(comments, sources)) / sum(files), 1),
        "docstrings, % of lines": round(100 * num_docstring_lines / sum(files), 1),
        "functions": len(lengths),
        "lines of a function, median": float(np.median(lengths)),
        "lines of a function, p90": float(np.percentile(lengths, 90)),
        "lines of a function, most": max(lengths),
        "Any, as a word": sum(len(re.findall(r"\bAny\b", source)) for source in sources),
        **{f"parameters of {name}": parameters(nodes, name) for name in CALLS},
        "words of pages": sum(
            len(path.read_text().split())
            for pattern in ("*.md", "docs/**/*.md")
            for path in checkout.glob(pattern)
        ),
    }


def parameters(nodes: list[ast.AST], name: str) -> int:
    """Of a function, the overloads that check types left out."""
    found = [node for node in nodes if isinstance(node, Function) and node.name == name]
    return max((len(f.args.args) + len(f.args.kwonlyargs) for f in found), default=0)


def code(source: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    prose = {line for node in ast.walk(ast.parse(source)) for line in docstring(node)}
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(text) and text[0] != "#" and number not in prose for number, text in lines)


def comments(source: str) -> int:
    """Lines that are a comment or end in one; what is said to a tool (`# fmt: skip`) is none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return sum(not re.match(r"# ?(fmt|noqa|type|isort|pragma)\b", text) for text in found)


def docstring(node: ast.AST) -> range:
    """The lines of its docstring."""
    if not isinstance(node, ast.Module | ast.ClassDef | Function) or not ast.get_docstring(node):
        return range(0)
    return lines_of(node.body[0])


def length(function: Function) -> int:
    """Lines of it, without its docstring and decorators; those of functions within count."""
    return len(lines_of(function)) - len(docstring(function))


def lines_of(node: ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)
