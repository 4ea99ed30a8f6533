"""The environment that the scripts make: when it is made again, and under which constraints."""

from __future__ import annotations

from bootstrap import environment
from bootstrap.environment import constraint_lines, installed_torch, stamp_key

TEXT = "# a comment\nray==2.60.0\n\ntorch==2.13.0\ntorchvision==0.29\n"


def test_without_a_torch_ours_is_pinned():
    assert constraint_lines(TEXT, None) == ["ray==2.60.0", "torch==2.13.0", "torchvision==0.29"]


def test_a_torch_that_is_there_is_held_where_it_is():
    assert constraint_lines(TEXT, "2.12.1+cu126") == [
        "ray==2.60.0",
        "torchvision==0.29",
        "torch==2.12.1+cu126",
    ]


def test_torchs_version_is_read_from_its_file(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(
        "from typing import Optional\n__all__ = ['__version__', 'cuda']\n"
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert installed_torch(tmp_path) == ("2.13.0+cu130", "13.0")
    (folder / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = None\n")
    assert installed_torch(tmp_path) == ("2.13.0", None)
    assert installed_torch(tmp_path / "elsewhere") is None


def _checkout(root):
    root.mkdir()
    (root / "pyproject.toml").write_text("a")
    (root / "constraints.txt").write_text("b")
    return root


def test_the_stamp_changes_with_requirements_constraints_and_place(tmp_path):
    root = _checkout(tmp_path / "one")
    keys = {stamp_key(root), stamp_key(_checkout(tmp_path / "two"))}
    (root / "pyproject.toml").write_text("c")
    keys.add(stamp_key(root))
    (root / "constraints.txt").write_text("d")
    keys.add(stamp_key(root))
    assert len(keys) == 4


class Installer:
    """Stands for pip: makes an interpreter's file, remembers what was asked for."""

    def __init__(self, monkeypatch, root):
        self.asked = []
        monkeypatch.setattr(environment, "ROOT", root)
        monkeypatch.setattr(environment, "VENV", root / ".venv")
        monkeypatch.setattr(environment, "_install", self._install)

    def _install(self, python, extras):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        self.asked.append(extras)


def test_the_second_run_installs_nothing(monkeypatch, tmp_path):
    installer = Installer(monkeypatch, _checkout(tmp_path / "root"))
    python = environment.ensure_venv(())
    assert environment.ensure_venv(()) == python
    assert installer.asked == [[]]


def test_an_extra_is_added_once_and_then_kept(monkeypatch, tmp_path):
    installer = Installer(monkeypatch, _checkout(tmp_path / "root"))
    for extras in ((), ("dev",), (), ("bench",), ("dev",)):
        environment.ensure_venv(extras)
    assert installer.asked == [[], ["dev"], ["bench", "dev"]]


def test_changed_requirements_install_again(monkeypatch, tmp_path):
    root = _checkout(tmp_path / "root")
    installer = Installer(monkeypatch, root)
    environment.ensure_venv(("dev",))
    (root / "constraints.txt").write_text("new")
    environment.ensure_venv(())
    assert installer.asked == [["dev"], []]
