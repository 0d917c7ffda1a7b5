"""Parser of the documentation's pages for tests: headings, links, code blocks, tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "lightning_pardist"

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*([\w+-]*)")
_MARK = re.compile(r"^\s*<!-- test: (.+?) -->\s*$")
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_IDENTIFIER = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Block:
    """Fenced code block.

    Attributes:
        page: File that contains it.
        line: Number of its first line of content.
        language: Language tag of the fence.
        mark: Words of the preceding ``<!-- test: ... -->``.
        text: Its content, dedented.
    """

    page: Path
    line: int
    language: str
    mark: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        """Return the id of a test of this block."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Page:
    """One Markdown file, with fenced blocks separated from prose."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Prose without code in backticks."""
        return _CODE.sub("", "\n".join(self.prose))

    @property
    def links(self) -> list[str]:
        """Targets of all links and images."""
        return _LINK.findall(self.text)

    @property
    def anchors(self) -> set[str]:
        """Valid anchors in this page: headings, and objects of the reference."""
        found: set[str] = set()
        for line in self.prose:
            if match := _HEADING.match(line):
                anchor = slug(match.group(2))
                count = sum(known == anchor or known.startswith(f"{anchor}_") for known in found)
                found.add(f"{anchor}_{count}" if anchor in found else anchor)
        return found | set(_IDENTIFIER.findall("\n".join(self.prose)))

    def table(self, first: str) -> list[list[str]]:
        """Return the rows of all tables whose first column is called ``first``."""
        rows: list[list[str]] = []
        inside = False
        for line in self.prose:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            if not cells:
                inside = False
            elif cells[0] == first:
                inside = True
            elif inside and not set(cells[0]) <= set("-: "):
                rows.append(cells)
        return rows


def slug(heading: str) -> str:
    """Return a heading's anchor as Python-Markdown generates it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = re.sub(r"[^\w\s-]", "", plain).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


@cache
def read(path: Path) -> Page:
    """Parse one Markdown file."""
    page = Page(path)
    mark: tuple[str, ...] = ()
    fence: tuple[str, str] | None = None
    content: list[str] = []
    start, language, indent = 0, "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _FENCE.match(line)
        if fence is not None:
            if match and match.group(2).startswith(fence[1]) and not match.group(3):
                text = "\n".join(text.removeprefix(indent) for text in content) + "\n"
                page.blocks.append(Block(path, start, language, mark, text))
                fence, mark = None, ()
            else:
                content.append(line)
        elif match:
            indent, language = match.group(1), match.group(3)
            fence, content, start = (indent, match.group(2)), [], number + 1
        elif found := _MARK.match(line):
            mark = tuple(found.group(1).split())
        else:
            page.prose.append(line)
    return page


def pages() -> list[Page]:
    """Return every page of the documentation, and the Markdown files at the top of the repository."""
    return [read(path) for path in sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])]


def blocks(language: str) -> list[Block]:
    """Return every fenced block of one language."""
    return [block for page in pages() for block in page.blocks if block.language == language]


def _strings(node: ast.AST) -> str:
    """Return a string expression as text, with ``\\0`` in place of interpolated values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_strings(value) for value in node.values)
    return "\0"


@cache
def messages() -> tuple[str, ...]:
    """Return every string of the package's source, with interpolated values left out."""

    def found() -> Iterator[str]:
        for path in sorted(PACKAGE.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    yield _strings(node)

    return tuple(found())


def is_printed(quoted: str) -> bool:
    """Return whether the package prints a message that the documentation quotes with ``…`` for values."""
    pieces = [re.escape(piece.strip()) for piece in quoted.split("…") if piece.strip()]
    pattern = re.compile(".*?".join(pieces), re.DOTALL)
    return any(pattern.search(message) for message in messages())
