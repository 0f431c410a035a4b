"""Architectures, the catalogue, names, and what is asked of torch."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from anyfp8 import device
from anyfp8.device import ARCHES, CATALOGUE, CPU, canonical_name, find_device, sibling
from anyfp8.errors import DeviceError

SHARED_MEMORY = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_110": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
    "gfx1100": 65536,
    "gfx1151": 65536,
    "gfx1200": 65536,
    "gfx1201": 65536,
    "cpu": 0,
}


@pytest.fixture(autouse=True)
def forget_devices():
    device._ask.cache_clear()
    yield
    device._ask.cache_clear()


class TestArches:
    def test_shared_memory_limits(self):
        assert {a.name: a.shared_memory for a in ARCHES.values()} == SHARED_MEMORY
        assert all(name == arch.name for name, arch in ARCHES.items())

    @pytest.mark.parametrize(
        ("capability", "fp8"),
        [
            ((7, 5), None),
            ((8, 0), None),
            ((8, 6), None),
            ((8, 7), None),
            ((8, 8), None),
            ((8, 9), "e4m3fn"),
            ((9, 0), "e4m3fn"),
            ((10, 0), "e4m3fn"),
            ((10, 3), "e4m3fn"),
            ((11, 0), "e4m3fn"),
            ((12, 0), "e4m3fn"),
            ((12, 1), "e4m3fn"),
            ((13, 0), "e4m3fn"),
        ],
    )
    def test_nvidia_has_fp8_units_from_sm89(self, capability, fp8):
        assert device.arch_of_capability(capability).fp8 == fp8
        assert find_device(capability).has_fp8 is (fp8 is not None)

    @pytest.mark.parametrize(
        ("gfx", "fp8"),
        [
            ("gfx90a", None),
            ("gfx942", "e4m3fnuz"),
            ("gfx950", "e4m3fn"),
            ("gfx1100", None),
            ("gfx1151", None),
            ("gfx1200", "e4m3fn"),
            ("gfx1201", "e4m3fn"),
        ],
    )
    def test_amd_fp8_formats(self, gfx, fp8):
        assert find_device(gfx).arch.fp8 == fp8
        assert find_device(gfx).capability is None

    def test_a_future_capability_gets_no_special_features(self):
        future = device.arch_of_capability((13, 0))
        assert future.name == "sm_130"
        assert future.features == frozenset()
        assert future.shared_memory == 101376

    def test_an_unknown_member_of_a_family_gets_what_all_its_members_have(self):
        assert device.arch_of_capability((8, 8)).shared_memory == 101376
        assert device.arch_of_capability((7, 0)).shared_memory == 49152
        assert device.arch_of_capability((9, 9)).features == frozenset()

    def test_only_hopper_has_wgmma_and_sm12x_takes_no_sm100_path(self):
        having = {f: {a.name for a in ARCHES.values() if f in a.features} for f in _features()}
        assert having["wgmma"] == {"sm_90"}
        assert having["tcgen05"] == {"sm_100", "sm_103", "sm_110"}
        assert "sm_89" not in having["tma"]
        assert {"sm_90", "sm_120", "sm_121"} <= having["tma"]
        assert "sm_75" not in having["cp_async"] | having["bf16_mma"]
        assert having["mfma"] == {"gfx90a", "gfx942", "gfx950"}

    def test_an_unknown_gfx_runs_weight_only_and_says_so(self, caplog):
        with caplog.at_level(logging.WARNING, logger="anyfp8.device"):
            arch = device.arch_of_gfx("gfx1250:sramecc+")
        assert (arch.name, arch.fp8, arch.features) == ("gfx1250", None, frozenset())
        assert "gfx1250" in caplog.text
        assert "weight-only" in caplog.text

    def test_a_known_gfx_with_target_flags_is_found_quietly(self, caplog):
        assert device.arch_of_gfx("gfx942:sramecc+:xnack-") is ARCHES["gfx942"]
        assert not caplog.records


def _features() -> set[str]:
    return set().union(*(a.features for a in ARCHES.values()))


class TestCatalogue:
    def test_it_holds_the_gpus_people_have(self):
        wanted = [
            *[
                "NVIDIA T4",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-PCIE-40GB",
                "NVIDIA A100 80GB PCIe",
            ],
            *["NVIDIA A800-SXM4-80GB", "NVIDIA A10", "NVIDIA A10G", "NVIDIA A30", "NVIDIA A40"],
            *["NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000", "NVIDIA L4", "NVIDIA L40"],
            *["NVIDIA L40S", "NVIDIA L20", "NVIDIA L20Y", "NVIDIA GeForce RTX 4090"],
            *["NVIDIA GeForce RTX 4090 D", "NVIDIA RTX 6000 Ada Generation"],
            *["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800"],
            *["NVIDIA H20", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA GB200"],
            *["NVIDIA B300 SXM6 AC", "NVIDIA GeForce RTX 5090", "Orin", "NVIDIA Thor"],
            *["NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GB10"],
            *["AMD Instinct MI210", "AMD Instinct MI250X", "AMD Instinct MI300X"],
            *["AMD Instinct MI308X", "AMD Instinct MI325X", "AMD Instinct MI350X"],
            *["AMD Instinct MI355X", "AMD Radeon RX 7900 XTX", "AMD Radeon RX 9070 XT"],
            "AMD Radeon AI PRO R9700",
        ]
        assert set(wanted) <= set(CATALOGUE)

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_every_row_is_plausible_and_sourced(self, name):
        gpu = CATALOGUE[name]
        assert gpu.name == name
        assert gpu.source
        assert gpu.shared_memory == gpu.arch.shared_memory
        assert gpu.vendor == gpu.arch.vendor
        assert gpu.sms is None or 8 <= gpu.sms <= 320
        assert gpu.l2_bytes is None or 2**20 <= gpu.l2_bytes <= 2**28
        assert gpu.bandwidth_gbs is None or 150 <= gpu.bandwidth_gbs <= 8000
        assert gpu.memory_bytes is None or 2**33 < gpu.memory_bytes <= 288 * 2**30
        if not gpu.has_fp8:
            assert gpu.fp8_tflops is None

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_peaks_are_dense(self, name):
        # a sparse figure in one column would show as a ratio of 4 or 1
        gpu = CATALOGUE[name]
        if gpu.fp8_tflops and gpu.bf16_tflops:
            assert gpu.fp8_tflops / gpu.bf16_tflops == pytest.approx(2.0, rel=0.03)

    @pytest.mark.parametrize(
        ("name", "fp8", "bf16", "bandwidth", "sms"),
        [
            ("NVIDIA H100 80GB HBM3", 1979, 989.5, 3350, 132),
            ("NVIDIA L40S", 733, 362, 864, 142),
            ("NVIDIA L40", 362, 181, 864, 142),
            ("NVIDIA A100-SXM4-80GB", None, 312, 2039, 108),
            ("NVIDIA GeForce RTX 4090", 330.3, 165.2, 1008, 128),
            ("NVIDIA H100 NVL", 1670.5, 835.5, 3900, 132),
            ("NVIDIA B200", 4500, 2250, 7700, 148),
            ("AMD Instinct MI300X", 2614.9, 1307.4, 5300, 304),
        ],
    )
    def test_figures_of_the_datasheets(self, name, fp8, bf16, bandwidth, sms):
        gpu = CATALOGUE[name]
        figures = (gpu.fp8_tflops, gpu.bf16_tflops, gpu.bandwidth_gbs, gpu.sms)
        assert figures == (fp8, bf16, bandwidth, sms)

    @pytest.mark.parametrize(
        ("name", "mhz", "flop"),
        [
            # boost clocks of the documents, BF16 FLOP a clock and SM with fp32 accumulation
            ("NVIDIA A100-SXM4-80GB", 1410, 2048),
            ("NVIDIA A10", 1695, 1024),
            ("NVIDIA A40", 1740, 1024),
            ("NVIDIA GeForce RTX 3090", 1695, 512),
            ("NVIDIA GeForce RTX 4090", 2520, 512),
            ("NVIDIA L40S", 2520, 1024),
            ("NVIDIA L40", 2490, 512),
            ("NVIDIA RTX 6000 Ada Generation", 2505, 1024),
            ("NVIDIA H100 80GB HBM3", 1830, 4096),
            ("NVIDIA GeForce RTX 5090", 2407, 512),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 2617, 1024),
            ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 2280, 1024),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 2430, 1024),
            ("AMD Instinct MI250X", 1700, 1024),
            ("AMD Instinct MI300X", 2100, 2048),
            ("AMD Instinct MI355X", 2400, 4096),
            ("AMD Radeon RX 7900 XTX", 2500, 512),
            ("AMD Radeon RX 9070 XT", 2970, 1024),
            ("AMD Radeon AI PRO R9700", 2920, 1024),
        ],
    )
    def test_a_peak_is_units_times_clock_times_rate(self, name, mhz, flop):
        gpu = CATALOGUE[name]
        assert gpu.bf16_tflops == pytest.approx(gpu.sms * mhz * flop * 1e-6, rel=0.015)

    @pytest.mark.parametrize(
        ("name", "reported"),
        [
            # what cudaDeviceProp gives
            ("NVIDIA A100-SXM4-40GB", 41_943_040),
            ("NVIDIA H100 NVL", 62_914_560),
            ("NVIDIA GH200 480GB", 62_914_560),
            ("NVIDIA B200", 132_644_864),
            ("NVIDIA B300 SXM6 AC", 132_644_864),
        ],
    )
    def test_the_l2_is_what_the_gpu_reports(self, name, reported):
        assert CATALOGUE[name].l2_bytes == reported

    @pytest.mark.parametrize(
        ("name", "figures"),
        [
            ("NVIDIA L20Y", ("sms", "l2_bytes", "bandwidth_gbs", "fp8_tflops", "bf16_tflops")),
            ("NVIDIA GB10", ("fp8_tflops", "bf16_tflops")),
            ("AMD Instinct MI308X", ("fp8_tflops", "bf16_tflops")),
            ("NVIDIA H20-3e", ("l2_bytes", "bandwidth_gbs")),
            ("NVIDIA A10G", ("l2_bytes", "bf16_tflops")),
        ],
    )
    def test_an_unpublished_figure_is_none(self, name, figures):
        assert [getattr(CATALOGUE[name], figure) for figure in figures] == [None] * len(figures)

    def test_the_l20y_is_a_hopper(self):
        assert CATALOGUE["NVIDIA L20Y"].arch is ARCHES["sm_90"]


class TestNames:
    @pytest.mark.parametrize(
        ("spelling", "name"),
        [
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
            ("NVIDIA_H100_80GB_HBM3", "NVIDIA H100 80GB HBM3"),
            ("h100", "NVIDIA H100 80GB HBM3"),
            ("H100", "NVIDIA H100 80GB HBM3"),
            ("h100-pcie", "NVIDIA H100 PCIe"),
            ("NVIDIA_H200", "NVIDIA H200"),
            ("h200", "NVIDIA H200"),
            ("NVIDIA_L40S", "NVIDIA L40S"),
            ("l40s", "NVIDIA L40S"),
            ("L40", "NVIDIA L40"),
            ("l4", "NVIDIA L4"),
            ("NVIDIA L20Y", "NVIDIA L20Y"),
            ("l20", "NVIDIA L20"),
            ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
            ("NVIDIA_GeForce_RTX_4090", "NVIDIA GeForce RTX 4090"),
            ("4090", "NVIDIA GeForce RTX 4090"),
            ("rtx4090", "NVIDIA GeForce RTX 4090"),
            ("RTX 4090", "NVIDIA GeForce RTX 4090"),
            ("geforce rtx 4090", "NVIDIA GeForce RTX 4090"),
            ("4090 D", "NVIDIA GeForce RTX 4090 D"),
            ("rtx4090d", "NVIDIA GeForce RTX 4090 D"),
            ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
            ("NVIDIA_A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
            ("a100", "NVIDIA A100-SXM4-80GB"),
            ("NVIDIA_A100_80GB_PCIe", "NVIDIA A100 80GB PCIe"),
            ("Tesla T4", "NVIDIA T4"),
            ("t4", "NVIDIA T4"),
            ("a6000", "NVIDIA RTX A6000"),
            ("NVIDIA_H20", "NVIDIA H20"),
            ("NVIDIA_H20-3e", "NVIDIA H20-3e"),
            ("b200", "NVIDIA B200"),
            ("b300", "NVIDIA B300 SXM6 AC"),
            ("5090", "NVIDIA GeForce RTX 5090"),
            ("dgx spark", "NVIDIA GB10"),
            ("AMD_Instinct_MI300X", "AMD Instinct MI300X"),
            ("AMD Instinct MI300X", "AMD Instinct MI300X"),
            ("mi300x", "AMD Instinct MI300X"),
            ("7900xtx", "AMD Radeon RX 7900 XTX"),
            ("rx 9070 xt", "AMD Radeon RX 9070 XT"),
            ("AMD Radeon AI PRO R9700", "AMD Radeon AI PRO R9700"),
        ],
    )
    def test_spellings_of_torch_engines_and_people(self, spelling, name):
        assert canonical_name(spelling) == name
        assert find_device(spelling).name == name

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_every_canonical_name_is_its_own_in_any_spelling(self, name):
        assert canonical_name(name) == name
        assert canonical_name(name.replace(" ", "_")) == name
        assert canonical_name(name.lower()) == name

    @pytest.mark.parametrize(
        ("spelling", "close"),
        [
            ("NVIDIA H100 80GB HBM2", "NVIDIA H100 80GB HBM3"),
            ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
            ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
            ("l40x", "NVIDIA L40S"),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3"),
        ],
    )
    def test_an_unknown_or_ambiguous_name_lists_close_ones(self, spelling, close):
        with pytest.raises(DeviceError) as caught:
            find_device(spelling)
        assert spelling in str(caught.value)
        assert close in caught.value.hint

    @pytest.mark.parametrize("spelling", ["", " ", "gpu", "nvidia", "90", "sm_", "gfx", "rtx"])
    def test_nonsense_is_refused(self, spelling):
        with pytest.raises(DeviceError):
            find_device(spelling)

    @pytest.mark.parametrize(
        ("spelling", "arch"),
        [
            ("sm_90", "sm_90"),
            ("SM90", "sm_90"),
            ("sm_90a", "sm_90"),
            ("9.0", "sm_90"),
            ("(9, 0)", "sm_90"),
            ((9, 0), "sm_90"),
            ("sm_120", "sm_120"),
            ("12.1", "sm_121"),
            ("gfx942", "gfx942"),
            ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ],
    )
    def test_an_architecture_gives_a_generic_device(self, spelling, arch):
        gpu = find_device(spelling)
        assert gpu.arch is ARCHES[arch]
        assert gpu.name == arch
        assert gpu.shared_memory == SHARED_MEMORY[arch]
        assert (gpu.sms, gpu.bandwidth_gbs, gpu.fp8_tflops) == (None, None, None)

    def test_cpu(self):
        assert find_device("cpu") is CPU
        assert CPU.has_fp8 is False
        assert CPU.capability is None


class TestSibling:
    @pytest.mark.parametrize(
        ("name", "whose"),
        [
            ("a800", "NVIDIA A100-SXM4-80GB"),
            ("h800", "NVIDIA H100 80GB HBM3"),
            ("a100-pcie", "NVIDIA A800 80GB PCIe"),
            # same bandwidth as no other
            ("h100", "NVIDIA H800"),
            ("h200", None),
            ("h100-pcie", "NVIDIA H800 PCIe"),
            # same chip and memory, half the tensor rate
            ("l40", None),
            ("l40s", None),
            ("4090", None),
            ("4090 d", None),
            ("mi300x", None),
            ("l20y", None),
            ("sm_90", None),
            ("cpu", None),
        ],
    )
    def test_whose_tables_fit(self, name, whose):
        assert sibling(find_device(name), CATALOGUE) == whose

    def test_only_the_given_names_are_considered(self):
        a800 = find_device("a800")
        assert sibling(a800, ["NVIDIA L40S", "NVIDIA A100-PCIE-40GB"]) is None
        assert sibling(a800, ["a GPU nobody knows", "NVIDIA A100-SXM4-80GB"]) is not None
        assert sibling(a800, ["NVIDIA A800-SXM4-80GB"]) is None


def properties(**changes) -> SimpleNamespace:
    h100 = {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 52428800,
        "shared_memory_per_block_optin": 232448,
        "total_memory": 85_000_000_000,
    }
    return SimpleNamespace(**{**h100, **changes})


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU of the properties that the test sets; counts the questions."""
    state = SimpleNamespace(properties=properties(), asked=0)

    def get(index):
        state.asked += 1
        return state.properties

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    return state


