"""Nothing is skipped in silence: only `gpu` may skip, and only where there is no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests.house_rules.sources import ROOT

CASES = """
import pytest

def test_passes():
    pass

def test_skips_itself():
    pytest.skip("not today")

@pytest.mark.skip(reason="never")
def test_is_skipped():
    pass

@pytest.mark.gpu
def test_on_a_gpu_that_may_be_missing():
    pytest.skip("no device of this kind")

@pytest.mark.xfail(strict=True)
def test_known_failure():
    assert False
"""
SKIPPED_MODULE = """
import pytest

pytest.importorskip("a_module_that_does_not_exist")

def test_never_seen():
    pass
"""


def _outcomes(folder, source: str) -> tuple[dict[str, int], str]:
    """Counts by outcome of a pytest run on `source` under the project's own conftest."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a CUDA device\n")
    (folder / "test_cases.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)", last)
    return {name: int(count) for count, name in found}, done.stdout


def test_only_a_gpu_test_may_skip(tmp_path):
    counts, output = _outcomes(tmp_path, CASES)
    # A skip by marker happens in the set-up, and a report that fails there is an error.
    assert counts == {"passed": 1, "failed": 1, "error": 1, "skipped": 1, "xfailed": 1}
    assert "skipped without the marker gpu" in output


def test_a_module_that_skips_itself_is_an_error(tmp_path):
    counts, output = _outcomes(tmp_path, SKIPPED_MODULE)
    assert set(counts) <= {"error", "errors"}
    assert counts
    assert "skips itself at import" in output


@pytest.mark.parametrize("marker", ["gpu", "ray", "slow", "hostcc"])
def test_the_markers_are_declared(marker, pytestconfig):
    assert any(line.startswith(f"{marker}:") for line in pytestconfig.getini("markers"))
