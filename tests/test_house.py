"""Rules for the whole source: direction of imports, nothing unsafe, no torch in the client, names and words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from packtrain.store import Store

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "packtrain"

# A package or module imports from itself or from those before it in this list, as in docs/architecture.md.
ORDER = [
    "errors", "units", "identity", "files", "system", "process", "backoff", "http_server", "store", "job", "pack",
    "data", "run", "housekeeping", "recipes", "observe", "train", "node", "fleet", "plan", "report", "export", "launch",
    "sweep", "web", "api", "cli",
]  # fmt: skip

# Modules, functions and arguments that run code from data, pass text to a shell, follow links out of an archive, or
# switch a check of the network off. The rules S of ruff look for more, and cannot be switched off as a whole.
FORBIDDEN_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {
    "eval", "exec", "__import__", "extractall", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "create_subprocess_shell", "tempfile.mktemp", "torch.load", "torch.save", "hub.load",
    "jit.load", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "_create_unverified_context",
}  # fmt: skip
FORBIDDEN_ARGUMENTS = {("shell", True), ("allow_pickle", True), ("weights_only", False), ("verify", False)}
FORBIDDEN_TEXTS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "--trusted-host", "--insecure")
# By its name, or by a variable. A command between backquotes is advice for a person.
PYTHON_IN_A_SHELL = re.compile(r'(?<!`)(?:python[\d.]*|\$\{?\w+\}?)"? -[mc] ')
AS_THE_USER_WROTE_IT = "job/launchers.py"  # a program finds the modules beside it, as it does without Packtrain

Nodes = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    """All nodes of the syntax tree of every module."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in modules()}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer(name: str) -> str:
    return name.removeprefix("packtrain.").split(".")[0]


def imports(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "packtrain":
                yield from (f"packtrain.{alias.name}" for alias in node.names)
            else:
                yield node.module


def called_name(call: ast.Call) -> tuple[str, str]:
    """Return the last name of the called expression, and its last two names with a dot."""
    text = ast.unparse(call.func)
    return text.rpartition(".")[2], ".".join(text.split(".")[-2:])


def faults(nodes: list[ast.AST]) -> Iterator[str]:
    for name in imports(nodes):
        if name.split(".")[0] in FORBIDDEN_IMPORTS:
            yield f"imports {name}"
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = {f"{(node.module or '').rpartition('.')[2]}.{alias.name}" for alias in node.names}
            yield from (f"imports {name}" for name in sorted(names & FORBIDDEN_CALLS))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"line {node.lineno} has {text}" for text in FORBIDDEN_TEXTS if text in node.value)
        if isinstance(node, ast.Call):
            plain, dotted = called_name(node)
            is_method = isinstance(node.func, ast.Attribute)
            if dotted in FORBIDDEN_CALLS or (
                plain in FORBIDDEN_CALLS and not (is_method and plain in ("eval", "exec"))
            ):
                yield f"line {node.lineno} calls {dotted}"
            for keyword in node.keywords:
                if (
                    isinstance(keyword.value, ast.Constant)
                    and (keyword.arg, keyword.value.value) in FORBIDDEN_ARGUMENTS
                ):
                    yield f"line {node.lineno} passes {keyword.arg}={keyword.value.value!r}"


def test_modules_import_in_one_direction(nodes: Nodes) -> None:
    wrong = []
    for path in nodes:
        own = path.relative_to(SOURCE).with_suffix("").parts[0]
        if own not in ("__init__", "__main__"):
            layers = {layer(name) for name in imports(nodes[path]) if name.startswith("packtrain.")}
            wrong += [f"{path} imports {name}" for name in layers if ORDER.index(name) > ORDER.index(own)]
    assert wrong == []


