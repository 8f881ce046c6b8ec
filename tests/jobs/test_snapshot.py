"""Test code snapshots: what they contain, what is refused, and that equal trees have equal digests."""

import io
import os
import subprocess
import tarfile

import pytest
from refusals import refuses

from dovetail.core.errors import MissingFileError, RecipeError
from dovetail.jobs.snapshot import code_files, settled, take, unpack
from dovetail.jobs.spec import CodeSpec


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    files = {
        ".gitignore": "*.log\n/data/\n!keep.log\nbuild/\n", "a.py": "print(1)\n", "x.log": "no", "keep.log": "yes",
        "data/big.bin": "no", "sub/data/small.txt": "yes", "sub/.gitignore": "local.*\n", "sub/local.txt": "no",
        "sub/build/out": "no", "__pycache__/a.pyc": "no", "run.sh": "echo\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "run.sh").chmod(0o755)
    return root


KEPT = [".gitignore", "a.py", "keep.log", "run.sh", "sub/.gitignore", "sub/data/small.txt"]


@pytest.mark.parametrize("with_git", [False, True])
def test_ignored_files_are_left_out(tree, with_git):
    if with_git:
        subprocess.run(["git", "init", "-q", str(tree)], check=True)
    assert [str(path) for path in code_files(tree)] == KEPT
    assert [str(path) for path in code_files(tree, ["sub/"])] == KEPT[:4]


def test_equal_trees_have_equal_digests_and_unpack_completely(tree, tmp_path):
    first = take(CodeSpec(str(tree)), tmp_path / "one")
    os.utime(tree / "a.py", (0, 0))
    second = take(CodeSpec(str(tree)), tmp_path / "two")
    archives = [tmp_path / where / f"{first}.tar.gz" for where in ("one", "two")]
    assert first == second and archives[0].read_bytes() == archives[1].read_bytes()
    unpack(archives[0], tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == KEPT and os.access(tmp_path / "out" / "run.sh", os.X_OK)
    (tree / "a.py").write_text("print(2)\n")
    assert take(CodeSpec(str(tree)), tmp_path / "one") != first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=1"),
        ("id_rsa", "x"),
        ("server.pem", "x"),
        ("notes.txt", "-----BEGIN " + "RSA PRIVATE KEY-----"),
        ("conf.py", "token = 'hf_" + "a1B2" * 9 + "'"),
        ("key.json", '{"private_key_id": "' + "0a" * 20 + '"}'),
    ],
)
def test_files_that_look_like_secrets_are_refused_by_name(tree, tmp_path, name, text):
    (tree / name).write_text(text)
    with refuses("code.exclude", code="secret_in_code", naming=name):
        take(CodeSpec(str(tree)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    take(CodeSpec(str(tree), exclude=(name,)), tmp_path / "out")


def test_large_files_are_refused_by_name(tree, tmp_path):
    (tree / "weights.bin").write_bytes(b"0" * 2_000_000)
    with refuses("code.file_mb", naming="weights.bin (2 MB)"):
        take(CodeSpec(str(tree), file_mb=1.0), tmp_path / "out")
    with refuses("code.total_mb", naming="weights.bin"):
        take(CodeSpec(str(tree), total_mb=1.0), tmp_path / "out")


def test_a_subfolder_takes_its_whole_repository(tree, tmp_path):
    alone = CodeSpec(str(tree / "sub"))
    assert settled(alone) == alone  # no repository
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    assert settled(CodeSpec("sub"), tree) == CodeSpec(str(tree), cwd="sub")
    assert settled(CodeSpec(str(tree))) == CodeSpec(str(tree))
    assert settled(CodeSpec("sub", cwd="."), tree) == CodeSpec("sub", cwd=".")
    assert settled(CodeSpec("sub/build"), tree) == CodeSpec("sub/build")  # which git ignores
    digest = take(settled(CodeSpec("sub"), tree), tmp_path / "out")
    assert digest == take(CodeSpec(str(tree)), tmp_path / "out")
    (tree / "a.pem").write_text("")
    with refuses("code.exclude", code="secret_in_code", naming="code.cwd=. takes the folder sub alone"):
        take(settled(CodeSpec("sub"), tree), tmp_path / "out")
    with refuses("code.cwd", MissingFileError):
        take(CodeSpec(str(tree), cwd="none"), tmp_path / "out")
    with refuses("cwd", RecipeError):
        CodeSpec(cwd="../elsewhere")


def test_unpacks_without_the_filters_that_came_with_python_3_11_4(tree, tmp_path, monkeypatch):
    """Debian 12 has Python 3.11.2: there `extractall` and `extract` know no `filter`."""

    def refuse(self, *given, **named):
        raise TypeError("TarFile.extractall() got an unexpected keyword argument 'filter'")

    for name in ("extract", "extractall"):
        monkeypatch.setattr(tarfile.TarFile, name, refuse)
    unpack(tmp_path / "one" / f"{take(CodeSpec(str(tree)), tmp_path / 'one')}.tar.gz", tmp_path / "out")
    assert (tmp_path / "out" / "sub/data/small.txt").read_text() == "yes"


def archive_of(path, *entries: tarfile.TarInfo):
    with tarfile.open(path, "w:gz") as tar:
        for entry in entries:
            entry.size = 3 if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(b"bad"))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, to
    return made


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../evil")],
        [entry("sub/../../evil")],
        [entry("/tmp/dovetail-evil")],
        [entry("link", tarfile.SYMTYPE, ".."), entry("link/evil")],
        [entry("evil", tarfile.LNKTYPE, "../outside")],
        [entry("evil", tarfile.CHRTYPE)],
        [entry("evil", tarfile.FIFOTYPE)],
    ],
)
def test_archives_that_leave_their_folder_are_refused(tmp_path, entries):
    (tmp_path / "outside").write_text("kept")
    with refuses(naming="a.tar.gz"):
        unpack(archive_of(tmp_path / "a.tar.gz", *entries), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if ".part" not in path.name) == ["a.tar.gz", "outside"]
    assert (tmp_path / "outside").read_text() == "kept" and not os.path.exists("/tmp/dovetail-evil")


def test_a_torn_archive_is_named(tree, tmp_path):
    whole = tmp_path / "one" / f"{take(CodeSpec(str(tree)), tmp_path / 'one')}.tar.gz"
    whole.write_bytes(whole.read_bytes()[:-40])
    with refuses(naming=whole.name):
        unpack(whole, tmp_path / "out")
