"""The doctor: right findings from given facts, and a report that a person can read."""

from __future__ import annotations

import pytest

from serve_app.doctor import (
    Finding,
    gpu_findings,
    install_plan,
    machine_findings,
    name_findings,
    package_findings,
    render,
)


def _versions(**installed: str):
    return lambda name: installed.get(name.replace("-", "_"))


def test_a_missing_package_is_a_problem_that_names_it():
    found = package_findings(_versions(ray="2.60.0", torch="2.13.0", cupy_cuda13x="14.2.0"))
    problems = [finding.text for finding in found if finding.level == "problem"]
    assert "tokenizers is missing" in problems
    assert not any("torch" in text for text in problems)
    assert Finding("packages", "cupy-cuda13x 14.2.0") in found


def test_a_gpu_without_cupy_gets_the_command_that_installs_it():
    found = gpu_findings("581.08", _versions(torch="2.13.0+cu130"))
    assert found[0].text == "NVIDIA driver 581.08"
    assert found[-1].text == "cupy-cuda13x is not installed: pip install 'deepinfer-sm86[cu13]'"
    assert found[-1].level == "note"


def test_without_a_gpu_nothing_is_missing():
    found = gpu_findings(None, _versions(torch="2.13.0+cpu"))
    assert [finding.level for finding in found] == ["ok", "ok"]
    assert "CPU" in found[1].text


@pytest.mark.parametrize(
    ("driver", "torch", "extra"),
    [
        ("581.08", "2.13.0+cu126", "cu12"),
        ("581.08", "2.13.0+cu130", "cu13"),
        ("581.08", "2.13.0+cpu", None),
        ("535.104.05", None, "cu12"),
        (None, None, None),
    ],
)
def test_the_plan_follows_the_torch_that_is_there(driver, torch, extra):
    assert install_plan(driver, torch).extra == extra


def test_both_common_names_are_ours_here():
    found = {finding.text.partition(":")[0]: finding.level for finding in name_findings()}
    assert found["configs"] == "ok"
    assert found["kernels"] in ("ok", "note")


def test_this_machine_is_one_that_we_support():
    assert [finding.level for finding in machine_findings()] == ["ok", "ok", "ok"]


def test_the_report_marks_problems_and_counts_them():
    report = render(
        [
            Finding("packages", "torch 2.13.0"),
            Finding("packages", "ray is missing", "problem"),
            Finding("names", "both are usable", "note"),
        ]
    )
    assert report.splitlines() == [
        "packages",
        "   torch 2.13.0",
        " ! ray is missing",
        "names",
        " - both are usable",
        "1 problem",
    ]