class TestDeviceOf:
    def test_a_known_gpu_gets_its_published_figures(self, gpu):
        found = device.device_of("cuda:0")
        assert found.name == "NVIDIA H100 80GB HBM3"
        assert found.bandwidth_gbs == 3350
        assert found.fp8_tflops == 1979
        assert found.memory_bytes == 85_000_000_000
        assert found.l2_bytes == 52428800

    def test_torch_is_asked_once(self, gpu):
        assert device.device_of("cuda") is device.device_of(0)
        assert device.device_of(torch.device("cuda", 0)) is device.current_device()
        assert gpu.asked == 1

    def test_a_gpu_that_is_not_there_is_an_error_of_ours(self, gpu):
        with pytest.raises(DeviceError, match="cuda:3"):
            device.device_of("cuda:3")

    def test_an_unknown_gpu_is_described_by_its_properties(self, gpu):
        gpu.properties = properties(
            name="NVIDIA GeForce RTX 6090",
            major=13,
            minor=0,
            multi_processor_count=200,
            shared_memory_per_block_optin=120_000,
        )
        found = device.device_of(0)
        assert found.name == "NVIDIA GeForce RTX 6090"
        assert found.arch.name == "sm_130"
        assert found.has_fp8
        assert found.sms == 200
        assert found.shared_memory == 120_000
        assert found.bandwidth_gbs is None

    def test_a_slice_of_a_gpu_has_no_published_figures(self, gpu):
        gpu.properties = properties(multi_processor_count=16)
        assert device.device_of(0).bandwidth_gbs is None
        assert device.device_of(0).sms == 16
        device._ask.cache_clear()
        gpu.properties = properties(
            name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", multi_processor_count=16
        )
        assert device.device_of(0).name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        assert device.device_of(0).fp8_tflops is None

    def test_amd_is_known_by_its_gfx_and_keeps_the_whole_l2(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "6.4")
        # HIP reports capability (9, 4) and the L2 of one die
        gpu.properties = properties(
            name="AMD Instinct MI300X",
            major=9,
            minor=4,
            gcnArchName="gfx942:sramecc+:xnack-",
            multi_processor_count=304,
            L2_cache_size=4 * 2**20,
            shared_memory_per_block_optin=0,
        )
        found = device.device_of(0)
        assert found.arch is ARCHES["gfx942"]
        assert found.capability is None
        assert found.l2_bytes == 32 * 2**20
        assert found.shared_memory == 65536
        assert found.bandwidth_gbs == 5300

    def test_rdna_counts_work_group_processors(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "6.4")
        gpu.properties = properties(
            name="AMD Radeon RX 7900 XTX",
            major=11,
            minor=0,
            gcnArchName="gfx1100",
            multi_processor_count=48,
        )
        found = device.device_of(0)
        assert (found.sms, found.bandwidth_gbs, found.has_fp8) == (96, 960, False)

    def test_a_name_does_not_overrule_the_architecture(self, gpu):
        gpu.properties = properties(name="NVIDIA L40S", multi_processor_count=142)
        found = device.device_of(0)
        assert found.arch is ARCHES["sm_90"]
        assert found.bandwidth_gbs is None

    def test_the_cpu_needs_no_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device.device_of("cpu") is CPU
        assert device.device_of(torch.device("cpu")) is CPU
        assert device.current_device() is CPU

    @pytest.mark.parametrize("place", ["cuda", "cuda:0", "meta", 0])
    def test_no_such_gpu_is_an_error_of_ours(self, monkeypatch, place):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(DeviceError, match="doctor"):
            device.device_of(place)


