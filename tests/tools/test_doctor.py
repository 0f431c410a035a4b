"""doctor and env: what they find on this machine, and that a fault is found and named."""

import json

import pytest
import torch

from anyfp8 import env
from anyfp8.device import current_device, find_device
from anyfp8.gemm.dequant import Dequant
from anyfp8.tools import doctor, env_command


def test_everything_willing_passes_on_this_machine(call):
    status, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert (status, found["passed"]) == (0, True)
    assert found["device"] == current_device().name
    names = [check["name"] for check in found["self_test"]]
    assert "quantize per_group" in names
    assert "dequant, w8a8-channel-token" in names
    assert "next: anyfp8 run" in err
    states = {one["name"]: one["state"] for one in found["backends"]}
    assert states["dequant"] == "willing"
    assert all(one["why"] for one in found["backends"] if one["state"] != "willing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_both_arithmetics_are_tested_and_gpus_can_be_asked_about(call):
    _, out, err = call("doctor")
    assert "ok   dequant, w8a8-tensor-static, FP8 units emulated" in out
    assert "multiplies on FP8 units and cpu has none" in out
    assert "next: anyfp8 explain MODEL --device h200" in err


def test_a_wrong_product_fails_by_name_with_status_1_and_a_way_out(call, monkeypatch):
    right = Dequant.run
    monkeypatch.setattr(Dequant, "run", lambda *a, **k: right(*a, **k) * 1.1)
    monkeypatch.setattr(doctor, "current_device", lambda: find_device("cpu"))
    status, out, err = call("doctor")
    assert status == 1
    assert "FAIL dequant, w8a8-channel-token: relative error 0.1" in out
    assert "ok   quantize per_token" in out
    assert "next: ANYFP8_BACKEND=dequant" in err


def test_a_backend_that_breaks_is_a_finding_not_a_crash(call, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("illegal instruction\nmore")

    monkeypatch.setattr(Dequant, "run", broken)
    monkeypatch.setattr(doctor, "current_device", lambda: find_device("cpu"))
    status, out, _ = call("doctor")
    assert status == 1
    assert "FAIL dequant, w8a8-channel-token: illegal instruction\n" in out


def test_a_trial_that_failed_earlier_is_shown_with_the_file_that_remembers_it(
    call, monkeypatch, tmp_path
):
    monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "probes"
    folder.mkdir()
    about = {"backend": "flashinfer", "gpu": "NVIDIA B200", "why": "gave no answer within 180 s"}
    (folder / "a.json").write_text(json.dumps(about))
    (folder / "good.json").write_text(json.dumps(about | {"why": None}))
    (folder / "broken.json").write_text("{")
    _, out, _ = call("doctor")
    assert out.count("flashinfer failed on") == 1
    assert "flashinfer failed on NVIDIA B200: it gave no answer within 180 s" in out
    assert f"delete {folder / 'a.json'} to try it again" in out


@pytest.mark.parametrize(
    ("gpu", "part"),
    [
        ("a100", "weight-only: sm_80 has no FP8 units; codes by integer"),
        ("l40s", "W8A8: sm_89 multiplies e4m3fn; codes by ptx"),
        ("h100", "W8A8: sm_90 multiplies e4m3fn; codes by hardware"),
        ("mi300x", "W8A8: gfx942 multiplies e4m3fnuz; codes by integer"),
        ("cpu", "weight-only: the CPU has no FP8 units"),
    ],
)
def test_the_choice_of_arithmetic_says_why(gpu, part):
    assert doctor.dtype_choice(find_device(gpu)).startswith(part)


def test_the_table_of_a_gpu_is_named(monkeypatch):
    assert "nvidia_l40s.jsonl" in doctor.table_found(find_device("l40s"))
    assert "none for NVIDIA GeForce RTX 3090" in doctor.table_found(find_device("3090"))


@pytest.mark.parametrize(("gpu", "tunes"), [("4090", True), ("l40s", False), ("a100", True)])
def test_tuning_is_the_next_step_where_a_table_is_missing(gpu, tunes):
    hints = doctor._hints(find_device(gpu), [])
    assert any(hint.startswith("anyfp8 tune") for hint in hints) == tunes


def test_env_lists_every_variable_with_its_source(call, monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "yes")
    monkeypatch.setenv("ANYFP8_BACKEND", "dequant")
    status, out, _ = call("env")
    assert status == 0
    assert "ANYFP8_FORCE_FP8_MARLIN=yes  (from SGLANG_FORCE_FP8_MARLIN)\n" in out
    assert "ANYFP8_BACKEND=dequant  (from ANYFP8_BACKEND)\n" in out
    assert "ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE=1\n" in out
    assert [row["name"] for row in env_command.rows()] == [v.name for v in env.VARIABLES]
    assert max(map(len, out.splitlines())) <= 80


def test_a_variable_that_cannot_be_read_stops_env_with_its_name(call, monkeypatch):
    monkeypatch.setenv("ANYFP8_FORCE_FP8_MARLIN", "perhaps")
    status, out, err = call("env")
    assert (status, out) == (2, "")
    assert "ANYFP8_FORCE_FP8_MARLIN='perhaps'" in err
