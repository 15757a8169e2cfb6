"""What the documentation says is so: its Python runs, and the messages it quotes exist.

Every Python block of a page runs on this machine, after the blocks before it, unless a comment
``<!-- not run: why -->`` stands above it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cudnn_mha

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
README = (ROOT / "README.md").read_text()

_BLOCK = re.compile(r"^(?:<!-- (not run: [^\n]+) -->\n)?```python\n(.*?)^```$", re.M | re.S)


def blocks(text: str) -> list[tuple[str, str]]:
    """Why a Python block is not run, if it is not, and its code; lines are those of the page."""
    return [
        (found[1] or "", "\n" * text[: found.start(2)].count("\n") + found[2])
        for found in _BLOCK.finditer(text)
    ]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """No page leaves the drop-in on, or plans behind."""
    yield
    cudnn_mha.disable()
    cudnn_mha.cache_clear()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Levels of loggers that a page sets are set back."""
    with caplog.at_level("WARNING", "cudnn_mha"):
        yield


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks(text)])
def test_the_python_of_a_page_runs(page: str, quiet: None) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for why_not, code in blocks(PAGES[page]):
        if not why_not:
            exec(compile(code, ROOT / page, "exec"), names)


def test_the_python_of_the_readme_runs() -> None:
    """On the CPU, with sequences of 64."""
    half = {"dtype": torch.bfloat16}
    pages = torch.randn(5, 8, 16, 128, **half)
    names: dict[str, object] = {
        "lens": torch.tensor([40, 64]),
        "sinks": torch.zeros(32, requires_grad=True),
    }
    packed: dict[str, object] = {
        "q": torch.randn(64, 32, 128, **half),
        "k": torch.randn(64, 8, 128, **half),
        "v": torch.randn(64, 8, 128, **half),
        "cu_seqlens": torch.tensor([0, 24, 64], dtype=torch.int32),
        "longest": 40,
    }
    paged: dict[str, object] = {
        "q": torch.randn(2, 32, 1, 128, **half),
        "key_pages": pages,
        "value_pages": pages,
        "block_table": torch.tensor([[0, 1], [4, 2]]),
        "seq_lens_kv": torch.tensor([20, 32]),
    }
    count = 0
    for why_not, code in blocks(README):
        if why_not:
            continue
        code = code.replace('"cuda"', '"cpu"').replace("4096", "64")
        for statement in ast.parse(code).body:
            text = ast.unparse(statement)
            given = packed if "varlen" in text else paged if "paged" in text else {}
            exec(compile(text, "README.md", "exec"), names | given if given else names)
            count += 1
    assert count > 15
    assert isinstance(output := names["output"], torch.Tensor)
    assert output.shape == (2, 32, 64, 128)


def test_which_blocks_are_run() -> None:
    page = "a\n```python\nb = 1\n```\n<!-- not run: needs c -->\n```python\nc\n```\n```sh\nd\n```\n"
    assert blocks(page) == [("", "\n\nb = 1\n"), ("not run: needs c", "\n" * 6 + "c\n")]
    assert "not run" not in re.sub(_BLOCK, "", "".join(PAGES.values()))  # none is misplaced


def test_each_integration_says_its_limits_and_versions() -> None:
    pages = {name: page for name, page in PAGES.items() if "integrations/" in name}
    assert len(pages) == 6
    for page in pages.values():
        _, limits = page.split("\n## Limits\n")
        limits, _ = limits.split("\n## Reference\n")
        assert limits.startswith("\n* ") and "\n**Versions:** " in limits


# ------------------------------------------------------------------------------------ messages


def _text(node: ast.AST) -> str:
    """A literal as the documentation quotes it: with … for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", "…", node.value)
    return "…"


def _sources() -> Iterator[ast.AST]:
    for path in (ROOT / "cudnn_mha").rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


LITERALS = [_text(node) for node in _sources() if isinstance(node, ast.JoinedStr | ast.Constant)]
RULES = {
    _text(node.args[0])
    for node in _sources()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason"
} - {"…"}
PAGE = PAGES["docs/troubleshooting.md"]
TERMS = re.findall(r"^(`.*)\n: ", PAGE, re.MULTILINE)
QUOTED = sorted(
    {" ".join(span.split()) for term in TERMS for span in re.findall(r"`([^`]+)`", term)}
    | {" ".join(span.split()) for span in re.findall(r"`([^`]*…[^`]*)`", PAGE)} - {"…"}
)


def test_messages_are_found() -> None:
    assert len(TERMS) > 60
    assert len(LITERALS) > 1000
    assert "capability" in RULES and len(RULES) > 30


@pytest.mark.parametrize("message", [quoted for quoted in QUOTED if quoted[0] != "["])
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    assert any(message in literal for literal in LITERALS)


def test_every_rule_is_explained() -> None:
    assert {quoted.strip("[]") for quoted in QUOTED if quoted[0] == "["} == RULES


@pytest.mark.parametrize(
    ("source", "quoted", "found"),
    [
        ("f'{name} must be at most {most}, got'", "… must be at most …", True),
        ("'a' f'b {c}'", "ab …", True),
        ("'%s names %s, which is no folder'", "… names …, which is no folder", True),
        ("f'{name} must be at least {most}'", "… must be at most …", False),
    ],
)
def test_how_messages_are_compared(source: str, quoted: str, found: bool) -> None:
    assert (quoted in _text(ast.parse(source, mode="eval").body)) == found


# --------------------------------------------------------------------------------------- pages


def test_every_public_name_has_its_reference() -> None:
    entries = r"^\.\. auto(?:function|class|exception):: (\w+)$"
    text = "".join(text for page, text in PAGES.items() if page.startswith("docs/api/"))
    assert {*re.findall(entries, text, re.MULTILINE)} >= {*cudnn_mha.__all__} - {"__version__"}
    assert ".. automodule:: cudnn_mha.ops" in text


@pytest.mark.parametrize(
    ("page", "start", "end"),
    [
        ("features", "<!-- `python -m cudnn_mha.features` -->", "<!-- end of features -->"),
        ("environment", "<!-- `python -m cudnn_mha.config` -->", "<!-- end of variables -->"),
    ],
)
def test_tables_are_those_of_the_readme(page: str, start: str, end: str) -> None:
    assert README.count(start) == README.count(end) == 1
    text = PAGES[f"docs/{page}.md"]
    assert f'```{{include}} ../README.md\n:start-after: "{start}"\n:end-before: "{end}"' in text