def test_only_its_own_folder_and_the_registry_name_a_recipe(nodes: Nodes) -> None:
    """A recipe is one folder and one line; in pack/, its word may be that of a field in raw data."""
    names = sorted(folder.name for folder in (SOURCE / "recipes").iterdir() if (folder / "job.yaml").is_file())
    assert len(names) > 3
    wrong = []
    for path in nodes:
        place = path.relative_to(SOURCE).parts
        words = {node.value for node in nodes[path] if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for name in names:
            if place[:2] in (("recipes", name), ("recipes", "__init__.py")):
                continue
            modules = [
                module for module in imports(nodes[path]) if f"{module}.".startswith(f"packtrain.recipes.{name}.")
            ]
            wrong += [f"{path} imports {module}" for module in modules]
            wrong += [f"{path} names {name}"] if name in words and place[0] != "pack" else []
    scripts = [*SOURCE.rglob("*.js"), *SOURCE.rglob("*.html")]
    quoted = re.compile(rf"""["'`]({"|".join(names)})["'`]""")
    assert wrong + [place for place, line in lines(scripts) if quoted.search(line)] == []


def test_nothing_unsafe_is_used(nodes: Nodes) -> None:
    assert [f"{path} {fault}" for path in nodes for fault in faults(nodes[path])] == []


def test_texts_become_html_in_one_place(nodes: Nodes) -> None:
    """`html.escape` alone leaves characters that turn the direction of text."""
    users = [str(path.relative_to(SOURCE)) for path in nodes if "html" in imports(nodes[path])]
    assert users == ["report/page.py", "store/uploads.py"]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "eval(text)", "subprocess.run(x, shell=True)", "torch.load(x)",
        "yaml.load(x)", "tar.extractall(x)", "np.load(x, allow_pickle=True)", "dist.broadcast_object_list(x)",
        "from os import system", "from subprocess import getoutput", "__import__(x)", "torch.hub.load(x)",
        "['ssh', '-o', 'StrictHostKeyChecking=no']", "get(x, verify=False)",
    ],
)  # fmt: skip
def test_the_search_for_unsafe_code_finds_it(code: str) -> None:
    assert len(list(faults(list(ast.walk(ast.parse(code)))))) == 1