@pytest.mark.gpu
def test_the_gpu_at_hand_has_the_limits_of_its_architecture():
    here = device.current_device()
    props = torch.cuda.get_device_properties(0)
    assert here.sms
    assert here.memory_bytes == props.total_memory
    if here.vendor == "nvidia":
        assert here.capability == torch.cuda.get_device_capability(0)
        assert here.shared_memory == here.arch.shared_memory
    known = CATALOGUE.get(here.name)
    if known is not None and known.sms == here.sms and here.vendor == "nvidia":
        assert known.l2_bytes in (None, props.L2_cache_size)


class TestPlanningDevice:
    def test_the_variable_names_a_gpu_that_is_not_here(self, monkeypatch):
        monkeypatch.setenv("ANYFP8_DEVICE_NAME", "l40s")
        assert device.planning_device() is CATALOGUE["NVIDIA L40S"]
        assert device.current_device().name != "NVIDIA L40S"

    def test_unset_means_the_current_device(self):
        assert device.planning_device() == device.current_device()

    def test_an_unknown_name_is_refused(self, monkeypatch):
        monkeypatch.setenv("ANYFP8_DEVICE_NAME", "h1000")
        with pytest.raises(DeviceError, match="h1000"):
            device.planning_device()


class TestRuntime:
    def test_cuda_hip_musa_or_none(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device.runtime() == "none"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert device.runtime() == "cuda"
        monkeypatch.setattr(torch, "musa", SimpleNamespace(), raising=False)
        assert device.runtime() == "musa"
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert device.runtime() == "hip"