def starts_of_python(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield commands that start Python without -P or -I: it would import from the current directory first."""
    read = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # documentation
    read |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "$value" for part in node.values]
            yield from (f"line {node.lineno}: {start}" for start in PYTHON_IN_A_SHELL.findall("".join(parts)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in read:
            yield from (f"line {node.lineno}: {start}" for start in PYTHON_IN_A_SHELL.findall(node.value))
        if isinstance(node, (ast.List, ast.Tuple)):
            words = [ast.unparse(word) for word in node.elts]
            for before, option, after in zip(["", *words], words, words[1:], strict=False):
                is_start = option == "'-m'" and not after.startswith("'-")
                is_start |= option == "'-c'" and re.search("python|executable", before) is not None
                if is_start and before not in ("'-P'", "'-I'"):
                    yield f"line {node.lineno}: {ast.unparse(node)}"


def test_every_python_that_we_start_ignores_the_current_directory(nodes: Nodes) -> None:
    own = {path: nodes[path] for path in nodes if not str(path).endswith(AS_THE_USER_WROTE_IT)}
    assert [f"{path} {start}" for path in own for start in starts_of_python(own[path])] == []
    scripts = lines([*SOURCE.rglob("*.sh"), *SOURCE.rglob("Dockerfile")])
    assert [place for place, line in scripts if PYTHON_IN_A_SHELL.search(line)] == []


@pytest.mark.parametrize(
    "code",
    [
        "[sys.executable, '-m', 'pip', *words]", "(python, '-m', __name__)", "['-m', 'packtrain.fleet.slurm']",
        "['python3', '-c', text]", "x = 'exec \"$python\" -m packtrain'", "x = f'{a}/bin/python -m venv {b}'",
        "x = 'fits() { \"$1\" -c \"$torch\"; }'", "x = f'{python} -m {module}'", "x = '${one} -c \"$check\"'",
    ],
)  # fmt: skip
def test_the_search_for_starts_of_python_finds_them(code: str) -> None:
    assert len(list(starts_of_python(list(ast.walk(ast.parse(code)))))) == 1


def test_the_rules_of_the_linter_for_security_are_on() -> None:
    """Ignored are those that would refuse what fleets are for, and each exception in a line says its reason."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    is_security = re.compile(r"S\d+").fullmatch
    assert {rule for rule in lint["ignore"] if is_security(rule)} == {"S101", "S603", "S607"}
    source = [rules for path, rules in lint["per-file-ignores"].items() if path.startswith("src")]
    assert not any(is_security(rule) for rules in source for rule in rules)


# Files and pipes are UTF-8, whatever the locale. The linter's own rule (PLW1514) does not look at subprocesses.
TEXT_MODE = re.compile(r"[rwax]t?\+?")


def without_encoding(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the calls that read or write text in the encoding of the locale."""
    for call in nodes:
        if not isinstance(call, ast.Call) or "encoding" in {keyword.arg for keyword in call.keywords}:
            continue
        name, dotted = called_name(call)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [value.value for value in arguments if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        if name in ("open", "fdopen"):
            is_text = any(map(TEXT_MODE.fullmatch, texts)) or (dotted == "open" and len(arguments) == 1)
            is_fault = is_text and dotted != "tarfile.open"
        elif name in ("read_text", "write_text"):
            is_fault = len(call.args) <= (name == "write_text") and not dotted.startswith("formatter.")  # of click
        else:
            is_fault = any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords) and (
                dotted.startswith("subprocess.")
            )
        if is_fault:
            yield f"line {call.lineno} calls {dotted} without an encoding"


def test_text_is_read_and_written_as_utf_8(nodes: Nodes) -> None:
    assert [f"{path} {fault}" for path in nodes for fault in without_encoding(nodes[path])] == []


@pytest.mark.parametrize(
    "code",
    [
        "open(x)", "open(x, 'w')", "path.open('a')", "path.open(mode='r')", "os.fdopen(x, 'w')", "path.read_text()",
        "path.read_text(errors='replace')", "path.write_text(x)", "subprocess.run(x, text=True)",
    ],
)  # fmt: skip
def test_the_search_for_text_without_an_encoding_finds_it(code: str) -> None:
    assert len(list(without_encoding(list(ast.walk(ast.parse(code)))))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "open(x, 'rb')", "path.open('wb')", "os.fdopen(x, 'w', encoding='utf-8')", "path.read_text('utf-8')",
        "path.write_text(x, 'utf-8')", "subprocess.run(x, encoding='utf-8')", "tarfile.open(x, 'w')", "store.open()",
    ],
)  # fmt: skip
def test_the_search_for_text_without_an_encoding_lets_the_rest_pass(code: str) -> None:
    assert list(without_encoding(list(ast.walk(ast.parse(code))))) == []


def test_models_may_be_put_into_evaluation_mode() -> None:
    assert list(faults(list(ast.walk(ast.parse("model.eval()"))))) == []


# Packtrain is not on an index: whoever takes the name there could run code wherever it is installed by name.
BY_NAME = re.compile(r"packtrain\[|pip (?:install|download)\b[^`;]*[\s'\"]packtrain(?![\w./-])", re.IGNORECASE)


def test_nothing_tells_people_to_install_packtrain_by_its_name() -> None:
    places = [*modules(), *pages(), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/**/*.yaml"), ROOT / "Makefile"]
    assert [place for place, line in lines(places) if BY_NAME.search(line)] == []


@pytest.mark.parametrize(
    "text", ["pip install packtrain", "pip install 'packtrain[train]'", "pip download -d x Packtrain"]
)
def test_the_search_for_installs_by_name_finds_them(text: str) -> None:
    assert BY_NAME.search(text)
    assert not BY_NAME.search("pip install '.[train]'; packtrain run job.yaml")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["packtrain", *sys.argv[1:]]
from packtrain.cli import main
main()
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("verb", [["--help"], ["ls"], ["init", "chat"]])
def test_the_client_works_without_torch(verb: list[str], directory_store: Store, tmp_path: Path) -> None:
    assert directory_store.url == str(tmp_path / "store"), "where the commands look"
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *verb], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("processes")
def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pydantic", "obstore"]
    code = f"import sys, packtrain.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("processes")
def test_a_node_and_what_starts_it_import_neither_torch_nor_numpy() -> None:
    code = "import sys, packtrain.fleet, packtrain.node.main; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Names and words.

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BAD_STARTS = ("What ", "Whether ", "One that", "One who", "Those ")
BRITISH = re.compile(
    r"behaviour|colour|favour|honour|neighbour|flavour|labelled|labelling|modelling|catalogue|licence"
    r"|centre|\bgrey|artefact|whilst|amongst"
    r"|(?:optimi|normali|initiali|seriali|recogni|organi|summari|visuali|tokeni|synchroni|quanti|minimi|maximi)s"
    r"(?:e|ing|ation)"
)


def definitions(nodes: Nodes, *kinds: type[Definition]) -> Iterator[tuple[str, Definition]]:
    """Yield every definition of these kinds in the source, each with its file and line."""
    for path in nodes:
        for node in nodes[path]:
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def lines(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield every line of these files, each with its file and number."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_no_two_classes_have_the_same_name(nodes: Nodes) -> None:
    places: dict[str, list[str]] = {}
    for place, node in definitions(nodes, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places.setdefault(node.name, []).append(place)
    assert [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1] == []


def test_docstrings_start_with_a_verb_or_a_noun(nodes: Nodes) -> None:
    documented = definitions(nodes, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    starts = [(place, (ast.get_docstring(node) or "").split("\n")[0]) for place, node in documented]
    assert [f"{place}: {start}" for place, start in starts if start.startswith(BAD_STARTS)] == []


def test_spelling_is_american() -> None:
    words = ((place, BRITISH.search(line.lower())) for place, line in lines([*modules(), *pages()]))
    assert [f"{place}: {found[0]}" for place, found in words if found] == []


def test_docs_wrap_at_100_columns() -> None:
    """Tables, code and single long words such as URLs cannot wrap."""
    too_long, is_code = [], False
    for place, line in lines(pages()):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and len(line) > 100 and not line.startswith("|") and " " in line.strip(" -*>#"):
            too_long.append(place)
    assert too_long == []
